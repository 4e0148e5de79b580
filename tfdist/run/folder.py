"""The run folder: the paths of a run's files, and how its record, history and curves are written and read.

Synopsis:

    >>> import tempfile
    >>> folder = RunFolder(Path(tempfile.mkdtemp()) / "run")
    >>> folder.write(schema.example())
    >>> load_record(folder.path).model.name
    'cnn'
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, ValidationError

from tfdist import extras, files, terminal
from tfdist.checkpointing.follower import Follower
from tfdist.errors import MissingPackageError, RunFolderError
from tfdist.run import schema
from tfdist.run.history import HistoryFile
from tfdist.run.schema import EpochRecord, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RECORD = "run.json"
MOST_RECORD_BYTES = 1 << 26  # `run.json` has about a kilobyte per epoch
# A folder with any of these contains a run.
_NAMES = (
    RECORD,
    "history.csv",
    "curves.png",
    "log.txt",
    "profile.txt",
    "tensorboard",
    "checkpoints",
    "model.keras",
)
# What a start of a run leaves before there is a record.
_STARTED = (*_NAMES, "output", "vocabulary.txt", "target_vocabulary.txt")
# Okabe and Ito's blue and vermilion are distinct for all kinds of colour vision; in grey, the line styles differ.
_TRAIN: dict[str, Any] = {"color": "#0072B2", "linestyle": "--", "marker": "o", "markersize": 4, "label": "training"}
_VALIDATION: dict[str, Any] = {
    "color": "#D55E00",
    "linestyle": "-",
    "marker": "s",
    "markersize": 4,
    "label": "validation",
}


def draw_curves(record: RunRecord, path: Path) -> None:
    """Draws the metrics of `record`, which has at least one epoch, into the image `path`."""
    # Not pyplot, which would keep the figure and choose a window system.
    with extras.importing("train", "The picture"):
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

    names = ["loss", *_second_panel(record)]
    figure = Figure(figsize=(5.4 * len(names), 4.2), dpi=120, layout=ConstrainedLayoutEngine(wspace=0.06))
    figure.suptitle(title_of(record), fontweight="bold")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        _draw_panel(axes, record.epochs, name)
    figure.savefig(path)


def title_of(record: RunRecord) -> str:
    """The title of the pictures of a run."""
    replicas = f" on {record.strategy.replicas} replicas" if record.strategy.replicas > 1 else ""
    status = "" if record.status in ("running", "completed") else f" ({record.status})"
    return f"{record.model.name}, {record.dataset.name}, {record.strategy.name}{replicas}{status}"


def _second_panel(record: RunRecord) -> list[str]:
    """The metric to draw next to the loss: an accuracy, else the first metric; empty if there is none."""
    names = dict.fromkeys(name for epoch in record.epochs for name in epoch.metrics)
    metrics = [name for name in names if not name.startswith("val_") and name not in ("loss", "learning_rate")]
    return sorted(metrics, key=lambda name: "accuracy" not in name)[:1]


def _draw_panel(axes: Axes, epochs: Sequence[EpochRecord], name: str) -> None:
    with extras.importing("train", "The picture"):
        from matplotlib.ticker import MaxNLocator

    percent = "accuracy" in name
    numbers = [epoch.epoch for epoch in epochs]
    train = _series(epochs, name, percent)
    validation = _series(epochs, f"val_{name}", percent)
    for values, style in ((train, _TRAIN), (validation, _VALIDATION)):
        if any(map(math.isfinite, values)):
            axes.plot(numbers, values, **style)
    selected = validation if any(map(math.isfinite, validation)) else train
    _mark_best(axes, numbers, selected, largest=percent)
    axes.set_xlabel("epoch")
    axes.set_ylabel(f"{name} (%)" if percent else f"{name} (mean per example)")
    axes.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        # Above the axes the legend covers no point.
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False, fontsize=9, columnspacing=1.2)
    else:
        axes.text(0.5, 0.5, "no finite values", ha="center", transform=axes.transAxes)


def _series(epochs: Sequence[EpochRecord], name: str, percent: bool) -> list[float]:
    """The metric per epoch; NaN, a gap in the line, for an epoch without it."""
    values = (epoch.metrics.get(name) for epoch in epochs)
    return [math.nan if value is None else value * (100 if percent else 1) for value in values]


def _mark_best(axes: Axes, numbers: Sequence[int], values: Sequence[float], largest: bool) -> None:
    finite = [(value, number) for value, number in zip(values, numbers, strict=True) if math.isfinite(value)]
    if not finite:
        return
    best, number = max(finite) if largest else min(finite)
    label = f"best: {best:.2f} % in epoch {number}" if largest else f"best: {best:.4g} in epoch {number}"
    axes.plot([number], [best], "o", markersize=12, fillstyle="none", color="black", markeredgewidth=1.5, label=label)


class RunFolder:
    """A folder for the files of one run.

    The chief writes the files of the run. Every other process of the job has a subfolder for its log.

    Args:
        run_dir: the folder of the run; created if it does not exist.
        resume: whether the folder may already contain a run.
        rank: the rank of this process.
        evaluator: the number of an evaluator, which has no rank.

    Attributes:
        run_dir: the folder of the run, into which the chief writes.
        path: the folder of this process.
        is_chief: whether this process writes the record, the history and the model.
        run_json: the record of the run, for all processes.
        history: the metrics, with one row per epoch.
        curves: the plot of the metrics per epoch.
        log: the terminal output of the run and TensorFlow's messages.
        vocabulary: the words of the input in the order of their IDs, one per line.
        target_vocabulary: the words of the target in the order of their IDs, one per line.
        tensorboard: the folder of TensorBoard events and of the traces of all ranks, to be viewed together.
        profile: the most expensive operations of the profiled steps.
        checkpoints: the folder of checkpoints.
        model: the trained model in Keras format.
        follower: finds the checkpoints of the run, which the chief writes; only of an evaluator.

    Raises:
        RunFolderError: the folder cannot be created or written; it contains a run and `resume` is not set; or a file
            that is read or appended to is not a regular file.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], resume: bool = False, rank: int = 0, evaluator: int | None = None
    ):
        self.run_dir = Path(run_dir)
        self.is_chief = rank == 0 and evaluator is None
        subfolder = f"rank-{rank}" if evaluator is None else f"evaluator-{evaluator}"
        self.path = self.run_dir if self.is_chief else self.run_dir / subfolder
        self.run_json = self.run_dir / RECORD
        self.history = self.path / "history.csv"
        self._history_file = HistoryFile(self.history)
        self.curves = self.path / "curves.png"
        self.log = self.path / "log.txt"
        self.vocabulary = self.path / "vocabulary.txt"
        self.target_vocabulary = self.path / "target_vocabulary.txt"
        self.tensorboard = self.run_dir / "tensorboard"
        self.profile = self.path / "profile.txt"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model.keras"
        self._is_new = not self.path.exists()
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        existing = sorted(name for name in _NAMES if (self.path / name).exists())
        if existing not in ([], [self.log.name]) and not resume:  # a start that failed leaves a log
            names = ", ".join(f"`{name}`" for name in existing)
            raise RunFolderError(
                f"The run folder `{self.path}` already contains a run: {names}",
                f"continue it with `python -m tfdist.train --resume --run-dir {run_dir}`, or choose another "
                "`--run-dir`",
            )

        for folder in (self.checkpoints, self.tensorboard, *([] if self.is_chief else [self.path])):
            _require_no_link(folder)
        for path in (self.run_json, self.log, self.vocabulary, self.target_vocabulary):
            _require_regular(path)
        checkpoints = self.run_dir / self.checkpoints.name
        self.follower = None if evaluator is None else Follower(checkpoints, self.checkpoints).start()

    def end_following(self) -> None:
        """Ends the search for new checkpoints."""
        if self.follower is not None:
            self.follower.close()

    def remove_if_unused(self) -> None:
        """Removes the folder if this object created it and it contains at most a log, since the run has not begun."""
        if self._is_new and {path.name for path in self.path.iterdir()} <= {self.log.name}:
            with contextlib.suppress(OSError):
                self.log.unlink(missing_ok=True)
                self.path.rmdir()

    def write(self, record: RunRecord) -> None:
        """Writes `run.json` atomically.

        Raises:
            RunFolderError: it cannot be written; the previous file is intact.
        """
        with writing(self.run_json):
            files.write_text(self.run_json, record.model_dump_json(indent=2) + "\n")

    def write_history(self, record: RunRecord) -> None:
        """Writes `history.csv`, with one row per epoch and one column per metric, empty where an epoch lacks it.

        If it cannot be written, a warning says so, and the previous file is intact: `run.json` has the same figures.
        """
        with optional(self.history):
            self._history_file.write(record.epochs)

    def draw_curves(self, record: RunRecord) -> None:
        """Draws `curves.png`, loss and accuracy per epoch, unless no epoch is finished.

        If it cannot be drawn or written, a warning says so, and the previous file is intact.
        """
        if not record.epochs:
            return
        with optional(self.curves, Exception):
            files.write_atomically(self.curves, lambda path: draw_curves(record, path))


