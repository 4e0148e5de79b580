"""What an operation costs by each algorithm, and so which one is used: a message takes `ALPHA + BETA * bytes` seconds.

With N processes the ring takes 2 (N - 1) hops, each with a part of the array:

    2 (N - 1) (ALPHA + BETA bytes / N)

and the tree goes up and down all its levels, at each of which a process handles the array once per child:

    2 depth (ALPHA + BETA bytes children)

Where hosts have several processes, the ring is one of the hosts. Those of a host meet after they have added up in their
memory, and again after the ring, with a message up and one down for each:

    2 (host's processes - 1) ALPHA + GAMMA bytes

The constants need not be exact: where both cost about the same, it does not matter which one is used. All processes
must choose the same one, so the choice depends on the numbers of processes and of bytes alone. `python -m
benchmarks.exchanges` measures what comes of it.

Synopsis:

    >>> [longest_by_tree(size, hosts=size) >> 10 for size in (2, 16, 512)]  # KiB
    [234, 248, 3151]
    >>> [longest_by_tree(size, hosts=1) >> 10 for size in (2, 4, 8, 16)]
    [156, 127, 105, 226]
    >>> [buffer_bytes(size) >> 20 for size in (2, 16, 512)]  # MiB
    [1, 2, 64]
"""

from __future__ import annotations

import functools

from tfdist.groups.sockets.tree import FAN_OUT, depth

ALPHA = 60e-6  # to send, to wake up the process that waits for it, and to receive
BETA = 5e-10  # per byte: to send, receive and add what is in the cache; 10 Gbit/s take 8e-10
GAMMA = 2.5e-10  # per byte: to write to the memory of a host, to add and to read
# Tensors are packed into buffers whose parts in the ring are at least as large as this, so that a hop takes about half
# of its time for the bytes at least.
PART_BYTES = 1 << 17
BUFFER_BYTES = 1 << 20


@functools.cache
def longest_by_tree(size: int, hosts: int) -> int:
    """The number of bytes up to which the tree is faster; what the ring carries has begun in the tree without bytes.

    Each of `size` processes adds up by itself if there are as many `hosts`; with fewer, those of a host share memory.
    """
    messages, seconds_per_byte = 2 * (hosts - 1), BETA * 2 * (hosts - 1) / hosts
    if hosts < size:
        meetings = 1 if hosts == 1 else 2
        messages += meetings * 2 * (-(-size // hosts) - 1)
        seconds_per_byte += GAMMA
    of_tree = BETA * 2 * depth(size) * min(FAN_OUT, size - 1)
    return int(messages * ALPHA / (of_tree - seconds_per_byte))


def buffer_bytes(size: int) -> int:
    """The size of the buffers in which gradients are added up."""
    return max(BUFFER_BYTES, size * PART_BYTES)
