"""The folders of datasets, caches, runs and temporary files: are they there, can they be written, is there space?"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tfdist.data.formats import tfds_prepare
from tfdist.data.input import cache_folder
from tfdist.doctor.finding import Finding, note, of_error, ok, problem
from tfdist.errors import DataError

GIB = 1 << 30
FEW_BYTES, TOO_FEW_BYTES = GIB, 16 << 20
MOST_NAMES = 12


def findings(data_dir: Path | None = None) -> list[Finding]:
    """What was found out about folders; `data_dir` is that of datasets, as `--data-dir` of `tfdist train`."""
    return [
        *_of_datasets(data_dir),
        *_of_runs(),
        *_needed("temporary files", _temporary(), "set `TMPDIR` to a folder that can be written"),
        *_of_caches(),
    ]


def _of_datasets(data_dir: Path | None) -> Iterator[Finding]:
    subject = "datasets"
    try:
        folder = tfds_prepare.data_folder(data_dir)
    except DataError as error:
        yield of_error(subject, error)
        return
    there = _prepared(folder)
    listed = ", ".join(there[:MOST_NAMES]) + (f" and {len(there) - MOST_NAMES} more" if len(there) > MOST_NAMES else "")
    has = f"`{folder}` has {listed}" if there else f"`{folder}` has no prepared dataset"
    wrong = _what_is_wrong_with(folder)
    if wrong:
        yield note(
            subject,
            f"{has}, and others cannot be prepared there: {wrong}",
            "choose another folder with `--data-dir` or `TFDS_DATA_DIR` to prepare more; `digits` needs no files",
        )
    else:
        yield ok(subject, f"{has}, and {_free(folder)} free")


def _prepared(folder: Path) -> list[str]:
    """The datasets in a folder of TFDS, each a folder of versions, or of configurations with versions."""
    with contextlib.suppress(OSError):
        return sorted(
            path.name
            for path in folder.iterdir()
            if any(path.glob("*/dataset_info.json")) or any(path.glob("*/*/dataset_info.json"))
        )
    return []


def _needed(subject: str, folder: Path, hint: str) -> Iterator[Finding]:
    wrong = _what_is_wrong_with(folder)
    if wrong:
        yield problem(subject, f"Nothing can be written to `{folder}`: {wrong}", hint)
    elif _free_bytes(folder) < FEW_BYTES:
        yield note(subject, f"`{folder}` has {_free(folder)} free", hint)
    else:
        yield ok(subject, f"`{folder}` can be written, and has {_free(folder)} free")


def _of_runs() -> Iterator[Finding]:
    hint = "start in a folder that can be written, or use `--run-dir`"
    try:
        folder = Path("runs").absolute()
    except FileNotFoundError:
        yield problem("runs", "The working folder has been removed", hint)
    else:
        yield from _needed("runs", folder, hint)


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # none of the usual folders can be written
        return Path(os.environ.get("TMPDIR") or "/tmp")


def _of_caches() -> Iterator[Finding]:
    folder = cache_folder.root()
    wrong = _what_is_wrong_with(folder)
    if wrong:
        yield note(
            "caches",
            f"Nothing can be kept in `{folder}`: {wrong}",
            f"set `{cache_folder.FOLDER_VARIABLE}` to a folder that can be written",
        )
    else:
        yield ok("caches", f"`{folder}` can be written")


def _what_is_wrong_with(folder: Path) -> str:
    """Why nothing can be written to a folder, which may not exist yet; empty if it can."""
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
    for path in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            if path.exists():
                return path
    return Path("/")


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(_existing(folder)).free


def _free(folder: Path) -> str:
    return f"{_free_bytes(folder) / GIB:.1f} GiB"
