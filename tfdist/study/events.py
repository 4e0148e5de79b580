"""The runs of a study as TensorBoard events: metrics by epoch, and a row per run in the HParams table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.study.results import Comparison
from tfdist.study.runs import Run

HYPERPARAMETERS = ("strategy", "workers", "model", "dataset", "batch_size", "seed")
# The columns of the HParams table after the hyperparameters.
COLUMNS = ("examples_per_second", "step_seconds", "loss", "accuracy", "val_loss", "val_accuracy")


def write(comparisons: Sequence[Comparison], folder: Path) -> None:
    """Writes the events of all runs below `folder`, with a folder for each run."""
    import tensorflow as tf
    from tensorboard.plugins.hparams import api

    with tf.summary.create_file_writer(str(folder)).as_default():
        api.hparams_config(
            hparams=[api.HParam(name) for name in HYPERPARAMETERS], metrics=[api.Metric(name) for name in COLUMNS]
        )
    for comparison in comparisons:
        for row in comparison.rows:
            for run in row.runs:
                name = f"{run.cell.folder}-{run.round}"
                with tf.summary.create_file_writer(str(folder / name)).as_default():
                    api.hparams(_hyperparameters(run), trial_id=name)
                    _write_metrics(tf, run)


def _hyperparameters(run: Run) -> dict[str, Any]:
    cell, case = run.cell, run.cell.case
    values = (cell.label, cell.workers, case.model, case.dataset, case.batch_size, run.seed or 0)
    return dict(zip(HYPERPARAMETERS, values, strict=True))


def _write_metrics(tf: Any, run: Run) -> None:
    for epoch in run.epochs:
        figures = {
            "examples_per_second": epoch.examples_per_second,
            "step_seconds": epoch.step_seconds,
            **epoch.metrics,
        }
        for name, value in figures.items():
            if value is not None:
                tf.summary.scalar(name, value, step=epoch.epoch)
