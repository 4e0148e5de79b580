"""The folder of caches that all processes and runs share: indexes of files, and decoded examples."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.jobs import consensus

FOLDER_VARIABLE = "TFDIST_CACHE_DIR"
DEFAULT_FOLDER = "~/.cache/tfdist"


def root() -> Path:
    """The folder: TFDIST_CACHE_DIR, else `~/.cache/tfdist`."""
    return Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER).expanduser()


def free_bytes() -> int:
    """The free space on the disk of the folder; 0 if it is unknown."""
    folder = root()
    with contextlib.suppress(OSError, StopIteration):
        return shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
    return 0


def fingerprint(purpose: Any, paths: Sequence[str | Path]) -> str:
    """A name for a cache of these files; it changes with their names, sizes and modification times.

    Args:
        purpose: what is cached, and how it was made from the files.
        paths: the files.

    Raises:
        OSError: a file is missing.
    """
    files = [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in zip(paths, map(os.stat, paths), strict=True)]
    return consensus.fingerprint([purpose, files])
