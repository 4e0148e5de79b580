"""How many times as fast a cell is as another, from runs of the same rounds.

A machine's speed drifts, so that times are compared within a round alone. Of the ratios' logarithms the median is
taken, with an interval by the percentile bootstrap (Efron, 1979, Annals of Statistics 7), which takes the ratios with
replacement again and again.

Synopsis:

    >>> found = of_rounds({0: 2.0, 1: 2.2, 2: 1.9}, {0: 1.0, 1: 1.0, 2: 1.0})
    >>> found.median, found.rounds
    (2.0, 3)
    >>> found.text
    '2.00 (1.90 to 2.20)'
    >>> of_rounds({0: 1.0, 1: 0.9}, {0: 0.9, 1: 1.0}).text
    'no difference (0.90 to 1.11)'
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 9_999


@dataclass(frozen=True)
class Ratio:
    """A median of ratios.

    Attributes:
        median: above 1 where the second cell is faster.
        low, high: the interval; `None` with a single round.
        rounds: how many ratios there are.
    """

    median: float
    low: float | None
    high: float | None
    rounds: int

    @property
    def is_difference(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    @property
    def text(self) -> str:
        """For a table."""
        if self.low is None or self.high is None:
            return f"{self.median:.2f} (one round)"
        interval = f"({self.low:.2f} to {self.high:.2f})"
        return f"{self.median:.2f} {interval}" if self.is_difference else f"no difference {interval}"


def of_rounds(base: Mapping[object, float], other: Mapping[object, float]) -> Ratio | None:
    """The ratio of seconds, `base` / `other`, each by round; `None` if no round has both.

    Args:
        base: seconds of the cell that is compared with.
        other: seconds of the cell that is judged.
    """
    logarithms = np.array([math.log(base[key] / other[key]) for key in base if key in other])
    if not len(logarithms):
        return None
    median = math.exp(np.median(logarithms))
    if len(logarithms) == 1:
        return Ratio(median, None, None, 1)
    low, high = np.exp(_interval(logarithms))
    return Ratio(median, float(low), float(high), len(logarithms))


def _interval(values: np.ndarray) -> np.ndarray:
    """The percentile bootstrap's interval of the median of `values`, `[n]`."""
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    tails = (1 - CONFIDENCE) / 2
    return np.quantile(np.median(drawn, axis=1), [tails, 1 - tails])
