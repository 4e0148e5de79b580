"""The file format of checkpoints: one file each, written atomically, readable without TensorFlow.

    magic line            identifies the format
    length of the header  8 bytes, little-endian
    header                JSON: the position, the states of callbacks, and the offset of each array
    arrays                raw bytes, little-endian, each at a multiple of 64 bytes
    SHA-256               32 bytes, the digest of everything before

Nothing is pickled, so that reading a file runs no code from it. If a file is truncated or altered, its checksum fails,
and the previous checkpoint is used with a warning. So is it if the file is not a regular file. The step of a checkpoint
is that of its header; the name of a file that was renamed does not matter.

Synopsis:

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> bias = Entry("model", "dense/bias", np.zeros(3, "float32"))
    >>> path = write(folder, Header(epoch=1, batch=0, step=40, optimizer="Adam"), [bias])
    >>> path.name
    'step-00000040.ckpt'
    >>> latest(folder).step
    40
    >>> read(path).entries[0].value
    array([0., 0., 0.], dtype=float32)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import shutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes  # noqa: F401 - registers bfloat16 and similar dtypes with NumPy
import numpy as np
from pydantic import TypeAdapter, ValidationError

from tfdist import files
from tfdist.errors import CheckpointError, CheckpointWarning
from tfdist.options import CountOrZero

SUFFIX = ".ckpt"
_MAGIC = b"tfdist checkpoint 1\n"
_ALIGNMENT = 64
_DIGEST_BYTES = hashlib.sha256().digest_size
_READ_BYTES = 1 << 20
MOST_HEADER_BYTES = 1 << 26  # a header has about 150 bytes per array, and 300 per epoch


@dataclass(frozen=True)
class Header:
    """The content of a checkpoint besides its arrays: numbers, strings, lists and dicts.

    Attributes:
        epoch: the epoch to continue with, from 0; equal to the number of finished epochs.
        batch: the number of finished batches of this epoch; 0 at the end of the previous epoch.
        step: the number of steps of the run, over all epochs.
        optimizer: the optimizer's class.
        stopped: whether a callback had ended the training.
        last: whether the training ended with it.
        best: `{"monitor", "value", "epoch"}` of the best epoch so far.
        train_seconds: the training time so far, without evaluation.
        epoch_logs: the logs of each finished epoch, with its number under "epoch".
        steps_per_epoch: the steps per epoch of the `fit` that wrote it, if known.
        seed: the seed of the order of the examples, if known.
        callbacks: the states of callbacks; an array is stored as `{"array": index among their entries}`.
        data: the position in the data, as arguments of `DataPasses.resume`; `None` if the data cannot be resumed.
        run: facts that identify the run, by name, such as its seed; empty in files of earlier versions.
        path: the path of the file; not stored in it.
    """

    epoch: CountOrZero
    batch: CountOrZero
    step: CountOrZero
    optimizer: str
    stopped: bool = False
    last: bool = False
    best: dict[str, Any] | None = None
    train_seconds: float = 0.0
    epoch_logs: list[dict[str, Any]] = field(default_factory=list)
    steps_per_epoch: int | None = None
    seed: int | None = None
    callbacks: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, int] | None = None
    run: dict[str, int | str] = field(default_factory=dict)
    path: Path | None = None


@dataclass(frozen=True)
class Entry:
    """One array of a checkpoint.

    Attributes:
        group: "model", "optimizer", "metrics", "strategy", "own", "held", "random", "callbacks" or "data".
        name: the path of a variable, or another name.
        value: `[*shape]`, or `[replicas, *shape]` if `by_replica`.
        by_replica: whether each replica has its own part.
        elsewhere: whether only another process has the value; `value` then has only the right shape and dtype.
    """

    group: str
    name: str
    value: np.ndarray
    by_replica: bool = False
    elsewhere: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the variable."""
        return self.value.shape[1:] if self.by_replica else self.value.shape

    @property
    def dtype(self) -> str:
        """The dtype's name, such as "float32"."""
        return self.value.dtype.name


