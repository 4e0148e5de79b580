"""A pseudo-random permutation of which any range can be computed, and random numbers by index.

The order of a very large dataset cannot be drawn: a shuffled array of 10⁹ numbers takes gigabytes and minutes in every
process and epoch. This permutation instead encrypts each position, in constant memory: with a Feistel network over the
next power of two, whose result is encrypted again until it is within the range ("cycle walking"; J. Black and
P. Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002).

Synopsis:

    >>> shuffled = Permutation(6, seed=1, epoch=0)
    >>> sorted(shuffled.between(0, 6).tolist())
    [0, 1, 2, 3, 4, 5]
    >>> shuffled.between(2, 4).tolist() == shuffled.between(0, 6)[2:4].tolist()
    True
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# The tests in `tests/test_data_order.py` can distinguish up to four rounds from chance. A round takes 3 ns per number.
ROUNDS = 6

# How many numbers are computed together: few enough for the cache of a core.
_AT_ONCE = 1 << 15


class Permutation:
    """A permutation of 0 to `size - 1`, a pure function of (seed, epoch).

    Args:
        size: the number of examples, at most 2**62.
        seed: not negative.
        epoch: the number of the epoch, from 0.
        rounds: the rounds of the network.
    """

    def __init__(self, size: int, seed: int, epoch: int, rounds: int = ROUNDS):
        self._size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits = bits // 2
        self._low, self._high = (np.uint32((1 << count) - 1) for count in (self._low_bits, bits - self._low_bits))
        self._keys = np.random.SeedSequence([seed, epoch]).generate_state(rounds, np.uint32)

    def between(self, begin: int, end: int) -> np.ndarray:
        """The numbers at the positions `begin` to `end - 1`: int64 `[end - begin]`."""
        numbers = np.empty(end - begin, np.int64)
        for first in range(begin, end, _AT_ONCE):
            last = min(first + _AT_ONCE, end)
            numbers[first - begin : last - begin] = self._permuted(np.arange(first, last, dtype=np.uint64))
        return numbers

    def _permuted(self, positions: np.ndarray) -> np.ndarray:
        numbers = self._encrypted(positions)
        outside = np.flatnonzero(numbers >= self._size)
        while len(outside):
            numbers[outside] = self._encrypted(numbers[outside])
            outside = outside[numbers[outside] >= self._size]
        return numbers

    def _encrypted(self, numbers: np.ndarray) -> np.ndarray:
        """A Feistel network: each round changes the high or the low bits depending on the others."""
        high, low = (numbers >> np.uint64(self._low_bits)).astype(np.uint32), numbers.astype(np.uint32) & self._low
        for number, key in enumerate(self._keys):
            if number % 2:
                low ^= _mixed(high + key) & self._low
            else:
                high ^= _mixed(low + key) & self._high
        return (high.astype(np.uint64) << np.uint64(self._low_bits)) | low


def uniform(indices: np.ndarray, columns: int, key: Sequence[int]) -> np.ndarray:
    """Random numbers in [0, 1) that depend on (key, index, column) only: float32 `[len(indices), columns]`.

    Args:
        indices: the numbers of examples, not negative, of any integer type `[n]`.
        columns: the number of random numbers per example.
        key: integers such as the seed and the epoch, not negative.
    """
    keys = np.random.SeedSequence(key).generate_state(2 * columns, np.uint32).reshape(2, columns)
    wide = np.asarray(indices).astype(np.uint64)[:, np.newaxis]
    high, low = (wide >> np.uint64(32)).astype(np.uint32), wide.astype(np.uint32)
    bits = _mixed(_mixed(low + keys[0]) ^ (high + keys[1]))
    return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Applies a bijection of 32 bits in place; each bit of the input changes about half of the output's bits.

    The constants are C. Wellons' `lowbias32` (https://nullprogram.com/blog/2018/07/31/).
    """
    numbers ^= numbers >> np.uint32(16)
    numbers *= np.uint32(0x7FEB352D)
    numbers ^= numbers >> np.uint32(15)
    numbers *= np.uint32(0x846CA68B)
    numbers ^= numbers >> np.uint32(16)
    return numbers
