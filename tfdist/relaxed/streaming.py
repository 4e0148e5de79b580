"""Local SGD that synchronizes one fragment of the weights at a time, while steps go on.

    at step s          fragment p of P is sent, where s - (p + 1) H / P is a multiple of H = `sync_every`
    at step s + tau    the outer optimizer updates the common weights with the mean of what was sent at step s, and the
                       weights become mixing * (those of this process) + (1 - mixing) * (the new common weights)

At the end of an epoch, and at a checkpoint within it, the fragments on their way are taken in, and then all fragments
are synchronized.

Source: Douillard et al., Streaming DiLoCo with overlapping communication, arXiv 2501.18512.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.relaxed.averages import Averages, learning_rate, mean_over_processes
from tfdist.relaxed.compression import pieces, squared_norm
from tfdist.relaxed.outer import OuterOptimizer


@dataclass
class _Transfer:
    """A fragment on its way."""

    due: int  # the step of the epoch at which it is taken in
    local: np.ndarray  # the weights that this process has sent, float32 `[n]`
    mean: concurrent.futures.Future[np.ndarray]  # over all processes


class Streaming(Averages):
    """Synchronizes fragments of the weights.

    Args:
        group: the processes of the job.
        model: compiled and built, with the slots of its optimizers.
        fragments: the outer optimizer of each fragment.
        sync_every: the number of steps between two synchronizations of a fragment.
        overlap: the number of steps while a fragment is on its way, fewer than `sync_every`.
    """

    def __init__(self, group: Any, model: Any, fragments: Sequence[OuterOptimizer], sync_every: int, overlap: int):
        super().__init__(group, model, fragments)
        self._fragments, self._every, self._overlap = fragments, sync_every, overlap
        self._offsets = [(number + 1) * sync_every // len(fragments) for number in range(len(fragments))]
        self._examples_of = [0] * len(fragments)  # since each fragment was last sent
        self._transfers: dict[int, _Transfer] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "fragments")

    def note(self, examples: int) -> None:
        super().note(examples)
        self._examples_of = [seen + examples for seen in self._examples_of]

    def steps_until_next(self, step: int) -> int:
        sends = [self._every - (step - offset) % self._every for offset in self._offsets]
        return min([*sends, *(transfer.due - step for transfer in self._transfers.values())])

    def after_steps(self, step: int) -> None:
        """Takes in, and sends, the fragments that are due after `step` steps of the epoch."""
        for number in [number for number, transfer in self._transfers.items() if transfer.due == step]:
            self._take_in(number)
        for number, offset in enumerate(self._offsets):
            if (step - offset) % self._every == 0:
                self._send(number, step + self._overlap)
                if not self._overlap:
                    self._take_in(number)

    def end_call(self) -> None:
        """Waits until no fragment is on its way, so that the group can be used; they are taken in when due."""
        concurrent.futures.wait([transfer.mean for transfer in self._transfers.values()])

    def take(self) -> None:
        for number in list(self._transfers):
            self._take_in(number)
        for number in range(len(self._fragments)):
            self._send(number, 0)
            self._take_in(number)
        self._average_parts()

    def _send(self, number: int, due: int) -> None:
        began = time.perf_counter()
        self.end_call()  # only one thread at a time may use the process group
        examples = self._exchange_status(self._examples_of[number])
        self._examples_of[number] = 0
        if sum(examples):
            share = examples[self.group.rank] / sum(examples)
            local = self._fragments[number].packed_weights()
            self._transfers[number] = _Transfer(due, local, self._thread.submit(self._mean_of, local, share))
        self._seconds += time.perf_counter() - began

    def _mean_of(self, local: np.ndarray, share: float) -> np.ndarray:
        return np.concatenate([mean_over_processes(self.group, piece, share) for piece in pieces(local)])

    def _take_in(self, number: int) -> None:
        if number not in self._transfers:  # no process has seen an example since the fragment was last sent
            return
        began = time.perf_counter()
        self.end_call()
        transfer = self._transfers.pop(number)
        mean = transfer.mean.result()
        self._note_distance(squared_norm(transfer.local - mean))
        self._fragments[number].update(mean, learning_rate(self._model))
        self.taken += 1
        self._seconds += time.perf_counter() - began