@dataclass(frozen=True)
class Stored:
    """A checkpoint, whose arrays are read from its file when they are used.

    Attributes:
        header: everything but the arrays.
        entries: the arrays.
        file: the file, mapped into memory.
    """

    header: Header
    entries: list[Entry]
    file: mmap.mmap | None = None

    def unload(self) -> None:
        """Frees the memory of the arrays that were read; they are read again when they are used again."""
        if self.file is not None:
            self.file.madvise(mmap.MADV_DONTNEED)

    def described(self, without: Callable[[Entry], bool]) -> dict[str, Any]:
        """Describes the header and the arrays for `described_by`; marks the arrays for which `without` is true."""
        rows = [_row(entry, entry.value.shape) | {"elsewhere": without(entry)} for entry in self.entries]
        return {"header": _plain(self.header), "path": str(self.header.path), "arrays": rows}


class _DamagedError(Exception):
    """The file is not a checkpoint, or was damaged after it was written."""


_HEADER: TypeAdapter[Header] = TypeAdapter(Header)


def paths(folder: Path) -> list[Path]:
    """Returns the checkpoint files in `folder`, newest first, including damaged files, whose names count."""
    checkpoints = [path for path in Path(folder).glob(f"step-*{SUFFIX}") if path.stem.removeprefix("step-").isdigit()]
    return sorted(checkpoints, key=_step, reverse=True)


def latest(folder: Path) -> Header | None:
    """Returns the header of the newest intact checkpoint; `None` if there is no checkpoint.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    stored = newest(folder)
    return stored.header if stored else None


def newest(folder: Path, wanted: Callable[[Header], bool] = lambda header: True) -> Stored | None:
    """Returns the newest intact checkpoint whose header is `wanted`; `None` if there is none.

    A damaged file is skipped with a warning.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    candidates = paths(folder)
    intact = 0
    for path in candidates:
        try:
            stored = read(path)
        except CheckpointError as error:
            warnings.warn(f"{error.sentence}; the previous checkpoint is used", CheckpointWarning, stacklevel=2)
            continue
        intact += 1
        if wanted(stored.header):
            return stored
    if candidates and not intact:
        raise CheckpointError(
            f"No checkpoint in `{folder}` is intact: {len(candidates)} damaged",
            "delete them to start from the beginning, or copy an intact checkpoint there",
        )
    return None


def read(path: Path) -> Stored:
    """Returns the checkpoint in the file `path`, after verifying its checksum.

    Raises:
        CheckpointError: it is damaged, or cannot be read.
    """
    try:
        return _read(Path(path))
    except (OSError, _DamagedError) as problem:
        raise CheckpointError(
            f"The checkpoint `{path}` cannot be used: {getattr(problem, 'strerror', None) or problem}",
            "use another checkpoint of the folder",
        ) from problem


def described_by(description: dict[str, Any]) -> Stored:
    """Returns a checkpoint that another process has described, with empty arrays to fill."""
    entries = []
    for row in description["arrays"]:
        shape, dtype = tuple(row["shape"]), np.dtype(row["dtype"])
        # A broadcast array has the shape and dtype without using memory.
        value = np.broadcast_to(np.zeros((), dtype), shape) if row["elsewhere"] else np.zeros(shape, dtype)
        entries.append(Entry(row["group"], row["name"], value, row["by_replica"], row["elsewhere"]))
    return Stored(Header(**description["header"], path=Path(description["path"])), entries)


def _read(path: Path) -> Stored:
    with files.open_regular(path) as file:
        _require_size(file, path)
        _verify(file)
        header, rows = _read_beginning(file, path)
        begin = file.tell()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    arrays = memoryview(mapped)[begin:-_DIGEST_BYTES]
    try:
        return Stored(header, [_entry(row, arrays) for row in rows], mapped)
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        raise _foreign(problem) from problem


