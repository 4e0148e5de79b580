"""Which example comes when: a pure function of (seed, epoch), and which replica takes which part of a batch.

Every strategy and every pipeline asks here, so that global batch k holds the same examples for any number of
replicas and processes (point 4 of the contract).

Synopsis:

    >>> list(epoch_order(5, seed=1, epoch=0)) == list(epoch_order(5, seed=1, epoch=0))
    True
    >>> [part(10, index, 4) for index in range(4)]
    [(0, 3), (3, 5), (5, 8), (8, 10)]
    >>> streams(7, batch_size=3).tolist()
    [0, 2, 4, 1, 3, 5]
"""

from __future__ import annotations

import numpy as np


def epoch_order(examples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch: a permutation of 0 to `examples - 1`, int32 `[examples]`."""
    return np.random.default_rng([seed, epoch]).permutation(examples).astype(np.int32)


def order_within_batches(examples: int, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """As stored, but for the examples of each batch, which are shuffled among themselves; int32 `[examples]`."""
    keys = np.random.default_rng([seed, epoch]).random(examples)
    return np.lexsort((keys, np.arange(examples) // batch_size)).astype(np.int32)


def bucketed_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """A shuffled order whose batches hold examples of similar lengths; a permutation, int32 `[examples]`.

    The whole set is sorted by length, equal lengths shuffled among themselves, and cut into batches, which come in
    random order. The last batch, where it is not full, is drawn at random.

    Args:
        lengths: of each example, integers `[examples]`.
        batch_size: examples in a global batch.
        seed: with `epoch`, all that the order depends on.
        epoch: which epoch, from 0.
    """
    generator = np.random.default_rng([seed, epoch])
    shuffled = generator.permutation(len(lengths)).astype(np.int32)
    whole, rest = np.split(shuffled, [len(lengths) // batch_size * batch_size])
    batches = whole[np.argsort(lengths[whole], kind="stable")].reshape(-1, batch_size)
    return np.concatenate([generator.permutation(batches).reshape(-1), rest])


def streams(examples: int, batch_size: int) -> np.ndarray:
    """The stored order read as `batch_size` streams side by side: row i of batch k + 1 follows row i of batch k.

    Returns:
        int32 `[examples // batch_size * batch_size]`: the tail that does not give each row an example is left out.
    """
    rows = np.arange(examples // batch_size * batch_size, dtype=np.int32).reshape(batch_size, -1)
    return rows.T.reshape(-1)


def places(examples: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each stored example is in the `streams`: the number of its stream, and its own in the stream.

    Returns:
        Two int32 `[examples]`; of the tail that is left out, what it would be in a further stream.
    """
    number = np.arange(examples, dtype=np.int32)
    a_stream = examples // batch_size
    return number // a_stream, number % a_stream


def as_stored(examples: int) -> np.ndarray:
    """The order without shuffling: 0 to `examples - 1`, int32 `[examples]`."""
    return np.arange(examples, dtype=np.int32)


def parts_by_file(
    indices: np.ndarray, files: np.ndarray, batch_size: int, rank: int, world_size: int
) -> list[np.ndarray]:
    """The examples of one rank in each step, where each rank has whole files.

    The largest files are dealt out first, each to the rank that has the fewest examples. All ranks get equally many
    batches; one that has had all its examples gets empty ones.

    Args:
        indices: the order of the epoch, int32 `[examples]`.
        files: the number of the file that each example is in, int `[examples]`, in stored order.
        batch_size: examples in a step over all ranks.
        rank: which.
        world_size: of how many.
    """
    numbers, sizes = np.unique(files[indices], return_counts=True)
    loads = np.zeros(world_size, int)
    owners = {}
    for place in np.argsort(-sizes, kind="stable"):
        owner = int(loads.argmin())
        owners[int(numbers[place])] = owner
        loads[owner] += sizes[place]
    ends = [part(batch_size, one, world_size) for one in range(world_size)]
    lengths = [max(1, end - begin) for begin, end in ends]
    steps = max(-(-int(load) // length) for load, length in zip(loads, lengths, strict=True))
    mine = indices[[owners[int(file)] == rank for file in files[indices]]]
    return [mine[step * lengths[rank] : (step + 1) * lengths[rank]] for step in range(steps)]


def parts(indices: np.ndarray, batch_size: int, rank: int, world_size: int) -> list[np.ndarray]:
    """The examples of one rank in each global batch of an epoch whose order is `indices`."""
    found = []
    for first in range(0, len(indices), batch_size):
        batch = indices[first : first + batch_size]
        begin, end = part(len(batch), rank, world_size)
        found.append(batch[begin:end])
    return found


def part(examples: int, index: int, count: int) -> tuple[int, int]:
    """The half-open range of a batch of `examples` that part `index` of `count` takes.

    Parts are contiguous and in order, so that joining them gives the batch back; their sizes differ by one at
    most, and part 0 of a batch with examples is never empty. Works on Python integers and on TensorFlow's integer
    tensors alike.
    """
    return (examples * index + count - 1) // count, (examples * (index + 1) + count - 1) // count
