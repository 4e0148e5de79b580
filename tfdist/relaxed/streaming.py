"""Local SGD whose weights meet a fragment at a time, and travel while steps go on.

    at step s          fragment p is sent, where s - (p + 1) H / P is a multiple of H
    at step s + tau    its outer optimizer has the mean of what was sent at s, and the weights become
                       mixing * (those of this process) + (1 - mixing) * (the new common ones)

An epoch, and a checkpoint within it, ends what is on its way, and has all fragments meet.

Source: Douillard et al., Streaming DiLoCo with overlapping communication, arXiv 2501.18512.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.relaxed.averages import Averages, learning_rate, pieces, squared
from tfdist.relaxed.local_sgd import IndependentProgram
from tfdist.relaxed.outer import Outer


@dataclass
class _Flight:
    """What is on its way of a fragment.

    Attributes:
        due: the step of the epoch at which it is taken in.
        local: the weights of this process that were sent, float32 `[n]`.
        mean: of all processes.
    """

    due: int
    local: np.ndarray
    mean: concurrent.futures.Future[np.ndarray]


class Streaming(Averages):
    """The meetings of fragments.

    Args:
        group: the processes of the job.
        model: compiled and built, with the slots of its optimizers.
        fragments: what makes the new weights of each.
        sync_every: steps from one meeting of a fragment to its next.
        overlap: steps while it travels, fewer than that.
    """

    def __init__(self, group: Any, model: Any, fragments: Sequence[Outer], sync_every: int, overlap: int):
        super().__init__(group, model, fragments)
        self._fragments, self._every, self._overlap = fragments, sync_every, overlap
        self._examples_of = [0] * len(fragments)
        self._flights: dict[int, _Flight] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "fragments")

    def note(self, examples: int) -> None:
        super().note(examples)
        self._examples_of = [seen + examples for seen in self._examples_of]

    def steps_until_next(self, step: int) -> int:
        """The number of steps from `step` of the epoch to where something is sent or taken in."""
        sends = [self._every - (step - offset) % self._every for offset in self._offsets]
        return min([*sends, *(flight.due - step for flight in self._flights.values())])

    def at(self, step: int) -> None:
        """Takes in, and sends, what is due after `step` steps of the epoch."""
        for number in [one for one, flight in self._flights.items() if flight.due == step]:
            self._take_in(number)
        for number, offset in enumerate(self._offsets):
            if (step - offset) % self._every == 0:
                self._send(number, step + self._overlap)
                if not self._overlap:
                    self._take_in(number)

    def pause(self) -> None:
        """Returns when nothing travels, so that other exchanges may follow; it is taken in at its step all the same."""
        concurrent.futures.wait([flight.mean for flight in self._flights.values()])

    def take(self) -> None:
        for number in list(self._flights):
            self._take_in(number)
        for number in range(len(self._fragments)):
            self._send(number, 0)
            self._take_in(number)
        self._average_rest()

    @property
    def _offsets(self) -> list[int]:
        return [(number + 1) * self._every // len(self._fragments) for number in range(len(self._fragments))]

    def _send(self, number: int, due: int) -> None:
        began = time.perf_counter()
        self.pause()  # one thread at a time uses the process group
        examples = self._meet(self._examples_of[number])
        self._examples_of[number] = 0
        if sum(examples):
            share = np.float32(examples[self.group.rank] / sum(examples))
            local = self._fragments[number].packed_weights()
            self._flights[number] = _Flight(due, local, self._thread.submit(self._mean_of, local, share))
        self._seconds += time.perf_counter() - began

    def _mean_of(self, local: np.ndarray, share: np.float32) -> np.ndarray:
        mean = local * share
        for piece in pieces(mean):
            self.group.sum_in_place(piece)
        return mean

    def _take_in(self, number: int) -> None:
        if number not in self._flights:  # nobody has seen an example since the fragment met last
            return
        began = time.perf_counter()
        self.pause()
        flight = self._flights.pop(number)
        mean = flight.mean.result()
        self._note_distance(squared(flight.local - mean))
        self._fragments[number].update(mean, learning_rate(self._model))
        self.taken += 1
        self._seconds += time.perf_counter() - began


class StreamingProgram(IndependentProgram):
    """Runs steps apart, while fragments of the weights come and go."""

    _averages: Streaming

    def steps_until_next(self, step: int) -> int:
        return self._averages.steps_until_next(step)

    def after_steps(self, step: int) -> None:
        self._averages.at(step)

    def end_call(self) -> None:
        self._averages.pause()
