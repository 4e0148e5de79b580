"""Atomic writes of files."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

_unfinished: set[Path] = set()


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
