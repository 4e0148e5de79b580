"""Fills the record of a run when it begins, when it is resumed and after each epoch, and describes the saved model."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np
import psutil
import tensorflow as tf
from pydantic import BaseModel

from tfdist import data, redaction, terminal
from tfdist.callbacks import memory
from tfdist.data.spec import DataSpec
from tfdist.errors import UsageError
from tfdist.groups import ExchangeTotals
from tfdist.interface.bound import SynchronousUpdates
from tfdist.interface.strategy import Strategy
from tfdist.internals import keras as keras_internals
from tfdist.jobs import consensus, job_environment
from tfdist.loop import programs
from tfdist.run import schema, trackers
from tfdist.run.config import TrainConfig
from tfdist.run.folder import RunFolder
from tfdist.run.schema import RunRecord


def rows(model: keras.Model, source: data.Source, dataset: str, path: Path) -> list[tuple[str, str]]:
    """The rows `load` and `input` of the final table: how to load the saved model, and what input it takes.

    Args:
        model: the trained model.
        source: the dataset.
        dataset: the dataset's name as the user wrote it.
        path: the file of the model.
    """
    return [("load", loading(model, path)), ("input", f"{_inputs(model, source.spec)}; {_content(source, dataset)}")]


def loading(model: keras.Model, path: Path) -> str:
    """The Python code that loads the saved model."""
    classes = {type(layer) for layer in keras_internals.all_layers(model)}
    custom = {kind for kind in classes if not keras_internals.is_of_keras(kind)}
    modules = sorted({kind.__module__ for kind in custom})
    unregistered = {
        kind.__name__: kind.__module__ for kind in custom if keras.saving.get_registered_name(kind) == kind.__name__
    }
    custom_objects = ", ".join(f"{name!r}: {module}.{name}" for name, module in sorted(unregistered.items()))
    compiled = [*keras_internals.metrics_of(model), *([] if model.loss is None else [model.loss])]
    loadable = all(isinstance(part, str) or keras_internals.is_of_keras(type(part)) for part in compiled)
    arguments = [
        f"{str(path)!r}",
        *([f"custom_objects={{{custom_objects}}}"] if custom_objects else []),
        *([] if loadable else ["compile=False"]),
    ]
    return "; ".join(
        [*(f"import {module}" for module in ["keras", *modules]), f"keras.saving.load_model({', '.join(arguments)})"]
    )


def _inputs(model: keras.Model, spec: DataSpec) -> str:
    """Dtype and shape of each input, such as `float32 [N, 28, 28, 1]`."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    if not inputs:
        return _dtype_and_shape("int32" if spec.vocabulary_size else "float32", spec.input_shape)
    texts = [_dtype_and_shape(tensor.dtype, tensor.shape[1:]) for tensor in inputs]
    if len(texts) == 1:
        return texts[0]
    return ", ".join(f"{tensor.name}: {text}" for tensor, text in zip(inputs, texts, strict=True))


def _dtype_and_shape(dtype: str, shape: Any) -> str:
    return f"{dtype} [{', '.join(['N', *('any' if size is None else str(size) for size in shape)])}]"


def _content(source: data.Source, dataset: str) -> str:
    spec = source.spec
    if ":" in dataset:
        return f"scaled as `{dataset}` returns it"
    if spec.vocabulary_size:
        token = "item" if spec.task == "recommendation" else "word" if spec.vocabulary else "token"
        origin = "the lines of vocabulary.txt counted from 0" if spec.vocabulary else "as the dataset returns them"
        return f"{token} IDs, {origin}"
    if len(spec.input_shape) != 3:
        return "as the dataset returns it"
    # Pictures in files are bytes; other values are divided by something else.
    values = (
        "bytes divided by 255" if source.divisor in (1, 255) else f"the dataset's values divided by {source.divisor}"
    )
    return f"pixels from 0 to 1 ({values})"


class RecordedRun(Protocol):
    """The attributes of `tfdist.run.session.Session`, which imports this module, that are used here."""

    config: TrainConfig
    folder: RunFolder
    record: RunRecord | None
    command: list[str]
    typed: str
    started: datetime
    data_touched: float
    tokens_per_example: float | None
    tracker: trackers.Guarded | None

    @property
    def model_options(self) -> dict[str, Any]: ...

    def raise_if_interrupted(self) -> None: ...

    def write_record(self) -> None: ...