def _read_beginning(file: BinaryIO, path: Path) -> tuple[Header, list[dict[str, Any]]]:
    """Reads the header and the table of arrays at the beginning of a file, whose checksum may be unverified."""
    file.seek(0)
    if file.read(len(_MAGIC)) != _MAGIC:
        raise _DamagedError("it does not begin like a checkpoint of this version")
    length = int.from_bytes(file.read(8), "little")
    if length > MOST_HEADER_BYTES:
        raise _DamagedError(f"its header has {length:,} bytes, and at most {MOST_HEADER_BYTES:,} are read")
    try:
        parsed = json.loads(file.read(length))
        return replace(_HEADER.validate_python(parsed["header"]), path=path), list(parsed["arrays"])
    except (KeyError, TypeError, ValueError, RecursionError) as problem:
        raise _foreign(problem) from problem


def _foreign(problem: Exception) -> _DamagedError:
    """The error for a file that tfdist did not write, if its checksum is right."""
    if isinstance(problem, ValidationError):
        first = problem.errors()[0]
        problem = ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    return _DamagedError(f"its header is not that of a checkpoint ({problem})")


def _require_size(file: BinaryIO, path: Path) -> None:
    """Raises `_DamagedError` for a file that is larger than its header says, before all of it is read."""
    size = file.seek(0, 2)
    if size <= MOST_HEADER_BYTES:
        return
    _, rows = _read_beginning(file, path)
    try:
        arrays = sum(_padded(math.prod(row["shape"]) * np.dtype(row["dtype"]).itemsize) for row in rows)
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        raise _foreign(problem) from problem
    expected = file.tell() + arrays + _DIGEST_BYTES
    if size > expected:
        raise _DamagedError(f"it has {size:,} bytes, and its header describes {expected:,}")


def _verify(file: BinaryIO) -> None:
    """Reads a file in small pieces, and raises `_DamagedError` if its checksum is wrong."""
    digest, remaining = hashlib.sha256(), file.seek(0, 2) - _DIGEST_BYTES
    file.seek(0)
    if file.read(len(_MAGIC)) != _MAGIC:
        raise _DamagedError("it does not begin like a checkpoint of this version")
    file.seek(0)
    while remaining > 0 and (piece := file.read(min(_READ_BYTES, remaining))):
        digest.update(piece)
        remaining -= len(piece)
    if digest.digest() != file.read(_DIGEST_BYTES + 1):
        raise _DamagedError("its checksum is wrong, so it was truncated or altered")


def header_of(path: Path) -> Header | None:
    """Returns the header of a file without verifying its checksum; `None` if it has none."""
    try:
        with files.open_regular(path) as file:
            return _read_beginning(file, path)[0]
    except (OSError, _DamagedError):
        return None


def write(folder: Path, header: Header, entries: list[Entry]) -> Path:
    """Writes a checkpoint into `folder` atomically, and returns its path.

    `entries` is emptied meanwhile, so that the memory of each array is free once it is written.

    Raises:
        CheckpointError: the file cannot be written; the existing checkpoints are unchanged.
    """
    folder = Path(folder)
    path = folder / f"step-{header.step:08d}{SUFFIX}"
    beginning = _beginning(header, entries)
    if len(beginning) > MOST_HEADER_BYTES:
        raise CheckpointError(
            f"A checkpoint would have a header of {len(beginning):,} bytes, and at most {MOST_HEADER_BYTES:,} are read",
            "let the callbacks store less in it, or arrays instead of lists",
        )
    size = len(beginning) + sum(_padded(entry.value.nbytes) for entry in entries) + _DIGEST_BYTES
    try:
        files.write_atomically(path, lambda temporary: _write(temporary, beginning, entries))
    except OSError as problem:
        raise _cannot_write(folder, size, problem) from problem
    return path


