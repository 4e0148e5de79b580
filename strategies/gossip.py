"""`gossip`: processes train independently and exchange weights with a few others around each step; there is no centre.
To study decentralised training, and for networks in which no process reaches all others.

    dpsgd      each process mixes its weights with those of its neighbours, at every step      synchronous
    sgp        each process pushes half of its weights to another process, at every step       synchronous
    gosgd      each process sometimes sends its weights to a random process                    asynchronous
    adpsgd     each process averages with a random neighbour, while steps go on                asynchronous

The sources are named in `tfdist.relaxed.gossip_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from tfdist.errors import UnknownNameError
from tfdist.interface.program import Program, Steps
from tfdist.interface.traits import Traits
from tfdist.options import require_owned
from tfdist.relaxed import gossip_rules, topologies
from tfdist.relaxed.averages import Averages, trained_weights
from tfdist.relaxed.gossip import Gossip
from tfdist.relaxed.local_sgd import AveragingProgram
from tfdist.relaxed.outer import SharedMean
from tfdist.relaxed.strategy import IndependentStrategy, refuse_use_ema


class GossipStrategy(IndependentStrategy):
    """Trains on all processes of a job, which exchange weights with a few others around each step.

    A synchronization, see `tfdist.relaxed.strategy`, computes the mean over the processes; each process continues with
    its own weights and keeps the state of its optimizer.

    Args:
        algorithm: "dpsgd", "sgp", "gosgd" or "adpsgd".
        topology: for `dpsgd` and `adpsgd`: "ring", "grid", "exponential", "full" or "tree", or a doubly stochastic
            matrix, see `tfdist.relaxed.topologies`; default: "ring".
        probability: for `gosgd`, the probability that a process sends after a step; default: 0.01.
        engine: the transport of the weights: "sockets", "mpi", or "auto", which is MPI in processes that `mpirun` has
            started, and otherwise sockets.
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
        values = {"topology": topology, "probability": probability}
        is_set = [name for name, value in values.items() if value is not None]
        require_owned(is_set, gossip_rules.OPTIONS, algorithm, "algorithm")
        self.algorithm = algorithm
        self.topology = gossip_rules.TOPOLOGY if topology is None else topology
        self.probability = gossip_rules.PROBABILITY if probability is None else probability
        super().__init__(engine=engine, same_settings=self._algorithm_options(), **options)
        self._mixing = topologies.matrix(self.topology, self.world.world_size)
        if algorithm == "adpsgd":
            gossip_rules.require_partners(self._mixing)

    def options(self) -> dict[str, Any]:
        return super().options() | self._algorithm_options()

    def program(self, steps: Steps) -> Program:
        if steps.kind != "train" or self.world.world_size == 1:
            return super().program(steps)
        self.require_whole_data(steps)

        def make_averages() -> Averages:
            shared = SharedMean(trained_weights(steps.model), self.devices[0])
            machine = gossip_rules.machine(self.algorithm, self.world.rank, self._mixing, self.probability, self.seed)
            return Gossip(self.group, steps.model, shared, machine)

        averages = self.averages_of(steps.model, make_averages)
        return AveragingProgram(self, steps, None, averages, split_once=False)

    def check(self, model: Any) -> None:
        super().check(model)
        refuse_use_ema(model, "gossip", "use another strategy")

    def _algorithm_options(self) -> dict[str, Any]:
        topology = self.topology if isinstance(self.topology, str) else np.asarray(self.topology).tolist()
        values = {"topology": topology, "probability": self.probability}
        return {"algorithm": self.algorithm} | {name: values[name] for name in gossip_rules.OPTIONS[self.algorithm]}


STRATEGY = GossipStrategy
TRAITS = Traits(
    processes=True,
    elastic=True,
    asynchronous=True,
)
