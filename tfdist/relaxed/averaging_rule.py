"""The rule of `local_sgd` and its options: how the new weights are computed when the processes synchronize.

    average            the mean of the weights
    slowmo             momentum over the changes from one synchronization to the next
    diloco             a Keras optimizer that takes the changes for gradients; optionally one fragment at a time
    easgd              a centre that the processes are drawn to
    module:function    a user's rule

`tfdist.relaxed.outer_rules` has the formulas and their sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from tfdist import registry
from tfdist.errors import UnknownNameError, UsageError
from tfdist.groups import ProcessGroup
from tfdist.options import require_owned
from tfdist.relaxed import outer, outer_rules
from tfdist.relaxed.averages import Averages, trained_weights
from tfdist.relaxed.compression import ENCODINGS
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
        name: one of `OPTIONS`, or a user's rule as `module:function`.
        options: the options of all rules, by name; `None` is not set.
        sync_every: the number of steps between synchronizations, or "epoch"; `None` is the default of the rule.
        compression: how the changes of the weights are encoded, one of `tfdist.relaxed.ENCODINGS`.

    Attributes:
        sync_every: the argument or its default, with `None` for "epoch".

    Raises:
        UnknownNameError: the rule or the compression is unknown.
        UsageError: an option belongs to another rule, or options cannot be used together.
    """

    def __init__(self, name: str, options: Mapping[str, Any], sync_every: int | str | None, compression: str):
        self.name = name
        self.compression = compression
        self._users_rule = registry.resolve(name, "outer rule") if ":" in name else None
        if self._users_rule is None and name not in OPTIONS:
            raise UnknownNameError("outer rule", name, OPTIONS)
        self._options = {option: value for option, value in options.items() if value is not None}
        require_owned(self._options, OPTIONS, name, "outer")
        if sync_every is None:
            sync_every = outer_rules.SYNC_EVERY.get(name, outer_rules.SYNC_EVERY["average"])
        self.sync_every = None if sync_every == EPOCH else int(sync_every)
        if compression not in ENCODINGS:
            raise UnknownNameError("compression", compression, ENCODINGS)
        self._fragments = int(self._options.get("fragments", 1))
        # Whether weights are synchronized one fragment at a time, or while steps go on.
        self._streams = self._fragments > 1 or any(self._options.get(name) for name in ("overlap", "mixing"))
        if self._streams:
            self._check_streaming()

    @property
    def is_plain(self) -> bool:
        """Whether the new weights are the mean, and are sent without encoding."""
        return self.name == "average" and self.compression == "none"

    @property
    def has_common_weights(self) -> bool:
        """Whether all processes have the same weights after a synchronization within an epoch."""
        # With `easgd` the weights of the processes differ from the centre; fragments are synchronized one at a time.
        return self.name != "easgd" and not self._streams

    def _check_streaming(self) -> None:
        """Raises `UsageError` for options that cannot be used with fragments."""
        overlap = self._options.get("overlap", 0)
        if self.sync_every is None:
            raise UsageError(
                "`fragments`, `overlap` and `mixing` need a number of steps, and `sync_every` is `epoch`",
                "set `sync_every` to a number of steps",
            )
        if overlap >= self.sync_every:
            raise UsageError(
                f"`overlap` is {overlap}, and a fragment is sent again after `sync_every` = {self.sync_every} steps",
                "use a smaller `overlap`, or a larger `sync_every`",
            )
        if self.compression != "none":
            raise UsageError(
                f"`compression` is `{self.compression}`, and fragments that are sent while steps go on are not encoded",
                "leave out `compression`, or `fragments`, `overlap` and `mixing`",
            )

    def check(self, model: Any) -> None:
        """Raises `UsageError` for a model with whose optimizer the rule cannot be used."""
        if not self.is_plain and not isinstance(model.optimizer, keras.optimizers.Optimizer):
            raise UsageError(
                f"The model `{model.name}` is compiled without an optimizer, and the rule `{self.name}` needs its "
                "learning rate",
                "pass the optimizer to `compile`, or use the rule `average`",
            )
        if self.name in ("diloco", "easgd"):
            refuse_use_ema(model, f"the rule `{self.name}`", "use the rule `average` or `slowmo`")

    def averages(self, group: ProcessGroup, model: Any, device: str) -> Averages:
        """Makes what synchronizes the weights of `model`, with its additional variables on `device`."""
        fragments = [] if self.is_plain else self._divided_weights(model)
        outers = [self._outer_optimizer(weights, device, group.size) for weights in fragments]
        if self._streams:
            assert self.sync_every is not None
            return Streaming(group, model, outers, self.sync_every, self._options.get("overlap", 0))
        return Averages(group, model, outers, self.compression)

    def _divided_weights(self, model: Any) -> list[list[Any]]:
        """The trained weights in fragments of consecutive weights, whose sizes are as even as possible."""
        weights = trained_weights(model)
        if self._fragments > max(len(weights), 1):
            raise UsageError(
                f"`fragments` is {self._fragments}, and the model `{model.name}` has {len(weights)} trained variables",
                "use at most one fragment per variable",
            )
        ends = np.cumsum([math.prod(weight.shape) for weight in weights])
        cuts = [0]
        for number in range(1, self._fragments):
            cut = int(np.searchsorted(ends, ends[-1] * number / self._fragments)) + 1
            cuts.append(min(max(cut, cuts[-1] + 1), len(weights) - (self._fragments - number)))
        return [weights[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(weights)], strict=True)]

    def _outer_optimizer(self, weights: list[Any], device: str, size: int) -> outer.OuterOptimizer:
        options = self._options
        if self._users_rule is not None:
            return outer.RuleOuterOptimizer(weights, device, self._users_rule)
        if self.name == "diloco":
            optimizer = _keras_optimizer(options.get("outer_optimizer"))
            return outer.KerasOuterOptimizer(weights, device, optimizer, options.get("mixing", 0.0))
        if self.name == "easgd":
            rate = options.get("moving_rate", outer_rules.MOVING_RATE_OF_ALL / size)
            return outer.ElasticAveraging(weights, device, rate, size)
        rule = outer_rules.average
        if self.name == "slowmo":
            rule = outer_rules.SlowMo(**{name.removeprefix("slow_"): value for name, value in options.items()})
        return outer.RuleOuterOptimizer(weights, device, rule)

    def options(self) -> dict[str, Any]:
        """The options in effect; an optimizer is described in words."""
        optimizer = self._options.get("outer_optimizer")
        described = {} if optimizer is None else {"outer_optimizer": _described(optimizer)}
        always = {"outer": self.name, "sync_every": self.sync_every or EPOCH, "compression": self.compression}
        return always | self._options | described


def _keras_optimizer(optimizer: Any) -> keras.optimizers.Optimizer:
    """A new Keras optimizer from the option `outer_optimizer`."""
    if optimizer is None:
        default = outer_rules.Nesterov()
        return keras.optimizers.SGD(default.rate, momentum=default.momentum, nesterov=True)
    try:
        if isinstance(optimizer, keras.optimizers.Optimizer):  # copied, since its variables belong to one model
            return type(optimizer).from_config(optimizer.get_config())
        return keras.optimizers.get(optimizer)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"`outer_optimizer` is `{optimizer}`, which is not an optimizer that Keras knows",
            'pass a Keras optimizer, such as `keras.optimizers.SGD(0.7, momentum=0.9)`, or a name, such as "sgd"',
        ) from error


def _described(optimizer: Any) -> str:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return str(optimizer)
    settings = {name: value for name, value in optimizer.get_config().items() if name != "name"}
    return f"{type(optimizer).__name__}({settings})"
