"""Checkpoints on disk: one file each, written whole or not at all, readable without TensorFlow.

    magic line            which format this is
    length of the header  8 bytes, little-endian
    header                JSON: the position, the states of callbacks, and the offset of each array
    arrays                raw bytes, little-endian, each at a multiple of 64 bytes
    SHA-256               32 bytes, of everything before

Nothing is pickled, so that reading a file runs no code from it. A file that is cut or altered fails its checksum; then
the previous checkpoint is used, with a warning.

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
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 and similar dtypes with NumPy
import numpy as np

from tfdist import files
from tfdist.errors import CheckpointError

SUFFIX = ".ckpt"
_MAGIC = b"tfdist checkpoint 1\n"
_ALIGNMENT = 64
_DIGEST_BYTES = hashlib.sha256().digest_size
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Header:
    """The content of a checkpoint besides its arrays: plain numbers, strings, lists and dicts.

    Attributes:
        epoch: the epoch to continue with, counted from 0, which is the number of finished epochs.
        batch: the number of its finished batches; 0 at the end of the previous epoch.
        step: the number of steps of the run, over all its epochs.
        optimizer: the optimizer's class.
        stopped: whether a callback had ended the training.
        best: `{"monitor", "value", "epoch"}` of the best epoch so far.
        train_seconds: training time so far, evaluation excluded.
        epoch_logs: the logs of each finished epoch, with its number under "epoch".
        steps_per_epoch: the steps per epoch of the `fit` that wrote it, if known.
        seed: the seed of the order of the examples, if known.
        callbacks: the states of callbacks; an array is stored as `{"array": index among their entries}`.
        data: the position in the data, as `DataPasses.resume` takes it; `None` if the data cannot be resumed.
        path: the file, which does not contain this attribute.
    """

    epoch: int
    batch: int
    step: int
    optimizer: str
    stopped: bool = False
    best: dict[str, Any] | None = None
    train_seconds: float = 0.0
    epoch_logs: list[dict[str, Any]] = field(default_factory=list)
    steps_per_epoch: int | None = None
    seed: int | None = None
    callbacks: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, int] | None = None
    path: Path | None = None


@dataclass(frozen=True)
class Entry:
    """One array of a checkpoint.

    Attributes:
        group: "model", "optimizer", "metrics", "held", "random", "callbacks" or "data".
        name: the path of a variable, or another name.
        value: `[*shape]`, or `[replicas, *shape]` where each replica has its own part.
        by_replica: whether each replica has its own part.
        elsewhere: whether another process has the value; `value` then tells its shape and dtype alone.
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
    """A checkpoint, whose arrays are read from its file where they are used.

    Attributes:
        header: all but the arrays.
        entries: the arrays.
        file: the file, mapped into memory.
    """

    header: Header
    entries: list[Entry]
    file: mmap.mmap | None = None

    def unload(self) -> None:
        """Frees the memory of what has been read; it is read again where it is used again."""
        if self.file is not None:
            self.file.madvise(mmap.MADV_DONTNEED)

    def described(self, without: Callable[[Entry], bool]) -> dict[str, Any]:
        """The header and the table of arrays, for `described_by`; the arrays for which `without` is true are marked."""
        rows = [_row(entry, entry.value.shape) | {"elsewhere": without(entry)} for entry in self.entries]
        return {"header": _plain(self.header), "path": str(self.header.path), "arrays": rows}


class _DamagedError(Exception):
    """The file is not a checkpoint, or not as it was written."""


