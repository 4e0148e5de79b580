"""Messages from one process to another: what they are made of, and those that wait to be received.

A message is a header of fixed size, with the tag, the dtype and the shape, and then the memory of the array. So a
receiver has to know none of them beforehand.

Synopsis:

    >>> tag, values = space_for(header(np.zeros([2, 3], np.float16), tag=5))
    >>> tag, values.dtype, values.shape
    (5, dtype('float16'), (2, 3))
"""

from __future__ import annotations

from collections import deque
from typing import Any

import ml_dtypes  # noqa: F401 (NumPy then knows bfloat16 by its name)
import numpy as np

from tfdist.errors import UsageError

MOST_AXES = 64  # of NumPy's arrays
NAME_NUMBERS = 4  # the name of a dtype
HEADER_NUMBERS = 2 + NAME_NUMBERS + MOST_AXES


def sendable(array: Any) -> np.ndarray:
    """`array`, which may be a tensor, as one that lies in memory in one piece.

    Raises:
        UsageError: it holds strings or objects.
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
    """The tag that a header names, and an array for the values of its message."""
    name = numbers[1 : 1 + NAME_NUMBERS].tobytes().rstrip(b"\0").decode()
    axes, *shape = numbers[1 + NAME_NUMBERS :].tolist()
    return int(numbers[0]), np.empty(shape[:axes], np.dtype(name))


def memory(values: np.ndarray) -> memoryview:
    """The memory of an array that lies in one piece, as bytes."""
    return memoryview(values.reshape(-1).view(np.uint8).data)


class Mailbox:
    """The messages that have come, by sender and tag, each in the order in which they were sent."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], deque[np.ndarray]] = {}

    def put(self, rank: int, tag: int, values: np.ndarray) -> None:
        self._waiting.setdefault((rank, tag), deque()).append(values)

    def has(self, rank: int, tag: int) -> bool:
        return (rank, tag) in self._waiting

    def take(self, rank: int, tag: int) -> np.ndarray:
        """The first message from `rank` with `tag`, of which there is one."""
        waiting = self._waiting[rank, tag]
        values = waiting.popleft()
        if not waiting:
            del self._waiting[rank, tag]
        return values

    def senders(self, tag: int) -> list[int]:
        """The ranks from which a message with `tag` has come."""
        return sorted(rank for rank, of_message in self._waiting if of_message == tag)


class Arriving:
    """The message of a process that is being read, in pieces of any size.

    Attributes:
        space: the memory that what comes next is to fill.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._header = np.empty(HEADER_NUMBERS, np.int64)
        self._message: tuple[int, np.ndarray] | None = None  # unknown before the header is there
        self.space = memory(self._header)

    def filled(self, count: int) -> tuple[int, np.ndarray] | None:
        """The tag and the values of the message if it is complete, after `count` bytes more of `space` are filled."""
        self.space = self.space[count:]
        if not self.space and self._message is None:
            self._message = space_for(self._header)
            self.space = memory(self._message[1])
        if self.space:
            return None
        message = self._message
        self._begin()
        return message
