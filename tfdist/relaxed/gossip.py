"""The inner loop of gossip: a process trains on its own part of the data, and exchanges weights around its steps.

    run(state, first, count)
        for each step
            Keras' plain train_step, on this process' examples alone
            messages to others and from others, as a machine of `tfdist.relaxed.gossip_rules` has them
        the messages that are still on their way

Processes that need not wait for each other do so at the end of a call: then every message has come.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.internals import keras as keras_internals
from tfdist.relaxed.averages import Averages
from tfdist.relaxed.flat_weights import unpacked
from tfdist.relaxed.gossip_rules import Machine, Sends
from tfdist.relaxed.local_sgd import IndependentProgram
from tfdist.relaxed.outer import Shown

# The tags of messages with weights, and of the word how many of them there are, and that no more questions will come.
WEIGHTS, DONE = 1, 2
SECONDS_BETWEEN_LOOKS = 1e-4


class Gossip(Averages):
    """What a process exchanges; a meeting of all forms the mean, which the model shows, and each keeps its own.

    Args:
        group: the processes of the job.
        model: compiled and built, with the slots of its optimizers.
        shown: of the model's weights.
        machine: says what is sent, and what becomes of what has come.
    """

    def __init__(self, group: Any, model: Any, shown: Shown, machine: Machine):
        super().__init__(group, model, [shown])
        self._shown, self._machine = shown, machine
        self._assign = tf.function(self._assign_flat, autograph=False)
        self._before = np.zeros(0, np.float32)
        # Messages with weights so far, to each process, and from each as far as it was looked for.
        self._sent, self._come = [0] * group.size, [0] * group.size
        self._weights: np.ndarray | None = None  # as they are; `None` where they may have been changed elsewhere

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._messages = 0

    def part(self) -> None:
        super().part()
        if self._model.optimizer is not None:
            self._machine.resume_at(int(keras_internals.iterations(self._model.optimizer).numpy()))

    def before_step(self) -> None:
        """A step begins."""
        self._before = self._packed()
        if not self._machine.waits:
            self._send(self._machine.begin(self._before))
        self._weights = None

    def after_step(self) -> None:
        """A step has ended. Where processes wait for each other, all messages of a step are sent after it."""
        began = time.perf_counter()
        if self._machine.waits:
            self._send(self._machine.begin(self._before))
        self._send(self._machine.stepped(self._packed()))
        for other in self._machine.expected:
            self._machine.receive(other, self.group.receive(other, WEIGHTS))
        self._finish()
        self._seconds += time.perf_counter() - began

    def end_call(self) -> None:
        """Returns when no message of any process is on its way."""
        if not self._machine.waits and self.group.size > 1:
            self._end_messages()
        self._weights = None

    def _end_messages(self) -> None:
        began = time.perf_counter()
        others = [rank for rank in range(self.group.size) if rank != self.group.rank]
        while self._machine.awaits_reply:
            self._answer()
        for other in others:
            self.group.send(np.array([self._sent[other]]), other, DONE)
        sent: dict[int, int] = {}  # to this process so far, by those that have said so
        while len(sent) < len(others) or any(self._come[other] < count for other, count in sent.items()):
            self._answer()
            for other in self.group.probe(DONE):
                sent[other] = int(self.group.receive(other, DONE)[0])
        self._seconds += time.perf_counter() - began

    def shares_of_processes(self) -> list[float]:
        masses = [float(one) for one in self.group.exchange(repr(self._machine.mass).encode())]
        return [one / sum(masses) for one in masses]

    def end_epoch(self) -> dict[str, float]:
        logs = super().end_epoch()
        sent = np.array([self._messages], np.float64)
        self.group.sum_in_place(sent)
        return logs | {"messages": float(sent[0])}

    def _packed(self) -> np.ndarray:
        if self._weights is None:
            self._weights = self._shown.packed_weights()
        return self._weights

    def _answer(self) -> None:
        if not self._finish():
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _finish(self) -> bool:
        """Makes new weights of what has come; returns whether anything has."""
        come = [] if self._machine.waits else self.group.probe(WEIGHTS)
        for other in come:
            self._machine.receive(other, self.group.receive(other, WEIGHTS))
            self._come[other] += 1
        if not (self._machine.waits or come):
            return False
        self._weights, sends = self._machine.finish(self._packed())
        self._assign(tf.constant(self._weights, tf.float32))
        self._send(sends)
        return True

    def _send(self, messages: Sends) -> None:
        if messages and not all(np.isfinite(np.sum(values)) for _, values in messages):
            raise self.not_finite([self.group.rank], "sent to others")
        self._messages += len(messages)
        for to, values in messages:
            self.group.send(values, to, WEIGHTS)
            self._sent[to] += 1

    def _assign_flat(self, flat: tf.Tensor) -> None:
        for variable, value in zip(self._shown.weights, unpacked(flat, self._shown.weights), strict=True):
            variable.assign(value)


class GossipProgram(IndependentProgram):
    """Runs steps apart, and gossips around each."""

    _averages: Gossip

    def steps_until_next(self, step: int) -> int:
        return 1

    def before_steps(self) -> None:
        self._averages.before_step()

    def after_steps(self, step: int) -> None:
        self._averages.after_step()

    def end_call(self) -> None:
        self._averages.end_call()
