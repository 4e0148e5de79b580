"""Checks that the folders of datasets, caches, runs and temporary files exist, are writable and have space."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tfdist.data.formats import tfds
from tfdist.data.input import disk_cache
from tfdist.doctor.finding import Finding, note, of_error, ok, problem
from tfdist.errors import DataError

GIB = 1 << 30
FEW_BYTES, TOO_FEW_BYTES = GIB, 16 << 20
MOST_NAMES = 12  # datasets to list


def findings(data_dir: Path | None = None) -> list[Finding]:
    """The findings about folders; `data_dir` is the folder of datasets, as for `tfdist train --data-dir`."""
    return [
        *_datasets(data_dir),
        *_runs(),
        *_required("temporary files", _temporary(), "set `TMPDIR` to a writable folder"),
        *_caches(),
    ]


def _datasets(data_dir: Path | None) -> Iterator[Finding]:
    subject = "datasets"
    try:
        folder = tfds.data_folder(data_dir)
    except DataError as error:
        yield of_error(subject, error)
        return
    names = _prepared(folder)
    listed = ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
    has = f"`{folder}` has {listed}" if names else f"`{folder}` has no prepared dataset"
    reason = _why_not_writable(folder)
    if reason:
        yield note(
            subject,
            f"{has}, and others cannot be prepared there: {reason}",
            "choose another folder with `--data-dir` or `TFDS_DATA_DIR` to prepare more; `digits` needs no files",
        )
    else:
        yield ok(subject, f"{has}, and {_free(folder)} free")


def _prepared(folder: Path) -> list[str]:
    """The datasets in a TFDS folder; each is a folder of versions, or of configurations with versions."""
    with contextlib.suppress(OSError):
        return sorted(
            path.name
            for path in folder.iterdir()
            if any(path.glob("*/dataset_info.json")) or any(path.glob("*/*/dataset_info.json"))
        )
    return []


def _required(subject: str, folder: Path, hint: str) -> Iterator[Finding]:
    reason = _why_not_writable(folder)
    if reason:
        yield problem(subject, f"Nothing can be written to `{folder}`: {reason}", hint)
    elif _free_bytes(folder) < FEW_BYTES:
        yield note(subject, f"`{folder}` has {_free(folder)} free", hint)
    else:
        yield ok(subject, f"`{folder}` is writable and has {_free(folder)} free")


def _runs() -> Iterator[Finding]:
    hint = "start in a writable folder, or use `--run-dir`"
    try:
        folder = Path("runs").absolute()
    except FileNotFoundError:
        yield problem("runs", "The working folder has been removed", hint)
    else:
        yield from _required("runs", folder, hint)


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # none of the usual folders is writable
        return Path(os.environ.get("TMPDIR") or "/tmp")


def _caches() -> Iterator[Finding]:
    folder = disk_cache.root()
    reason = _why_not_writable(folder)
    if reason:
        yield note(
            "caches",
            f"Nothing can be written to `{folder}`: {reason}",
            f"set `{disk_cache.FOLDER_VARIABLE}` to a writable folder",
        )
    else:
        yield ok("caches", f"`{folder}` is writable")


def _why_not_writable(folder: Path) -> str:
    """Why nothing can be written to a folder, which may not exist yet; empty if it is writable."""
    existing = _existing(folder)
    if not existing.is_dir():
        return f"`{existing}` is not a folder"
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return str(error.strerror or error)
    free = _free_bytes(folder)
    return f"its disk has {free >> 20} MiB free" if free < TOO_FEW_BYTES else ""


def _existing(folder: Path) -> Path:
    """The folder or its closest existing parent."""
    for path in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            if path.exists():
                return path
    return Path("/")


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(_existing(folder)).free


def _free(folder: Path) -> str:
    return f"{_free_bytes(folder) / GIB:.1f} GiB"
