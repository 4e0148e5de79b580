"""The runs below given folders, each with its record and its measurement.

A run that `compare` has not made counts as the only round of a separate study, since the conditions of its measurement
are unknown.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from tfdist import files, terminal
from tfdist.errors import RunFolderError
from tfdist.run.folder import load_record
from tfdist.run.schema import EpochRecord, RunRecord, UtilizationRecord
from tfdist.study.measure import MEASURED, MOST_MEASURED_BYTES, Measured
from tfdist.study.plan import Case, Cell


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        cell: the cell that was run.
        study: the study that the run belongs to; "" for a run that `compare` has not made.
        round: the number of its round in the study.
        seed: its seed.
        folder: its folder.
        record: its `run.json`; `None` if it failed before writing one.
        measured: what `compare` measured; `None` for a run that `compare` has not made.
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
        """Whether `compare` had its steps traced, so that its times do not count."""
        return self.measured is not None and self.measured.traced

    @property
    def position(self) -> int:
        """The position of its cell in the plan of the study."""
        return 0 if self.measured is None else self.measured.position

    @property
    def occasion(self) -> tuple[str, int, str]:
        """The study, the round and the kind of machine: only runs with the same occasion have comparable times."""
        return self.study, self.round, "" if self.record is None else self.record.machine.cpu

    @property
    def has_gpu(self) -> bool:
        """Whether TensorFlow has seen a GPU."""
        return self.record is not None and bool(self.record.machine.gpus)

    @property
    def error(self) -> str:
        """Why the run failed; "" if it did not."""
        if self.measured is not None and self.measured.exit_code:
            return self.measured.error or f"exit code {self.measured.exit_code}"
        if self.record is None:
            return "the run has no record"
        return "" if self.record.status in ("completed", "stopped") else self.record.reason or self.record.status

    @property
    def started(self) -> str:
        """When the run was started, ISO 8601; "" if unknown."""
        if self.measured is not None:
            return self.measured.started
        return "" if self.record is None else self.record.started.isoformat()

    @property
    def cause(self) -> str:
        """The most informative line of `error`."""
        return terminal.cause(self.error)

    @property
    def epochs(self) -> list[EpochRecord]:
        return [] if self.record is None else self.record.epochs

    @property
    def later_epochs(self) -> list[EpochRecord]:
        """The epochs after the first, which traces and warms up; the first if it is the only epoch."""
        return self.epochs[1:] or self.epochs

    @property
    def epoch_seconds(self) -> float | None:
        """The median training time of the later epochs."""
        return median(epoch.train_seconds for epoch in self.later_epochs)

    @property
    def warm_up_seconds(self) -> float | None:
        """The additional time of the first epoch, for tracing, compiling and initial reads."""
        if len(self.epochs) < 2 or self.epochs[0].train_seconds is None or self.epoch_seconds is None:
            return None
        return max(0.0, self.epochs[0].train_seconds - self.epoch_seconds)

    @property
    def reached(self) -> bool | None:
        """Whether the run reached its target; `None` without a target."""
        target = None if self.record is None else self.record.time_to_target
        return None if target is None else target.epoch is not None

    @property
    def epochs_to_target(self) -> int | None:
        """The epoch that reached the target, from 1."""
        target = None if self.record is None else self.record.time_to_target
        return None if target is None else target.epoch

    @property
    def seconds_to_target(self) -> float | None:
        """Wall time from the first access to data to the end of that epoch, with evaluation (MLPerf's clock)."""
        target = self.epochs_to_target
        return next((epoch.elapsed_seconds for epoch in self.epochs if epoch.epoch == target), None)

    @property
    def utilization(self) -> UtilizationRecord | None:
        """The computation of its steps; `None` if it is not known."""
        return None if self.record is None else self.record.utilization

    def last(self, metric: str) -> float | None:
        """Returns a metric of the last epoch."""
        return self.epochs[-1].metrics.get(metric) if self.epochs else None


def load(folders: Iterable[Path]) -> list[Run]:
    """Reads the runs below `folders`, in the order in which they were started.

    Raises:
        RunFolderError: a folder has no run, or a file cannot be read.
    """
    runs: dict[Path, Run] = {}
    for folder in folders:
        run_folders = {path.parent for name in (MEASURED, "run.json") for path in Path(folder).rglob(name)}
        if not run_folders:
            raise RunFolderError(
                f"`{folder}` has no run: there is neither a `{MEASURED}` nor a `run.json` below it",
                "name folders of runs, or of studies that `tfdist compare` has made",
            )
        for run_folder in sorted(run_folders):
            runs[run_folder.resolve()] = _load(run_folder)
    return sorted(runs.values(), key=lambda run: run.started)


def _load(folder: Path) -> Run:
    measured = _measured(folder / MEASURED)
    record: RunRecord | None = None
    try:
        record = load_record(folder)
    except RunFolderError:
        if measured is None or measured.exit_code == 0:
            raise
    if measured is not None:
        return Run(measured.cell, measured.study, measured.round, measured.seed, folder, record, measured)
    assert record is not None
    return Run(_cell_of(record), "", 0, record.seed, folder, record, None)


def _measured(path: Path) -> Measured | None:
    try:
        return Measured.model_validate_json(files.read_text(path, MOST_MEASURED_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise RunFolderError(
            f"`{path}` is not what `tfdist compare` writes: {str(error).splitlines()[0]}",
            "remove the file, or read it with the version of tfdist that has written it",
        ) from error


def _cell_of(record: RunRecord) -> Cell:
    name = record.strategy.name
    workers = record.world.world_size if record.world.world_size > 1 else record.strategy.replicas
    case = Case(record.model.name, record.dataset.name, record.global_batch_size, record.dataset.input)
    return Cell(case, name, 1 if name == "single" else workers, name)


def median(values: Iterable[float | None]) -> float | None:
    """Returns the median of the values that are not `None`; `None` without any."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
