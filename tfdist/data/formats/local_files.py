"""The user's own files: finding and reading them."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from tfdist.data.input.bad_examples import BadExamples
from tfdist.errors import DataError, UsageError

OTHER_ENCODING = "name another encoding with `--data-option encoding=latin-1`"
# The image formats that TensorFlow decodes.
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
# Folders that systems and archives add: macOS' archives, and thumbnails of Synology and Windows.
_OF_SYSTEMS = ("__MACOSX", "@eaDir", "System Volume Information", "$RECYCLE.BIN", "lost+found")
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


def folder(data_dir: str | PathLike[str] | None, dataset: str) -> Path:
    """The folder of a dataset's files.

    Raises:
        UsageError: no folder was given.
        DataError: the folder does not exist.
    """
    if not data_dir:
        raise UsageError(f"`{dataset}` reads your own files, but no folder is given", "give it with `--data-dir`")
    directory = Path(data_dir).expanduser()
    if not directory.is_dir():
        raise DataError(
            f"Dataset `{dataset}` cannot be read: `{directory}` is not a folder", "give the folder with `--data-dir`"
        )
    return directory


def find(directory: Path, patterns: str | None, dataset: str, option: str) -> list[Path]:
    """The files in `directory` that an option selects.

    Args:
        directory: the folder.
        patterns: names or patterns such as `*.bin`, separated by commas; `None` selects no files.
        dataset: the name of the dataset, for messages.
        option: the name of the option, for messages.

    Raises:
        DataError: no file matches a name or a pattern.
    """
    paths: list[Path] = []
    for pattern in str(patterns).split(",") if patterns is not None else []:
        is_wanted = _is_of_user if not pattern.strip().startswith(".") else lambda path: True
        matching = sorted(path for path in directory.glob(pattern.strip()) if path.is_file() and is_wanted(path))
        if not matching:
            content = ", ".join(f"`{path.name}`" for path in sorted(directory.iterdir())[:12]) or "nothing"
            raise DataError(
                f"Dataset `{dataset}` has no file `{pattern.strip()}` in `{directory}`, which has {content}",
                f"name the files with `--data-option {option}=NAME`",
            )
        paths += matching
    return paths


def content(path: Path) -> bytes:
    """The bytes of a file, decompressed if its name ends in `.gz` or `.xz`.

    Raises:
        DataError: the file cannot be read or decompressed.
    """
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            return file.read()
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"`{path}` cannot be read: {error}", "fetch the file again")


def raw_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, one after the other, decompressed if its name ends in `.gz` or `.xz`; for large files.

    Raises:
        DataError: the file cannot be read or decompressed.
    """
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            yield from file
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise _unreadable(path, error) from error


def folders_in(directory: Path) -> list[Path]:
    """The user's folders in a folder, sorted by name: neither hidden ones nor those that systems and archives add."""
    return sorted(path for path in directory.iterdir() if path.is_dir() and _is_of_user(path))


def _is_of_user(path: Path) -> bool:
    """Whether a file or folder is neither hidden, such as `.thumbs` and macOS' `._1.jpg`, nor added by a system."""
    return not path.name.startswith(".") and path.name not in _OF_SYSTEMS


def pictures_in(directory: Path) -> list[Path]:
    """The pictures in a folder that are not hidden, sorted by name; empty if there is no such folder."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.suffix.lower() in PICTURES and _is_of_user(path))


def text(path: Path, encoding: str) -> str:
    """The text in a file.

    Raises:
        UsageError: no such encoding.
        DataError: the file cannot be read, or is not in that encoding.
    """
    data = content(path)
    try:
        return _decoded(data, encoding)
    except UnicodeDecodeError as error:
        line_begin = data.rfind(b"\n", 0, error.start) + 1
        sentence = _not_text(path, data.count(b"\n", 0, error.start) + 1, encoding, data, error.start, line_begin)
        raise DataError(sentence, OTHER_ENCODING) from error


def lines(path: Path, encoding: str, bad: BadExamples) -> Iterator[tuple[int, str | None]]:
    """The lines of a text with their numbers, from 1; `None` in place of a bad line that is left out.

    Raises:
        UsageError: no such encoding.
        DataError: the file cannot be read, or a line is not in that encoding.
    """
    for number, line in enumerate(content(path).removesuffix(b"\n").split(b"\n"), 1):
        try:
            yield number, _decoded(line.removesuffix(b"\r"), encoding)
        except UnicodeDecodeError as error:
            bad.add(_not_text(path, number, encoding, line, error.start, 0), OTHER_ENCODING)
            yield number, None


def _decoded(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except LookupError as error:
        raise UsageError(f"There is no encoding `{encoding}`", "use for example `utf-8` or `latin-1`") from error


def _not_text(path: Path, number: int, encoding: str, data: bytes, position: int, line_begin: int) -> str:
    return f"Line {number} of `{path}` is not `{encoding}`: byte 0x{data[position]:02x} at {position - line_begin}"
