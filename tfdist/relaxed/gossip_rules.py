"""Decentralised training as state machines: what a process sends around its steps, and makes of what it receives.

    begin(weights)              before a step: messages to send
    stepped(weights)            after it: messages to send
    receive(from_, message)     a message has come
    finish(weights)             the new weights, and messages to send

`expected` are the processes whose messages the next `finish` needs; none, where processes do not wait for each other.
`awaits_reply`: an answer is on its way to this process. Weights and messages are arrays, float32 or float64 `[n]`; a
message may have one number more than there are weights. Nothing here knows how messages travel, or when steps run.

    DPsgd      synchronous, over a mixing matrix          Lian et al., arXiv 1705.09056, algorithm 1
    PushSum    synchronous, directed                      Assran et al., arXiv 1811.10792, algorithm 1
    GoSgd      asynchronous, to a random process          Blot et al., arXiv 1611.09726, algorithm 1
    AdPsgd     asynchronous, with a random neighbour      Lian et al., arXiv 1710.06952, algorithm 1

Synopsis:

    >>> two = [DPsgd(rank, np.full((2, 2), 0.5)) for rank in range(2)]
    >>> at = [np.array([0.0]), np.array([4.0])]
    >>> [[(to, _)], [(_, back)]] = [machine.begin(one) for machine, one in zip(two, at)]
    >>> two[0].receive(1, back)
    >>> two[0].finish(at[0] + 1)[0]  # whose own step has added 1
    array([3.])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from tfdist.relaxed import topologies

# To whom, and what.
Sends = list[tuple[int, np.ndarray]]
# The options of each algorithm, and what they are if not said.
OPTIONS = {"dpsgd": ("topology",), "sgp": (), "gosgd": ("probability",), "adpsgd": ("topology",)}
TOPOLOGY, PROBABILITY = "ring", 0.01


class Machine:
    """One process of a decentralised training.

    Args:
        rank: of this process.
        size: the number of processes.

    Attributes:
        waits: `finish` needs messages of others; otherwise it takes what has come.
    """

    waits: ClassVar[bool] = False

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self._arrived: list[tuple[int, np.ndarray]] = []

    @property
    def expected(self) -> Sequence[int]:
        """The processes whose messages are needed before `finish`."""
        return ()

    @property
    def awaits_reply(self) -> bool:
        """Whether another process awaits_reply this one an answer."""
        return False

    @property
    def mass(self) -> float:
        """The weight with which this process counts in the mean over all."""
        return 1.0

    def resume_at(self, step: int) -> None:
        """The next step is number `step` of the training."""
        del step

    def begin(self, weights: np.ndarray) -> Sends:
        """A step begins."""
        del weights
        return []

    def stepped(self, weights: np.ndarray) -> Sends:
        """A step has ended."""
        del weights
        return []

    def receive(self, from_: int, message: np.ndarray) -> None:
        """A message has come from process `from_`."""
        self._arrived.append((from_, message))

    def finish(self, weights: np.ndarray) -> tuple[np.ndarray, Sends]:
        """Makes the new weights of those of this process and of what has come."""
        raise NotImplementedError

    def _taken(self) -> list[tuple[int, np.ndarray]]:
        taken, self._arrived = sorted(self._arrived, key=lambda one: one[0]), []
        return taken


class DPsgd(Machine):
    """x_i <- sum over j of W_ij x_j, and the step of process i, whose gradient is taken at x_i of before.

    Args:
        rank: of this process.
        mixing: the matrix W, see `tfdist.relaxed.topologies`.
    """

    waits = True

    def __init__(self, rank: int, mixing: np.ndarray):
        super().__init__(rank, len(mixing))
        self._mixing = mixing
        self._before: np.ndarray | None = None

    @property
    def expected(self) -> Sequence[int]:
        return [other for other in range(self.size) if other != self.rank and self._mixing[self.rank, other] > 0]

    def begin(self, weights: np.ndarray) -> Sends:
        self._before = weights
        hear = [other for other in range(self.size) if other != self.rank and self._mixing[other, self.rank] > 0]
        return [(other, weights) for other in hear]

    def finish(self, weights: np.ndarray) -> tuple[np.ndarray, Sends]:
        assert self._before is not None
        of = self._mixing[self.rank].tolist()  # Python's numbers, which leave the dtype of arrays as it is
        mixed = sum((of[other] * theirs for other, theirs in self._taken()), of[self.rank] * self._before)
        return weights + (mixed - self._before), []


class PushSum(Machine):
    """Each process pushes half of what it has to another one, and divides what it gets by the weights that come too."""

    waits = True

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self._mass, self._step = 1.0, 0
        self._before: np.ndarray | None = None
        self._kept: np.ndarray | None = None

    @property
    def mass(self) -> float:
        return self._mass

    @property
    def expected(self) -> Sequence[int]:
        return [
            other for other in range(self.size) if other != self.rank and self._to(other, self._step - 1) == self.rank
        ]

    def resume_at(self, step: int) -> None:
        self._step = step

    def _to(self, rank: int, step: int) -> int:
        return topologies.sends_to(step, rank, self.size)

    def begin(self, weights: np.ndarray) -> Sends:
        self._before = weights
        return []

    def stepped(self, weights: np.ndarray) -> Sends:
        assert self._before is not None
        moved = self._mass * self._before + (weights - self._before)
        to, self._step = self._to(self.rank, self._step), self._step + 1
        if to == self.rank:
            self._kept = moved
            return []
        self._kept, self._mass = moved / 2, self._mass / 2
        return [(to, np.append(self._kept, np.asarray(self._mass, weights.dtype)))]

    def finish(self, weights: np.ndarray) -> tuple[np.ndarray, Sends]:
        assert self._kept is not None
        total = self._kept
        for _, message in self._taken():
            total, self._mass = total + message[:-1], self._mass + float(message[-1])
        return np.asarray(total / self._mass, weights.dtype), []


class GoSgd(Machine):
    """With some probability a process sends its weights, and half of its mass, to a random one; masses weigh a mean.

    Args:
        rank: of this process.
        size: the number of processes.
        probability: of a message after a step.
        seed: of all processes.
    """

    def __init__(self, rank: int, size: int, probability: float, seed: int):
        super().__init__(rank, size)
        self._probability = probability
        self._random = np.random.default_rng([seed, rank])
        self._mass = 1.0 / size

    @property
    def mass(self) -> float:
        return self._mass

    def stepped(self, weights: np.ndarray) -> Sends:
        if self.size == 1 or self._random.random() >= self._probability:
            return []
        to = (self.rank + 1 + int(self._random.integers(self.size - 1))) % self.size
        self._mass /= 2
        return [(to, np.append(weights, np.asarray(self._mass, weights.dtype)))]

    def finish(self, weights: np.ndarray) -> tuple[np.ndarray, Sends]:
        for _, message in self._taken():
            theirs = float(message[-1])
            weights = (self._mass * weights + theirs * message[:-1]) / (self._mass + theirs)
            self._mass += theirs
        return weights, []


class AdPsgd(Machine):
    """An active process and a passive neighbour both take the mean of their weights, while steps go on.

    Even ranks are active: they send their weights before a step, if no answer is on its way, and add half of the
    difference when the answer comes, however many steps later. Passive ones answer between their steps. So no two wait
    for each other, gradients are taken at weights that may be old, and the sum of all weights stays.

    Args:
        rank: of this process.
        mixing: whose neighbours a process chooses among, each with the same chance.
        seed: of all processes.
    """

    def __init__(self, rank: int, mixing: np.ndarray, seed: int):
        super().__init__(rank, len(mixing))
        self._random = np.random.default_rng([seed, rank])
        self._passive = [other for other in range(1, self.size, 2) if mixing[rank, other] > 0]
        self._asked: np.ndarray | None = None  # what was sent with the question whose answer has not come

    @property
    def is_active(self) -> bool:
        """Whether this process asks, and does not answer."""
        return self.rank % 2 == 0

    @property
    def awaits_reply(self) -> bool:
        return self._asked is not None

    def begin(self, weights: np.ndarray) -> Sends:
        if not self.is_active or self._asked is not None or not self._passive:
            return []
        self._asked = weights
        return [(self._passive[int(self._random.integers(len(self._passive)))], weights)]

    def finish(self, weights: np.ndarray) -> tuple[np.ndarray, Sends]:
        sends: Sends = []
        for other, message in self._taken():
            if self.is_active:
                assert self._asked is not None
                weights, self._asked = weights + (message - self._asked) / 2, None
            else:
                sends.append((other, weights))
                weights = weights + (message - weights) / 2
        return weights, sends


def machine(algorithm: str, rank: int, mixing: np.ndarray, probability: float, seed: int) -> Machine:
    """The machine of an algorithm of `OPTIONS`.

    Args:
        algorithm: its name.
        rank: of the process.
        mixing: the matrix of the processes, for those that have one; its size is their number.
        probability: of `gosgd`.
        seed: of all processes.
    """
    if algorithm == "dpsgd":
        return DPsgd(rank, mixing)
    if algorithm == "sgp":
        return PushSum(rank, len(mixing))
    if algorithm == "gosgd":
        return GoSgd(rank, len(mixing), probability, seed)
    return AdPsgd(rank, mixing, seed)
