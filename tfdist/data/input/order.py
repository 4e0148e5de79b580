"""The order of examples, a pure function of (seed, epoch), and the examples of each rank.

Every strategy and every pipeline uses it, so that global batch k has the same examples for any number of replicas
and processes (point 4 of the contract). An order is asked for by range; only a small one is drawn as a whole.

Synopsis:

    >>> shuffled = epoch_order(5, seed=1, epoch=0)
    >>> len(shuffled), list(shuffled) == list(epoch_order(5, seed=1, epoch=0))
    (5, True)
    >>> len(epoch_order(1_000_000_000, seed=1, epoch=0)[500_000_000:500_000_256])
    256
    >>> streams(7, batch_size=3)[:].tolist()
    [0, 2, 4, 1, 3, 5]
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

import numpy as np

from tfdist.data.input.division import WHOLE, Division
from tfdist.data.input.permutation import Permutation

# Up to here an order is drawn as a whole: 40 MB, and a second per epoch. Above, it is computed: drawing takes 0.1 µs
# per example and all of the memory at once; computing takes 0.04 µs where it is asked for.
LARGEST_DRAWN = 10_000_000

_BLOCKS = 2  # the generators of [seed, epoch] and [seed, epoch, 1] are of orders and of augmentation


def is_computed(examples: int) -> bool:
    """Whether what is random about so many examples is computed by range, and not drawn for all of them at once."""
    return examples > LARGEST_DRAWN


def index_type(examples: int) -> type[np.signedinteger]:
    """The type of the numbers of so many examples: int32 where they fit into it, and int64 elsewhere."""
    return np.int32 if examples <= np.iinfo(np.int32).max else np.int64


@dataclass(frozen=True)
class Order:
    """The numbers of the examples of an epoch, in the order in which it takes them.

    `order[begin:end]` is an array of `index_type`, and only that range is computed.

    Attributes:
        examples: the length.
        between: `between(begin, end)`: the numbers at these positions, which are inside the order.
    """

    examples: int
    between: Callable[[int, int], np.ndarray]

    def __len__(self) -> int:
        return self.examples

    @overload
    def __getitem__(self, wanted: int) -> int: ...
    @overload
    def __getitem__(self, wanted: slice) -> np.ndarray: ...
    def __getitem__(self, wanted: int | slice) -> int | np.ndarray:
        if isinstance(wanted, slice):
            begin, end, step = wanted.indices(self.examples)
            assert step == 1, "an order is asked for by range"
            return self.between(begin, max(begin, end))
        position = range(self.examples)[wanted]
        return int(self.between(position, position + 1)[0])


def _drawn(examples: int, draw: Callable[[], np.ndarray]) -> Order:
    """An order that is drawn as a whole, when it is first asked for."""
    whole = functools.cache(draw)
    return Order(examples, lambda begin, end: whole()[begin:end])


def epoch_order(examples: int, seed: int, epoch: int) -> Order:
    """The order of one epoch: a permutation of 0 to `examples - 1`."""
    dtype = index_type(examples)
    if is_computed(examples):
        shuffled = Permutation(examples, seed, epoch)
        return Order(examples, lambda begin, end: shuffled.between(begin, end).astype(dtype, copy=False))
    return _drawn(examples, lambda: np.random.default_rng([seed, epoch]).permutation(examples).astype(dtype))


def order_by_file(starts: np.ndarray, buffer: int, seed: int, epoch: int) -> Order:
    """The files in random order, one after the other, and their examples shuffled within blocks of `buffer` of them.

    What is read for a block is the next piece of a file, or of some, and only the orders of the files and of a block
    are in memory. Which examples of a file are near to each other differs little between epochs.

    Args:
        starts: the number of the first example of each file, and of the one after the last: int64 `[files + 1]`.
        buffer: examples per block; the last one may have fewer.
        seed: the seed; the order depends on `seed` and `epoch` only.
        epoch: the number of the epoch, from 0.
    """
    files = np.random.default_rng([seed, epoch]).permutation(len(starts) - 1)
    ends, examples = np.cumsum(np.diff(starts)[files]), int(starts[-1] - starts[0])
    dtype = index_type(int(starts[-1]))

    @functools.lru_cache(maxsize=2)
    def block(number: int) -> np.ndarray:
        begin, end = number * buffer, min((number + 1) * buffer, examples)
        place = begin + np.random.default_rng([seed, epoch, _BLOCKS, number]).permutation(end - begin)
        file = np.searchsorted(ends, place, side="right")
        return (starts[files[file] + 1] - (ends[file] - place)).astype(dtype)

    def between(begin: int, end: int) -> np.ndarray:
        first, last = begin // buffer, -(-end // buffer)
        blocks = [np.zeros(0, dtype), *map(block, range(first, last))]
        return np.concatenate(blocks)[begin - first * buffer : end - first * buffer]

    return Order(examples, between)


def order_within_batches(examples: int, batch_size: int, seed: int, epoch: int) -> Order:
    """The stored order, with the examples of each batch shuffled within the batch."""
    dtype = index_type(examples)

    def sorted_by(keys: np.ndarray, first: int) -> np.ndarray:
        """The examples from number `first` on, those of each batch sorted by their keys."""
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
    """A shuffled order whose batches have examples of similar lengths; a permutation.

    The whole set is sorted by length, with equal lengths in random order, and divided into batches, which are shuffled.
    If the last batch is not full, its examples are drawn at random. It is drawn as a whole, however large.

    Args:
        lengths: the length of each example, integers `[examples]`.
        batch_size: examples per global batch.
        seed: the seed; the order depends on `seed` and `epoch` only.
        epoch: the number of the epoch, from 0.
    """

    def draw() -> np.ndarray:
        generator = np.random.default_rng([seed, epoch])
        shuffled = generator.permutation(len(lengths)).astype(index_type(len(lengths)))
        whole, rest = np.split(shuffled, [len(lengths) // batch_size * batch_size])
        batches = whole[np.argsort(lengths[whole], kind="stable")].reshape(-1, batch_size)
        return np.concatenate([generator.permutation(batches).reshape(-1), rest])

    return _drawn(len(lengths), draw)


def streams(examples: int, batch_size: int) -> Order:
    """The stored order read as `batch_size` streams side by side: row i of batch k + 1 follows row i of batch k.

    The end of the data that does not fill all rows is left out.
    """
    a_stream, dtype = examples // batch_size, index_type(examples)

    def between(begin: int, end: int) -> np.ndarray:
        batch, row = np.divmod(np.arange(begin, end), batch_size)
        return (row * a_stream + batch).astype(dtype)

    return Order(a_stream * batch_size, between)


def stream_positions(examples: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The stream of each stored example in `streams`, and its position in the stream.

    Returns:
        Two arrays of `index_type`, `[examples]`; examples that are left out get the values of a further stream.
    """
    number = np.arange(examples, dtype=index_type(examples))
    a_stream = examples // batch_size
    return number // a_stream, number % a_stream


