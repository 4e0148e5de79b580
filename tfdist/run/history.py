"""`history.csv`: a row for each epoch and a column for each metric, empty where an epoch lacks it."""

from __future__ import annotations

import csv
import io
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tfdist import files
from tfdist.run.schema import EpochRecord


class HistoryFile:
    """The file, to which the rows of new epochs are appended, so that an epoch costs the same in a long run.

    It is written anew, atomically, for a metric that is new, and if the file is not as it was left.

    Args:
        path: the file.
    """

    def __init__(self, path: Path):
        self._path = path
        self._columns: list[str] = []
        self._epochs = self._bytes = 0  # how much the file has

    def write(self, epochs: Sequence[EpochRecord]) -> None:
        """Writes the rows of `epochs`, which are all epochs of the run so far.

        Raises:
            OSError: the file cannot be written; its content is as before.
        """
        new = list(map(_row, epochs[self._epochs :]))
        if 0 < self._epochs < len(epochs) and _names(new) <= set(self._columns) and self._is_as_it_was_left():
            self._append(_text(self._columns, new))
        else:
            rows = list(map(_row, epochs))
            columns = list(dict.fromkeys(name for row in rows for name in row))
            columns = columns or list(EpochRecord.model_fields)[:-1]
            text = _text(columns, rows, heading=True)
            files.write_text(self._path, text)
            self._columns, self._bytes = columns, len(text.encode())
        self._epochs = len(epochs)

    def _is_as_it_was_left(self) -> bool:
        try:
            status = self._path.lstat()
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == self._bytes

    def _append(self, text: str) -> None:
        content = left = text.encode()
        with self._path.open("ab", buffering=0) as file:
            try:
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(self._bytes)
                raise
        self._bytes += len(content)


def _row(epoch: EpochRecord) -> dict[str, Any]:
    figures = epoch.model_dump(exclude={"metrics"})
    return figures | {name: value for name, value in epoch.metrics.items() if name not in figures}


def _names(rows: Iterable[dict[str, Any]]) -> set[str]:
    return {name for row in rows for name in row}


def _text(columns: Sequence[str], rows: Iterable[dict[str, Any]], heading: bool = False) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if heading:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
