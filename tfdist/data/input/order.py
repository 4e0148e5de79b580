"""The order of examples, a pure function of (seed, epoch), and the examples of each rank.

Every strategy and every pipeline uses it, so that global batch k has the same examples for any number of replicas
and processes (point 4 of the contract). An order is read by range; only a short order is drawn as a whole. A shuffled
array of 10⁹ numbers would take gigabytes and minutes in every process and epoch; `Permutation` instead encrypts each
position, in constant memory: with a Feistel network over the next power of two, whose result is encrypted again until
it is within the range ("cycle walking"; J. Black and P. Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002).

Synopsis:

    >>> shuffled = epoch_order(5, seed=1, epoch=0)
    >>> len(shuffled), list(shuffled) == list(epoch_order(5, seed=1, epoch=0))
    (5, True)
    >>> len(epoch_order(1_000_000_000, seed=1, epoch=0)[500_000_000:500_000_256])
    256
    >>> shuffled = Permutation(6, seed=1, epoch=0)
    >>> sorted(shuffled.between(0, 6).tolist())
    [0, 1, 2, 3, 4, 5]
    >>> shuffled.between(2, 4).tolist() == shuffled.between(0, 6)[2:4].tolist()
    True
    >>> streams(7, batch_size=3)[:].tolist()
    [0, 2, 4, 1, 3, 5]
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from tfdist.data.input.division import WHOLE, Division

# The largest order that is drawn as a whole, which takes 40 MB and a second per epoch. A larger order is computed where
# it is read: that takes 0.04 µs per example instead of 0.1 µs, and no memory for the whole order.
LARGEST_DRAWN = 10_000_000

# The tests in `tests/test_data_order.py` can distinguish up to four rounds from chance. A round takes 3 ns per number.
FEISTEL_ROUNDS = 6

# How many numbers are computed together: few enough for the cache of a core.
_AT_ONCE = 1 << 15

_BLOCKS = 2  # [seed, epoch] seeds the order of an epoch, and [seed, epoch, 1] its augmentation


def is_computed(examples: int) -> bool:
    """Whether the random numbers for this many examples are computed by range, and not drawn for all at once."""
    return examples > LARGEST_DRAWN


def index_type(examples: int) -> type[np.signedinteger]:
    """The type of the example numbers in a dataset of this size: int32 if they fit, else int64."""
    return np.int32 if examples <= np.iinfo(np.int32).max else np.int64


@dataclass(frozen=True)
class Order:
    """The numbers of the examples of an epoch, in the order of training.

    `order[begin:end]` is an array of `index_type`; only that range is computed.

    Attributes:
        examples: the length.
        between: `between(begin, end)`: the numbers at these positions, which are within the order.
    """

    examples: int
    between: Callable[[int, int], np.ndarray]

    def __len__(self) -> int:
        return self.examples

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> np.ndarray: ...
    def __getitem__(self, index: int | slice) -> int | np.ndarray:
        if isinstance(index, slice):
            begin, end, step = index.indices(self.examples)
            assert step == 1, "an order is read by range"
            return self.between(begin, max(begin, end))
        position = range(self.examples)[index]
        return int(self.between(position, position + 1)[0])


# The order of the examples in pass number `epoch`.
OrderOf = Callable[[int], Order]


def _drawn(examples: int, draw: Callable[[], np.ndarray]) -> Order:
    """An order that is drawn as a whole when it is first read."""
    drawn = functools.cache(draw)
    return Order(examples, lambda begin, end: drawn()[begin:end])


def epoch_order(examples: int, seed: int, epoch: int) -> Order:
    """The order of one epoch: a permutation of 0 to `examples - 1`."""
    dtype = index_type(examples)
    if is_computed(examples):
        shuffled = Permutation(examples, seed, epoch)
        return Order(examples, lambda begin, end: shuffled.between(begin, end).astype(dtype, copy=False))
    return _drawn(examples, lambda: np.random.default_rng([seed, epoch]).permutation(examples).astype(dtype))


def order_by_file(starts: np.ndarray, buffer: int, seed: int, epoch: int) -> Order:
    """The files in random order, with their examples shuffled within blocks of `buffer` examples.

    A block is the next contiguous piece of one or more files, and only the order of the files and that of a block are
    in memory. Examples that are close to each other in a file stay close in every epoch.

    Args:
        starts: the number of the first example of each file, and the total number: int64 `[files + 1]`.
        buffer: the number of examples per block; the last block may have fewer.
        seed: the seed; the order depends on `seed` and `epoch` only.
        epoch: the number of the epoch, from 0.
    """
    files = np.random.default_rng([seed, epoch]).permutation(len(starts) - 1)
    ends, examples = np.cumsum(np.diff(starts)[files]), int(starts[-1] - starts[0])
    dtype = index_type(int(starts[-1]))

    @functools.lru_cache(maxsize=2)
    def block(number: int) -> np.ndarray:
        begin, end = number * buffer, min((number + 1) * buffer, examples)
        position = begin + np.random.default_rng([seed, epoch, _BLOCKS, number]).permutation(end - begin)
        file = np.searchsorted(ends, position, side="right")
        return (starts[files[file] + 1] - (ends[file] - position)).astype(dtype)

    def between(begin: int, end: int) -> np.ndarray:
        first, last = begin // buffer, -(-end // buffer)
        blocks = [np.zeros(0, dtype), *map(block, range(first, last))]
        return np.concatenate(blocks)[begin - first * buffer : end - first * buffer]

    return Order(examples, between)


def order_within_batches(examples: int, batch_size: int, seed: int, epoch: int) -> Order:
    """The stored order, with the examples shuffled within each batch."""
    dtype = index_type(examples)

    def sorted_by(keys: np.ndarray, first: int) -> np.ndarray:
        """The examples from number `first` on, sorted by their keys within each batch."""
        numbers = np.arange(first, first + len(keys))
        return numbers[np.lexsort((keys, numbers // batch_size))].astype(dtype)

    if not is_computed(examples):
        return _drawn(examples, lambda: sorted_by(np.random.default_rng([seed, epoch]).random(examples), 0))
    keys = Permutation(examples, seed, epoch)

    def between(begin: int, end: int) -> np.ndarray:
        first, last = begin // batch_size * batch_size, min(-(-end // batch_size) * batch_size, examples)
        return sorted_by(keys.between(first, last), first)[begin - first : end - first]

    return Order(examples, between)


def bucketed_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> Order:
    """A shuffled order whose batches have examples of similar lengths.

    The examples are sorted by length, equal lengths in random order, and divided into batches, which are shuffled. If
    the last batch is not full, its examples are drawn at random. The order is drawn as a whole, whatever its length.

    Args:
        lengths: the length of each example, integers `[examples]`.
        batch_size: the number of examples per global batch.
        seed: the seed; the order depends on `seed` and `epoch` only.
        epoch: the number of the epoch, from 0.
    """

    def draw() -> np.ndarray:
        generator = np.random.default_rng([seed, epoch])
        shuffled = generator.permutation(len(lengths)).astype(index_type(len(lengths)))
        in_full_batches, in_last_batch = np.split(shuffled, [len(lengths) // batch_size * batch_size])
        by_length = in_full_batches[np.argsort(lengths[in_full_batches], kind="stable")]
        batches = by_length.reshape(-1, batch_size)
        return np.concatenate([generator.permutation(batches).reshape(-1), in_last_batch])

    return _drawn(len(lengths), draw)


def streams(examples: int, batch_size: int) -> Order:
    """The stored order read as `batch_size` streams side by side: row i of batch k + 1 follows row i of batch k.

    The end of the data is left out if it does not fill all rows.
    """
    stream_length, dtype = examples // batch_size, index_type(examples)

    def between(begin: int, end: int) -> np.ndarray:
        batch, row = np.divmod(np.arange(begin, end), batch_size)
        return (row * stream_length + batch).astype(dtype)

    return Order(stream_length * batch_size, between)


def stream_positions(examples: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The stream of each stored example in `streams`, and its position in the stream.

    Returns:
        Two arrays of `index_type`, `[examples]`; examples that are left out get the values of one more stream.
    """
    number = np.arange(examples, dtype=index_type(examples))
    stream_length = examples // batch_size
    return number // stream_length, number % stream_length


