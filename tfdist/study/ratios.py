"""How many times as fast as another a cell is, from runs of the same rounds.

A machine's speed drifts, so times are compared only within a round. The result is the geometric mean of the ratios,
with Student's interval for the mean of their logarithms (1908, Biometrika 6). For log-normal times it covers the true
ratio as often as it says, for any number of rounds from two; outliers widen it (Benjamini, 1983, JASA 78).

A table has several ratios, and each of them could differ from 1 by chance. Holm's procedure (1979, Scandinavian Journal
of Statistics 6) bounds the probability that any ratio is called a difference although it is none. Each interval has the
level of the ratio's step in the procedure, so that exactly the intervals of differences exclude 1.

Synopsis:

    >>> ratio = of_rounds({0: 2.0, 1: 2.2, 2: 1.9}, {0: 1.0, 1: 1.0, 2: 1.0})
    >>> ratio.rounds, ratio.text
    (3, '2.03 (1.69 to 2.44)')
    >>> of_rounds({0: 1.0, 1: 0.9, 2: 1.02}, {0: 0.9, 1: 1.0, 2: 1.0}).text
    'not decided (0.77 to 1.31)'
    >>> of_rounds({0: 2.0}, {0: 1.0}).text
    '2.00 (one round)'
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist import extras

ERROR = 0.05  # the probability that any ratio of a table is called a difference although it is none
RESOLUTION = 1.05  # an interval between 1 / RESOLUTION and RESOLUTION shows that there is no difference of interest
ONE_ROUND, ADDED_ROUNDS = "one round", "rounds were added later"  # reasons for a ratio without an interval
MOST_ROUNDS = 1000  # of which `rounds_needed` thinks

Logarithms = tuple[float, ...]


@dataclass(frozen=True)
class Ratio:
    """The geometric mean of the ratios of several rounds.

    Attributes:
        estimate: above 1 if the second cell is faster.
        low, high: the interval; `None` if there is none.
        rounds: the number of ratios.
        rounds_needed: the number of rounds after which the interval is expected to be narrower than `RESOLUTION` on
            either side; `None` if it is unknown.
        reason: why there is no interval; "" if there is one.
    """

    estimate: float
    low: float | None
    high: float | None
    rounds: int
    rounds_needed: int | None = None
    reason: str = ""

    @property
    def is_difference(self) -> bool:
        """Whether the interval excludes 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    @property
    def is_equal(self) -> bool:
        """Whether the interval shows that there is no difference of interest."""
        return self.low is not None and self.high is not None and self.low > 1 / RESOLUTION and self.high < RESOLUTION

    @property
    def is_settled(self) -> bool:
        """Whether more rounds are not needed."""
        return self.is_difference or self.is_equal

    @property
    def text(self) -> str:
        """The text for a table."""
        if self.low is None or self.high is None:
            return f"{self.estimate:.2f} ({self.reason})"
        interval = f"({self.low:.2f} to {self.high:.2f})"
        if self.is_difference:
            return f"{self.estimate:.2f} {interval}"
        return f"no difference {interval}" if self.is_equal else f"not decided {interval}"


def of_rounds(base: Mapping[object, float], other: Mapping[object, float]) -> Ratio | None:
    """Returns the ratio of seconds, `base` / `other`, alone in its table; `None` if no round has both."""
    return of_table([logarithms(base, other)])[0]


def logarithms(base: Mapping[object, float], other: Mapping[object, float]) -> Logarithms:
    """Returns the logarithms of the ratios of seconds, `base` / `other`, of the rounds that have both.

    Args:
        base: seconds of the base cell, by round.
        other: seconds of the other cell, by round.
    """
    return tuple(math.log(base[key] / other[key]) for key in base if key in other)


def of_table(samples: Sequence[Logarithms], error: float | None = ERROR) -> list[Ratio | None]:
    """Returns the ratio of each sample, with Holm's procedure over the samples; `None` for an empty sample.

    Args:
        samples: the logarithms of the ratios of each row.
        error: the probability that any of them is called a difference although it is none; `None` if no such
            probability can be stated, because rounds were added after their results were known.
    """
    if error is None:
        return [_without_interval(sample, ADDED_ROUNDS) if sample else None for sample in samples]
    levels = _levels({index: _p_value(sample) for index, sample in enumerate(samples) if len(sample) > 1}, error)
    return [
        _ratio(sample, levels[index]) if index in levels else _without_interval(sample, ONE_ROUND) if sample else None
        for index, sample in enumerate(samples)
    ]


def of_next(sample: Logarithms) -> tuple[float, float]:
    """Returns the bounds between which one more value lies with probability 1 - `ERROR`: Student's prediction interval.

    Args:
        sample: the logarithms of at least two values.
    """
    half = _quantile(len(sample), ERROR) * statistics.stdev(sample) * math.sqrt(1 + 1 / len(sample))
    mean = statistics.fmean(sample)
    return math.exp(mean - half), math.exp(min(mean + half, 700.0))


def _levels(p_values: Mapping[int, float], error: float) -> dict[int, float]:
    """The probability of error of each interval: in Holm's procedure, of its step or of the step that ended it."""
    levels: dict[int, float] = {}
    level, goes_on = error, True
    for step, index in enumerate(sorted(p_values, key=p_values.__getitem__)):
        if goes_on:
            level = error / (len(p_values) - step)
            goes_on = p_values[index] < level
        levels[index] = level
    return levels


def _p_value(sample: Logarithms) -> float:
    """The probability of a mean at least as far from 0, if the true mean is 0."""
    mean, standard_error = _mean_and_error(sample)
    if not standard_error:
        return 0.0 if mean else 1.0
    return 2 * float(special_functions().stdtr(len(sample) - 1, -abs(mean) / standard_error))


def _ratio(sample: Logarithms, level: float) -> Ratio:
    mean, standard_error = _mean_and_error(sample)
    half = _quantile(len(sample), level) * standard_error
    low, high = math.exp(mean - half), math.exp(min(mean + half, 700.0))
    return Ratio(math.exp(mean), low, high, len(sample), _rounds_needed(sample, level))


def _without_interval(sample: Logarithms, reason: str) -> Ratio:
    return Ratio(math.exp(statistics.fmean(sample)), None, None, len(sample), reason=reason)


def _mean_and_error(sample: Logarithms) -> tuple[float, float]:
    """The mean of a sample and its standard error."""
    return statistics.fmean(sample), statistics.stdev(sample) / math.sqrt(len(sample))


def _quantile(rounds: int, level: float) -> float:
    """The standard errors on either side of a mean that an interval with this probability of error has."""
    return float(special_functions().stdtrit(rounds - 1, 1 - level / 2))


def _rounds_needed(sample: Logarithms, level: float) -> int | None:
    """The number of rounds after which the half of the interval is expected to be less than `RESOLUTION`."""
    deviation = statistics.stdev(sample)

    def is_enough(rounds: int) -> bool:
        return _quantile(rounds, level) * deviation / math.sqrt(rounds) < math.log(RESOLUTION)

    rounds = 2 + bisect.bisect_left(range(2, MOST_ROUNDS + 1), True, key=is_enough)
    return rounds if rounds <= MOST_ROUNDS else None


def special_functions() -> Any:
    """SciPy's special functions, which only the ratios of a study need.

    Raises:
        MissingPackageError: SciPy is not installed.
    """
    with extras.importing("report", "An interval"):
        from scipy import special

    return special
