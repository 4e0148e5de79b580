"""The inner loop of gossip: a process trains on its own part of the data, and exchanges weights around its steps.

    run(state, first, count)
        for each step
            Keras' plain train_step, on the examples of this process alone
            messages to and from other processes, as a machine of `tfdist.relaxed.gossip_rules` requires
        the messages that are still on their way

Processes of asynchronous algorithms wait for each other only at the end of a call, until every message has arrived.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tfdist.internals import keras as keras_internals
from tfdist.relaxed.averages import Averages
from tfdist.relaxed.gossip_rules import Machine, Messages
from tfdist.relaxed.outer import SharedMean

# The tags of messages with weights, and of the messages at the end of a call with the number of weights messages sent.
WEIGHTS, DONE = 1, 2
SECONDS_BETWEEN_PROBES = 1e-4


class Gossip(Averages):
    """Exchanges weights as a machine requires; synchronizing computes the mean, and each process keeps its own weights.

    Args:
        group: the processes of the job.
        model: compiled and built, with the slots of its optimizers.
        shared: the mean of the weights, which the model shows after a synchronization.
        machine: determines the messages and the new weights.
    """

    def __init__(self, group: Any, model: Any, shared: SharedMean, machine: Machine):
        super().__init__(group, model, [shared])
        self._machine = machine
        self._packed = shared.packed
        self._before = np.zeros(0, np.float32)  # the weights before the step
        # The number of messages with weights so far, to and from each process.
        self._sent, self._received = [0] * group.size, [0] * group.size
        self._weights: np.ndarray | None = None  # of the variables; `None` where they may have changed since

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._messages = 0

    def begin_local_steps(self) -> None:
        super().begin_local_steps()
        if self._model.optimizer is not None:
            self._machine.resume_at(int(keras_internals.iterations(self._model.optimizer).numpy()))

    def steps_until_next(self, step: int) -> int:
        return 1

    def before_steps(self) -> None:
        self._before = self._current_weights()
        if not self._machine.waits:
            self._send(self._machine.begin(self._before))
        self._weights = None

    def after_steps(self, step: int) -> None:
        """Sends the messages of the step; synchronous algorithms then wait for those of other processes."""
        began = time.perf_counter()
        if self._machine.waits:
            self._send(self._machine.begin(self._before))
        self._send(self._machine.stepped(self._current_weights()))
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
            self._poll()
        for other in others:
            self.group.send(np.array([self._sent[other]]), other, DONE)
        counts: dict[int, int] = {}  # messages to this process, by the processes that are done
        while len(counts) < len(others) or any(self._received[other] < count for other, count in counts.items()):
            self._poll()
            for other in self.group.probe(DONE):
                counts[other] = int(self.group.receive(other, DONE)[0])
        self._seconds += time.perf_counter() - began

    def shares_of_processes(self) -> list[float]:
        masses = [float(message) for message in self.group.exchange(repr(self._machine.mass).encode())]
        return [mass / sum(masses) for mass in masses]

    def end_epoch(self) -> dict[str, float]:
        logs = super().end_epoch()
        return logs | {"messages": self.sum_over_processes(self._messages)}

    def _current_weights(self) -> np.ndarray:
        if self._weights is None:
            self._weights = self._packed.read()
        return self._weights

    def _poll(self) -> None:
        if not self._finish():
            time.sleep(SECONDS_BETWEEN_PROBES)

    def _finish(self) -> bool:
        """Computes new weights from the messages that have arrived; returns whether there are any."""
        senders = [] if self._machine.waits else self.group.probe(WEIGHTS)
        for other in senders:
            self._machine.receive(other, self.group.receive(other, WEIGHTS))
            self._received[other] += 1
        if not (self._machine.waits or senders):
            return False
        self._weights, messages = self._machine.finish(self._current_weights())
        self._packed.assign(self._weights)
        self._send(messages)
        return True

    def _send(self, messages: Messages) -> None:
        if messages and not all(np.isfinite(np.sum(values)) for _, values in messages):
            raise self.not_finite([self.group.rank], "sent to others")
        self._messages += len(messages)
        for to, values in messages:
            self.group.send(values, to, WEIGHTS)
            self._sent[to] += 1
