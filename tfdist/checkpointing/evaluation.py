"""The evaluation of a training's checkpoints in a process of its own, while the training goes on.

Such an evaluator takes no part in the training: it only reads the folder of the callback `Checkpoint`. It evaluates
every checkpoint once, in their order, and ends after the one with which the training ended.
"""

from __future__ import annotations

import csv
import io
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist import files, terminal
from tfdist.checkpointing import format as checkpoint_format
from tfdist.checkpointing import state
from tfdist.checkpointing.follower import LOOK_SECONDS, Follower
from tfdist.checkpointing.format import Stored
from tfdist.errors import CheckpointError, CheckpointWarning, ClusterError

# A network file system may show a new name before the content.
SECONDS_TO_COMPLETE = 10.0
MOST_HISTORY_BYTES = 1 << 26

Evaluate = Callable[[], Mapping[str, Any]]
# Says whether no further checkpoint will come, from the seconds since the last one; may raise an error instead.
Ended = Callable[[float], bool]


class History:
    """The results by checkpoint, in `history.csv` and in a TensorBoard log.

    Args:
        path: the file; the rows of an earlier evaluator are kept.
        board: the folder of the TensorBoard log.

    Attributes:
        path: the file.
        rows: for each checkpoint its step, its number of finished epochs, and the results by name.
    """

    def __init__(self, path: Path, board: Path):
        self.rows: list[dict[str, Any]] = []
        self.path = path
        self._writer = tf.summary.create_file_writer(str(board))
        if path.exists():
            self.rows = [
                {name: _number(value) for name, value in row.items() if value}
                for row in csv.DictReader(io.StringIO(files.read_text(path, MOST_HISTORY_BYTES)))
            ]

    def has(self, step: int) -> bool:
        """Whether the checkpoint of this step was evaluated."""
        return any(row["step"] == step for row in self.rows)

    def add(self, row: Mapping[str, Any], results: Mapping[str, float]) -> None:
        """Adds a row, and writes it to both files."""
        self.rows.append({**row, **results})
        text = io.StringIO()
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        files.write_text(self.path, text.getvalue())
        with self._writer.as_default(step=int(row["step"])):
            for name, value in results.items():
                # The name by which Keras' callback TensorBoard logs what `evaluate` gives.
                tf.summary.scalar(f"evaluation_{name.removeprefix('val_')}_vs_iterations", value)
        self._writer.flush()


def _number(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)


def evaluate_each(
    model: keras.Model,
    follower: Follower,
    evaluate: Evaluate,
    history: History,
    ended: Ended,
    *,
    resumed: bool = False,
    prefix: str = "val_",
    show: Callable[[str], None] = terminal.say,
) -> list[dict[str, Any]]:
    """Evaluates the checkpoints of a training as they appear, until the training has ended.

    Args:
        model: the compiled model, whose weights are replaced.
        follower: finds the checkpoints.
        evaluate: evaluates the model; returns the results by name.
        history: where the results go; checkpoints that it has already are left out.
        ended: says whether the training has ended without a last checkpoint, or raises an error.
        resumed: the last checkpoint in the history may be that of a training that is resumed.
        prefix: what the names of the results begin with.
        show: shows a line for each checkpoint.

    Returns:
        The rows of the history.

    Raises:
        CheckpointError: a checkpoint is of another model.
    """
    if not model.built:
        evaluate()
    news, finished = time.monotonic(), False
    while True:
        over = ended(time.monotonic() - news)
        path = follower.next()
        if path is None:
            if over or finished:
                return history.rows
            time.sleep(LOOK_SECONDS)
            continue
        stored = _read(path)
        if stored is not None:
            known = history.has(stored.header.step)
            finished = stored.header.last and not (known and resumed)
            if not known:
                state.restore_weights(model, stored)
                results = {f"{prefix}{name}": float(value) for name, value in evaluate().items()}
                history.add({"step": stored.header.step, "epoch": stored.header.epoch}, results)
                show(_line(history.rows[-1]))
        follower.release(path)
        news = time.monotonic()


def _line(row: Mapping[str, Any]) -> str:
    results = ", ".join(f"{name} {value:.4f}" for name, value in row.items() if name not in ("step", "epoch"))
    return f"Checkpoint of step {row['step']:,}, after epoch {row['epoch']}: {results}"


def _read(path: Path) -> Stored | None:
    """The checkpoint in a file; `None`, with a warning, if it is damaged or was deleted."""
    until = time.monotonic() + SECONDS_TO_COMPLETE
    while True:
        try:
            return checkpoint_format.read(path)
        except CheckpointError as error:
            if time.monotonic() >= until or not path.exists():
                warnings.warn(f"{error.sentence}; it is not evaluated", CheckpointWarning, stacklevel=2)
                return None
        time.sleep(LOOK_SECONDS)


def evaluate_checkpoints(
    model: keras.Model,
    folder: str | Path,
    x: Any,
    y: Any = None,
    *,
    log_dir: str | Path | None = None,
    seconds: float = 3600.0,
    **options: Any,
) -> list[dict[str, Any]]:
    """Evaluates each checkpoint of a training that runs in other processes, until the training has ended.

    This is what the process with the role `evaluator` of TF_CONFIG does. It takes no part in the training. The weights
    of every checkpoint are assigned to `model`, and `model.evaluate` runs. The results are appended to `history.csv`,
    with a row per checkpoint, and to a TensorBoard log.

    Args:
        model: the compiled model of the training; without a strategy, or with one of this process alone.
        folder: the folder of the training's callback `tfdist.callbacks.Checkpoint`, on a shared file system.
        x: the data for `model.evaluate`, usually the validation data.
        y: the targets, if `x` does not contain them.
        log_dir: the folder for the results; by default `evaluator` beside `folder`.
        seconds: how long to wait for the next checkpoint.
        options: further options of `model.evaluate`, such as `batch_size`.

    Returns:
        A dict per checkpoint: its `step`, its `epoch` (the finished epochs), and the results such as `val_loss`.

    Raises:
        CheckpointError: a checkpoint is of another model.
        ClusterError: no new checkpoint has appeared for `seconds`.
    """
    folder = Path(folder)
    out = folder.parent / "evaluator" if log_dir is None else Path(log_dir)
    out.mkdir(parents=True, exist_ok=True)

    def ended(waited: float) -> bool:
        if waited > seconds:
            raise no_checkpoint(folder, waited, history)
        return False

    history = History(out / "history.csv", out)
    follower = Follower(folder, out / "checkpoints").start()
    try:
        evaluate = lambda: model.evaluate(x, y, return_dict=True, verbose=0, **options)  # noqa: E731
        return evaluate_each(model, follower, evaluate, history, ended)
    finally:
        follower.close()


def no_checkpoint(folder: Path, waited: float, history: History) -> ClusterError:
    """The error of an evaluator that has waited for a checkpoint too long."""
    last = f", and the last was that of step {history.rows[-1]['step']:,}" if history.rows else ""
    return ClusterError(
        f"No new checkpoint has appeared in `{folder}` for {waited:,.0f} s{last}",
        "the training was killed, or does not write to this folder: it has to be on a file system that the evaluator "
        "shares with the chief; if its epochs take longer, let the evaluator wait longer",
    )