def check_resumed(config: TrainConfig, earlier: RunRecord) -> None:
    """Raises `UsageError` unless the resumed run has the same model and the same examples in the same order."""
    options = redaction.hide_in_options({name: str(value) for name, value in config.load_options.items()})
    earlier_options = earlier.dataset.options
    settings = [
        ("--dataset", earlier.dataset.name, config.dataset),
        *(
            ("--data-option", _setting(name, earlier_options), _setting(name, options))
            for name in sorted(earlier_options | options)
        ),
        ("--augment", earlier.dataset.augment, config.augment),
        ("--input", earlier.dataset.input, config.input),
        ("--model", earlier.model.name, config.model),
        ("--batch-size", earlier.global_batch_size, config.batch_size),
        ("--seed", earlier.seed, config.seed),
    ]
    for option, earlier_value, value in settings:
        if earlier_value != value:
            raise UsageError(
                f"The run in `{config.run_dir}` was started with `{option} {earlier_value}`, and it is resumed with "
                f"`{option} {value}`",
                f"use `{option} {earlier_value}`, or start a new run in another `--run-dir`",
            )


def resume_warning(config: TrainConfig, earlier: RunRecord) -> str | None:
    """Returns a warning if no epoch is left to train, or if the learning rate schedule has changed; else `None`."""
    done, before, now = len(earlier.epochs), earlier.planned_epochs, config.epochs
    if done >= now:
        trained = terminal.counted(done, "epoch")
        return f"The run has trained {trained} already, and `--epochs` is {now}: the model is only evaluated"
    if config.schedule == "constant" or before in (None, now):
        return None
    return (
        f"The run was started with `--epochs {before}`, and it is resumed with `--epochs {now}`: "
        f"`--schedule {config.schedule}` now ends after epoch {now}, and the learning rates of the earlier epochs "
        f"differ from those of a run that was started with `--epochs {now}`"
    )


def _setting(name: str, options: Mapping[str, str]) -> str:
    return f"{name}={options[name]}" if name in options else f"{name} unset"


