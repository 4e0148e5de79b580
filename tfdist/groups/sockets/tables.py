"""Which processes say what: different messages, each with the ranges of ranks that have it.

If all processes say the same, a table has the size of one message, however many they are. A table whose messages are
too long together is `None`.

Synopsis:

    >>> table = merged([of_one(b"yes", 0), of_one(b"no", 1), of_one(b"yes", 2), of_one(b"yes", 3)], longest=100)
    >>> table
    {b'yes': [(0, 1), (2, 4)], b'no': [(1, 2)]}
    >>> by_rank(unpacked(packed(table)), 4)
    [b'yes', b'no', b'yes', b'yes']
    >>> merged([of_one(b"yes", 0), of_one(b"no", 1)], longest=4) is None
    True
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

Table = dict[bytes, list[tuple[int, int]]]

COUNTS = struct.Struct("<QQ")  # before each message: its length, and the number of its ranges
RANGE = struct.Struct("<QQ")
TOO_LONG = b"\xff"  # shorter than any table


def of_one(message: bytes, rank: int) -> Table:
    """The table of one process."""
    return {message: [(rank, rank + 1)]}


def merged(parts: Iterable[Table | None], longest: int) -> Table | None:
    """The table of all processes of `parts`, whose ranks ascend; `None` if its messages exceed `longest` bytes."""
    whole: Table = {}
    for part in parts:
        if part is None:
            return None
        for message, ranges in part.items():
            known = whole.setdefault(message, [])
            for begin, end in ranges:
                if known and known[-1][1] == begin:
                    known[-1] = known[-1][0], end
                else:
                    known.append((begin, end))
    return whole if sum(map(len, whole)) <= longest else None


def packed(table: Table | None) -> bytes:
    """A table as bytes."""
    if table is None:
        return TOO_LONG
    pieces = []
    for message, ranges in table.items():
        pieces += [COUNTS.pack(len(message), len(ranges)), *(RANGE.pack(*each) for each in ranges), message]
    return b"".join(pieces)


def unpacked(data: bytes | bytearray | memoryview) -> Table | None:
    """The table that `packed` has made bytes of."""
    if len(data) == len(TOO_LONG):
        return None
    table: Table = {}
    view, at = memoryview(data), 0
    while at < len(view):
        length, count = COUNTS.unpack_from(view, at)
        begin = at + COUNTS.size + count * RANGE.size
        ranges = list(RANGE.iter_unpack(view[at + COUNTS.size : begin]))
        at = begin + length
        table[bytes(view[begin:at])] = ranges
    return table


def by_rank(table: Table, size: int) -> list[bytes]:
    """The message of each process; equal ones are the same object."""
    if len(table) == 1:
        return [*table] * size
    messages = [b""] * size
    for message, ranges in table.items():
        for begin, end in ranges:
            messages[begin:end] = [message] * (end - begin)
    return messages
