"""`gossip`: processes train apart and exchange weights with few others around each step; there is no centre.

    dpsgd      each mixes its weights with those of its neighbours, at every step         synchronous
    sgp        each pushes half of its weights to another process, at every step          synchronous
    gosgd      each sends its weights to a random process, now and then                   asynchronous
    adpsgd     each averages with a random neighbour, while steps go on                   asynchronous

The sources are named in `tfdist.relaxed.gossip_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from tfdist.errors import UnknownNameError, UsageError
from tfdist.interface.program import Program, Steps
from tfdist.interface.traits import Traits
from tfdist.options import require_owned
from tfdist.relaxed import gossip as programs
from tfdist.relaxed import gossip_rules, topologies
from tfdist.relaxed.averages import Averages, trained_weights
from tfdist.relaxed.outer import Shown
from tfdist.relaxed.strategy import IndependentStrategy, refuse_use_ema


class GossipStrategy(IndependentStrategy):
    """Trains on all processes of a job, which exchange weights with few others around each step.

    A meeting, see `tfdist.relaxed.strategy`, forms the mean over the processes, and each goes on with its own weights.
    Each process keeps the state of its optimizer.

    Args:
        algorithm: "dpsgd", "sgp", "gosgd" or "adpsgd".
        topology: of `dpsgd` and `adpsgd`: "ring", "grid", "exponential" or "full", or a doubly stochastic matrix, see
            `tfdist.relaxed.topologies`; "ring" if not said.
        probability: of `gosgd`, that a process sends after a step; 0.01 if not said.
        engine: what carries the weights: "sockets", "mpi", or "auto", which is MPI in processes that `mpirun` has
            started, else sockets.
        options: see `tfdist.relaxed.strategy.IndependentStrategy`.
    """

    name = "gossip"
    engines = ("auto", "sockets", "mpi")  # those with messages between two processes

    def __init__(
        self,
        *,
        algorithm: str = "dpsgd",
        topology: str | Sequence[Sequence[float]] | None = None,
        probability: Annotated[float, Field(ge=0, le=1)] | None = None,
        engine: str = "auto",
        **options: Any,
    ):
        if algorithm not in gossip_rules.OPTIONS:
            raise UnknownNameError("algorithm", algorithm, gossip_rules.OPTIONS)
        given = {"topology": topology, "probability": probability}
        set_ = [name for name, value in given.items() if value is not None]
        require_owned(set_, gossip_rules.OPTIONS, algorithm, "algorithm")
        self.algorithm = algorithm
        self.topology = gossip_rules.TOPOLOGY if topology is None else topology
        self.probability = gossip_rules.PROBABILITY if probability is None else probability
        super().__init__(engine=engine, alike=self._shown_options(), **options)
        self._mixing = topologies.matrix(self.topology, self.world.world_size)
        self._require_partners()

    def options(self) -> dict[str, Any]:
        return super().options() | self._shown_options()

    def program(self, steps: Steps) -> Program:
        if steps.kind != "train" or self.world.world_size == 1:
            return super().program(steps)
        self.require_whole_data(steps)
        rank, mixing = self.world.rank, self._mixing

        def made() -> Averages:
            shown = Shown(trained_weights(steps.model), self.devices[0])
            machine = gossip_rules.machine(self.algorithm, rank, mixing, self.probability, self.seed)
            return programs.Gossip(self.group, steps.model, shown, machine)

        return programs.GossipProgram(self, steps, self.averages_of(steps.model, made), split_once=False)

    def check(self, model: Any) -> None:
        super().check(model)
        refuse_use_ema(model, "gossip", "use another strategy")

    def _require_partners(self) -> None:
        """Raises `UsageError` for a topology in which a process of `adpsgd` has nobody to average with."""
        size = self.world.world_size
        if self.algorithm != "adpsgd" or size == 1:
            return
        for rank in range(size):
            others = range((rank + 1) % 2, size, 2)  # those that answer if this one asks, and the reverse
            if not any(self._mixing[rank, other] > 0 for other in others):
                kind = "odd" if rank % 2 == 0 else "even"
                raise UsageError(
                    f"In `topology` rank {rank} has no neighbour whose rank is {kind}, and `adpsgd` averages an even "
                    "rank with an odd one",
                    "connect even ranks with odd ones, as `ring` does",
                )

    def _shown_options(self) -> dict[str, Any]:
        topology = self.topology if isinstance(self.topology, str) else np.asarray(self.topology).tolist()
        own = {"topology": topology, "probability": self.probability}
        return {"algorithm": self.algorithm} | {name: own[name] for name in gossip_rules.OPTIONS[self.algorithm]}


STRATEGY = GossipStrategy
TRAITS = Traits(
    processes=True,
    elastic=True,
    asynchronous=True,
    options=("timeout_seconds", "callback_timeout_seconds"),
)
