"""`local_sgd`: processes train apart, and meet at times, when an outer rule makes new weights of the mean of theirs.

    average       the mean                                                          every 16 steps
    slowmo        a momentum over the moves from meeting to meeting                 every 48
    diloco        an optimizer of Keras' takes the moves for gradients              every 500
    easgd         a centre that the processes are drawn to, and keep apart from     every 10
    module:function   the user's own rule, see `tfdist.relaxed.outer_rules`            every 16

The sources are named in `tfdist.relaxed.outer_rules` and `tfdist.relaxed.outer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import keras
import numpy as np
from pydantic import Field

from tfdist import registry
from tfdist.errors import UnknownNameError, UsageError
from tfdist.interface.bound import Averaging, Bound
from tfdist.interface.program import Program, Steps
from tfdist.interface.traits import Traits
from tfdist.options import Count, CountOrZero, Factor, Fraction, require_owned
from tfdist.relaxed import apart, outer_rules, streaming
from tfdist.relaxed import compression as encodings
from tfdist.relaxed import local_sgd as programs
from tfdist.relaxed import outer as outers
from tfdist.relaxed.averages import Averages, trained_weights

EPOCH = "epoch"
# The options of each rule.
OPTIONS = {
    "average": (),
    "slowmo": ("slow_momentum", "slow_rate"),
    "diloco": ("outer_optimizer", "fragments", "overlap", "mixing"),
    "easgd": ("moving_rate",),
}


class LocalSgdStrategy(apart.ApartStrategy):
    """Trains on all processes of a job, which meet after a number of steps, see `tfdist.relaxed.apart`.

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
        options: see `tfdist.relaxed.apart.ApartStrategy`.
    """

    name = "local_sgd"
    split_once = False

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
        self._rule_options = {name: value for name, value in given.items() if value is not None}
        self.outer, self._own_rule = outer, _own_rule(outer)
        require_owned(self._rule_options, OPTIONS, outer, "outer")
        wanted = (
            outer_rules.SYNC_EVERY.get(outer, outer_rules.SYNC_EVERY["average"]) if sync_every is None else sync_every
        )
        self.sync_every = None if wanted == EPOCH else int(wanted)
        self.local_from, self.compression = local_from, compression
        if compression not in encodings.NAMES:
            raise UnknownNameError("compression", compression, encodings.NAMES)
        self._require_streaming()
        super().__init__(engine=engine, alike=self._own_options(), **options)

    @property
    def bound(self) -> Bound | None:
        # A centre is what the processes have in common, and no process is there.
        # Nor have they the same weights after one fragment has met.
        if self.world.world_size == 1 or self.outer == "easgd" or self.local_from or self._streams:
            return None
        return Averaging(self.sync_every, plain=self._is_plain)

    def options(self) -> dict[str, Any]:
        return super().options() | self._own_options()

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return not self._is_plain

    def program(self, steps: Steps) -> Program:
        alone = self.world.world_size == 1 and self._is_plain
        if steps.kind != "train" or alone:
            return super().program(steps)
        self.require_whole_data(steps)
        local = self._local(steps, self.averages_of(steps.model, lambda: self._new_averages(steps.model)))
        if not self.local_from:
            return local
        return programs.PostLocalProgram(steps.model, self.local_from, super().program(steps), local)

    def _local(self, steps: Steps, averages: Averages) -> Program:
        if isinstance(averages, streaming.Streaming):
            return streaming.StreamingProgram(self, steps, averages, split_once=self.split_once)
        return programs.AveragingProgram(self, steps, self.sync_every, averages, split_once=self.split_once)

    def check(self, model: Any) -> None:
        super().check(model)
        self._check_optimizer(model)

    @property
    def _streams(self) -> bool:
        """Whether weights meet a fragment at a time, or travel while steps go on."""
        return any(self._rule_options.get(name) for name in ("overlap", "mixing")) or self._fragments > 1

    @property
    def _fragments(self) -> int:
        return int(self._rule_options.get("fragments", 1))

    def _require_streaming(self) -> None:
        """Raises `UsageError` for options that fragments cannot have."""
        overlap = self._rule_options.get("overlap", 0)
        if not self._streams:
            return
        if self.sync_every is None:
            raise UsageError(
                "`fragments`, `overlap` and `mixing` belong to meetings within an epoch, and `sync_every` is `epoch`",
                "set `sync_every` to a number of steps",
            )
        if overlap >= self.sync_every:
            raise UsageError(
                f"`overlap` is {overlap}, and a fragment is sent again after `sync_every` = {self.sync_every} steps",
                "use a smaller `overlap`, or a larger `sync_every`",
            )
        if self.compression != "none":
            raise UsageError(
                f"`compression` is `{self.compression}`, and fragments that travel while steps go on are sent whole",
                "leave `compression` out, or `fragments`, `overlap` and `mixing`",
            )

    def _fragments_of(self, model: Any) -> list[list[Any]]:
        """The trained weights in fragments of consecutive ones, whose sizes are as even as that allows."""
        weights = trained_weights(model)
        if self._fragments > max(len(weights), 1):
            raise UsageError(
                f"`fragments` is {self._fragments}, and the model `{model.name}` has {len(weights)} trained variables",
                "use at most one fragment for each variable",
            )
        ends = np.cumsum([math.prod(weight.shape) for weight in weights])
        cuts = [0]
        for number in range(1, self._fragments):
            wanted = int(np.searchsorted(ends, ends[-1] * number / self._fragments)) + 1
            cuts.append(min(max(wanted, cuts[-1] + 1), len(weights) - (self._fragments - number)))
        return [weights[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(weights)], strict=True)]

    @property
    def _is_plain(self) -> bool:
        """Whether a meeting gives nothing but the mean."""
        return self.outer == "average" and self.compression == "none"

    def _check_optimizer(self, model: Any) -> None:
        optimizer = model.optimizer
        if not self._is_plain and not isinstance(optimizer, keras.optimizers.Optimizer):
            raise UsageError(
                f"The model `{model.name}` is compiled without an optimizer, and the rule `{self.outer}` needs its "
                "learning rate",
                "pass the optimizer to `compile`, or use the rule `average`",
            )
        if self.local_from and not isinstance(optimizer, keras.optimizers.Optimizer):
            raise UsageError(
                f"The model `{model.name}` is compiled without an optimizer, which counts the steps for `local_from`",
                "pass the optimizer to `compile`, or leave `local_from` out",
            )
        if self.outer in ("diloco", "easgd"):
            apart.refuse_averages_of_optimizers(model, f"the rule `{self.outer}`", "use the rule `average` or `slowmo`")

    def _new_averages(self, model: Any) -> Averages:
        outers_ = [] if self._is_plain else [self._outer_of(weights) for weights in self._fragments_of(model)]
        if self._streams:
            assert self.sync_every is not None
            overlap = self._rule_options.get("overlap", 0)
            return streaming.Streaming(self.group, model, outers_, self.sync_every, overlap)
        return Averages(self.group, model, outers_, self.compression)

    def _outer_of(self, weights: list[Any]) -> outers.Outer:
        given, device = self._rule_options, self.devices[0]
        if self.outer == "diloco":
            optimizer = _outer_optimizer(given.get("outer_optimizer"))
            return outers.ByOptimizer(weights, device, optimizer, given.get("mixing", 0.0))
        if self.outer == "easgd":
            size = self.world.world_size
            rate = given.get("moving_rate", outer_rules.MOVING_RATE_OF_ALL / size)
            return outers.Elastic(weights, device, rate, size)
        return outers.ByRule(weights, device, self._function)

    @property
    def _function(self) -> outer_rules.Rule:
        if self._own_rule is not None:
            return self._own_rule
        if self.outer == "average":
            return outer_rules.average
        named = {"slow_momentum": "momentum", "slow_rate": "rate"}
        return outer_rules.SlowMo(**{named[name]: value for name, value in self._rule_options.items()})

    def _own_options(self) -> dict[str, Any]:
        """The options in effect, as text where they are objects."""
        optimizer = self._rule_options.get("outer_optimizer")
        shown = {} if optimizer is None else {"outer_optimizer": _described(optimizer)}
        return {
            "outer": self.outer,
            "sync_every": self.sync_every or EPOCH,
            "local_from": self.local_from,
            "compression": self.compression,
            **self._rule_options,
            **shown,
        }


def _own_rule(name: str) -> Callable[..., Any] | None:
    if ":" in name:
        found: Callable[..., Any] = registry.resolve(name, "outer rule")
        return found
    if name not in OPTIONS:
        raise UnknownNameError("outer rule", name, OPTIONS)
    return None


def _outer_optimizer(given: Any) -> keras.optimizers.Optimizer:
    if given is None:
        usual = outer_rules.Nesterov()
        return keras.optimizers.SGD(usual.rate, momentum=usual.momentum, nesterov=True)
    try:
        # A copy, since the variables of an optimizer belong to one model.
        config = given.get_config() if isinstance(given, keras.optimizers.Optimizer) else None
        return keras.optimizers.get(given) if config is None else type(given).from_config(config)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"`outer_optimizer` is `{given}`, which Keras knows no optimizer by",
            'pass an optimizer of Keras\', such as `keras.optimizers.SGD(0.7, momentum=0.9)`, or a name, such as "sgd"',
        ) from error


def _described(optimizer: Any) -> str:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return str(optimizer)
    settings = {name: value for name, value in optimizer.get_config().items() if name != "name"}
    return f"{type(optimizer).__name__}({settings})"


STRATEGY = LocalSgdStrategy
TRAITS = Traits(
    processes=True,
    elastic=True,
    asynchronous=True,
    options=("sync_every", "compression", "timeout_seconds", "callback_timeout_seconds"),
)
