"""The inner loop of local SGD: each process trains on its own part of the data, and they synchronize from time to time.

    run(state, first, count)
        steps until the next synchronization   Keras' plain train_step, on the examples of this process alone
        synchronization                        see `tfdist.relaxed.averages`
        metrics                                are summed over the processes

SGD whose weights are averaged after each step is synchronous training: the mean of the new weights is a step along the
mean gradient. Otherwise the weights diverge between synchronizations; the distance is measured before each of them.
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
from tfdist.relaxed.averages import Averages
from tfdist.relaxed.local_batches import local_batches


class AveragingProgram(StepProgram):
    """Runs `model.train_step` on this process's part of the data, and synchronizes the processes.

    Args:
        strategy: has the `group`.
        steps: of training, on the batches of all processes.
        sync_every: the number of steps between averagings; `None` averages only at the end of an epoch. Subclasses of
            `Averages` may determine the steps themselves.
        averages: synchronizes the processes; `None` averages over all of them.
        split_once: see `tfdist.relaxed.local_batches.local_batches`.
    """

    meets_in_each_step = False

    def __init__(
        self,
        strategy: Any,
        steps: Steps,
        sync_every: int | None,
        averages: Averages | None = None,
        *,
        split_once: bool = True,
    ):
        self._job = strategy
        self._averages = averages or Averages(strategy.group, steps.model)
        self._averages.sync_every = sync_every
        self._global_state: Any = None
        self._local_state: Any = None
        group = strategy.group
        self._local_batches = local_batches(steps.batches, group.rank, group.size, split_once=split_once)
        local_steps = dataclasses.replace(steps, batches=self._local_batches, at_nan=AtNan.NOTHING)
        super().__init__(OnThisProcess(strategy), local_steps)

    def begin_epoch(self) -> None:
        self._averages.begin_epoch()

    def end_epoch(self) -> dict[str, float]:
        """Synchronizes; returns the logs about the epoch's synchronizations."""
        return self._averages.end_epoch()

    def run(self, state: Any, first: int, count: int) -> Outcome:
        """Runs `count` global steps; in some of them this process may have no example."""
        if state is not self._global_state:
            self._global_state, self._local_state = state, self._local_batches.state(state)
        self._averages.begin_local_steps()
        done, ended = 0, False
        local_logs: Logs = {}
        while done < count and not ended:
            step = first + done
            self._averages.before_steps()
            until_next = self._averages.steps_until_next(step) or count
            outcome = super().run(self._local_state, step, min(count - done, until_next))
            self._averages.note(self._local_batches.examples(self._local_state, step, outcome.steps))
            done, ended, local_logs = done + outcome.steps, outcome.data_ended, outcome.logs or local_logs
            if outcome.steps:
                self._averages.after_steps(first + done)
        self._averages.end_call()
        merged = metrics.results(self._job, self._model) if done else {}
        others = {name: value for name, value in local_logs.items() if name not in merged}
        summed = self._sums(others) if others else {}
        merged = {name: value for name, value in merged.items() if name in local_logs}
        return Outcome(done, ended, local_logs | summed | merged)

    def _sums(self, logs: Logs) -> Logs:
        """The sums over the processes of logs that a step itself returns, each of which is weighted by its share."""
        values = [np.asarray(value, np.float64) for value in tf.nest.flatten(logs)]
        flat = np.concatenate([value.reshape(-1) for value in values])
        self._job.group.sum_in_place(flat)
        ends = np.cumsum([value.size for value in values])[:-1]
        sums = [part.reshape(value.shape) for part, value in zip(np.split(flat, ends), values, strict=True)]
        structured: Logs = tf.nest.pack_sequence_as(logs, sums)
        return structured

    def _step(self, state: Any, batch: Any) -> tuple[tf.Tensor, Logs]:
        self._local_batches.note(state, batch)
        has_examples = self._local_batches.has_examples(state, batch)
        if has_examples is True:
            return super()._step(state, batch)
        step = super()._step
        return tf.cond(has_examples, lambda: step(state, batch), lambda: (tf.constant(True), self._no_logs()))


class PostLocalProgram(Program):
    """Trains synchronously up to a step of the run, and with local SGD from then on.

    Source: Lin, Stich, Patel and Jaggi, Don't use large mini-batches, use local SGD, arXiv 1808.07217.

    Args:
        model: its optimizer counts the steps of the run.
        local_from: the number of synchronous steps.
        synchronous: runs the synchronous steps.
        local: runs the other steps.
    """

    def __init__(self, model: Any, local_from: int, synchronous: Program, local: Program):
        self._model, self._local_from = model, local_from
        self._synchronous, self._local = synchronous, local

    def begin_epoch(self) -> None:
        self._synchronous.begin_epoch()
        self._local.begin_epoch()

    def run(self, state: Any, first: int, count: int) -> Outcome:
        """Runs `count` global steps."""
        left = self._local_from - int(keras_internals.iterations(self._model.optimizer).numpy())
        if left <= 0:
            return self._local.run(state, first, count)
        begun = self._synchronous.run(state, first, min(left, count))
        if begun.steps == count or begun.data_ended:
            return begun
        rest = self._local.run(state, first + begun.steps, count - begun.steps)
        return Outcome(begun.steps + rest.steps, rest.data_ended, rest.logs or begun.logs)

    def end_epoch(self) -> Logs:
        return self._synchronous.end_epoch() | self._local.end_epoch()
