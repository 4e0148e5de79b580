"""Memory that processes of one host share: pages without a file, which the kernel frees with the last process.

One process creates it, and tells the others where they find it. What they find has the name of a token that only the
members of the job know: two containers may have the same host name, and number their processes alike, but the memory of
another container is not found, and what is found in its place has another name.

Synopsis:

    >>> segment, offer = create(8)
    >>> segment[:4] = b"abcd"
    >>> attach(offer.message, 8)[:4]
    b'abcd'
    >>> offer.close()
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct

TOKEN_BYTES = 16
PLACE = struct.Struct(f"!II{TOKEN_BYTES}s")  # the process, its descriptor of the memory, the token


class Offer:
    """Says where the memory of a process is found, for as long as it is not closed.

    Attributes:
        message: for `attach` in other processes.
    """

    def __init__(self, descriptor: int, token: bytes):
        self.message = PLACE.pack(os.getpid(), descriptor, token)
        self._descriptor = descriptor

    def close(self) -> None:
        """The memory remains to those that have attached it."""
        os.close(self._descriptor)


def create(size_bytes: int) -> tuple[mmap.mmap, Offer]:
    """Memory of zeros, which takes up a page once it is written to.

    Raises:
        OSError: this system has none.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory without a file")
    token = secrets.token_bytes(TOKEN_BYTES)
    descriptor = os.memfd_create(_name(token))
    try:
        os.ftruncate(descriptor, size_bytes)
        return mmap.mmap(descriptor, size_bytes), Offer(descriptor, token)
    except BaseException:
        os.close(descriptor)
        raise


def attach(message: bytes, size_bytes: int) -> mmap.mmap:
    """The memory that a process of this host has created, by the `message` of its offer.

    Raises:
        OSError: it is not found; the other process is on another host, or in another container.
    """
    process, descriptor, token = PLACE.unpack(message)
    path = f"/proc/{process}/fd/{descriptor}"
    if os.readlink(path) != f"/memfd:{_name(token)} (deleted)":  # by its name alone: to open it could block
        raise OSError("this host has no such memory")
    own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(own, size_bytes)
    finally:
        os.close(own)


def _name(token: bytes) -> str:
    return f"tfdist-{token.hex()}"