def as_stored(examples: int) -> Order:
    """The order without shuffling: 0 to `examples - 1`."""
    return Order(examples, lambda begin, end: np.arange(begin, end, dtype=index_type(examples)))


@dataclass(frozen=True)
class Parts:
    """The examples of one rank in each step of an epoch.

    Attributes:
        indices: the order of the epoch.
        batch_size: the number of examples per global batch.
        rank: the rank.
        division: how a batch is divided among the ranks.
        batches: the number of steps, if it is larger than that of batches; the last steps then have no examples.
    """

    indices: Order
    batch_size: int
    rank: int = 0
    division: Division = WHOLE
    batches: int = 0

    def __len__(self) -> int:
        return max(self.batches, -(-len(self.indices) // self.batch_size))

    def length(self, batch: int) -> int:
        """The number of the rank's examples in batch number `batch`."""
        begin, end = self.division.part(self._end(batch + 1) - self._end(batch), self.rank)
        return end - begin

    def joined(self, first: int, last: int) -> np.ndarray:
        """The rank's examples in the batches `first` to `last - 1`, one batch after the other."""
        examples = self.indices[self._end(first) : self._end(last)]
        full, rest = np.split(examples, [len(examples) // self.batch_size * self.batch_size])
        return np.concatenate([self._part(full.reshape(-1, self.batch_size)).reshape(-1), self._part(rest)])

    def runs(self, first: int) -> list[tuple[int, int, int]]:
        """The batches from number `first` on, divided into runs of the same length.

        Returns:
            Per run its first batch, the batch after its last, and the length of its batches. The last batch of a run
            may be shorter.
        """
        full, last = len(self.indices) // self.batch_size, -(-len(self.indices) // self.batch_size)
        changes = {first, last, len(self)} | (set() if 0 < self.length(full) <= self.length(0) else {full})
        borders = sorted(border for border in changes if border >= first)
        return [(begin, end, self.length(begin)) for begin, end in itertools.pairwise(borders)]

    def _part(self, batches: np.ndarray) -> np.ndarray:
        """The rank's part of the last axis."""
        begin, end = self.division.part(batches.shape[-1], self.rank)
        return batches[..., begin:end]

    def _end(self, batches: int) -> int:
        """The number of examples in the first `batches` batches."""
        return min(batches * self.batch_size, len(self.indices))


def parts_by_file(indices: Order, files: np.ndarray, batch_size: int, rank: int, division: Division) -> Parts:
    """The examples of one rank in each step, if each rank reads whole files.

    The largest files are assigned first, each to the rank with the fewest examples. All ranks get the same number of
    batches; a rank that runs out of examples gets empty batches. Only the numbers of the rank's examples are kept.

    Args:
        indices: the order of the epoch, a permutation of the examples.
        files: the number of the file of each example, from 0, int `[examples]`, in stored order.
        batch_size: the number of examples per step over all ranks.
        rank: the rank.
        division: how a batch is divided among the ranks.
    """
    files, sizes = files[: len(indices)], np.zeros(0, np.int64)
    for begin in range(0, len(files), LARGEST_DRAWN):
        counts = np.bincount(files[begin : begin + LARGEST_DRAWN], minlength=len(sizes))
        counts[: len(sizes)] += sizes
        sizes = counts
    loads, owners = np.zeros(division.count, np.int64), np.zeros(len(sizes), np.int64)
    for file in np.argsort(-sizes, kind="stable"):
        owners[file] = loads.argmin()
        loads[owners[file]] += sizes[file]
    bounds = [division.part(batch_size, index) for index in range(division.count)]
    lengths = [max(1, end - begin) for begin, end in bounds]
    steps = max(-(-int(load) // length) for load, length in zip(loads, lengths, strict=True))

    def examples_of_rank() -> np.ndarray:
        ranges = (indices[begin : begin + LARGEST_DRAWN] for begin in range(0, len(indices), LARGEST_DRAWN))
        return np.concatenate([numbers[owners[files[numbers]] == rank] for numbers in ranges])

    return Parts(_drawn(int(loads[rank]), examples_of_rank), lengths[rank], batches=steps)


class Permutation:
    """A permutation of 0 to `size - 1`, a pure function of (seed, epoch).

    Args:
        size: the number of examples, at most 2**62.
        seed: not negative.
        epoch: the number of the epoch, from 0.
        rounds: the rounds of the network.
    """

    def __init__(self, size: int, seed: int, epoch: int, rounds: int = FEISTEL_ROUNDS):
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
