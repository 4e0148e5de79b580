"""The cost of an operation by each algorithm, which decides between them: a message takes `ALPHA + BETA * bytes` s.

With N processes the ring takes 2 (N - 1) hops, each with a part of the array:

    2 (N - 1) (ALPHA + BETA bytes / N)

and the tree goes up and down all its levels. At each level, a process handles the array once per child:

    2 depth (ALPHA + BETA bytes children)

If hosts have several processes, the ring connects the hosts. The processes of a host synchronize after they have added
in their shared memory, and again after the ring, each time with one message up and one down per process:

    2 (host's processes - 1) ALPHA + GAMMA bytes

The constants need not be exact: if both algorithms cost about the same, the choice does not matter. All processes must
choose the same algorithm, so the choice depends only on the numbers of processes and of bytes. `python -m
benchmarks.exchanges` measures the result.

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

from tfdist.jobs.tree import FAN_OUT, depth

ALPHA = 60e-6  # to send, to wake up the waiting process, and to receive
BETA = 5e-10  # per byte: to send, receive and add data in the cache; a network of 10 Gbit/s takes 8e-10
GAMMA = 2.5e-10  # per byte: to write to the shared memory of a host, to add and to read
# Tensors are packed into buffers whose parts in the ring have at least this size, so that at least about half of the
# time of a hop is for the bytes.
PART_BYTES = 1 << 17
BUFFER_BYTES = 1 << 20


@functools.cache
def longest_by_tree(size: int, hosts: int) -> int:
    """The number of bytes up to which the tree is faster, though the ring also begins with a header in the tree.

    With as many `hosts` as processes, each process adds for itself; with fewer, those of a host share memory.
    """
    messages, seconds_per_byte = 2 * (hosts - 1), BETA * 2 * (hosts - 1) / hosts
    if hosts < size:
        meetings = 1 if hosts == 1 else 2
        messages += meetings * 2 * (-(-size // hosts) - 1)
        seconds_per_byte += GAMMA
    tree_seconds_per_byte = BETA * 2 * depth(size) * min(FAN_OUT, size - 1)
    return int(messages * ALPHA / (tree_seconds_per_byte - seconds_per_byte))


def buffer_bytes(size: int) -> int:
    """The size of the buffers in which gradients are summed."""
    return max(BUFFER_BYTES, size * PART_BYTES)
