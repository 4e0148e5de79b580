"""The seed of a strategy that is given none."""

from __future__ import annotations

import random


def seed_of_random() -> int:
    """A number that follows from the state of Python's `random`, and leaves it as it is.

    So the weights that Keras draws next are those that it would draw without the strategy.
    """
    copy = random.Random()
    copy.setstate(random.getstate())
    return copy.getrandbits(31)
