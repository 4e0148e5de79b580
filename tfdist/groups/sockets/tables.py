"""Messages of many processes: each different message, with the ranges of ranks that have sent it.

If all processes send the same message, a table has the size of one message, for any number of processes. A table whose
messages are too long together is `None`.

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

COUNTS = struct.Struct("<QQ")  # precedes each message: its length, and the number of its ranges
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
            merged_ranges = whole.setdefault(message, [])
            for begin, end in ranges:
                if merged_ranges and merged_ranges[-1][1] == begin:
                    merged_ranges[-1] = merged_ranges[-1][0], end
                else:
                    merged_ranges.append((begin, end))
    return whole if sum(map(len, whole)) <= longest else None


def packed(table: Table | None) -> bytes:
    """Encodes a table as bytes."""
    if table is None:
        return TOO_LONG
    pieces = []
    for message, ranges in table.items():
        pieces += [COUNTS.pack(len(message), len(ranges)), *(RANGE.pack(*bounds) for bounds in ranges), message]
    return b"".join(pieces)


def unpacked(data: bytes | bytearray | memoryview) -> Table | None:
    """Decodes the bytes of `packed`."""
    if len(data) == len(TOO_LONG):
        return None
    table: Table = {}
    view, position = memoryview(data), 0
    while position < len(view):
        length, count = COUNTS.unpack_from(view, position)
        begin = position + COUNTS.size + count * RANGE.size
        ranges = list(RANGE.iter_unpack(view[position + COUNTS.size : begin]))
        position = begin + length
        table[bytes(view[begin:position])] = ranges
    return table


def by_rank(table: Table, size: int) -> list[bytes]:
    """The message of each process; equal messages are the same object."""
    if len(table) == 1:
        return [*table] * size
    messages = [b""] * size
    for message, ranges in table.items():
        for begin, end in ranges:
            messages[begin:end] = [message] * (end - begin)
    return messages
