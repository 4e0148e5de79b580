"""The modes of `parameter_server`: what workers do with the weights on the servers, and when.

    asp         asynchronous: no worker waits for another                         no options
    rounds      S + 1 steps at a time                                             staleness
    ssp         a worker is at most S steps ahead of the slowest                  staleness
    bsp         synchronous: each worker computes a part of each batch            no options
    downpour    a worker trains on a copy of the weights and pushes its changes   push_every, fetch_every
    easgd       the copies and the centre move towards each other                 sync_every, moving_rate
    eamsgd      the same, with momentum                                           sync_every, moving_rate, momentum

Two modes have a bounded staleness. In `rounds` the next round starts when all steps are done, so that no step is staler
than S. In `ssp` each worker has a clock, which may be S steps ahead of the slowest one (Ho et al., NIPS 2013); with W
workers no step is staler than (2 S + 1) (W - 1). A clock is not tied to a process: any free process may take a clock's
next steps. If a process is lost or slow, another one continues its clock.

The sources of the last three are cited in `tfdist.relaxed.centre_rules`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tfdist.errors import UnknownNameError, UsageError
from tfdist.interface.bound import Bound, Staleness, SynchronousUpdates
from tfdist.interface.program import Program, Steps
from tfdist.internals import keras as keras_internals
from tfdist.internals import tensorflow_coordinator
from tfdist.options import require_owned
from tfdist.parameter_server import closures, copies, synchronous
from tfdist.parameter_server.closures import ClosureReplica
from tfdist.parameter_server.workers import SECONDS_BETWEEN_CHECKS, Watchdog
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
            return RoundsProgram(strategy, steps, self.options["staleness"])
        if self.name == "ssp":
            return ClocksProgram(strategy, steps, self.options["staleness"])
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


class RoundsProgram(closures.ClosureProgram):
    """Trains in rounds.

    Args:
        strategy: the strategy whose workers run the steps.
        steps: the steps of the training.
        staleness: S.
    """

    def __init__(self, strategy: Any, steps: Steps, staleness: int):
        super().__init__(strategy, steps, measures_staleness=staleness > 0)
        self._sequential, self._steps_together = staleness == 0, staleness + 1


class ClocksProgram(closures.ClosureProgram):
    """Trains with one clock per worker.

    Args:
        strategy: the strategy whose workers run the steps.
        steps: the steps of the training.
        slack: S.
    """

    def __init__(self, strategy: Any, steps: Steps, slack: int):
        self._slack = slack
        # With closures of half the slack, a worker that is one closure ahead need not wait.
        self._length = max(1, min(closures.STEPS_OF_A_CLOSURE, (slack + 1) // 2))
        super().__init__(strategy, steps)

    def _results_in_turn(self, state: Any, first: int, count: int) -> Iterator[tuple[list[closures.Result], bool]]:
        # A call ends when all its steps are done and visible to all workers, so each call starts with new clocks.
        clocks = [Clock() for _ in range(self._strategy.workers.count)]
        work = closures.closures_of(self._feed_batches, state, first, count, self._length)
        scheduled, finite = 0, True
        results: list[closures.Result] = []
        closure = next(work, None)
        while closure is not None or any(clock.running is not None for clock in clocks):
            while closure is not None and finite:
                clock = next_clock(clocks, closure.steps, self._slack)
                if clock is None:
                    break
                clock.running, clock.steps = self._schedule(closure), closure.steps
                scheduled += closure.steps
                closure = next(work, None)
            finished = self._wait_for_any(clocks)
            results += finished
            finite = finite and all(result.finite for result in finished)
            if not finite:
                closure = None
        yield results, scheduled < count

    def _wait_for_any(self, clocks: list[Clock]) -> list[closures.Result]:
        """Waits until a closure has finished; returns the results of all that have."""
        watchdog = Watchdog(self._strategy.workers)
        busy = [clock for clock in clocks if clock.running is not None]
        while True:
            finished = [clock for clock in busy if tensorflow_coordinator.finished(clock.running, 0)]
            if finished:
                return [self._result(clock) for clock in finished]
            tensorflow_coordinator.finished(busy[0].running, SECONDS_BETWEEN_CHECKS)
            watchdog.check()

    def _result(self, clock: Clock) -> closures.Result:
        result: closures.Result = self._codec.unpack(clock.running.fetch())
        clock.running = None
        clock.done += clock.steps
        return result


@dataclass
class Clock:
    """The clock of one worker.

    Attributes:
        done: the number of steps that are done.
        running: the handle of the running closure; `None` while the worker is idle.
        steps: the number of steps of the running closure.
    """

    done: int = 0
    running: Any = None
    steps: int = 0


def next_clock(clocks: Sequence[Clock], steps: int, slack: float) -> Clock | None:
    """Returns the clock that takes the next `steps`; `None` if all are busy or it would get more than `slack` ahead."""
    idle = [clock for clock in clocks if clock.running is None]
    slowest = min(clock.done for clock in clocks)
    candidate = min(idle, key=lambda clock: clock.done, default=None)
    return None if candidate is None or candidate.done + steps - 1 - slowest > slack else candidate
