"""The run folder: `run.json` and its schema, `history.csv`, `curves.png`, and where everything else lies.

The schema is described, field by field, in `docs/run.json.md`. This module imports neither TensorFlow nor
Keras; who fills the record passes the values.

Synopsis:

    >>> import tempfile
    >>> folder = RunFolder(Path(tempfile.mkdtemp()) / "run")
    >>> record = example()
    >>> record.epochs.append(EpochRecord.from_logs(1, {"loss": float("nan"), "step_seconds": 0.002}, 1.5))
    >>> folder.write(record)
    >>> load(folder.path).epochs[0].metrics  # not a number is written as null
    {'loss': None}
"""

from __future__ import annotations

import csv
import importlib.metadata
import io
import math
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import psutil
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

import tfdist
from tfdist import files
from tfdist.cluster.world import cores
from tfdist.errors import RunFolderError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCHEMA_VERSION = 2


def _finite_or_none(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if value is None or isinstance(value, str):
        return value
    number = float(value)  # NumPy's and TensorFlow's scalars too
    return number if math.isfinite(number) else None


Number = Annotated[float | None, BeforeValidator(_finite_or_none)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class Versions(_Part):
    """The versions that computed the run; None for a package that was not there."""

    python: str
    tfdist: str
    tensorflow: str | None
    keras: str | None
    numpy: str | None

    @classmethod
    def detect(cls) -> Versions:
        """The installed versions, without importing anything."""
        installed = {name: _installed_version(name) for name in ("tensorflow", "keras", "numpy")}
        return cls(python=platform.python_version(), tfdist=tfdist.__version__, **installed)


class Machine(_Part):
    """The machine, without its name."""

    cpu: str
    cores: int
    memory_bytes: int
    platform: str
    gpus: list[str]

    @classmethod
    def detect(cls, gpus: Sequence[str] = ()) -> Machine:
        """This machine; TensorFlow alone can name the GPUs."""
        return cls(
            cpu=_cpu_model(),
            cores=cores(),
            memory_bytes=psutil.virtual_memory().total,
            platform=platform.platform(),
            gpus=list(gpus),
        )


class Threads(_Part):
    """TensorFlow's thread pools; 0 leaves the number to TensorFlow."""

    intra_op: int
    inter_op: int


class StrategyRecord(_Part):
    """The strategy, by name and options."""

    name: str
    options: dict[str, Any]
    replicas: int


class WorldRecord(_Part):
    """The place of the process that wrote the record; see `tfdist.cluster.world.World`."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    source: str


class ModelRecord(_Part):
    """The model."""

    name: str
    parameters: int
    options: dict[str, str] = {}


class DatasetRecord(_Part):
    """The dataset."""

    name: str
    examples: dict[str, int]
    options: dict[str, str] = {}
    augment: str = "none"
    skipped: int = 0


class EpochRecord(_Part):
    """One epoch."""

    epoch: int = Field(ge=1)
    train_seconds: Number
    evaluation_seconds: Number
    examples_per_second: Number
    step_seconds: Number
    metrics: dict[str, Number]

    @classmethod
    def from_logs(
        cls, epoch: int, logs: Mapping[str, Any], train_seconds: float, evaluation_seconds: float = 0.0
    ) -> EpochRecord:
        """The record of epoch number `epoch`, from 1, with the logs that Keras and our callbacks filled."""
        metrics = {name: value for name, value in logs.items() if name not in _NOT_METRICS}
        return cls(
            epoch=epoch,
            train_seconds=train_seconds,
            evaluation_seconds=evaluation_seconds,
            examples_per_second=logs.get("examples_per_second"),
            step_seconds=logs.get("step_seconds"),
            metrics=metrics,
        )


# What our callbacks put into the logs and the record holds elsewhere.
_NOT_METRICS = ("examples_per_second", "step_seconds", "peak_memory_bytes", "peak_gpu_memory_bytes")


class TargetRecord(_Part):
    """The target, and when it was reached."""

    monitor: str
    target: float
    seconds: Number = None
    epoch: int | None = None


Status = Literal["running", "completed", "stopped", "interrupted", "failed"]


class RunRecord(_Part):
    """All of `run.json`."""

    schema_version: int = SCHEMA_VERSION
    status: Status = "running"
    reason: str | None = None
    command: list[str]
    started: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))
    versions: Versions = Field(default_factory=Versions.detect)
    machine: Machine = Field(default_factory=Machine.detect)
    threads: Threads | None = None
    strategy: StrategyRecord
    world: WorldRecord
    model: ModelRecord
    dataset: DatasetRecord
    global_batch_size: int
    per_replica_batch_size: int
    seed: int | None
    optimizer: str
    learning_rate: Number
    dtype_policy: str
    startup_seconds: Number = None
    epochs: list[EpochRecord] = []
    peak_memory_bytes: int | None = None
    peak_gpu_memory_bytes: int | None = None
    time_to_target: TargetRecord | None = None
    test_metrics: dict[str, Number] | None = None
    files: dict[str, str] = {}


class RunFolder:
    """A folder for the files of one run.

    Args:
        path: the folder; made if it is not there.
        resume: whether the files of a run may already lie in it.

    Raises:
        RunFolderError: it cannot be made or written; or it holds another run and `resume` is not set.
    """

    def __init__(self, path: str | os.PathLike[str], resume: bool = False):
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        found = sorted(name for name in _NAMES if (self.path / name).exists())
        if found and not resume:
            names = ", ".join(f"`{name}`" for name in found)
            raise RunFolderError(
                f"The run folder `{self.path}` already holds a run: {names}",
                f"continue it with `python -m tfdist.train --resume --run-dir {path}`, or choose another `--run-dir`",
            )

    @property
    def run_json(self) -> Path:
        """The record."""
        return self.path / "run.json"

    @property
    def history(self) -> Path:
        """One row an epoch."""
        return self.path / "history.csv"

    @property
    def curves(self) -> Path:
        """The picture of the run."""
        return self.path / "curves.png"

    @property
    def log(self) -> Path:
        """What TensorFlow and the run had to say."""
        return self.path / "log.txt"

    @property
    def vocabulary(self) -> Path:
        """The words of the input by number, a line each."""
        return self.path / "vocabulary.txt"

    @property
    def target_vocabulary(self) -> Path:
        """The words of the target by number, a line each."""
        return self.path / "target_vocabulary.txt"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's events and traces."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The trained model, as Keras loads it."""
        return self.path / "model.keras"

    def write(self, record: RunRecord) -> None:
        """Writes `run.json`, whole or not at all.

        Raises:
            RunFolderError: it cannot be written; the one before is intact.
        """
        self._write_text(self.run_json, record.model_dump_json(indent=2) + "\n")

    def write_history(self, record: RunRecord) -> None:
        """Writes `history.csv`: one row an epoch, all metrics that any epoch has, empty where one has not.

        Raises:
            RunFolderError: it cannot be written; the one before is intact.
        """
        rows = [_history_row(epoch) for epoch in record.epochs]
        columns = dict.fromkeys(name for row in rows for name in row)
        text = io.StringIO()
        writer = csv.DictWriter(text, columns or list(EpochRecord.model_fields)[:-1], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        self._write_text(self.history, text.getvalue())

    def draw_curves(self, record: RunRecord) -> None:
        """Draws `curves.png`: loss and accuracy by epoch, or nothing where no epoch is finished.

        Raises:
            RunFolderError: it cannot be written; the one before is intact.
        """
        if not record.epochs:
            return
        try:
            files.write_whole(self.curves, lambda path: _draw(record, path))
        except OSError as error:
            raise _cannot_write(self.curves, error) from error

    def _write_text(self, path: Path, text: str) -> None:
        try:
            files.write_text(path, text)
        except OSError as error:
            raise _cannot_write(path, error) from error


_NAMES = ("run.json", "history.csv", "curves.png", "log.txt", "tensorboard", "checkpoints", "model.keras")


def load(path: str | os.PathLike[str]) -> RunRecord:
    """Reads the record in the run folder `path`.

    Raises:
        RunFolderError: there is none, it is not valid, or a newer tfdist wrote it.
    """
    file = Path(path) / "run.json"
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise RunFolderError(
            f"The run folder `{path}` has no `run.json` that can be read: {error.strerror}",
            "give the folder that `--run-dir` named",
        ) from error
    except UnicodeDecodeError as error:
        raise _invalid(file, str(error)) from error
    try:
        version = _Versioned.model_validate_json(text).schema_version
        if version > SCHEMA_VERSION:
            raise RunFolderError(
                f"`{file}` has schema version {version}, and this tfdist reads up to {SCHEMA_VERSION}",
                "read it with the tfdist that wrote it, or a newer one: `pip install --upgrade tfdist`",
            )
        return RunRecord.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole file"
        raise _invalid(file, f"{where}: {first['msg']}") from error


class _Versioned(BaseModel):
    schema_version: int = Field(ge=1)


def example() -> RunRecord:
    """A record of a run that has just begun; for documentation and tests."""
    return RunRecord(
        command=["tfdist", "train", "--model", "cnn"],
        strategy=StrategyRecord(name="mirrored", options={"devices": 2}, replicas=2),
        world=WorldRecord(rank=0, world_size=1, local_rank=0, local_world_size=1, source="alone"),
        model=ModelRecord(name="cnn", parameters=225_034),
        dataset=DatasetRecord(name="fashion_mnist", examples={"train": 54_000, "validation": 6_000}),
        global_batch_size=128,
        per_replica_batch_size=64,
        seed=0,
        optimizer="adam",
        learning_rate=0.001,
        dtype_policy="float32",
    )


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _cannot_write(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"The run folder cannot be written: `{path}`: {error.strerror or error}",
        "choose a folder that you can write, with room on its disk, with `--run-dir`",
    )


def _invalid(file: Path, problem: str) -> RunFolderError:
    return RunFolderError(
        f"`{file}` is not a valid record of a run: {problem}",
        "it was not written by tfdist, or altered since; the schema is in docs/run.json.md",
    )


def _history_row(epoch: EpochRecord) -> dict[str, Any]:
    figures = epoch.model_dump(exclude={"metrics"})
    return figures | {name: value for name, value in epoch.metrics.items() if name not in figures}


# Okabe and Ito's blue and vermilion: told apart with any colour vision, and in grey by the line.
_TRAIN: dict[str, Any] = {
    "color": "#0072B2",
    "linestyle": "--",
    "marker": "o",
    "markersize": 4,
    "label": "training",
}
_VALIDATION: dict[str, Any] = {
    "color": "#D55E00",
    "linestyle": "-",
    "marker": "s",
    "markersize": 4,
    "label": "validation",
}


def _draw(record: RunRecord, path: Path) -> None:
    # No pyplot: it would keep the figure, and choose a window system.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    names = ["loss", *_second_panel(record)]
    figure = Figure(figsize=(5.4 * len(names), 4.2), dpi=120, layout=ConstrainedLayoutEngine(wspace=0.06))
    figure.suptitle(_title(record), fontweight="bold")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        _draw_panel(axes, record.epochs, name)
    figure.savefig(path)


def _title(record: RunRecord) -> str:
    replicas = f" on {record.strategy.replicas} replicas" if record.strategy.replicas > 1 else ""
    status = "" if record.status in ("running", "completed") else f" ({record.status})"
    return f"{record.model.name}, {record.dataset.name}, {record.strategy.name}{replicas}{status}"


def _second_panel(record: RunRecord) -> list[str]:
    """The accuracy where there is one, else the first metric beside the loss."""
    names = dict.fromkeys(name for epoch in record.epochs for name in epoch.metrics)
    others = [n for n in names if not n.startswith("val_") and n not in ("loss", "learning_rate")]
    return sorted(others, key=lambda name: "accuracy" not in name)[:1]


def _draw_panel(axes: Axes, epochs: Sequence[EpochRecord], name: str) -> None:
    from matplotlib.ticker import MaxNLocator

    percent = "accuracy" in name
    numbers = [epoch.epoch for epoch in epochs]
    train = _series(epochs, name, percent)
    validation = _series(epochs, f"val_{name}", percent)
    for values, style in ((train, _TRAIN), (validation, _VALIDATION)):
        if any(map(math.isfinite, values)):
            axes.plot(numbers, values, **style)
    judged = validation if any(map(math.isfinite, validation)) else train
    _mark_best(axes, numbers, judged, largest=percent)
    axes.set_xlabel("epoch")
    axes.set_ylabel(f"{name} (%)" if percent else f"{name} (mean per example)")
    axes.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        # Above the axes it covers no point, wherever the points are.
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False, fontsize=9, columnspacing=1.2)
    else:
        axes.text(0.5, 0.5, "no finite values", ha="center", transform=axes.transAxes)


def _series(epochs: Sequence[EpochRecord], name: str, percent: bool) -> list[float]:
    """The metric by epoch, NaN where it has none: a gap in the line."""
    values = (epoch.metrics.get(name) for epoch in epochs)
    return [math.nan if value is None else value * (100 if percent else 1) for value in values]


def _mark_best(axes: Axes, numbers: Sequence[int], values: Sequence[float], largest: bool) -> None:
    finite = [(value, number) for value, number in zip(values, numbers, strict=True) if math.isfinite(value)]
    if not finite:
        return
    best, number = max(finite) if largest else min(finite)
    label = f"best: {best:.2f} % in epoch {number}" if largest else f"best: {best:.4g} in epoch {number}"
    axes.plot(
        [number],
        [best],
        "o",
        markersize=12,
        fillstyle="none",
        color="black",
        markeredgewidth=1.5,
        label=label,
    )
