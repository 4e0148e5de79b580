"""The error bound that a strategy states when its steps differ from those of one device by design.

    Averaging     after each averaging all ranks have the same weights; n steps of SGD later, with learning rate r and
                  gradients of norm at most G, a rank is at most r * G * n away from them
    Staleness     at most S updates of others come between the reads of a step and its own update; and each step is one
                  update
    SynchronousUpdates      each step is one update, by all workers

`tfdist.verification.bounds` measures whether a strategy keeps its bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Bound:
    """The bound of an asynchronous strategy.

    Attributes:
        equality: when its steps equal those of one device, as a sentence without its full stop.
    """

    equality: ClassVar[str]


@dataclass(frozen=True)
class Averaging(Bound):
    """Ranks train independently and average their weights.

    Attributes:
        sync_every: the number of steps from one averaging to the next; `None` averages at the end of an epoch.
        plain: the new weights are the mean, without an outer optimizer, and are sent uncompressed.
    """

    equality: ClassVar[str] = "averaging after each step of SGD is synchronous training"
    sync_every: int | None
    plain: bool = True


@dataclass(frozen=True)
class Staleness(Bound):
    """Workers update common variables, each at its own pace.

    Attributes:
        most: the largest staleness of a step, in updates; `None` states none.
    """

    equality: ClassVar[str] = "with a staleness of 0, one step runs after the other"
    most: int | None


@dataclass(frozen=True)
class SynchronousUpdates(Staleness):
    """All workers take each step together, which is one update."""

    equality: ClassVar[str] = "the workers take each step together, each with a part of the batch"
    most: int | None = 0
