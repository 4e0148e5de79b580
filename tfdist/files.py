"""Atomic writes of files, and reads that neither wait nor exceed a limit."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from tfdist.errors import UsageError

_unfinished: set[Path] = set()
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def require_regular(path: Path) -> None:
    """Raises `OSError` unless `path` is a regular file; a FIFO could wait for ever, and a link could lead elsewhere."""
    _require_regular(os.lstat(path), path)


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file to read it.

    Raises:
        OSError: it cannot be opened, or it is not a regular file, which is never opened.
    """
    require_regular(path)
    # It may have been replaced meanwhile.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_text(path: Path, most_bytes: int, errors: str = "strict") -> str:
    """Reads a regular file as UTF-8.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than `most_bytes`.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most_bytes:,} are read", str(path))
        return file.read(most_bytes).decode("utf-8", errors)


def _require_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file atomically: `write` fills a temporary file in the same folder, which is synced and renamed.

    A reader, also after a crash at any time, sees either the complete old file or the complete new file.

    Raises:
        OSError: the file cannot be written, for example without space or permission; `path` is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _created_beside(path)
    _unfinished.add(temporary)
    try:
        write(temporary)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    finally:
        _unfinished.discard(temporary)


def require_writable(path: Path, option: str) -> None:
    """Raises `UsageError` unless `path`, the value of `option`, can be written: called before what takes long."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        _created_beside(path).unlink()
    except OSError as error:
        raise UsageError(
            f"`{option}` is `{path}`, which cannot be written: {error.strerror}", "name another file"
        ) from error


def remove_unfinished() -> None:
    """Removes the temporary files of other threads, before a process ends without waiting for them."""
    for temporary in list(_unfinished):
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path` atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def sync(path: Path) -> None:
    """Waits until the content of a file, or of a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _created_beside(path: Path) -> Path:
    """Creates an empty file with a new name in the folder of `path`.

    The operating system applies the umask. Reading the umask with `os.umask` would set it to another value for a
    moment, also for the files that other threads create.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{path.suffix}")
        with contextlib.suppress(FileExistsError):
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            return temporary
