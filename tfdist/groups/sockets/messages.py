"""Messages from one process to another: their format, and the messages that wait to be received.

A message is a header of fixed size with the tag, the dtype and the shape, followed by the memory of the array. So a
receiver needs to know none of these in advance.

Synopsis:

    >>> tag, values = space_for(header(np.zeros([2, 3], np.float16), tag=5))
    >>> tag, values.dtype, values.shape
    (5, dtype('float16'), (2, 3))
"""

from __future__ import annotations

from collections import deque
from typing import Any

import ml_dtypes  # noqa: F401 (makes the name bfloat16 known to NumPy)
import numpy as np

from tfdist.errors import UsageError

MOST_AXES = 64  # of NumPy's arrays
NAME_NUMBERS = 4  # int64 numbers that contain the name of a dtype
HEADER_NUMBERS = 2 + NAME_NUMBERS + MOST_AXES


def sendable(array: Any) -> np.ndarray:
    """`array`, which may be a tensor, as a C-contiguous array in native byte order.

    Raises:
        UsageError: it contains strings or objects.
    """
    values = np.asarray(array, order="C")
    if values.dtype.kind in "OSUM" or values.dtype.names:
        raise UsageError(f"An array of dtype `{values.dtype}` cannot be sent", "send numbers; encode others as bytes")
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def header(values: np.ndarray, tag: int) -> np.ndarray:
    """The header `[HEADER_NUMBERS]` int64 of a message."""
    name = np.frombuffer(values.dtype.name.encode().ljust(8 * NAME_NUMBERS, b"\0"), np.int64)
    numbers = np.zeros(HEADER_NUMBERS, np.int64)
    numbers[: 2 + NAME_NUMBERS] = tag, *name, values.ndim
    numbers[2 + NAME_NUMBERS :][: values.ndim] = values.shape
    return numbers


def space_for(numbers: np.ndarray) -> tuple[int, np.ndarray]:
    """The tag of a header, and an empty array for the values of its message."""
    name = numbers[1 : 1 + NAME_NUMBERS].tobytes().rstrip(b"\0").decode()
    axes, *shape = numbers[1 + NAME_NUMBERS :].tolist()
    return int(numbers[0]), np.empty(shape[:axes], np.dtype(name))


def memory(values: np.ndarray) -> memoryview:
    """The memory of a contiguous array, as bytes."""
    return memoryview(values.reshape(-1).view(np.uint8).data)


class Mailbox:
    """The messages that have arrived, by sender and tag, each in the order in which they were sent."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], deque[np.ndarray]] = {}

    def put(self, rank: int, tag: int, values: np.ndarray) -> None:
        self._waiting.setdefault((rank, tag), deque()).append(values)

    def has(self, rank: int, tag: int) -> bool:
        return (rank, tag) in self._waiting

    def take(self, rank: int, tag: int) -> np.ndarray:
        """Removes and returns the first message from `rank` with `tag`; there must be one."""
        waiting = self._waiting[rank, tag]
        values = waiting.popleft()
        if not waiting:
            del self._waiting[rank, tag]
        return values

    def senders(self, tag: int) -> list[int]:
        """The ranks from which a message with `tag` has arrived."""
        return sorted(rank for rank, waiting_tag in self._waiting if waiting_tag == tag)


class Arriving:
    """The message of a process that is being read, in pieces of any size.

    Attributes:
        space: the memory that the next data must fill.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._header = np.empty(HEADER_NUMBERS, np.int64)
        self._message: tuple[int, np.ndarray] | None = None  # unknown until the header is complete
        self.space = memory(self._header)

    def filled(self, count: int) -> tuple[int, np.ndarray] | None:
        """Notes that the next `count` bytes of `space` are filled; returns tag and values of a complete message."""
        self.space = self.space[count:]
        if not self.space and self._message is None:
            self._message = space_for(self._header)
            self.space = memory(self._message[1])
        if self.space:
            return None
        message = self._message
        self._begin()
        return message
