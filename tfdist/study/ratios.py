"""How many times as fast as another a cell is, from runs of the same rounds.

A machine's speed drifts, so times are compared only within a round. The result is the median of the log ratios, with a
percentile-bootstrap interval (Efron, 1979, Annals of Statistics 7), which resamples the ratios with replacement.

Synopsis:

    >>> ratio = of_rounds({0: 2.0, 1: 2.2, 2: 1.9}, {0: 1.0, 1: 1.0, 2: 1.0})
    >>> ratio.median, ratio.rounds
    (2.0, 3)
    >>> ratio.text
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
    """The median of the ratios of several rounds.

    Attributes:
        median: above 1 if the second cell is faster.
        low, high: the confidence interval; `None` with a single round.
        rounds: the number of ratios.
    """

    median: float
    low: float | None
    high: float | None
    rounds: int

    @property
    def is_difference(self) -> bool:
        """Whether the interval excludes 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    @property
    def text(self) -> str:
        """The text for a table."""
        if self.low is None or self.high is None:
            return f"{self.median:.2f} (one round)"
        interval = f"({self.low:.2f} to {self.high:.2f})"
        return f"{self.median:.2f} {interval}" if self.is_difference else f"no difference {interval}"


def of_rounds(base: Mapping[object, float], other: Mapping[object, float]) -> Ratio | None:
    """Returns the ratio of seconds, `base` / `other`; `None` if no round has both.

    Args:
        base: seconds of the base cell, by round.
        other: seconds of the other cell, by round.
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
    """Returns the percentile-bootstrap interval of the median of `values`, `[n]`."""
    resampled = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    tail = (1 - CONFIDENCE) / 2
    return np.quantile(np.median(resampled, axis=1), [tail, 1 - tail])
