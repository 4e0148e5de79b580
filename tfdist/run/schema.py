"""The schema of `run.json`, the record of a run.

`docs/run.json.md` describes every field. This module imports neither TensorFlow nor Keras.

Synopsis:

    >>> record = example()
    >>> record.epochs.append(EpochRecord.from_logs(1, {"loss": float("nan"), "step_seconds": 0.002}, 1.5))
    >>> record.epochs[0].metrics  # JSON has no NaN; it is written as null
    {'loss': None}
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import psutil
from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field

import tfdist
from tfdist import machine, redaction
from tfdist.jobs.job_environment import cores

SCHEMA_VERSION = 10


def _finite_or_none(value: Any) -> Any:
    """`None` for NaN and infinity, which JSON cannot represent."""
    if value is None or isinstance(value, str):
        return value
    number = float(value)  # also converts scalars of NumPy and TensorFlow
    return number if math.isfinite(number) else None


Number = Annotated[float | None, BeforeValidator(_finite_or_none)]
# Run folders are shared and published, so that a record has no secret values.
Options = Annotated[dict[str, Any], AfterValidator(redaction.hide_in_options)]
Command = Annotated[list[str], AfterValidator(redaction.hide_in_command)]
CommandLine = Annotated[str, AfterValidator(redaction.hide)]
Sentence = Annotated[str, AfterValidator(redaction.hide_in_sentence)]
TextOptions = Annotated[dict[str, str], AfterValidator(redaction.hide_in_options)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class Versions(_Part):
    """The versions of the packages; `None` for a package that is not installed."""

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
    """The machine, without its host name."""

    cpu: str
    cores: int
    memory_bytes: int
    platform: str
    gpus: list[str]

    @classmethod
    def detect(cls, gpus: Sequence[str] = ()) -> Machine:
        """This machine; the caller passes the names of the GPUs, which only TensorFlow knows."""
        return cls(
            cpu=machine.processor(),
            cores=cores(),
            memory_bytes=psutil.virtual_memory().total,
            platform=platform.platform(),
            gpus=list(gpus),
        )


class Threads(_Part):
    """TensorFlow's thread pools; 0 leaves the number to TensorFlow."""

    intra_op: int
    inter_op: int


class StageRecord(_Part):
    """A stage of a pipeline; in a traced run, `busy_seconds` is the time per step in which it computes."""

    device: str
    layers: list[str]
    parameters: int
    busy_seconds: float | None = None


class StrategyRecord(_Part):
    """The strategy with its options; with `pipeline`, a replica is a micro-batch.

    `as_one_device` is whether its steps equal those of one device; by design, those of averaging and of asynchronous
    updates do not.

    In a traced run of a pipeline, `bubble` is the fraction of a step's time in which a stage waits, and `even_bubble`
    is that fraction for stages that take the same time, (S - 1) / (M + S - 1).
    """

    name: str
    options: Options
    replicas: int
    as_one_device: bool | None = None
    stages: list[StageRecord] = []
    bubble: float | None = None
    even_bubble: float | None = None


class WorldRecord(_Part):
    """The job, and the rank of the process that wrote the record: the chief; see `tfdist.jobs.world.World`."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    source: str


class ModelRecord(_Part):
    """The model."""

    name: str
    parameters: int | None
    options: TextOptions = {}


class BreakdownRecord(_Part):
    """The breakdown of a traced step's time, in seconds; see `tfdist.profiling.breakdown`."""

    compute_seconds: float
    communication_seconds: float
    input_seconds: float
    waiting_seconds: float


class PartitionRecord(_Part):
    """The additional cost of a partitioned step, compared with one device; see `tfdist.spmd`."""

    repeated_share: float
    gathered_values: int
    gathered_bytes: int
    reduced_values: int
    reduced_bytes: int


class UtilizationRecord(_Part):
    """The computation of the steps, and its share of the machine's peak; see `tfdist.run.utilization`."""

    flops_per_step: int
    flops_per_second: Number = None
    peak_flops_per_second: Number = None
    mfu: Number = None