def as_stored(examples: int) -> Order:
    """The order without shuffling: 0 to `examples - 1`."""
    return Order(examples, lambda begin, end: np.arange(begin, end, dtype=index_type(examples)))


@dataclass(frozen=True)
class Parts:
    """The examples of one rank in each step of an epoch.

    Attributes:
        indices: the order of the epoch.
        batch_size: examples per global batch.
        rank: the rank.
        division: of a batch among the ranks.
        batches: the number of steps, if there are more than batches: the last ones then have no examples.
    """

    indices: Order
    batch_size: int
    rank: int = 0
    division: Division = WHOLE
    batches: int = 0

    def __len__(self) -> int:
        return max(self.batches, -(-len(self.indices) // self.batch_size))

    def length(self, batch: int) -> int:
        """The number of examples of the rank in batch number `batch`."""
        begin, end = self.division.part(self._end(batch + 1) - self._end(batch), self.rank)
        return end - begin

    def joined(self, first: int, last: int) -> np.ndarray:
        """The examples of the rank in the batches from number `first` to `last`, one batch after the other."""
        examples = self.indices[self._end(first) : self._end(last)]
        whole, rest = np.split(examples, [len(examples) // self.batch_size * self.batch_size])
        return np.concatenate([self._own(whole.reshape(-1, self.batch_size)).reshape(-1), self._own(rest)])

    def runs(self, first: int) -> list[tuple[int, int, int]]:
        """The batches from number `first` on, divided where their lengths change: begin, end, length of the first.

        A shorter batch at the end of a run does not divide it.
        """
        whole, last = len(self.indices) // self.batch_size, -(-len(self.indices) // self.batch_size)
        changes = {first, last, len(self)} | (set() if 0 < self.length(whole) <= self.length(0) else {whole})
        borders = sorted(border for border in changes if border >= first)
        return [(begin, end, self.length(begin)) for begin, end in itertools.pairwise(borders)]

    def _own(self, batches: np.ndarray) -> np.ndarray:
        """The part of the rank, of the last axis."""
        begin, end = self.division.part(batches.shape[-1], self.rank)
        return batches[..., begin:end]

    def _end(self, batches: int) -> int:
        """The number of examples in the first `batches` batches."""
        return min(batches * self.batch_size, len(self.indices))


def parts_by_file(indices: Order, files: np.ndarray, batch_size: int, rank: int, division: Division) -> Parts:
    """The examples of one rank in each step, if each rank reads whole files.

    The largest files are assigned first, each to the rank with the fewest examples. All ranks get the same number of
    batches; a rank without further examples gets empty batches. A rank keeps the numbers of its own examples.

    Args:
        indices: the order of the epoch, a permutation of the examples.
        files: the number of the file of each example, from 0, int `[examples]`, in stored order.
        batch_size: examples per step over all ranks.
        rank: the rank.
        division: of a batch among the ranks.
    """
    files, sizes = files[: len(indices)], np.zeros(0, np.int64)
    for begin in range(0, len(files), LARGEST_DRAWN):
        more = np.bincount(files[begin : begin + LARGEST_DRAWN], minlength=len(sizes))
        more[: len(sizes)] += sizes
        sizes = more
    loads, owners = np.zeros(division.count, np.int64), np.zeros(len(sizes), np.int64)
    for file in np.argsort(-sizes, kind="stable"):
        owners[file] = loads.argmin()
        loads[owners[file]] += sizes[file]
    ends = [division.part(batch_size, one) for one in range(division.count)]
    lengths = [max(1, end - begin) for begin, end in ends]
    steps = max(-(-int(load) // length) for load, length in zip(loads, lengths, strict=True))

    def mine() -> np.ndarray:
        ranges = (indices[begin : begin + LARGEST_DRAWN] for begin in range(0, len(indices), LARGEST_DRAWN))
        return np.concatenate([some[owners[files[some]] == rank] for some in ranges])

    return Parts(_drawn(int(loads[rank]), mine), lengths[rank], batches=steps)
