"""The error bounds of strategies whose steps differ from those of one device by design.

    Averaging            after each averaging, all ranks have the same weights; n steps of SGD later, with learning rate
                         r and gradients of norm at most G, a rank is at most r * G * n away from these weights
    Staleness            each step makes one update, and between a step's reads and its update there are at most S
                         updates by other workers
    SynchronousUpdates   all workers take each step together, and it makes one update

`tfdist.verification.bounds` measures whether a strategy keeps its bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Bound:
    """The bound of an asynchronous strategy.

    Attributes:
        equality: why its steps can equal those of one device, as a sentence without a full stop.
    """

    equality: ClassVar[str]


@dataclass(frozen=True)
class Averaging(Bound):
    """Ranks train independently and average their weights.

    Attributes:
        sync_every: the number of steps from one averaging to the next; `None` averages at the end of an epoch.
        plain: whether the new weights are the plain mean, without an outer optimizer or compression.
    """

    equality: ClassVar[str] = "averaging after each step of SGD is synchronous training"
    sync_every: int | None
    plain: bool = True


@dataclass(frozen=True)
class Staleness(Bound):
    """Workers update shared variables asynchronously.

    Attributes:
        most: the largest allowed staleness of a step, in updates; `None` for no limit.
    """

    equality: ClassVar[str] = "with a staleness of 0, one step runs after the other"
    most: int | None


@dataclass(frozen=True)
class SynchronousUpdates(Staleness):
    """All workers take each step together, and it makes one update."""

    equality: ClassVar[str] = "the workers take each step together, each with a part of the batch"
    most: int | None = 0