def paths(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, newest first, damaged ones included."""
    found = [path for path in Path(folder).glob(f"step-*{SUFFIX}") if path.stem.removeprefix("step-").isdigit()]
    return sorted(found, key=_step, reverse=True)


def latest(folder: Path) -> Header | None:
    """The header of the newest whole checkpoint, `None` if there is no checkpoint.

    Raises:
        CheckpointError: there are checkpoints, and none of them is whole.
    """
    stored = newest(folder)
    return stored.header if stored else None


def newest(folder: Path, wanted: Callable[[Header], bool] = lambda header: True) -> Stored | None:
    """The newest whole checkpoint for whose header `wanted` is true, `None` if there is none.

    A damaged file is skipped with a warning.

    Raises:
        CheckpointError: there are checkpoints, and none of them is whole.
    """
    candidates = paths(folder)
    whole = 0
    for path in candidates:
        try:
            stored = read(path)
        except CheckpointError as error:
            warnings.warn(f"{error.sentence}; the one before it is used", stacklevel=2)
            continue
        whole += 1
        if wanted(stored.header):
            return stored
    if candidates and not whole:
        raise CheckpointError(
            f"None of the checkpoints in `{folder}` is whole: {len(candidates)} damaged",
            "delete them to start from the beginning, or copy a whole one there",
        )
    return None


def read(path: Path) -> Stored:
    """The checkpoint in the file `path`, its checksum verified.

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
    """The checkpoint that another process has described, with space for its arrays."""
    entries = []
    for row in description["arrays"]:
        shape, dtype = tuple(row["shape"]), np.dtype(row["dtype"])
        # An array without memory of its own has a shape and a dtype too.
        value = np.broadcast_to(np.zeros((), dtype), shape) if row["elsewhere"] else np.zeros(shape, dtype)
        entries.append(Entry(row["group"], row["name"], value, row["by_replica"], row["elsewhere"]))
    return Stored(Header(**description["header"], path=Path(description["path"])), entries)


def _read(path: Path) -> Stored:
    with path.open("rb") as file:
        _verify(file)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    content = memoryview(mapped)
    begin = len(_MAGIC) + 8
    end = begin + int.from_bytes(content[len(_MAGIC) : begin], "little")
    try:
        parsed = json.loads(bytes(content[begin:end]))
        entries = [_entry(row, content[end:]) for row in parsed["arrays"]]
        return Stored(Header(**parsed["header"], path=path), entries, mapped)
    except (KeyError, TypeError, ValueError) as problem:  # the checksum is right, so tfdist did not write the file
        raise _DamagedError(f"its header is not a checkpoint's ({problem})") from problem


def _verify(file: Any) -> None:
    """Reads a file to its end, a little at a time."""
    digest, left = hashlib.sha256(), file.seek(0, 2) - _DIGEST_BYTES
    file.seek(0)
    if file.peek(len(_MAGIC))[: len(_MAGIC)] != _MAGIC:
        raise _DamagedError("it does not begin as a checkpoint of this version does")
    while left > 0 and (piece := file.read(min(_READ_BYTES, left))):
        digest.update(piece)
        left -= len(piece)
    if digest.digest() != file.read():
        raise _DamagedError("its checksum is wrong, so it was cut or altered")


def write(folder: Path, header: Header, entries: list[Entry]) -> Path:
    """Writes a checkpoint into `folder`, whole or not at all, and returns its path.

    `entries` is emptied on the way, so that the memory of each array is free once it is written.

    Raises:
        CheckpointError: the file system refused; the existing checkpoints are unchanged.
    """
    folder = Path(folder)
    path = folder / f"step-{header.step:08d}{SUFFIX}"
    beginning = _beginning(header, entries)
    size = len(beginning) + sum(_padded(entry.value.nbytes) for entry in entries) + _DIGEST_BYTES
    try:
        files.write_atomically(path, lambda temporary: _write(temporary, beginning, entries))
    except OSError as problem:
        raise _cannot_write(folder, size, problem) from problem
    return path


def prune(folder: Path, keep: int, written: Path) -> None:
    """Of the checkpoints in `folder` up to the one just `written`, deletes all but the newest `keep`.

    Later ones were damaged when the run was resumed from an earlier one; whole ones must not be deleted for them.
    """
    for path in [path for path in paths(folder) if _step(path) <= _step(written)][keep:]:
        path.unlink(missing_ok=True)


def remove_temporaries(folder: Path) -> None:
    """Deletes the temporary files of processes that were killed while writing."""
    for path in Path(folder).glob(f".step-*{SUFFIX}.*{SUFFIX}"):
        path.unlink(missing_ok=True)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _beginning(header: Header, entries: Iterable[Entry]) -> bytes:
    """The bytes of a file up to its arrays."""
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


def _little_endian(value: np.ndarray) -> np.ndarray:
    """The bytes of any dtype, bfloat16 included, which the buffer protocol does not know."""
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
            content = _little_endian(entries.pop().value)
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
    kept = paths(folder) if folder.is_dir() else []
    good = f"; the last checkpoint, `{kept[0].name}`, is as it was" if kept else ""
    return CheckpointError(
        f"A checkpoint of {size:,} bytes cannot be written to `{folder}`{free}: {problem.strerror or problem}",
        f"make room there, or choose another folder{good}",
    )