class DatasetRecord(_Part):
    """The dataset."""

    name: str
    examples: dict[str, int]
    options: TextOptions = {}
    augment: str = "none"
    input: str = "real"
    skipped: int = 0
    class_names: list[str] = []


class EpochRecord(_Part):
    """One epoch."""

    epoch: int = Field(ge=1)
    train_seconds: Number
    evaluation_seconds: Number
    examples_per_second: Number
    step_seconds: Number
    tokens_per_second: Number = None
    elapsed_seconds: Number = None
    network_bytes: int | None = None
    exchanges: int | None = None
    exchange_seconds: Number = None
    sent_bytes: int | None = None
    received_bytes: int | None = None
    metrics: dict[str, Number]

    @classmethod
    def from_logs(
        cls, epoch: int, logs: Mapping[str, Any], train_seconds: float, evaluation_seconds: float = 0.0, **figures: Any
    ) -> EpochRecord:
        """Returns the record of epoch number `epoch`, counted from 1, from the logs of Keras and tfdist's callbacks."""
        metrics = {name: value for name, value in logs.items() if name not in _NOT_METRICS}
        return cls(
            epoch=epoch,
            train_seconds=train_seconds,
            evaluation_seconds=evaluation_seconds,
            examples_per_second=logs.get("examples_per_second"),
            step_seconds=logs.get("step_seconds"),
            metrics=metrics,
            **figures,
        )


class ProcessRecord(_Part):
    """One process of the job, at the end of the last epoch."""

    peak_memory_bytes: int | None = None
    peak_gpu_memory_bytes: int | None = None
    cpu_seconds: Number = None
    exchanges: int | None = None
    exchange_seconds: Number = None
    sent_bytes: int | None = None
    received_bytes: int | None = None
    differing_metrics: dict[str, Number] | None = None

    @classmethod
    def of_all(cls, figures: Sequence[Mapping[str, Any]]) -> list[ProcessRecord]:
        """The records of all processes, from the fields and the `metrics` of each process; the first is the chief."""
        chief_metrics = figures[0]["metrics"]
        return [
            cls(
                **{name: value for name, value in fields.items() if name != "metrics"},
                differing_metrics=None if fields["metrics"] == chief_metrics else fields["metrics"],
            )
            for fields in figures
        ]


# Values in the logs of tfdist's callbacks for which the record has other fields.
_NOT_METRICS = ("examples_per_second", "step_seconds", "peak_memory_bytes", "peak_gpu_memory_bytes")


class TargetRecord(_Part):
    """The target, and the time and epoch in which it was reached."""

    monitor: str
    target: float
    seconds: Number = None
    epoch: int | None = None


Status = Literal["running", "completed", "stopped", "interrupted", "failed"]


class RunRecord(_Part):
    """The whole content of `run.json`."""

    schema_version: int = SCHEMA_VERSION
    status: Status = "running"
    reason: Sentence | None = None
    command: Command
    typed: list[CommandLine] = []
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
    initial_weights: str | None = None
    startup_seconds: Number = None
    planned_epochs: int | None = None
    epochs: list[EpochRecord] = []
    optimizer_steps: int | None = None
    peak_memory_bytes: int | None = None
    peak_gpu_memory_bytes: int | None = None
    processes: list[ProcessRecord] = []
    breakdown: BreakdownRecord | None = None
    partition: PartitionRecord | None = None
    utilization: UtilizationRecord | None = None
    time_to_target: TargetRecord | None = None
    test_metrics: dict[str, Number] | None = None
    files: dict[str, str] = {}


def example() -> RunRecord:
    """Returns the record of a run that has just begun, for documentation and tests."""
    return RunRecord(
        command=["tfdist", "train", "--model", "cnn"],
        typed=["python -m tfdist.train --model cnn"],
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
        planned_epochs=5,
    )


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
