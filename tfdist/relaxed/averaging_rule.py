"""The rule by which the processes of `local_sgd` synchronize, with its options: what the new weights are made of.

average            the mean of the weights
slowmo             a momentum over the moves from one synchronization to the next
diloco             an optimizer of Keras', which takes the moves for gradients; in fragments, if asked
easgd              a centre that the processes are drawn to
module:function    the user's own rule, see `tfdist.relaxed.outer_rules`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from tfdist import registry
from tfdist.errors import UnknownNameError, UsageError
from tfdist.groups import ProcessGroup
from tfdist.options import require_owned
from tfdist.relaxed import compression as encodings
from tfdist.relaxed import outer, outer_rules
from tfdist.relaxed.averages import Averages, trained_weights
from tfdist.relaxed.strategy import refuse_use_ema
from tfdist.relaxed.streaming import Streaming

EPOCH = "epoch"
# The options of each rule.
OPTIONS = {
    "average": (),
    "slowmo": ("slow_momentum", "slow_rate"),
    "diloco": ("outer_optimizer", "fragments", "overlap", "mixing"),
    "easgd": ("moving_rate",),
}


class AveragingRule:
    """A rule with its options.

    Args:
        name: one of `OPTIONS`, or the user's own as `module:function`.
        given: the options of rules, by name; `None` is not set.
        sync_every: the number of steps from one synchronization to the next, or "epoch"; `None` is that of the rule.
        compression: how the moves of the weights are sent, see `tfdist.relaxed.compression`.

    Attributes:
        sync_every: as the argument, and `None` for "epoch".

    Raises:
        UnknownNameError: there is no such rule, or no such compression.
        UsageError: an option belongs to another rule, or options cannot be used together.
    """

    def __init__(self, name: str, given: Mapping[str, Any], sync_every: int | str | None, compression: str):
        self.name = name
        self.compression = compression
        self._own = _own_rule(name)
        self._options = {option: value for option, value in given.items() if value is not None}
        require_owned(self._options, OPTIONS, name, "outer")
        usual = outer_rules.SYNC_EVERY.get(name, outer_rules.SYNC_EVERY["average"])
        wanted = usual if sync_every is None else sync_every
        self.sync_every = None if wanted == EPOCH else int(wanted)
        if compression not in encodings.NAMES:
            raise UnknownNameError("compression", compression, encodings.NAMES)
        self._require_streaming()

    @property
    def is_plain(self) -> bool:
        """Whether the new weights are the mean, and are sent as they are."""
        return self.name == "average" and self.compression == "none"

    @property
    def has_common_weights(self) -> bool:
        """Whether all processes have the same weights after a synchronization within an epoch."""
        # No process is where the centre is, nor have they the same weights after one fragment was synchronized.
        return self.name != "easgd" and not self._streams

    @property
    def _streams(self) -> bool:
        """Whether weights are synchronized a fragment at a time, or travel while steps go on."""
        return any(self._options.get(name) for name in ("overlap", "mixing")) or self._fragments > 1

    @property
    def _fragments(self) -> int:
        return int(self._options.get("fragments", 1))

    def _require_streaming(self) -> None:
        """Raises `UsageError` for options that fragments cannot have."""
        overlap = self._options.get("overlap", 0)
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

    def _parts(self, model: Any) -> list[list[Any]]:
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

    def check(self, model: Any) -> None:
        """Raises `UsageError` for a model whose optimizer the rule cannot use."""
        optimizer = model.optimizer
        if not self.is_plain and not isinstance(optimizer, keras.optimizers.Optimizer):
            raise UsageError(
                f"The model `{model.name}` is compiled without an optimizer, and the rule `{self.name}` needs its "
                "learning rate",
                "pass the optimizer to `compile`, or use the rule `average`",
            )
        if self.name in ("diloco", "easgd"):
            refuse_use_ema(model, f"the rule `{self.name}`", "use the rule `average` or `slowmo`")

    def averages(self, group: ProcessGroup, model: Any, device: str) -> Averages:
        """What synchronizes the weights of `model`, whose variables of its own are made on `device`."""
        made = [] if self.is_plain else [self._outer(weights, device, group.size) for weights in self._parts(model)]
        if self._streams:
            assert self.sync_every is not None
            return Streaming(group, model, made, self.sync_every, self._options.get("overlap", 0))
        return Averages(group, model, made, self.compression)

    def _outer(self, weights: list[Any], device: str, size: int) -> outer.Outer:
        options = self._options
        if self.name == "diloco":
            optimizer = _outer_optimizer(options.get("outer_optimizer"))
            return outer.ByOptimizer(weights, device, optimizer, options.get("mixing", 0.0))
        if self.name == "easgd":
            rate = options.get("moving_rate", outer_rules.MOVING_RATE_OF_ALL / size)
            return outer.Elastic(weights, device, rate, size)
        return outer.ByRule(weights, device, self._function)

    @property
    def _function(self) -> outer_rules.Rule:
        if self._own is not None:
            return self._own
        if self.name == "average":
            return outer_rules.average
        named = {"slow_momentum": "momentum", "slow_rate": "rate"}
        return outer_rules.SlowMo(**{named[name]: value for name, value in self._options.items()})

    def options(self) -> dict[str, Any]:
        """The options in effect, as text where they are objects."""
        optimizer = self._options.get("outer_optimizer")
        shown = {} if optimizer is None else {"outer_optimizer": _described(optimizer)}
        own = {"outer": self.name, "sync_every": self.sync_every or EPOCH, "compression": self.compression}
        return own | self._options | shown


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
