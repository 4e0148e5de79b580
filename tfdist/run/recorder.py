"""How the record of a run is filled: once when it begins, and after each epoch."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np
import psutil
import tensorflow as tf

from tfdist import data
from tfdist.callbacks import memory
from tfdist.data.spec import DataSpec
from tfdist.groups import ExchangeTotals
from tfdist.interface.strategy import Strategy
from tfdist.internals import keras as keras_internals
from tfdist.jobs import consensus, job_environment
from tfdist.loop import programs
from tfdist.run import resume, schema
from tfdist.run.config import TrainConfig
from tfdist.run.folder import RunFolder
from tfdist.run.schema import RunRecord


def rows(model: keras.Model, spec: DataSpec, dataset: str, path: Path) -> list[tuple[str, str]]:
    """The rows `load` and `input`.

    Args:
        model: the trained model.
        spec: the facts about the dataset.
        dataset: the dataset's name as the user gave it.
        path: the file of the model.
    """
    return [("load", loading(model, path)), ("input", f"{_inputs(model, spec)}; {_content(spec, dataset)}")]


def loading(model: keras.Model, path: Path) -> str:
    """The Python code that loads the model."""
    own = {type(layer) for layer in keras_internals.all_layers(model) if not keras_internals.is_of_keras(type(layer))}
    own.discard(type(model) if type(model) is keras.Model else None)
    modules = sorted({kind.__module__ for kind in own})
    others = sorted(kind.__name__ for kind in own if keras.saving.get_registered_name(kind) == kind.__name__)
    named = ", ".join(f"{name!r}: {_module_of(own, name)}.{name}" for name in others)
    compiled = [*keras_internals.metrics_of(model), model.loss]
    plain = all(isinstance(one, str) or keras_internals.is_of_keras(type(one)) for one in compiled)
    arguments = [
        f"{str(path)!r}",
        *([f"custom_objects={{{named}}}"] if named else []),
        *([] if plain else ["compile=False"]),
    ]
    return "; ".join([*(f"import {module}" for module in modules), f"keras.saving.load_model({', '.join(arguments)})"])


def _module_of(kinds: set[Any], name: str) -> str:
    return next(kind.__module__ for kind in kinds if kind.__name__ == name)


def _inputs(model: keras.Model, spec: DataSpec) -> str:
    """Type and shape of each input, such as `float32 [N, 28, 28, 1]`."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    if not inputs:
        return _typed("int32" if spec.vocabulary_size else "float32", spec.input_shape)
    found = [_typed(one.dtype, one.shape[1:]) for one in inputs]
    if len(found) == 1:
        return found[0]
    return ", ".join(f"{one.name}: {text}" for one, text in zip(inputs, found, strict=True))


def _typed(dtype: str, shape: Any) -> str:
    return f"{dtype} [{', '.join(['N', *('any' if size is None else str(size) for size in shape)])}]"


def _content(spec: DataSpec, dataset: str) -> str:
    if ":" in dataset:
        return f"scaled as `{dataset}` gives it"
    if spec.vocabulary:
        return "words by their number in vocabulary.txt, from 0"
    if spec.vocabulary_size:
        return "tokens by number, as the dataset gives them"
    return "pixels from 0 to 1 (bytes divided by 255)" if len(spec.input_shape) == 3 else "as the dataset gives it"


class Recorded(Protocol):
    """A run of the command, whose record is filled; `tfdist.run.session.Session` is one.

    Attributes:
        config: what is trained.
        folder: the folder of its files.
        record: `None` before it begins.
        command: the command and its options.
        typed: the command line as it was typed.
        started: when the process began.
        data_touched: when the dataset was first read, by `time.monotonic`.
    """

    config: TrainConfig
    folder: RunFolder
    record: RunRecord | None
    command: list[str]
    typed: str
    started: datetime
    data_touched: float

    @property
    def model_options(self) -> dict[str, Any]:
        """The options of the model."""
        ...

    def raise_if_interrupted(self) -> None:
        """Raises `KeyboardInterrupt` if the run is to end."""
        ...

    def write_record(self) -> None:
        """Writes the record of all processes, in the chief."""
        ...


