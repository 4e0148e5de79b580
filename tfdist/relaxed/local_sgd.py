"""The inner loop of local SGD: each process trains on its own part of the data, and they meet at times.

    run(state, first, count)
        steps up to the next meeting           Keras' plain train_step, on this process' examples alone
        the weights = those of the meeting     see `tfdist.relaxed.averages`
        metrics = their sums over the processes

SGD whose weights are averaged after each step is synchronous training: the mean of the new weights is a step along the
mean gradient. Otherwise the weights drift apart between meetings; the distance is measured before each.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.interface.program import AtNan, Logs, Outcome, Program, Steps
from tfdist.interface.strategy import OnThisProcess
from tfdist.internals import keras as keras_internals
from tfdist.loop import metrics
from tfdist.loop.inner_loop import StepProgram
from tfdist.relaxed import local_batches
from tfdist.relaxed.averages import Averages


class IndependentProgram(StepProgram):
    """Runs `model.train_step` on this process' part of the data, without the other processes.

    Args:
        strategy: has the `group`.
        steps: of training, on the batches of all processes.
        averages: their meetings.
        split_once: see `tfdist.relaxed.local_batches.own`.
    """

    meets_in_each_step = False

    def __init__(self, strategy: Any, steps: Steps, averages: Averages, *, split_once: bool):
        self._job = strategy
        self._averages = averages
        self._state: tuple[Any, Any] = (None, None)  # of all processes, and of this one
        group = strategy.group
        self._own = local_batches.own(steps.batches, group.rank, group.size, split_once=split_once)
        own = dataclasses.replace(steps, batches=self._own, at_nan=AtNan.NOTHING)
        super().__init__(OnThisProcess(strategy), own)

    def begin_epoch(self) -> None:
        self._averages.begin_epoch()

    def end_epoch(self) -> dict[str, float]:
        """Meets the others, and returns the logs about the epoch's meetings."""
        return self._averages.end_epoch()

    def run(self, state: Any, first: int, count: int) -> Outcome:
        """Runs `count` global steps; in some of them this process may have no example."""
        if state is not self._state[0]:
            self._state = state, self._own.state(state)
        self._averages.part()
        done, ended = 0, False
        own: Logs = {}
        while done < count and not ended:
            at = first + done
            self.before_steps()
            outcome = super().run(self._state[1], at, min(count - done, self.steps_until_next(at) or count))
            self._averages.note(self._own.examples(self._state[1], at, outcome.steps))
            done, ended, own = done + outcome.steps, outcome.data_ended, outcome.logs or own
            if outcome.steps:
                self.after_steps(first + done)
        self.end_call()
        merged = metrics.results(self._job, self._model) if done else {}
        parts = {name: value for name, value in own.items() if name not in merged}
        summed = self._sums(parts) if parts else {}
        return Outcome(done, ended, own | summed | {name: value for name, value in merged.items() if name in own})

    def _sums(self, parts: Logs) -> Logs:
        """Of what a step itself returns: the sums of the processes' parts, each of which is weighed by its share."""
        values = [np.asarray(one, np.float64) for one in tf.nest.flatten(parts)]
        joined = np.concatenate([value.reshape(-1) for value in values])
        self._job.group.sum_in_place(joined)
        ends = np.cumsum([value.size for value in values])[:-1]
        pieces = zip(np.split(joined, ends), values, strict=True)
        found: Logs = tf.nest.pack_sequence_as(parts, [piece.reshape(value.shape) for piece, value in pieces])
        return found

    def steps_until_next(self, step: int) -> int | None:
        """The number of steps from `step` of the epoch to where the processes exchange something, within the epoch."""
        raise NotImplementedError

    def before_steps(self) -> None:
        """Called before steps."""

    def after_steps(self, step: int) -> None:
        """Called after steps, of which the epoch has had `step`."""
        raise NotImplementedError

    def end_call(self) -> None:
        """Called after the last step of a call."""

    def _step(self, state: Any, batch: Any) -> tuple[tf.Tensor, Logs]:
        self._own.note(state, batch)
        has_examples = self._own.has_examples(state, batch)
        if has_examples is True:
            return super()._step(state, batch)
        step = super()._step
        return tf.cond(has_examples, lambda: step(state, batch), lambda: (tf.constant(True), self._no_logs()))


class AveragingProgram(IndependentProgram):
    """Runs steps apart, and meets at times.

    Args:
        strategy: has the `group`.
        steps: of training, on the batches of all processes.
        sync_every: meet after this number of steps; `None` meets at the end of an epoch only.
        averages: what a meeting makes of the weights; `None` averages over all processes.
        split_once: see `tfdist.relaxed.local_batches.own`.
    """

    def __init__(
        self,
        strategy: Any,
        steps: Steps,
        sync_every: int | None,
        averages: Averages | None = None,
        *,
        split_once: bool = True,
    ):
        self._sync_every = sync_every
        meetings = averages or Averages(strategy.group, steps.model)
        super().__init__(strategy, steps, meetings, split_once=split_once)

    def steps_until_next(self, step: int) -> int | None:
        return None if self._sync_every is None else self._sync_every - step % self._sync_every

    def after_steps(self, step: int) -> None:
        if self._sync_every is not None and step % self._sync_every == 0:
            self._averages.take()


class PostLocalProgram(Program):
    """Trains in lock-step up to a step of the run, and apart from then on.

    Source: Lin, Stich, Patel and Jaggi, Don't use large mini-batches, use local SGD, arXiv 1808.07217.

    Args:
        model: whose optimizer counts the steps of the run.
        local_from: the number of steps in lock-step.
        together: runs these.
        apart: runs the others.
    """

    def __init__(self, model: Any, local_from: int, together: Program, apart: Program):
        self._model, self._local_from = model, local_from
        self._together, self._apart = together, apart

    def begin_epoch(self) -> None:
        self._together.begin_epoch()
        self._apart.begin_epoch()

    def run(self, state: Any, first: int, count: int) -> Outcome:
        """Runs `count` global steps."""
        left = self._local_from - int(keras_internals.iterations(self._model.optimizer).numpy())
        if left <= 0:
            return self._apart.run(state, first, count)
        begun = self._together.run(state, first, min(left, count))
        if begun.steps == count or begun.data_ended:
            return begun
        rest = self._apart.run(state, first + begun.steps, count - begun.steps)
        return Outcome(begun.steps + rest.steps, rest.data_ended, rest.logs or begun.logs)

    def end_epoch(self) -> Logs:
        return self._together.end_epoch() | self._apart.end_epoch()
