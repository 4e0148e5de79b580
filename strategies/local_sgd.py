"""`local_sgd`: processes train independently, and synchronize their weights at intervals. For networks on which
exchanging gradients in each step takes too long.

The rules of synchronization:

    average           the mean                                                          every 16 steps
    slowmo            momentum over the changes between synchronizations                every 48 steps
    diloco            a Keras optimizer that takes the changes for gradients            every 500 steps
    easgd             processes are drawn to a centre, and keep their own weights       every 10 steps
    module:function   a user's rule, see `tfdist.relaxed.outer_rules`                   every 16 steps

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
from tfdist.relaxed.local_sgd import AveragingProgram, AveragingRule, PostLocalProgram
from tfdist.relaxed.strategy import IndependentStrategy


class LocalSgdStrategy(IndependentStrategy):
    """Trains on all processes of a job, which synchronize after a number of steps.

    Args:
        outer: the rule: "average", "slowmo", "diloco", "easgd", or a user's rule as `module:function`.
        sync_every: the number of steps between synchronizations, counted from the beginning of an epoch, or "epoch"; by
            default that of the rule.
        local_from: the step of the run from which on processes train independently; earlier steps are synchronous.
        engine: the transport of the weights: "sockets", "mpi", "horovod", or "auto", which is MPI in processes that
            `mpirun` has started, and otherwise sockets.
        compression: how the changes of the weights are sent: "none", "bf16", "fp16" or "int8", with error feedback.
        slow_momentum: for `slowmo`, beta of Wang et al.; default: 0.5.
        slow_rate: for `slowmo`, alpha of Wang et al.; default: 1.
        outer_optimizer: for `diloco`, a Keras optimizer or its name; default: SGD with a learning rate of 0.7 and
            Nesterov momentum of 0.9.
        fragments: for `diloco`, the number of fragments of the weights that are synchronized in turn; default: 1.
        overlap: for `diloco`, the number of steps while a fragment is on its way; default: 0.
        mixing: for `diloco`, the fraction of its own weights that a process keeps when a fragment arrives; default: 0.
        moving_rate: for `easgd`, alpha of Zhang et al.; default: 0.9 divided by the number of processes.
        options: see `tfdist.relaxed.strategy.IndependentStrategy`.
    """

    name = "local_sgd"
    split_once: ClassVar[bool] = False  # each batch is divided among the processes, instead of the dataset

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
        rule_options = {
            "slow_momentum": slow_momentum,
            "slow_rate": slow_rate,
            "outer_optimizer": outer_optimizer,
            "fragments": fragments,
            "overlap": overlap,
            "mixing": mixing,
            "moving_rate": moving_rate,
        }
        self._rule = AveragingRule(outer, rule_options, sync_every, compression)
        self.outer, self.sync_every, self.compression = outer, self._rule.sync_every, compression
        self.local_from = local_from
        super().__init__(engine=engine, same_settings=self._algorithm_options(), **options)

    @property
    def bound(self) -> Bound | None:
        if self.world.world_size == 1 or self.local_from or not self._rule.has_common_weights:
            return None
        return Averaging(self.sync_every, plain=self._rule.is_plain)

    def options(self) -> dict[str, Any]:
        return super().options() | self._algorithm_options()

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return not self._rule.is_plain

    def program(self, steps: Steps) -> Program:
        is_single_device = self.world.world_size == 1 and self._rule.is_plain
        if steps.kind != "train" or is_single_device:
            return super().program(steps)
        self.require_whole_data(steps)
        model = steps.model
        averages = self.averages_of(model, lambda: self._rule.averages(self.group, model, self.devices[0]))
        local = AveragingProgram(self, steps, self.sync_every, averages, split_once=self.split_once)
        if not self.local_from:
            return local
        return PostLocalProgram(model, self.local_from, super().program(steps), local)

    def check(self, model: Any) -> None:
        super().check(model)
        self._rule.check(model)
        if self.local_from and not isinstance(model.optimizer, keras.optimizers.Optimizer):
            raise UsageError(
                f"The model `{model.name}` is compiled without an optimizer, which counts the steps for `local_from`",
                "pass the optimizer to `compile`, or leave `local_from` out",
            )

    def _algorithm_options(self) -> dict[str, Any]:
        return self._rule.options() | {"local_from": self.local_from}


STRATEGY = LocalSgdStrategy
TRAITS = Traits(
    processes=True,
    elastic=True,
    asynchronous=True,
)
