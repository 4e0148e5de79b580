"""The runs below some folders, each with its record and what was measured of it.

A run that `compare` has not made is taken for a round of its own of a study of its own: nothing is known of what ran
beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from tfdist import terminal
from tfdist.errors import RunFolderError
from tfdist.run.folder import load_record
from tfdist.run.schema import EpochRecord, RunRecord
from tfdist.study.measure import MEASURED, Measured
from tfdist.study.plan import Case, Cell


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        cell: what was run.
        study: of which study; "" for a run that was made alone.
        round: the number of its round there.
        seed: its seed.
        folder: where it is.
        record: its `run.json`; `None` if it failed before there was one.
        measured: what `compare` measured; `None` for a run that was made alone.
    """

    cell: Cell
    study: str
    round: int
    seed: int | None
    folder: Path
    record: RunRecord | None
    measured: Measured | None

    @property
    def traced(self) -> bool:
        """Whether steps were traced, so that its times do not count; of a study, not of a run that was made alone."""
        return self.measured is not None and self.measured.traced

    @property
    def occasion(self) -> tuple[str, int, str]:
        """What it shares with the runs that its times are compared with: study, round and kind of machine."""
        return self.study, self.round, "" if self.record is None else self.record.machine.cpu

    @property
    def error(self) -> str:
        """Why it failed; "" if it did not."""
        if self.measured is not None and self.measured.exit_code:
            return self.measured.error or f"exit code {self.measured.exit_code}"
        if self.record is None:
            return "there is no record"
        return "" if self.record.status in ("completed", "stopped") else self.record.reason or self.record.status

    @property
    def begun(self) -> str:
        """When it was begun, ISO 8601."""
        if self.measured is not None:
            return self.measured.started
        return "" if self.record is None else self.record.started.isoformat()

    @property
    def cause(self) -> str:
        """The line of `error` that tells most."""
        return terminal.cause(self.error)

    @property
    def epochs(self) -> list[EpochRecord]:
        """The epochs that were trained."""
        return [] if self.record is None else self.record.epochs

    @property
    def later_epochs(self) -> list[EpochRecord]:
        """Those after the first one, which traces and warms up; the first one if there is no other."""
        return self.epochs[1:] or self.epochs

    @property
    def epoch_seconds(self) -> float | None:
        """Training seconds of a later epoch, the median."""
        return _median(epoch.train_seconds for epoch in self.later_epochs)

    @property
    def warm_up_seconds(self) -> float | None:
        """What the first epoch takes longer than later ones: tracing, and what is read or compiled once."""
        if len(self.epochs) < 2 or self.epochs[0].train_seconds is None or self.epoch_seconds is None:
            return None
        return max(0.0, self.epochs[0].train_seconds - self.epoch_seconds)

    @property
    def reached(self) -> bool | None:
        """Whether it reached its target; `None` if it had none."""
        target = None if self.record is None else self.record.time_to_target
        return None if target is None else target.epoch is not None

    @property
    def epochs_to_target(self) -> int | None:
        """The epoch that reached the target, from 1."""
        target = None if self.record is None else self.record.time_to_target
        return None if target is None else target.epoch

    @property
    def seconds_to_target(self) -> float | None:
        """Wall time from the first touch of data to the end of that epoch, evaluation included (MLPerf's clock)."""
        epoch = self.epochs_to_target
        found = [one.elapsed_seconds for one in self.epochs if one.epoch == epoch]
        return found[0] if found else None

    def last(self, metric: str) -> float | None:
        """A metric of the last epoch."""
        return self.epochs[-1].metrics.get(metric) if self.epochs else None


def load(folders: Iterable[Path]) -> list[Run]:
    """The runs below `folders`, in the order in which they were begun.

    Raises:
        RunFolderError: a folder has none, or one of their files cannot be read.
    """
    found: dict[Path, Run] = {}
    for folder in folders:
        places = {path.parent for name in (MEASURED, "run.json") for path in Path(folder).rglob(name)}
        if not places:
            raise RunFolderError(
                f"`{folder}` has no run: there is neither a `{MEASURED}` nor a `run.json` below it",
                "name folders of runs, or of studies that `tfdist compare` has made",
            )
        for place in sorted(places):
            found[place.resolve()] = _load(place)
    return sorted(found.values(), key=lambda run: run.begun)


def _load(folder: Path) -> Run:
    measured = _measured(folder / MEASURED)
    if measured is None:
        record = load_record(folder)
        return Run(_cell_of(record), "", 0, record.seed, folder, record, None)
    try:
        record_or_none = load_record(folder)
    except RunFolderError:
        if measured.exit_code == 0:
            raise
        record_or_none = None
    return Run(measured.cell, measured.study, measured.round, measured.seed, folder, record_or_none, measured)


def _measured(path: Path) -> Measured | None:
    try:
        return Measured.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise RunFolderError(
            f"`{path}` is not what `tfdist compare` writes: {str(error).splitlines()[0]}",
            "remove the file, or read it with the tfdist that wrote it",
        ) from error


def _cell_of(record: RunRecord) -> Cell:
    """The cell of a run that was made alone."""
    name = record.strategy.name
    workers = record.world.world_size if record.world.world_size > 1 else record.strategy.replicas
    case = Case(record.model.name, record.dataset.name, record.global_batch_size, record.dataset.input)
    return Cell(case, name, 1 if name == "single" else workers, name)


def _median(values: Iterable[float | None]) -> float | None:
    there: Sequence[float] = [value for value in values if value is not None]
    return statistics.median(there) if there else None