def require_regular_outputs(folder: Path) -> None:
    """Raises `RunFolderError` if an output file of a job's processes is not a regular file, since it is opened."""
    _require_no_link(folder)
    for path in sorted(folder.glob("*")):
        _require_regular(path)


def _require_no_link(folder: Path) -> None:
    """Raises `RunFolderError` for a symbolic link in place of a folder, through which files elsewhere are changed."""
    if folder.is_symlink():
        raise RunFolderError(
            f"`{folder}` of the run folder is a symbolic link, to `{os.readlink(folder)}`",
            "replace it by the folder, or make the whole run folder a link",
        )


def _require_regular(path: Path) -> None:
    try:
        files.require_regular(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFolderError(
            f"`{path}` of the run folder cannot be used: {error.strerror}", "remove it, or put the original file there"
        ) from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within this context, turns an `OSError` into a `RunFolderError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"The run folder cannot be written: `{path}`: {error.strerror or error}",
            "choose a writable folder on a disk with free space with `--run-dir`",
        ) from error


@contextlib.contextmanager
def optional(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Within this context, an `OSError` or a missing package is a warning: the run can do without `path`.

    Args:
        path: the file or folder that is written, such as a picture.
        errors: further kinds of errors that must not end the run either.
    """
    expected: tuple[type[Exception], ...] = (OSError, MissingPackageError, *errors)
    try:
        yield
    except expected as error:
        # TensorFlow's messages have the name of the operation before and after the cause.
        cause = str(error).partition("\n")[0].rpartition("}} ")[2].partition(" [Op:")[0]
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {cause}"
        if isinstance(error, MissingPackageError):
            reason = f"{error.sentence}; {error.hint}"
        terminal.say(f"warning: `{path}` cannot be written, and the run continues without it: {reason}")


def load_record(path: str | os.PathLike[str]) -> RunRecord:
    """Reads the record in the run folder `path`.

    Raises:
        RunFolderError: there is no record, it is invalid, or a newer tfdist wrote it.
    """
    file = Path(path) / RECORD
    try:
        text = files.read_text(file, MOST_RECORD_BYTES)
    except OSError as error:
        raise RunFolderError(
            f"The run folder `{path}` has no readable `{RECORD}`: {error.strerror}",
            similar_runs(Path(path)) or "use the folder that was set with `--run-dir`",
        ) from error
    except UnicodeDecodeError as error:
        raise _invalid(file, str(error)) from error
    try:
        version = _Versioned.model_validate_json(text).schema_version
        if version > schema.SCHEMA_VERSION:
            raise RunFolderError(
                f"`{file}` has schema version {version}, and this tfdist reads versions up to {schema.SCHEMA_VERSION}",
                "read it with the tfdist that wrote it, or with a newer version: `pip install --upgrade tfdist`",
            )
        return RunRecord.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole file"
        raise _invalid(file, f"{where}: {first['msg']}") from error


def require_run_or_its_start(path: Path) -> None:
    """Refuses to resume the run in `path`, unless it has a record, or ended before it wrote one.

    A scheduler that starts a job again with `--resume` may find a folder that is empty, or that has only the output of
    a start that failed: training then starts from the beginning, and says so.

    Raises:
        RunFolderError: there is no such folder, or it has other files, so that its name is probably wrong.
    """
    if not path.is_dir():
        raise RunFolderError(
            f"There is no run folder `{path}` to resume",
            similar_runs(path) or "correct `--run-dir`; to start a run in a new folder, leave `--resume` out",
        )
    content = sorted(each.name for each in path.iterdir() if not each.name.startswith("."))
    if content and not any(name in _STARTED or name.startswith("rank-") for name in content):
        names = ", ".join(f"`{name}`" for name in content[:4]) + ", ..." * (len(content) > 4)
        raise RunFolderError(
            f"The folder `{path}` has no run to resume: it has {names}, and no `{RECORD}`",
            _run_in(path) or similar_runs(path) or "correct `--run-dir`; to start a run there, leave `--resume` out",
        )


def similar_runs(path: Path) -> str:
    """A hint that names the run folder next to `path` with the most similar name; empty if there is none."""
    return _meant(path.parent, difflib.get_close_matches(path.name, _runs_in(path.parent), n=1))


def _run_in(path: Path) -> str:
    """A hint that names the latest run in the folder `path` of several runs; empty if there is none."""
    return _meant(path, _runs_in(path)[-1:])


def _meant(folder: Path, names: Sequence[str]) -> str:
    return f"did you mean `--run-dir {folder / names[0]}`?" if names else ""


def _runs_in(folder: Path) -> list[str]:
    """The names of the runs in a folder, the latest last."""
    with contextlib.suppress(OSError):
        records = [each / RECORD for each in folder.iterdir() if (each / RECORD).is_file()]
        return [record.parent.name for record in sorted(records, key=lambda record: record.stat().st_mtime)]
    return []


class _Versioned(BaseModel):
    schema_version: int = Field(ge=1)


def _invalid(file: Path, problem: str) -> RunFolderError:
    return RunFolderError(
        f"`{file}` is not a valid record of a run: {problem}",
        "tfdist did not write it, or it was edited afterwards; the schema is in docs/run.json.md",
    )
