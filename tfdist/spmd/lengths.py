"""Symbolic lengths of axes: an integer times lengths that are unknown while the graph is built.

A step for sequences of unknown length computes shapes such as `[batch * length, features]`. The first axis of such a
shape can be sharded as the batch is if it is known to be a multiple of the batch size.

Synopsis:

    >>> batch, length = Monomial(8), Monomial(1, ("length",))
    >>> (batch * length).multiple_of(4)
    True
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Monomial:
    """`factor` times unknown lengths, each named by a symbol.

    Attributes:
        factor: a non-negative integer.
        symbols: sorted.
    """

    factor: int
    symbols: tuple[str, ...] = ()

    def __mul__(self, other: Monomial) -> Monomial:
        return Monomial(self.factor * other.factor, tuple(sorted(self.symbols + other.symbols)))

    def divided_by(self, other: Monomial) -> Monomial | None:
        """The quotient; `None` if it is not known to be an integer."""
        symbols = list(self.symbols)
        for symbol in other.symbols:
            if symbol not in symbols:
                return None
            symbols.remove(symbol)
        if other.factor == 0 or self.factor % other.factor:
            return None
        return Monomial(self.factor // other.factor, tuple(symbols))

    def multiple_of(self, divisor: int) -> bool:
        """Whether the length is a multiple of `divisor`, whatever the unknown lengths are."""
        return self.factor % divisor == 0


ONE = Monomial(1)

# What is known of each entry of a vector of lengths, or of one length.
Lengths = list[Monomial | None]


def product(lengths: Sequence[Monomial | None]) -> Monomial | None:
    """The product of lengths; `None` if nothing is known of one of them."""
    result = ONE
    for length in lengths:
        if length is None:
            return None
        result = result * length
    return result
