"""Decentralized training as state machines: what a process sends around its steps, and how it uses what it receives.

    begin(weights)              before a step; returns messages to send
    stepped(weights)            after a step; returns messages to send
    receive(from_, message)     a message has arrived
    finish(weights)             returns the new weights, and messages to send

In synchronous algorithms the next `finish` needs messages of the processes in `expected`. `awaits_reply` is set while a
reply to this process is on its way. Weights and messages are arrays, float32 or float64 `[n]`; a message may have one
number more than there are weights. A machine knows neither how messages are sent nor when steps run.

    DPsgd      synchronous, over a mixing matrix          Lian et al., arXiv 1705.09056, algorithm 1
    PushSum    synchronous, directed                      Assran et al., arXiv 1811.10792, algorithm 1
    GoSgd      asynchronous, to a random process          Blot et al., arXiv 1611.09726, algorithm 1
    AdPsgd     asynchronous, with a random neighbour      Lian et al., arXiv 1710.06952, algorithm 1

Synopsis:

    >>> machines = [DPsgd(rank, np.full((2, 2), 0.5)) for rank in range(2)]
    >>> weights = [np.array([0.0]), np.array([4.0])]
    >>> [[(to, _)], [(_, message)]] = [machine.begin(x) for machine, x in zip(machines, weights)]
    >>> machines[0].receive(1, message)
    >>> machines[0].finish(weights[0] + 1)[0]  # the step of process 0 has added 1
    array([3.])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from tfdist.errors import UsageError
from tfdist.relaxed import topologies

# The receiver and the content of each message.
Messages = list[tuple[int, np.ndarray]]
# The options of each algorithm, and their defaults.
OPTIONS = {"dpsgd": ("topology",), "sgp": (), "gosgd": ("probability",), "adpsgd": ("topology",)}
TOPOLOGY, PROBABILITY = "ring", 0.01


class Machine:
    """One process of decentralized training.

    Args:
        rank: the rank of this process.
        size: the number of processes.

    Attributes:
        waits: `finish` needs messages of other processes; otherwise it uses those that have arrived.
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
        """Whether another process still has to reply to this one."""
        return False

    @property
    def mass(self) -> float:
        """The weight of this process in the mean over all processes."""
        return 1.0

    def resume_at(self, step: int) -> None:
        """Sets the number of the next step of the training."""
        del step

    def begin(self, weights: np.ndarray) -> Messages:
        del weights
        return []

    def stepped(self, weights: np.ndarray) -> Messages:
        del weights
        return []

    def receive(self, from_: int, message: np.ndarray) -> None:
        self._arrived.append((from_, message))

    def finish(self, weights: np.ndarray) -> tuple[np.ndarray, Messages]:
        """Combines this process's weights with the received ones; returns the new weights, and messages to send."""
        raise NotImplementedError

    def _take_arrived(self) -> list[tuple[int, np.ndarray]]:
        """Removes and returns the messages that have arrived, by sender."""
        arrived, self._arrived = sorted(self._arrived, key=lambda message: message[0]), []
        return arrived


class DPsgd(Machine):
    """x_i <- sum over j of W_ij x_j, plus the step of process i, whose gradient is taken at the old x_i.

    W is the matrix `mixing`, see `tfdist.relaxed.topologies`.
    """

    waits = True

    def __init__(self, rank: int, mixing: np.ndarray):
        super().__init__(rank, len(mixing))
        self._mixing = mixing
        self._before: np.ndarray | None = None  # the weights before the step

    @property
    def expected(self) -> Sequence[int]:
        return [other for other in range(self.size) if other != self.rank and self._mixing[self.rank, other] > 0]

    def begin(self, weights: np.ndarray) -> Messages:
        self._before = weights
        receivers = [other for other in range(self.size) if other != self.rank and self._mixing[other, self.rank] > 0]
        return [(other, weights) for other in receivers]

    def finish(self, weights: np.ndarray) -> tuple[np.ndarray, Messages]:
        assert self._before is not None
        row = self._mixing[self.rank].tolist()  # Python floats, which leave the dtype of arrays as it is
        mixed = sum((row[other] * message for other, message in self._take_arrived()), row[self.rank] * self._before)
        return weights + (mixed - self._before), []


