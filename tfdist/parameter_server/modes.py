"""The modes of `parameter_server`: what workers do with the weights on the servers, and when.

    asp         asynchronous: no worker waits for another                         no options
    rounds      S + 1 steps at a time                                             staleness
    ssp         a worker is at most S steps ahead of the slowest                  staleness
    bsp         synchronous: each worker computes a part of each batch            no options
    downpour    a worker trains on a copy of the weights and pushes its changes   push_every, fetch_every
    easgd       the copies and the centre move towards each other                 sync_every, moving_rate
    eamsgd      the same, with momentum                                           sync_every, moving_rate, momentum

The sources are cited in `tfdist.relaxed.centre_rules` and `tfdist.parameter_server.clocks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from tfdist.errors import UnknownNameError, UsageError
from tfdist.interface.bound import Bound, Staleness, SynchronousUpdates
from tfdist.interface.program import Program, Steps
from tfdist.internals import keras as keras_internals
from tfdist.options import require_owned
from tfdist.parameter_server import clocks, closures, copies, synchronous
from tfdist.parameter_server.closure_replica import ClosureReplica
from tfdist.relaxed import centre_rules, outer_rules

OPTIONS = {
    "asp": (),
    "rounds": ("staleness",),
    "ssp": ("staleness",),
    "bsp": (),
    "downpour": ("push_every", "fetch_every"),
    "easgd": ("sync_every", "moving_rate"),
    "eamsgd": ("sync_every", "moving_rate", "momentum"),
}
# The default of `moving_rate` depends on the number of workers, see `Mode.settle`.
DEFAULTS = {
    "staleness": 3,
    **dict.fromkeys(("push_every", "fetch_every", "sync_every"), centre_rules.EVERY),
    "momentum": centre_rules.MOMENTUM,
}


class Mode:
    """A mode with its options.

    Args:
        name: a key of `OPTIONS`; `None` means "rounds" if a staleness is set, else "asp".
        options: the options by name; `None` stands for the default.

    Raises:
        UsageError: the mode is unknown, or has no such option.
    """

    def __init__(self, name: str | None, options: Mapping[str, Any]):
        specified = {option: value for option, value in options.items() if value is not None}
        if name is None:
            name = "rounds" if "staleness" in specified else "asp"
        if name not in OPTIONS:
            raise UnknownNameError("mode", name, OPTIONS)
        require_owned(specified, OPTIONS, name, "mode")
        self.name = name
        self.options: dict[str, Any] = {
            option: specified.get(option, DEFAULTS.get(option)) for option in OPTIONS[name] if option != "moving_rate"
        }
        self._moving_rate = specified.get("moving_rate")
        self._steps_overlap = False

    def settle(self, workers: int) -> None:
        """Sets what depends on the number of workers."""
        sequential = self.name == "bsp" or (self.options.get("staleness") == 0 and self.name == "rounds")
        self._steps_overlap = workers > 1 and not sequential
        if "moving_rate" in OPTIONS[self.name]:
            # Zhang et al. choose a moving rate for all workers together, and divide it by their number.
            default = outer_rules.MOVING_RATE_OF_ALL / workers
            self.options["moving_rate"] = default if self._moving_rate is None else self._moving_rate

    @property
    def as_one_device(self) -> bool:
        """Whether the steps equal those of one device."""
        return self.name == "bsp"

    def bound(self, workers: int) -> Bound | None:
        """Returns the error bound that `verify` checks for this mode; `None` if there is none."""
        if self.name == "rounds":
            return Staleness(self.options["staleness"])
        if self.name == "ssp":
            return Staleness((2 * self.options["staleness"] + 1) * (workers - 1))
        if self.name == "bsp":
            return SynchronousUpdates()
        return Staleness(None) if self.name == "asp" else None

    def program(self, strategy: Any, steps: Steps) -> Program:
        """Returns the inner loop of a training or of an evaluation."""
        if steps.kind == "test" or self.name == "asp":
            return closures.ClosureProgram(strategy, steps)
        if self.name == "rounds":
            return clocks.RoundsProgram(strategy, steps, self.options["staleness"])
        if self.name == "ssp":
            return clocks.ClocksProgram(strategy, steps, self.options["staleness"])
        if self.name == "bsp":
            return synchronous.SynchronousProgram(strategy, steps)
        return copies.CopiesProgram(strategy, steps, self._rule())

    def replica(self) -> ClosureReplica:
        """Returns the replica that computes a worker's step."""
        return copies.CopiesReplica() if self._has_copies else ClosureReplica()

    def check(self, model: Any) -> None:
        """Raises `UsageError` for a model that cannot be trained in this mode."""
        if self._has_copies:
            copies.refuse_shared_state(model, self.name)
        if self._steps_overlap:
            closures.refuse_accumulation(model, f"`mode={self.name}`")
        if self.name == "eamsgd":
            for optimizer in keras_internals.optimizers(model):
                if type(optimizer) is not keras.optimizers.SGD or optimizer.momentum:
                    raise UsageError(
                        f"`mode=eamsgd` has its own momentum, and the optimizer is `{type(optimizer).__name__}`"
                        + (f" with a momentum of {optimizer.momentum:g}" if getattr(optimizer, "momentum", 0) else ""),
                        "compile with `keras.optimizers.SGD` without momentum, or use `mode=easgd`",
                    )

    @property
    def _has_copies(self) -> bool:
        return self.name in ("downpour", "easgd", "eamsgd")

    def _rule(self) -> centre_rules.Rule:
        options = self.options
        if self.name == "downpour":
            return centre_rules.Downpour(options["push_every"], options["fetch_every"])
        if self.name == "easgd":
            return centre_rules.Easgd(options["sync_every"], options["moving_rate"])
        return centre_rules.Eamsgd(options["sync_every"], options["moving_rate"], options["momentum"])
