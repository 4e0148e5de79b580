"""Runs an epoch: calls of the inner loop between the batch hooks of the callbacks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from tfdist.data.input.feed import DataPasses
from tfdist.interface.program import AtNan, Logs, Program
from tfdist.interface.strategy import Strategy
from tfdist.internals import keras as keras_internals
from tfdist.loop import metrics, programs, steps_per_call

# The attributes of a model that callbacks set to end a `fit`, `evaluate` or `predict`.
STOPS = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}


class EpochRunner:
    """Runs the epochs of a `fit`, an `evaluate` or a `predict`.

    Args:
        strategy: the strategy that runs the steps.
        model: a compiled and built model.
        kind: "train", "test" or "predict".
        passes: the data.
        callbacks: a `keras.callbacks.CallbackList`.
        on_call: called with the logs of each call of the inner loop, before the hooks.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: Any,
        kind: str,
        passes: DataPasses,
        callbacks: Any,
        on_call: Callable[[Logs], None] = lambda logs: None,
    ):
        self._strategy = strategy
        self._model = model
        self._kind = kind
        self._passes = passes
        self._callbacks = callbacks
        self._on_call = on_call
        self._program = self._current_program()
        self._steps_per_execution = model.steps_per_execution
        self._pace = steps_per_call.Pace(
            callbacks.callbacks, kind, self._steps_per_execution, self._steps_at_most(), strategy.seconds_per_call
        )
        self._done = 0  # the number of finished steps of the epoch
        self._total: int | None = None  # the number of its steps, if known
        self._data_ended = False
        self._logs: Logs = {}

    def run(self, first: int) -> Logs:
        """Runs one epoch, beginning with step number `first`; returns its logs."""
        self._begin(first)
        # As in Keras, one call runs even if a callback has requested a stop before the epoch.
        count = self._steps_per_execution if self._stop_wanted else self._pace.steps(first)
        count, stop = self._coordinate(count, stop=False)
        while not (stop or self._ended):
            self._call(count)
            count, stop = self._coordinate(self._pace.steps(self._done), self._stop_wanted)
            setattr(self._model, STOPS[self._kind], stop)
        self._passes.end_epoch(self._done - first, self._data_ended, stop)
        if first and self._done == first:  # resumed after the last step of the epoch
            self._logs = metrics.results(self._strategy, self._model)
        return self._logs | self._program.end_epoch()

    def _begin(self, first: int) -> None:
        self._program = self._current_program()
        self._program.begin_epoch()
        remaining = self._passes.begin_epoch()
        ends = [self._passes.num_batches, None if remaining is None else first + remaining]
        self._total = min((end for end in ends if end is not None), default=None)
        self._done, self._data_ended, self._logs = first, remaining == 0, {}

    def _call(self, count: int) -> None:
        """Calls the inner loop for at most `count` steps, between the batch hooks."""
        count = count if self._total is None else min(count, self._total - self._done)
        getattr(self._callbacks, f"on_{self._kind}_batch_begin")(self._done)
        self._renew_program()
        began = time.perf_counter()
        with self._passes.feed.naming_bad_examples(self._passes.position, count):
            outcome = self._program.run(self._passes.state, self._passes.position, count)
        self._pace.ran(outcome.steps, time.perf_counter() - began)
        self._done += outcome.steps
        self._passes.position += outcome.steps
        self._data_ended = outcome.data_ended or self._passes.position == self._passes.feed.num_batches
        if outcome.steps:
            self._logs = outcome.logs
            self._on_call(self._logs)
            getattr(self._callbacks, f"on_{self._kind}_batch_end")(self._last_batch(), self._logs)

    def _last_batch(self) -> int:
        """Returns the batch number for `on_..._batch_end`."""
        if not self._ended:
            return self._done - 1
        # Keras numbers the last call of an epoch as if it had all `steps_per_execution` steps.
        return math.ceil(self._done / self._steps_per_execution) * self._steps_per_execution - 1

    def _renew_program(self) -> None:
        """Switches to another program if a callback has compiled the model or changed which layers are trainable."""
        current = self._current_program()
        if current is not self._program:
            self._program.end_epoch()
            self._program = current
            current.begin_epoch()

    def _current_program(self) -> Program:
        return programs.program(self._strategy, self._model, self._kind, self._passes.feed, self._callbacks.callbacks)

    @property
    def _ended(self) -> bool:
        return self._data_ended or (self._total is not None and self._done >= self._total)

    @property
    def _stop_wanted(self) -> bool:
        return bool(getattr(self._model, STOPS[self._kind]))

    def _coordinate(self, steps: int, stop: bool) -> tuple[int, bool]:
        """Agrees on the steps of the next call, and on stopping, with the processes that share these data."""
        if self._passes.feed.batches.local:
            return steps, stop
        return self._strategy.coordinate(steps, stop)

    def _steps_at_most(self) -> int | None:
        """Returns the largest number of steps per call; `None` if only the step time limits it."""
        # The inner loop checks Keras' own loss for NaN; the loss of a custom step appears only in the logs of a call.
        own_step = self._kind == "train" and keras_internals.has_own_step(self._model, "train")
        unwatched = own_step and steps_per_call.at_nan(self._callbacks.callbacks) is not AtNan.NOTHING
        # The outputs of each call are copied to the host, and an eager loop gains nothing from long calls.
        if self._kind == "predict" or self._model.run_eagerly or unwatched:
            return int(self._model.steps_per_execution)
        return self._strategy.steps_per_call
