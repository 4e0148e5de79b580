"""How many rounds a study has: a group-sequential design, whose probability of error does not depend on when it stops.

The results are looked at after 4, 6 and 8 rounds, and a table ends as soon as all its ratios are settled: each is a
difference, or is shown to be within `ratios.RESOLUTION` of 1. Each look has a share of the probability of error of the
table (error spending; Jennison and Turnbull, "Group sequential methods", 1999, chapter 7). The shares add up to 1, so
that by Bonferroni's inequality the probability that any look calls a ratio a difference although it is none is at most
`ratios.ERROR`, however the looks depend on each other, and the intervals hold whatever the reason to stop was (repeated
confidence intervals). Later looks have larger shares, as O'Brien and Fleming's boundaries do, because they decide most.

A study with `--repeats` has a single look, after its last round. If rounds are added to a study whose results are
known, its probability of error can no longer be stated.

Synopsis:

    >>> share(planned(repeats=None, seeds=1), rounds=4), share(planned(repeats=None, seeds=1), rounds=8)
    (0.2, 0.5)
    >>> looks = planned(repeats=5, seeds=1)
    >>> looks, share(looks, rounds=5), share(extended(looks, planned(repeats=8, seeds=1)), rounds=8)
    (((5, 1.0),), 1.0, None)
"""

from __future__ import annotations

from collections.abc import Sequence

Looks = Sequence[tuple[int, float]]  # the number of rounds before each look, and the share of the look

DEFAULT = ((4, 0.2), (6, 0.3), (8, 0.5))


def planned(repeats: int | None, seeds: int) -> Looks:
    """Returns the looks of a study.

    Args:
        repeats: the number of rounds for each seed; `None` for a number that depends on the results.
        seeds: the number of seeds.
    """
    looks = DEFAULT if repeats is None else ((repeats, 1.0),)
    return tuple((rounds * seeds, part) for rounds, part in looks)


def extended(looks: Looks, more: Looks) -> Looks:
    """Returns the looks of a study whose results are known and that then has more rounds."""
    return (*looks, *((rounds, 0.0) for rounds, _ in more if rounds > looks[-1][0]))


def share(looks: Looks, rounds: int) -> float | None:
    """Returns the share of the probability of error that the look after `rounds` rounds has; `None` if none is left."""
    if not looks:  # a study of an earlier version, which had a single look
        return 1.0
    return next((part for look, part in looks if rounds <= look), 0.0) or None
