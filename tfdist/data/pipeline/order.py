"""The order of examples, a pure function of (seed, epoch), and the division of batches into parts.

Every strategy and every pipeline uses it, so that global batch k has the same examples for any number of replicas
and processes (point 4 of the contract).

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
    """The stored order, with the examples of each batch shuffled within the batch; int32 `[examples]`."""
    keys = np.random.default_rng([seed, epoch]).random(examples)
    return np.lexsort((keys, np.arange(examples) // batch_size)).astype(np.int32)


def bucketed_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """A shuffled order whose batches have examples of similar lengths; a permutation, int32 `[examples]`.

    The whole set is sorted by length, with equal lengths in random order, and divided into batches, which are shuffled.
    If the last batch is not full, its examples are drawn at random.

    Args:
        lengths: the length of each example, integers `[examples]`.
        batch_size: examples per global batch.
        seed: the seed; the order depends on `seed` and `epoch` only.
        epoch: the number of the epoch, from 0.
    """
    generator = np.random.default_rng([seed, epoch])
    shuffled = generator.permutation(len(lengths)).astype(np.int32)
    whole, rest = np.split(shuffled, [len(lengths) // batch_size * batch_size])
    batches = whole[np.argsort(lengths[whole], kind="stable")].reshape(-1, batch_size)
    return np.concatenate([generator.permutation(batches).reshape(-1), rest])


def streams(examples: int, batch_size: int) -> np.ndarray:
    """The stored order read as `batch_size` streams side by side: row i of batch k + 1 follows row i of batch k.

    Returns:
        int32 `[examples // batch_size * batch_size]`: the end of the data that does not fill all rows is left out.
    """
    rows = np.arange(examples // batch_size * batch_size, dtype=np.int32).reshape(batch_size, -1)
    return rows.T.reshape(-1)


def stream_positions(examples: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The stream of each stored example in `streams`, and its position in the stream.

    Returns:
        Two int32 `[examples]`; examples that are left out get the values of a further stream.
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
    """The examples of one rank in each step, if each rank reads whole files.

    The largest files are assigned first, each to the rank with the fewest examples. All ranks get the same number of
    batches; a rank without further examples gets empty batches.

    Args:
        indices: the order of the epoch, int32 `[examples]`.
        files: the number of the file of each example, int `[examples]`, in stored order.
        batch_size: examples per step over all ranks.
        rank: the rank.
        world_size: the number of ranks.
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

    Parts are contiguous and in order, so that joining them returns the batch. Their sizes differ by at most one, and
    part 0 of a batch with examples is never empty. The function works on Python integers and on TensorFlow's integer
    tensors.
    """
    return (examples * index + count - 1) // count, (examples * (index + 1) + count - 1) // count