class PushSum(Machine):
    """Pushes half of the weights and half of the mass to another process; what a process has is divided by its mass."""

    waits = True

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self._mass, self._step = 1.0, 0
        self._before: np.ndarray | None = None  # the weights before the step
        self._kept: np.ndarray | None = None  # the half that stays here

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

    def begin(self, weights: np.ndarray) -> Messages:
        self._before = weights
        return []

    def stepped(self, weights: np.ndarray) -> Messages:
        assert self._before is not None
        moved = self._mass * self._before + (weights - self._before)
        to, self._step = self._to(self.rank, self._step), self._step + 1
        if to == self.rank:
            self._kept = moved
            return []
        self._kept, self._mass = moved / 2, self._mass / 2
        return [(to, _with_mass(self._kept, self._mass, weights.dtype))]

    def finish(self, weights: np.ndarray) -> tuple[np.ndarray, Messages]:
        assert self._kept is not None
        total = self._kept
        for _, message in self._take_arrived():
            total, self._mass = total + message[:-1], self._mass + float(message[-1])
        return np.asarray(total / self._mass, weights.dtype), []


class GoSgd(Machine):
    """After a step, with some probability, a process sends its weights and half of its mass to a random process.

    The receiver averages the weights, weighted by mass. The `seed` is the same in all processes.
    """

    def __init__(self, rank: int, size: int, probability: float, seed: int):
        super().__init__(rank, size)
        self._probability = probability
        self._random = np.random.default_rng([seed, rank])
        self._mass = 1.0 / size

    @property
    def mass(self) -> float:
        return self._mass

    def stepped(self, weights: np.ndarray) -> Messages:
        if self.size == 1 or self._random.random() >= self._probability:
            return []
        to = (self.rank + 1 + int(self._random.integers(self.size - 1))) % self.size
        self._mass /= 2
        return [(to, _with_mass(weights, self._mass, weights.dtype))]

    def finish(self, weights: np.ndarray) -> tuple[np.ndarray, Messages]:
        for _, message in self._take_arrived():
            mass = float(message[-1])
            weights = (self._mass * weights + mass * message[:-1]) / (self._mass + mass)
            self._mass += mass
        return weights, []


class AdPsgd(Machine):
    """An active process and a passive neighbour both take the mean of their weights, while steps go on.

    Even ranks are active: before a step they send their weights, unless a reply is on its way, and add half of the
    difference when the reply arrives, any number of steps later. Odd ranks are passive and reply between their steps.
    No process waits for another, gradients may be taken at stale weights, and the sum of all weights is conserved.

    A process chooses among its neighbours in the matrix `mixing` with equal probability. The `seed` is the same in all
    processes.
    """

    def __init__(self, rank: int, mixing: np.ndarray, seed: int):
        super().__init__(rank, len(mixing))
        self._random = np.random.default_rng([seed, rank])
        self._passive = [other for other in range(1, self.size, 2) if mixing[rank, other] > 0]
        self._sent: np.ndarray | None = None  # weights to which the reply has not arrived

    @property
    def is_active(self) -> bool:
        """Whether this process sends weights by itself; otherwise it replies."""
        return self.rank % 2 == 0

    @property
    def awaits_reply(self) -> bool:
        return self._sent is not None

    def begin(self, weights: np.ndarray) -> Messages:
        if not self.is_active or self._sent is not None or not self._passive:
            return []
        self._sent = weights
        return [(self._passive[int(self._random.integers(len(self._passive)))], weights)]

    def finish(self, weights: np.ndarray) -> tuple[np.ndarray, Messages]:
        replies: Messages = []
        for other, message in self._take_arrived():
            if self.is_active:
                sent, self._sent = self._sent, None
                assert sent is not None
            else:
                sent = weights
                replies.append((other, sent))
            moved = message - sent
            moved /= 2  # in place, since copies take longer than the sums
            moved += weights
            weights = moved
        return weights, replies


def _with_mass(weights: np.ndarray, mass: float, dtype: np.dtype) -> np.ndarray:
    """A message with the weights of a process and its mass."""
    return np.append(weights, np.asarray(mass, dtype))


def machine(algorithm: str, rank: int, mixing: np.ndarray, probability: float, seed: int) -> Machine:
    """Makes the machine of an algorithm in `OPTIONS`; the size of `mixing` is the number of processes."""
    if algorithm == "dpsgd":
        return DPsgd(rank, mixing)
    if algorithm == "sgp":
        return PushSum(rank, len(mixing))
    if algorithm == "gosgd":
        return GoSgd(rank, len(mixing), probability, seed)
    return AdPsgd(rank, mixing, seed)


def require_partners(mixing: np.ndarray) -> None:
    """Raises `UsageError` for a matrix in which a process of `adpsgd` has no process to average with."""
    size = len(mixing)
    for rank in range(size if size > 1 else 0):
        if not any(mixing[rank, partner] > 0 for partner in range((rank + 1) % 2, size, 2)):
            kind = "odd" if rank % 2 == 0 else "even"
            raise UsageError(
                f"In `topology` rank {rank} has no neighbour whose rank is {kind}, and `adpsgd` averages an even "
                "rank with an odd one",
                "connect even ranks with odd ones, as `ring` does",
            )