def prune(folder: Path, keep: int, written: Path) -> None:
    """Deletes all but the newest `keep` of the checkpoints in `folder` up to the file just `written`.

    Files of later steps do not count: they were damaged when the run was resumed from an earlier checkpoint.
    """
    for path in [path for path in paths(folder) if _step(path) <= _step(written)][keep:]:
        path.unlink(missing_ok=True)


def remove_temporaries(folder: Path) -> None:
    """Deletes the temporary files of processes that were killed while writing."""
    for path in Path(folder).glob(f".step-*{SUFFIX}.*{SUFFIX}"):
        path.unlink(missing_ok=True)


def _step(path: Path) -> int:
    """The step of a checkpoint; that of the file's name if it is damaged."""
    named = int(path.stem.removeprefix("step-"))
    header = header_of(path)
    if header is None or header.step == named:
        return named
    # The file was renamed, or its header is damaged, which its checksum shows.
    with contextlib.suppress(OSError, _DamagedError):
        return _read(path).header.step
    return named


def _beginning(header: Header, entries: Iterable[Entry]) -> bytes:
    offset, table = 0, []
    for entry in entries:
        value = _storable(entry)
        table.append(_row(entry, value.shape) | {"offset": offset})
        offset += _padded(value.nbytes)
    text = json.dumps({"header": _plain(header), "arrays": table}).encode()
    length = len(_MAGIC) + 8 + len(text)
    text += b" " * (_padded(length) - length)
    return _MAGIC + len(text).to_bytes(8, "little") + text


def _row(entry: Entry, shape: tuple[int, ...]) -> dict[str, Any]:
    row = {"group": entry.group, "name": entry.name, "dtype": entry.dtype, "shape": list(shape)}
    return row | {"by_replica": entry.by_replica}


def _plain(header: Header) -> dict[str, Any]:
    plain = asdict(replace(header, path=None))
    del plain["path"]
    return plain


def _storable(entry: Entry) -> np.ndarray:
    value = entry.value
    if value.dtype.hasobject or value.dtype.kind in "SUMm":
        raise CheckpointError(
            f"The {entry.group} array `{entry.name}` cannot be stored: its dtype is `{value.dtype}`",
            "use a numeric dtype",
        )
    return value


def little_endian(value: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array, even for dtypes without the buffer protocol, such as bfloat16."""
    value = np.ascontiguousarray(value).reshape(-1)
    return value.astype(value.dtype.newbyteorder("<"), copy=False).view(np.uint8)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _write(path: Path, beginning: bytes, entries: list[Entry]) -> None:
    digest = hashlib.sha256()
    entries.reverse()
    with path.open("wb") as file:
        file.write(beginning)
        digest.update(beginning)
        while entries:
            content = little_endian(entries.pop().value)
            for piece in (content.data, b"\0" * (_padded(content.nbytes) - content.nbytes)):
                digest.update(piece)
                file.write(piece)
        file.write(digest.digest())


def _entry(row: dict[str, Any], arrays: memoryview) -> Entry:
    dtype = np.dtype(row["dtype"])
    shape = tuple(row["shape"])
    count = math.prod(shape)
    raw = arrays[row["offset"] : row["offset"] + count * dtype.itemsize]
    value = np.frombuffer(raw, np.uint8).view(dtype).reshape(shape) if count else np.empty(shape, dtype)
    return Entry(row["group"], row["name"], value, row["by_replica"])


def _cannot_write(folder: Path, size: int, problem: OSError) -> CheckpointError:
    free = ""
    with contextlib.suppress(OSError):
        free = f", where {shutil.disk_usage(folder).free:,} are free"
    existing = paths(folder) if folder.is_dir() else []
    unchanged = f"; the last checkpoint, `{existing[0].name}`, is unchanged" if existing else ""
    return CheckpointError(
        f"A checkpoint of {size:,} bytes cannot be written to `{folder}`{free}: {problem.strerror or problem}",
        f"make room there, or choose another folder{unchanged}",
    )
