"""What workers do with the weights on parameter servers, and when: the modes of `parameter_server`.

    asp         asynchronous: no worker waits for another                          options: none
    rounds      S + 1 steps at a time                                              staleness
    ssp         a worker is at most S steps ahead of the slowest                   staleness
    bsp         synchronous: each worker has a part of each batch                  none
    downpour    a worker trains on a copy, and pushes what has changed             push_every, fetch_every
    easgd       copies and the centre move towards each other                      sync_every, moving_rate
    eamsgd      the same, with a momentum                                          sync_every, moving_rate, momentum

The sources are named in `tfdist.relaxed.centre_rules` and `tfdist.parameter_server.clocks`.
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
from tfdist.parameter_server import clocks, copies, synchronous
from tfdist.parameter_server import closures as loop
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
# What is not said; the moving rate is that of all workers, divided by their number, as Zhang et al. have it.
USUAL = {
    "staleness": 3,
    **dict.fromkeys(("push_every", "fetch_every", "sync_every"), centre_rules.EVERY),
    "momentum": centre_rules.MOMENTUM,
}


class Mode:
    """A mode with its options.

    Args:
        name: of `OPTIONS`; `None` is "rounds" if a staleness is given, else "asp".
        given: the options, by name; `None` is not said.

    Raises:
        UsageError: the mode is unknown, or has no such option.
    """

    def __init__(self, name: str | None, given: Mapping[str, Any]):
        said = {option: value for option, value in given.items() if value is not None}
        if name is None:
            name = "rounds" if "staleness" in said else "asp"
        if name not in OPTIONS:
            raise UnknownNameError("mode", name, OPTIONS)
        require_owned(said, OPTIONS, name, "mode")
        self.name = name
        self.options: dict[str, Any] = {
            option: said.get(option, USUAL.get(option)) for option in OPTIONS[name] if option != "moving_rate"
        }
        self._moving_rate = said.get("moving_rate")
        self._overlaps = False

    def settle(self, workers: int) -> None:
        """Sets what follows from the number of workers."""
        one_by_one = self.name == "bsp" or (self.options.get("staleness") == 0 and self.name == "rounds")
        self._overlaps = workers > 1 and not one_by_one
        if "moving_rate" in OPTIONS[self.name]:
            usual = outer_rules.MOVING_RATE_OF_ALL / workers
            self.options["moving_rate"] = usual if self._moving_rate is None else self._moving_rate

    @property
    def as_one_device(self) -> bool:
        """Whether the steps are those of one device."""
        return self.name == "bsp"

    def bound(self, workers: int) -> Bound | None:
        """What is stated of steps that are not those of one device; `None` if nothing is."""
        if self.name == "rounds":
            return Staleness(self.options["staleness"])
        if self.name == "ssp":
            return Staleness((2 * self.options["staleness"] + 1) * (workers - 1))
        if self.name == "bsp":
            return SynchronousUpdates()
        return Staleness(None) if self.name == "asp" else None

    def program(self, strategy: Any, steps: Steps) -> Program:
        """The inner loop of a training, or of an evaluation."""
        if steps.kind == "test" or self.name == "asp":
            return loop.ClosureProgram(strategy, steps)
        if self.name == "rounds":
            return clocks.RoundsProgram(strategy, steps, self.options["staleness"])
        if self.name == "ssp":
            return clocks.ClocksProgram(strategy, steps, self.options["staleness"])
        if self.name == "bsp":
            return synchronous.SynchronousProgram(strategy, steps)
        return copies.CopiesProgram(strategy, steps, self._rule())

    def replica(self) -> ClosureReplica:
        """The replica of a worker's step."""
        return copies.CopiesReplica() if self._has_copies else ClosureReplica()

    def check(self, model: Any) -> None:
        """Raises `UsageError` for a model that cannot be trained in this mode."""
        if self._has_copies:
            copies.require_plain(model, self.name)
        if self._overlaps:
            loop.refuse_accumulation(model, f"`mode={self.name}`")
        if self.name == "eamsgd":
            for optimizer in keras_internals.optimizers(model):
                if type(optimizer) is not keras.optimizers.SGD or optimizer.momentum:
                    raise UsageError(
                        f"`mode=eamsgd` has a momentum of its own, and the optimizer is `{type(optimizer).__name__}`"
                        + (f" with a momentum of {optimizer.momentum:g}" if getattr(optimizer, "momentum", 0) else ""),
                        "compile with `keras.optimizers.SGD` without momentum, or use `mode=easgd`",
                    )

    @property
    def _has_copies(self) -> bool:
        return self.name in ("downpour", "easgd", "eamsgd")

    def _rule(self) -> centre_rules.Rule:
        given = self.options
        if self.name == "downpour":
            return centre_rules.Downpour(given["push_every"], given["fetch_every"])
        if self.name == "easgd":
            return centre_rules.Easgd(given["sync_every"], given["moving_rate"])
        return centre_rules.Eamsgd(given["sync_every"], given["moving_rate"], given["momentum"])