def begin_record(
    session: RecordedRun, strategy: Any, model: Any, source: data.Source, earlier: RunRecord | None
) -> RunRecord:
    """Returns the record of a run that begins, or that continues the run with the record `earlier`."""
    config = session.config
    world = strategy.world
    return RunRecord(
        command=session.command,
        typed=[*([] if earlier is None else earlier.typed), session.typed],
        started=session.started if earlier is None else earlier.started,
        machine=schema.Machine.detect([gpu.name for gpu in tf.config.list_physical_devices("GPU")]),
        threads=schema.Threads(
            intra_op=tf.config.threading.get_intra_op_parallelism_threads(),
            inter_op=tf.config.threading.get_inter_op_parallelism_threads(),
        ),
        strategy=schema.StrategyRecord(
            name=config.strategy,
            options=strategy.options(),
            # With parameter servers, each worker computes its own steps.
            replicas=getattr(strategy, "num_workers", strategy.num_replicas),
            as_one_device=not config.traits.asynchronous or isinstance(strategy.bound, SynchronousUpdates),
        ),
        world=schema.WorldRecord(**_attributes(world, schema.WorldRecord)),
        model=schema.ModelRecord(
            name=config.model,
            parameters=_parameters(model),
            options={name: str(value) for name, value in session.model_options.items()},
        ),
        dataset=schema.DatasetRecord(
            name=config.dataset,
            examples=dict(source.spec.examples),
            options={name: str(value) for name, value in config.load_options.items()},
            augment=config.augment,
            input=config.input,
            skipped=len(source.skipped),
            class_names=list(source.spec.class_names),
        ),
        global_batch_size=config.batch_size,
        per_replica_batch_size=-(-config.batch_size // strategy.num_replicas),
        seed=config.seed,
        optimizer=model.optimizer.name,
        learning_rate=_learning_rate(model.optimizer),
        dtype_policy=config.dtype_policy,
        initial_weights=(_digest(model) if world.is_chief else None) if earlier is None else earlier.initial_weights,
        planned_epochs=config.epochs,
        epochs=[] if earlier is None else list(earlier.epochs),
        startup_seconds=None if earlier is None else earlier.startup_seconds,
    )


class Recorder(keras.callbacks.Callback):
    """A callback that updates the record after each epoch."""

    def __init__(self, session: RecordedRun, strategy: Strategy, throughput: Any, timer: Any):
        super().__init__()
        self._session = session
        self._strategy = strategy
        self._throughput = throughput
        self._timer = timer
        epochs = [] if session.record is None else session.record.epochs
        self._seconds_before = (epochs[-1].elapsed_seconds or 0.0) if epochs else 0.0
        self._sent_before: int | None = None
        self._exchanged_before: ExchangeTotals | None = None

    def batches_until_hook(self, batch: int) -> int | None:
        return None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        record = self._session.record
        assert record is not None
        record.epochs = [earlier for earlier in record.epochs if earlier.epoch <= epoch]
        self._sent_before, self._exchanged_before = _network_bytes(), self._strategy.exchanged()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._session.raise_if_interrupted()
        record = self._session.record
        if record is not None and record.model.parameters is None:
            record.model.parameters = _parameters(self.model)
        if record is not None and record.startup_seconds is None:
            record.startup_seconds = (datetime.now(UTC) - record.started).total_seconds()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        record = self._session.record
        assert record is not None
        rate, tokens = (logs or {}).get("examples_per_second"), self._session.tokens_per_example
        record.epochs.append(
            schema.EpochRecord.from_logs(
                epoch + 1,
                logs or {},
                self._throughput.train_seconds,
                self._throughput.evaluation_seconds,
                tokens_per_second=None if rate is None or tokens is None else rate * tokens,
                elapsed_seconds=self._seconds_before + time.monotonic() - self._session.data_touched,
                network_bytes=None if (sent := _network_bytes()) is None else sent - (self._sent_before or 0),
            )
        )
        record.optimizer_steps = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        record.peak_memory_bytes = memory.peak_resident_bytes()
        record.partition = _partition(self.model)
        if self._timer is not None:
            record.time_to_target = schema.TargetRecord(**_attributes(self._timer, schema.TargetRecord))
        self._record_processes(record)
        self._session.write_record()
        if self._session.folder.is_chief:
            self._session.folder.write_history(record)
        if self._session.tracker is not None:
            self._session.tracker.log(trackers.metrics_of(record.epochs[-1]), epoch + 1)

    def _record_processes(self, record: RunRecord) -> None:
        """Gathers the figures of all processes at the end of an epoch, and records them."""
        epoch, exchanged = record.epochs[-1], self._strategy.exchanged()
        figures = {
            "peak_memory_bytes": memory.peak_resident_bytes(),
            "peak_gpu_memory_bytes": memory.peak_gpu_bytes(),
            "cpu_seconds": time.process_time(),
            "metrics": epoch.metrics,
        }
        in_epoch = {}
        if exchanged is not None and self._exchanged_before is not None:
            figures |= dataclasses.asdict(exchanged)
            in_epoch = dataclasses.asdict(exchanged.since(self._exchanged_before))
        gathered = consensus.all_gather_object(self._strategy, [figures, in_epoch], "ends an epoch")
        record.processes = schema.ProcessRecord.of_all([figures for figures, _ in gathered])
        for name in in_epoch:
            setattr(epoch, name, sum(counts[name] for _, counts in gathered))


def _attributes(source: Any, record: type[BaseModel]) -> dict[str, Any]:
    """The attributes of `source` that have the names of the fields of `record`."""
    return {name: getattr(source, name) for name in record.model_fields}


def _partition(model: Any) -> schema.PartitionRecord | None:
    cost = programs.cost(model)
    if cost is None:
        return None
    return schema.PartitionRecord(
        repeated_share=cost.repeated_share,
        gathered_values=cost.gathers,
        gathered_bytes=cost.gathered_bytes,
        reduced_values=cost.reductions,
        reduced_bytes=cost.reduced_bytes,
    )


def _parameters(model: Any) -> int | None:
    """The number of scalars in the weights; `None` for a model that is not built yet."""
    return int(model.count_params()) if model.built else None


def _digest(model: Any) -> str | None:
    """A hash of the weights, which the chief broadcasts; `None` for a model that is not built yet."""
    if not model.built:
        return None
    digest = hashlib.sha256()
    for weight in model.weights:
        value = np.ascontiguousarray(keras.ops.convert_to_numpy(weight))
        # A view of bytes avoids a copy, and works for dtypes that NumPy does not know, such as bfloat16.
        digest.update(value.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]


def _network_bytes() -> int | None:
    """The bytes that the job's processes have sent; `None` if the job shares its network with other programs."""
    if job_environment.OWN_NETWORK not in os.environ:
        return None
    return int(psutil.net_io_counters().bytes_sent)


def _learning_rate(optimizer: Any) -> float | None:
    """The learning rate of the whole run; `None` if it follows a schedule."""
    if isinstance(keras_internals.learning_rate(optimizer), keras.optimizers.schedules.LearningRateSchedule):
        return None
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))
