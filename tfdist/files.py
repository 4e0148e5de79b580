"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

_unfinished: set[Path] = set()


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Lets `write` fill a file beside `path`, makes it durable, then renames it to `path`.

    A reader, and a process that starts after a crash at any moment, sees the old file or the new one.

    Raises:
        OSError: the file system refused (no space, no permission); `path` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    _unfinished.add(temporary)
    try:
        write(temporary)
        temporary.chmod(0o666 & ~_umask())
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    finally:
        _unfinished.discard(temporary)


def remove_unfinished() -> None:
    """Removes what other threads are writing; for a process that ends at once, since their writes then fail."""
    for temporary in list(_unfinished):
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path`, whole or not at all."""
    write_whole(path, lambda temporary: _write(temporary, text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
