"""`local_sgd`: processes train independently and synchronize from time to time, by a rule of the mean of their weights.

    average       the mean                                                             every 16 steps
    slowmo        a momentum over the moves from one synchronization to the next       every 48
    diloco        an optimizer of Keras' takes the moves for gradients                 every 500
    easgd         a centre that the processes are drawn to, and keep apart from        every 10
    module:function   the user's own rule, see `tfdist.relaxed.outer_rules`            every 16

The sources are named in `tfdist.relaxed.outer_rules` and `tfdist.relaxed.outer`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import keras
from pydantic import Field

from tfdist.errors import UsageError
from tfdist.interface.bound import Averaging, Bound
from tfdist.interface.program import Program, Steps
from tfdist.interface.traits import Traits
from tfdist.options import Count, CountOrZero, Factor, Fraction
from tfdist.relaxed import local_sgd as programs
from tfdist.relaxed import streaming
from tfdist.relaxed.averages import Averages
from tfdist.relaxed.averaging_rule import AveragingRule
from tfdist.relaxed.strategy import IndependentStrategy


class LocalSgdStrategy(IndependentStrategy):
    """Trains on all processes of a job, which meet after a number of steps, see `tfdist.relaxed.strategy`.

    Args:
        outer: the rule: "average", "slowmo", "diloco", "easgd", or the user's own as `module:function`.
        sync_every: the number of steps from one meeting to the next, counted from the beginning of an epoch, or
            "epoch"; `None` is that of the rule.
        local_from: the step of the run from which on processes train apart; before, they train in lock-step.
        engine: what carries the weights: "sockets", "mpi", "horovod", or "auto", which is MPI in processes that
            `mpirun` has started, else sockets.
        compression: how the moves of the weights are sent: "none", "bf16", "fp16" or "int8", with error feedback.
        slow_momentum: of `slowmo`, beta of Wang et al.; 0.5 if not said.
        slow_rate: of `slowmo`, their alpha; 1 if not said.
        outer_optimizer: of `diloco`, an optimizer of Keras', or its name; if not said, SGD with a rate of 0.7 and
            Nesterov's momentum of 0.9.
        fragments: of `diloco`, the number of parts of the weights that meet one after the other; 1 if not said.
        overlap: of `diloco`, the number of steps while a fragment travels; 0 if not said.
        mixing: of `diloco`, what a process keeps of its own weights when a fragment has come; 0 if not said.
        moving_rate: of `easgd`, alpha of Zhang et al.; 0.9 divided by the number of processes if not said.
        options: see `tfdist.relaxed.strategy.IndependentStrategy`.
    """

    name = "local_sgd"
    split_once: ClassVar[bool] = False  # each process has its part of each batch, instead of a part of the dataset

    def __init__(
        self,
        *,
        outer: str = "average",
        sync_every: Count | Literal["epoch"] | None = None,
        local_from: CountOrZero = 0,
        engine: str = "auto",
        compression: str = "none",
        slow_momentum: Fraction | None = None,
        slow_rate: Factor | None = None,
        outer_optimizer: Any = None,
        fragments: Count | None = None,
        overlap: CountOrZero | None = None,
        mixing: Fraction | None = None,
        moving_rate: Annotated[float, Field(ge=0, le=1)] | None = None,
        **options: Any,
    ):
        given = {
            "slow_momentum": slow_momentum,
            "slow_rate": slow_rate,
            "outer_optimizer": outer_optimizer,
            "fragments": fragments,
            "overlap": overlap,
            "mixing": mixing,
            "moving_rate": moving_rate,
        }
        self._rule = AveragingRule(outer, given, sync_every, compression)
        self.outer, self.sync_every, self.compression = outer, self._rule.sync_every, compression
        self.local_from = local_from
        super().__init__(engine=engine, alike=self._own_options(), **options)

    @property
    def bound(self) -> Bound | None:
        if self.world.world_size == 1 or self.local_from or not self._rule.has_common_weights:
            return None
        return Averaging(self.sync_every, plain=self._rule.is_plain)

    def options(self) -> dict[str, Any]:
        return super().options() | self._own_options()

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return not self._rule.is_plain

    def program(self, steps: Steps) -> Program:
        alone = self.world.world_size == 1 and self._rule.is_plain
        if steps.kind != "train" or alone:
            return super().program(steps)
        self.require_whole_data(steps)
        model, rule = steps.model, self._rule
        local = self._local(steps, self.averages_of(model, lambda: rule.averages(self.group, model, self.devices[0])))
        if not self.local_from:
            return local
        return programs.PostLocalProgram(model, self.local_from, super().program(steps), local)

    def _local(self, steps: Steps, averages: Averages) -> Program:
        if isinstance(averages, streaming.Streaming):
            return streaming.StreamingProgram(self, steps, averages, split_once=self.split_once)
        return programs.AveragingProgram(self, steps, self.sync_every, averages, split_once=self.split_once)

    def check(self, model: Any) -> None:
        super().check(model)
        self._rule.check(model)
        if self.local_from and not isinstance(model.optimizer, keras.optimizers.Optimizer):
            raise UsageError(
                f"The model `{model.name}` is compiled without an optimizer, which counts the steps for `local_from`",
                "pass the optimizer to `compile`, or leave `local_from` out",
            )

    def _own_options(self) -> dict[str, Any]:
        return self._rule.options() | {"local_from": self.local_from}


STRATEGY = LocalSgdStrategy
TRAITS = Traits(
    processes=True,
    elastic=True,
    asynchronous=True,
    options=("sync_every", "compression", "timeout_seconds", "callback_timeout_seconds"),
)