def begin_record(
    session: Recorded, strategy: Any, model: Any, source: data.Source, earlier: RunRecord | None
) -> RunRecord:
    """The record of a new run, or of one that continues the run of `earlier`."""
    config = session.config
    world = strategy.world
    return RunRecord(
        command=session.command if earlier is None else resume.continued(earlier.command, session.command),
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
            # With parameter servers the workers compute at the same time, each its own step.
            replicas=getattr(strategy, "num_workers", strategy.num_replicas),
        ),
        world=schema.WorldRecord(
            rank=world.rank,
            world_size=world.world_size,
            local_rank=world.local_rank,
            local_world_size=world.local_world_size,
            source=world.source,
        ),
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
    """Updates the record after each epoch."""

    def __init__(self, session: Recorded, strategy: Strategy, throughput: Any, timer: Any):
        super().__init__()
        self._session = session
        self._strategy = strategy
        self._throughput = throughput
        self._timer = timer
        found = session.record
        self._seconds_before = (found.epochs[-1].elapsed_seconds or 0.0) if found is not None and found.epochs else 0.0
        self._sent_before: int | None = None
        self._exchanged_before: ExchangeTotals | None = None

    def batches_until_hook(self, batch: int) -> int | None:
        return None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        found = self._session.record
        assert found is not None
        found.epochs = [earlier for earlier in found.epochs if earlier.epoch <= epoch]
        self._sent_before, self._exchanged_before = _network_bytes(), self._strategy.exchanged()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._session.raise_if_interrupted()
        found = self._session.record
        if found is not None and found.model.parameters is None:
            found.model.parameters = _parameters(self.model)
        if found is not None and found.startup_seconds is None:
            found.startup_seconds = (datetime.now(UTC) - found.started).total_seconds()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        found = self._session.record
        assert found is not None
        found.epochs.append(
            schema.EpochRecord.from_logs(
                epoch + 1,
                logs or {},
                self._throughput.train_seconds,
                self._throughput.evaluation_seconds,
                elapsed_seconds=self._seconds_before + time.monotonic() - self._session.data_touched,
                network_bytes=None if (sent := _network_bytes()) is None else sent - (self._sent_before or 0),
            )
        )
        found.optimizer_steps = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        found.peak_memory_bytes = memory.peak_resident_bytes()
        found.partition = _partition(self.model)
        if self._timer is not None:
            found.time_to_target = schema.TargetRecord(
                monitor=self._timer.monitor,
                target=self._timer.target,
                seconds=self._timer.seconds,
                epoch=self._timer.epoch,
            )
        self._record_processes(found)
        self._session.write_record()
        if self._session.folder.is_chief:
            self._session.folder.write_history(found)

    def _record_processes(self, found: RunRecord) -> None:
        """Records the figures of all processes, which tell them to each other at the end of an epoch."""
        epoch, exchanged = found.epochs[-1], self._strategy.exchanged()
        mine = {
            "peak_memory_bytes": memory.peak_resident_bytes(),
            "peak_gpu_memory_bytes": memory.peak_gpu_bytes(),
            "cpu_seconds": time.process_time(),
            "metrics": epoch.metrics,
        }
        in_epoch = {}
        if exchanged is not None and self._exchanged_before is not None:
            mine |= dataclasses.asdict(exchanged)
            in_epoch = dataclasses.asdict(exchanged.since(self._exchanged_before))
        of_all = consensus.all_gather_object(self._strategy, [mine, in_epoch], "ends an epoch")
        found.processes = schema.ProcessRecord.of_all([figures for figures, _ in of_all])
        for name in in_epoch:
            setattr(epoch, name, sum(counted[name] for _, counted in of_all))


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
    """The number of scalars in the weights; `None` for a model whose weights are made by its first step."""
    return int(model.count_params()) if model.built else None


def _digest(model: Any) -> str | None:
    """A hash of the weights, which the chief gives to the others; `None` for a model without any."""
    if not model.built:
        return None
    digest = hashlib.sha256()
    for weight in model.weights:
        value = np.ascontiguousarray(keras.ops.convert_to_numpy(weight))
        digest.update(
            value.reshape(-1).view(np.uint8).data
        )  # no copy of the bytes, and also of types that only Keras knows
    return digest.hexdigest()[:16]


def _network_bytes() -> int | None:
    """What the processes of the job have sent so far; `None` where others use their network too."""
    if job_environment.OWN_NETWORK not in os.environ:
        return None
    return int(psutil.net_io_counters().bytes_sent)


def _learning_rate(optimizer: Any) -> float | None:
    """The learning rate of the whole run; `None` if it follows a schedule."""
    if isinstance(keras_internals.learning_rate(optimizer), keras.optimizers.schedules.LearningRateSchedule):
        return None
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))
