"""The sizes of encoded pictures, read from their headers.

A picture of a megabyte may have a billion pixels, which would take gigabytes of memory. Therefore its header is read
before it is decoded. Sources: ISO/IEC 15948 (PNG), ITU-T T.81 (JPEG), GIF89a, RFC 9649 (WebP).

Synopsis:

    >>> size_of(b"\\x89PNG\\r\\n\\x1a\\n" + b"\\0\\0\\0\\rIHDR" + struct.pack(">II", 640, 480))
    PictureSize(height=480, width=640, frames=1)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

# A decoded picture takes three bytes per pixel, and some are decoded at the same time.
MAX_PIXELS = 100_000_000

_JPEG_SIZES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # SOF markers
_JPEG_WITHOUT_LENGTH = {0x01, *range(0xD0, 0xDA)}
_JPEG_SCAN = 0xDA


class PictureSize(NamedTuple):
    """The size of a picture in pixels; a GIF may have several frames, which are decoded together."""

    height: int
    width: int
    frames: int = 1

    @property
    def pixels(self) -> int:
        """The number of pixels of all frames."""
        return self.height * self.width * self.frames

    def __str__(self) -> str:
        frames = f" in {self.frames:,} frames" if self.frames > 1 else ""
        return f"{self.width:,} x {self.height:,} pixels{frames}"


def size_of(encoded: bytes) -> PictureSize | None:
    """The size of a PNG, JPEG, GIF, BMP or WebP picture; `None` for other formats, and for an incomplete header."""
    for mark, read in _READERS.items():
        if encoded.startswith(mark):
            try:
                return read(encoded)
            except (struct.error, IndexError):
                return None
    return None


def _png(encoded: bytes) -> PictureSize:
    width, height = struct.unpack_from(">II", encoded, 16)
    return PictureSize(height, width)


def _jpeg(encoded: bytes) -> PictureSize | None:
    position = 2
    while True:
        while encoded[position] != 0xFF or encoded[position + 1] == 0xFF:  # fill bytes, and garbage before a marker
            position += 1
        marker = encoded[position + 1]
        position += 2
        if marker in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", encoded, position + 3)
            return PictureSize(height, width)
        if marker == _JPEG_SCAN:
            return None
        if marker and marker not in _JPEG_WITHOUT_LENGTH:
            position += struct.unpack_from(">H", encoded, position)[0]


def _gif(encoded: bytes) -> PictureSize:
    width, height = struct.unpack_from("<HH", encoded, 6)
    sizes = [(height, width), *_frames_of_gif(encoded)]
    # The decoder unpacks every frame, of which any may be larger than the screen.
    return PictureSize(max(h for h, _ in sizes), max(w for _, w in sizes), max(1, len(sizes) - 1))


def _frames_of_gif(encoded: bytes) -> Iterator[tuple[int, int]]:
    position = 13 + _bytes_of_colours(encoded[10])
    while position < len(encoded):
        kind = encoded[position]
        if kind == 0x2C:  # a frame: position, size, flags, colours, bits per code
            if position + 10 > len(encoded):
                return
            width, height = struct.unpack_from("<HH", encoded, position + 5)
            yield height, width
            position += 11 + _bytes_of_colours(encoded[position + 9])
        elif kind == 0x21:  # an extension
            position += 2
        else:
            return
        while position < len(encoded) and encoded[position]:  # blocks with their lengths, ended by an empty block
            position += 1 + encoded[position]
        position += 1


def _bytes_of_colours(flags: int) -> int:
    return 3 << (flags % 8 + 1) if flags & 0x80 else 0


def _bmp(encoded: bytes) -> PictureSize:
    width, height = struct.unpack_from("<ii", encoded, 18)
    return PictureSize(abs(height), abs(width))


def _webp(encoded: bytes) -> PictureSize | None:
    kind = encoded[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(encoded[start : start + 3], "little") + 1 for start in (24, 27))
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", encoded, 21)
        width, height = bits % 2**14 + 1, (bits >> 14) % 2**14 + 1
    elif kind == b"VP8 ":
        width, height = (side % 2**14 for side in struct.unpack_from("<HH", encoded, 26))
    else:
        return None
    return PictureSize(height, width)


_READERS = {b"\x89PNG": _png, b"\xff\xd8\xff": _jpeg, b"GIF8": _gif, b"BM": _bmp, b"RIFF": _webp}
