"""Sends a run of the command to a tracker: its parameters, the metrics of each epoch, and the run folder.

| tracker | stores, unless its own variables say otherwise | variables |
|---|---|---|
| mlflow | `mlflow.db` and `mlruns/` in the current folder | MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME |
| wandb | `wandb/` in the current folder, offline; `wandb sync` sends it | WANDB_MODE, WANDB_PROJECT, WANDB_DIR |
| tensorboard | `tensorboard/` in the run folder, with the parameters in the HParams table | |

Only the chief sends. A run that is resumed continues its run in the tracker.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from tfdist import extras, files, terminal
from tfdist.run.schema import EpochRecord, RunRecord

PROJECT = "tfdist"
# Where the identity of a run in a tracker is kept, in the run folder.
IDENTITY = "tracker.json"
_MLFLOW_STATUS = {"completed": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED"}

Parameters = Mapping[str, str | int | float | bool]


class Tracker(Protocol):
    """A run in a tracker."""

    def log(self, metrics: Mapping[str, float], epoch: int) -> None:
        """Sends the metrics of an epoch, counted from 1."""

    def end(self, status: str, folder: Path) -> None:
        """Sends the run folder, and ends the run with a status of `schema.Status`."""


def begin(name: str, record: RunRecord, folder: Path) -> Tracker:
    """Begins a run in the tracker `name`, or continues the one that the run in `folder` began."""
    kinds: dict[str, type[_Mlflow | _Wandb | _TensorBoard]]
    kinds = {"mlflow": _Mlflow, "wandb": _Wandb, "tensorboard": _TensorBoard}
    path = folder / IDENTITY
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    tracker = kinds[name](parameters(record), folder, known.get(name))
    files.write_text(path, json.dumps(known | {name: tracker.identity}) + "\n")
    return tracker


def parameters(record: RunRecord) -> dict[str, str | int | float | bool]:
    """The parameters of a run, with options as `model.NAME`, `dataset.NAME` and `strategy.NAME`."""
    named = {
        "strategy": record.strategy.name,
        "replicas": record.strategy.replicas,
        "workers": record.world.world_size,
        "model": record.model.name,
        "model_parameters": record.model.parameters,
        "dataset": record.dataset.name,
        "batch_size": record.global_batch_size,
        "epochs": record.planned_epochs,
        "seed": record.seed,
        "optimizer": record.optimizer,
        "learning_rate": record.learning_rate,
        "dtype_policy": record.dtype_policy,
        "augment": record.dataset.augment,
    }
    for part, options in (
        ("strategy", record.strategy.options),
        ("model", record.model.options),
        ("dataset", record.dataset.options),
    ):
        named |= {f"{part}.{name}": value for name, value in options.items()}
    return {
        name: value if isinstance(value, str | int | float | bool) else str(value)
        for name, value in named.items()
        if value is not None
    }


def metrics_of(epoch: EpochRecord) -> dict[str, float]:
    """The metrics of an epoch, and its speed."""
    figures = {name: getattr(epoch, name) for name in ("train_seconds", "examples_per_second", "tokens_per_second")}
    return {name: float(value) for name, value in {**epoch.metrics, **figures}.items() if value is not None}


class _Mlflow:
    def __init__(self, values: Parameters, folder: Path, identity: str | None):
        with extras.importing("mlflow", "`--tracker mlflow`"):
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        # By default, MLflow repeats requests to a server that does not answer for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        self._client, self._metric = MlflowClient(), Metric
        self.identity = identity or self._create(folder.name)
        known = self._client.get_run(self.identity).data.params  # which MLflow does not allow to change
        added = [Param(name, str(value)) for name, value in values.items() if name not in known]
        self._client.log_batch(self.identity, params=added)
        self._client.update_run(self.identity, status="RUNNING")

    def _create(self, name: str) -> str:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if known is None else known.experiment_id
        return str(self._client.create_run(number, run_name=name).info.run_id)

    def log(self, metrics: Mapping[str, float], epoch: int) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self.identity, metrics=[self._metric(name, value, now, epoch) for name, value in metrics.items()]
        )

    def end(self, status: str, folder: Path) -> None:
        self._client.log_artifacts(self.identity, str(folder))
        self._client.set_terminated(self.identity, _MLFLOW_STATUS.get(status, "FAILED"))


class _Wandb:
    def __init__(self, values: Parameters, folder: Path, identity: str | None):
        with extras.importing("wandb", "`--tracker wandb`"):
            import wandb
        os.environ.setdefault("WANDB_MODE", "offline")
        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=identity,
            resume="allow" if identity else None,
            config=dict(values),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.identity = self._run.id

    def log(self, metrics: Mapping[str, float], epoch: int) -> None:
        self._run.log(dict(metrics), step=epoch)

    def end(self, status: str, folder: Path) -> None:
        artifact = self._wandb.Artifact(f"run-{self.identity}", type="run")
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact)
        self._run.finish(exit_code=0 if status in ("completed", "stopped") else 1)


class _TensorBoard:
    def __init__(self, values: Parameters, folder: Path, identity: str | None):
        import tensorflow as tf

        with extras.importing("profile", "`--tracker tensorboard`"):
            from tensorboard.plugins.hparams import api
        self.identity = folder.name
        self._writer = tf.summary.create_file_writer(str(folder / "tensorboard" / "run"))
        self._summary = tf.summary
        with self._writer.as_default():
            api.hparams(dict(values), trial_id=self.identity)

    def log(self, metrics: Mapping[str, float], epoch: int) -> None:
        with self._writer.as_default():
            for name, value in metrics.items():
                self._summary.scalar(name, value, step=epoch)

    def end(self, status: str, folder: Path) -> None:
        with self._writer.as_default():
            self._summary.text("run folder", f"`{folder}` ({status})", step=0)
        self._writer.close()


class Guarded:
    """A tracker that is switched off with a warning if it fails, so that a training does not end with its tracker.

    Args:
        name: the name of the tracker.
        make: begins the run in the tracker.
    """

    def __init__(self, name: str, make: Callable[[], Tracker]):
        self._name = name
        self._tracker: Tracker | None = None
        with self._switched_off_by_errors():
            self._tracker = make()

    def log(self, metrics: Mapping[str, float], epoch: int) -> None:
        """See `Tracker`."""
        with self._switched_off_by_errors():
            if self._tracker is not None:
                self._tracker.log(metrics, epoch)

    def end(self, status: str, folder: Path) -> None:
        """See `Tracker`."""
        with self._switched_off_by_errors():
            if self._tracker is not None:
                self._tracker.end(status, folder)

    @contextlib.contextmanager
    def _switched_off_by_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # trackers raise errors of their own, of databases and of networks
            self._tracker = None
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            terminal.say(f"warning: The tracker `{self._name}` failed, and the run continues without it: {reason}")
