"""What an operation costs by each algorithm, and so which one is used: a message takes `ALPHA + BETA * bytes` seconds.

With N processes the ring takes 2 (N - 1) hops, each with a part of the array:

    2 (N - 1) (ALPHA + BETA bytes / N)

and the tree goes up and down all its levels, at each of which a process handles the array once per child:

    2 depth (ALPHA + BETA bytes children)

The constants need not be exact: where both cost about the same, it does not matter which one is used. All processes
must choose the same one, so the choice depends on the numbers of processes and of bytes alone. `python -m
benchmarks.exchanges` measures what comes of it.

Synopsis:

    >>> [longest_by_tree(size) >> 10 for size in (2, 16, 512)]  # KiB
    [234, 248, 3151]
    >>> [buffer_bytes(size) >> 20 for size in (2, 16, 512)]  # MiB
    [1, 2, 64]
"""

from __future__ import annotations

import functools

from tfdist.transport.tree import FAN_OUT, depth

ALPHA = 60e-6  # to send, to wake up the process that waits for it, and to receive
BETA = 5e-10  # per byte: to send, receive and add what is in the cache; 10 Gbit/s take 8e-10
# Tensors are packed into buffers whose parts in the ring are at least as large as this, so that a hop takes about half
# of its time for the bytes at least.
PART_BYTES = 1 << 17
BUFFER_BYTES = 1 << 20


@functools.cache
def longest_by_tree(size: int) -> int:
    """The number of bytes up to which the tree is faster; what the ring carries has begun in the tree without bytes."""
    hops, parts_by_ring = 2 * (size - 1), 2 * (size - 1) / size
    wholes_by_tree = 2 * depth(size) * min(FAN_OUT, size - 1)
    return int(hops * ALPHA / (BETA * (wholes_by_tree - parts_by_ring)))


def buffer_bytes(size: int) -> int:
    """The size of the buffers in which gradients are added up."""
    return max(BUFFER_BYTES, size * PART_BYTES)
