"""What a process does in its turn: the header that goes before each collective operation, and before an error.

Synopsis:

    >>> header = Operation(7, ALL_REDUCE, 40).header(body_bytes=0)
    >>> Operation.read(header)
    (Operation(number=7, kind=0, size_bytes=40), 0)
    >>> print(Operation.read(header)[0])
    a tensor of 40 bytes
"""

from __future__ import annotations

import json
import struct
from typing import NamedTuple

from tfdist.errors import ClusterError, DisagreementError

Body = bytes | bytearray | memoryview

# The number of the operation, its kind, its size in bytes, and how many bytes follow at once.
HEADER = struct.Struct("<QQQQ")
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, EXCHANGE, ERROR, MEETING = range(6)
NAMES = {
    ALL_REDUCE: "a tensor",
    ALL_GATHER: "rows",
    REDUCE_SCATTER: "a tensor to be scattered",
    EXCHANGE: "a message",
}


class Operation(NamedTuple):
    """A collective operation, which is equal in all processes.

    Attributes:
        number: how many this process has begun.
        kind: such as `ALL_REDUCE`.
        size_bytes: of what all processes bring alike: of a tensor that is added, or of one row of those gathered.
    """

    number: int
    kind: int
    size_bytes: int

    def header(self, body_bytes: int = 0) -> bytes:
        return HEADER.pack(*self, body_bytes)

    @classmethod
    def read(cls, header: bytes | bytearray) -> tuple[Operation, int]:
        """The operation of a header, and how many bytes follow it."""
        number, kind, size_bytes, body_bytes = HEADER.unpack(header[: HEADER.size])
        return cls(number, kind, size_bytes), body_bytes

    def __str__(self) -> str:
        what = NAMES.get(self.kind, "something else")
        return what if self.kind == EXCHANGE else f"{what} of {self.size_bytes} bytes"


def error_frame(error: ClusterError) -> bytes:
    """A header of the kind `ERROR`, and `error`, for processes that wait for the header of an operation."""
    body = json.dumps([isinstance(error, DisagreementError), error.sentence, error.hint]).encode()
    return Operation(0, ERROR, 0).header(len(body)) + body


def error_of(body: bytes | bytearray) -> ClusterError:
    """The error that another process has sent."""
    disagrees, sentence, hint = json.loads(body)
    return (DisagreementError if disagrees else ClusterError)(sentence, hint)
