"""Simulates TensorFlow's BFC allocator: best fit with coalescing.

Kernels of oneDNN, which tfdist uses on x86 CPUs, allocate their tensors with it, and so do GPUs. It takes regions of
doubling sizes from the system, cuts them into chunks, and never gives them back. A chunk less than twice as large as
wanted is not cut, so that memory is lost in it and between the chunks.

Written for TensorFlow 2.21.0, `xla/tsl/framework/bfc_allocator.cc` and `mkl_cpu_allocator.h`.

Synopsis:

    >>> allocator = BfcAllocator()
    >>> chunk = allocator.allocate(3 << 20)
    >>> allocator.free(chunk)
    >>> _ = allocator.allocate(2 << 20)  # in the same memory
    >>> allocator.touched_bytes >> 20
    3
"""

from __future__ import annotations

import bisect
import dataclasses

# Smaller tensors are allocated by the C library.
LARGE_BYTES = 1 << 18
_UNIT = 256  # the size of a chunk is a multiple
_FIRST_REGION_BYTES = 2 << 20
# A chunk is cut if more than this would be lost in it, even if it is not twice as large as wanted.
_MOST_LOST_BYTES = 128 << 20
# The system provides memory in pages, when they are first written.
_PAGE_BYTES = 4096


@dataclasses.dataclass(eq=False)
class Chunk:
    """A part of a region, in bytes from the beginning of the first region; its neighbours are in the same region."""

    begin: int
    size: int
    is_free: bool = True
    previous: Chunk | None = None
    next: Chunk | None = None


class BfcAllocator:
    """The chunks of an allocator, and which pages have been written."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # the size and begin of the free chunks, sorted: the first fit is best
        self._chunks: dict[int, Chunk] = {}  # the free chunks by their begin
        self._next_region_bytes = _FIRST_REGION_BYTES
        self._written = bytearray()  # 1 for each page that has been written

    @property
    def touched_bytes(self) -> int:
        """The memory that a process has used so far: all pages that have been written."""
        return _PAGE_BYTES * self._written.count(1)

    def allocate(self, size: int) -> Chunk:
        """Allocates `size` bytes, all of which are then written."""
        rounded = -(-max(size, 1) // _UNIT) * _UNIT
        index = bisect.bisect_left(self._free, (rounded, 0))
        if index == len(self._free):
            self._extend(rounded)
            index = bisect.bisect_left(self._free, (rounded, 0))
        chunk = self._take(self._chunks[self._free[index][1]])
        lost = chunk.size - rounded
        if lost >= min(rounded, _MOST_LOST_BYTES):
            rest = Chunk(chunk.begin + rounded, lost, previous=chunk, next=chunk.next)
            if rest.next is not None:
                rest.next.previous = rest
            chunk.size, chunk.next = rounded, rest
            self._give(rest)
        chunk.is_free = False
        first, last = chunk.begin // _PAGE_BYTES, -(-(chunk.begin + size) // _PAGE_BYTES)
        self._written[first:last] = b"\1" * (last - first)
        return chunk

    def free(self, chunk: Chunk) -> None:
        """Frees a chunk, and joins it with the free chunks beside it."""
        if chunk.next is not None and chunk.next.is_free:
            self._join(chunk, self._take(chunk.next))
        if chunk.previous is not None and chunk.previous.is_free:
            before = self._take(chunk.previous)
            self._join(before, chunk)
            chunk = before
        self._give(chunk)

    def _extend(self, size: int) -> None:
        """Takes a region from the system that is at least `size` bytes and at least twice as large as the last one."""
        doubled = self._next_region_bytes
        while doubled < size:
            doubled *= 2
        # After a region that was enlarged for its first chunk, TensorFlow takes another one of the same size.
        self._next_region_bytes = doubled * 2 if doubled == self._next_region_bytes else doubled
        begin = len(self._written) * _PAGE_BYTES
        self._written.extend(bytes(doubled // _PAGE_BYTES))
        self._give(Chunk(begin, doubled))

    def _give(self, chunk: Chunk) -> None:
        chunk.is_free = True
        self._chunks[chunk.begin] = chunk
        bisect.insort(self._free, (chunk.size, chunk.begin))

    def _take(self, chunk: Chunk) -> Chunk:
        del self._chunks[chunk.begin]
        del self._free[bisect.bisect_left(self._free, (chunk.size, chunk.begin))]
        return chunk

    @staticmethod
    def _join(chunk: Chunk, after: Chunk) -> None:
        chunk.size, chunk.next = chunk.size + after.size, after.next
        if chunk.next is not None:
            chunk.next.previous = chunk
