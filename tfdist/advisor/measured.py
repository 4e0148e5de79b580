"""The short measurements behind a prediction: steps at two batch sizes, the stages of a pipeline, and links.

The steps are those of `tfdist train --strategy single`. For N processes that share this machine, N runs take place at
the same time, each on its share of the cores, so that the measurement includes how they slow each other down.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist import terminal
from tfdist.advisor.costs import MICRO_BATCHES, Compute, Link, Message, Stages
from tfdist.doctor import child, links
from tfdist.errors import UsageError
from tfdist.run.folder import load_record
from tfdist.run.schema import RunRecord
from tfdist.study.measure import OUTPUT, start_training
from tfdist.study.plan import as_options

# Enough steps to make the fixed cost of an epoch negligible, but few enough that an epoch of a large model ends soon.
MAX_STEPS, MIN_STEPS, PROBE_STEPS, EPOCH_SECONDS = 250, 10, 10, 5.0
# Epochs per run after the first, which warms up. Short epochs vary more, so that there are more of them.
MIN_EPOCHS, MAX_EPOCHS = 2, 20
MAX_RUN_SECONDS = 300.0
# Steps of a short run, which shows whether a strategy can train a model.
SHORT_STEPS = 2
# Hops in an all-reduce of two processes.
HOPS_OF_TWO = 2
SETTINGS, RESULT = "settings.json", "result.json"  # of `tfdist.advisor.stages`


@dataclass(frozen=True)
class Work:
    """The training that is measured.

    Attributes:
        options: options of `tfdist train` by name, without strategy, batch size and run folder.
        batch_size: examples per global batch.
        examples: training examples of the dataset.
        cores: the cores of this machine.
        steps: steps per epoch of each run.
        epochs: epochs of each run, of which the first warms up.
    """

    options: dict[str, object]
    batch_size: int
    examples: int
    cores: tuple[int, ...]
    steps: int = PROBE_STEPS
    epochs: int = 1 + MIN_EPOCHS

    @property
    def epoch_steps(self) -> int:
        """Full steps of an epoch on the global batch: `steps`, or as many as there are examples for."""
        return min(self.steps, max(1, self.examples // self.batch_size))

    def with_lengths_for(self, folder: Path, epoch_seconds: float = EPOCH_SECONDS) -> Work:
        """Returns the same work with enough steps and epochs, judged by a short run: an epoch of about `epoch_seconds`.

        If the data or `MAX_STEPS` end an epoch earlier, there are more epochs, which take as long in total, with their
        evaluations.
        """
        (record,) = run_side_by_side(self, self.batch_size, 1, folder / "probe")
        last = record.epochs[-1]
        seconds = last.step_seconds or epoch_seconds
        steps = min(max(MIN_STEPS, round(epoch_seconds / seconds)), MAX_STEPS)
        longer = dataclasses.replace(self, steps=steps)
        one = longer.epoch_steps * seconds + (last.evaluation_seconds or 0.0)
        epochs = round(MIN_EPOCHS * epoch_seconds / one)
        return dataclasses.replace(longer, epochs=1 + min(max(MIN_EPOCHS, epochs), MAX_EPOCHS))


def compute(work: Work, processes: int, folder: Path) -> tuple[Compute, RunRecord]:
    """Measures the computation of a process's part of the global batch, with `processes` on this machine.

    Also returns the record of one run.
    """
    seconds, record = _steps(work, -(-work.batch_size // processes), processes, folder)
    return Compute(seconds, 0.0), record


def compute_of_any_part(work: Work, folder: Path) -> tuple[Compute, RunRecord]:
    """Measures the computation of any part of the global batch on one machine; also returns the record of one run."""
    half = max(1, work.batch_size // 2)
    half_seconds, _ = _steps(work, half, 1, folder)
    seconds, record = _steps(work, work.batch_size, 1, folder)
    return Compute.through((half, half_seconds), (work.batch_size, seconds)), record


def _steps(work: Work, size: int, processes: int, folder: Path) -> tuple[float, RunRecord]:
    records = run_side_by_side(work, size, processes, folder / f"{processes}-{size}")
    return _median_step_seconds(records), records[0]


def micro_batched_seconds(work: Work, processes: int, folder: Path) -> float:
    """Measures a step of one device in micro-batches, with `processes` on this machine."""
    strategy = {"strategy": "pipeline", "devices": 1, "strategy_option": f"micro_batches={MICRO_BATCHES}"}
    records = run_side_by_side(work, work.batch_size, processes, folder / f"{processes}-micro-batched", strategy)
    return _median_step_seconds(records)


def _median_step_seconds(records: Sequence[RunRecord]) -> float:
    """The median over the epochs of all runs, without the first epoch of each, which warms up."""
    return statistics.median(
        epoch.step_seconds for record in records for epoch in record.epochs[1:] if epoch.step_seconds
    )


def link(strategy: str) -> Link | None:
    """Measures the link of `strategy` between two processes of this machine; `None` if it is unavailable."""
    measurement = links.between_two_processes(strategy).link
    if measurement is None:
        return None
    return Link(measurement.latency_microseconds / 1e6 / HOPS_OF_TWO, measurement.gigabytes_per_second * 1e9)


def refusal(work: Work, strategy: str, folder: Path) -> str | None:
    """Returns why two processes of `strategy` cannot train the model on this machine; `None` if they can.

    They train on its CPU, because two processes may have to share one GPU.
    """
    options = {**work.options, "strategy": strategy, "workers": 2, "batch_size": work.batch_size}
    options |= {"limit": SHORT_STEPS * work.batch_size, "epochs": 1}
    process = _start(options, folder, work.cores, os.environ | {"CUDA_VISIBLE_DEVICES": "-1"})
    try:
        code = child.wait(process, MAX_RUN_SECONDS)
    finally:
        child.kill(process)
    return None if code == 0 else _reason(folder, code)


def job(work: Work, strategy: str, processes: int, folder: Path) -> tuple[float, float | None]:
    """Measures the seconds per step of a job of `processes` on this machine.

    Returns:
        The seconds per step, and those of an averaging of `mpi_split`; `None` for other strategies.

    Raises:
        UsageError: the job failed or took too long.
    """
    started = {"strategy": strategy, "workers": processes}
    records = run_side_by_side(work, work.batch_size, 1, folder, started)
    averagings = [epoch.metrics.get("sync_seconds") for epoch in records[0].epochs[1:]]
    return _median_step_seconds(records), min((value for value in averagings if value is not None), default=None)


@dataclass(frozen=True)
class Pipelines:
    """The pipelines of a model.

    Attributes:
        stages: the stages, by their number.
        refusals: why the model cannot be divided into a number of stages.
        averaged_bytes: the bytes of weights and slots, which `mpi_split` averages.
    """

    stages: Mapping[int, Stages]
    refusals: Mapping[int, str]
    averaged_bytes: float


def pipelines(work: Work, counts: Sequence[int], processes: int, folder: Path) -> Pipelines:
    """Measures the stages of the model for each number of stages, while `processes` share this machine.

    Raises:
        UsageError: the measurement failed or took too long.
    """
    options = {name: str(value) if isinstance(value, Path) else value for name, value in work.options.items()}
    settings = {"options": options, "batch_size": work.batch_size, "micro_batches": MICRO_BATCHES, "counts": counts}
    folders = [folder / str(rank) for rank in range(processes)]
    children = [_start_stages(settings, run, work.cores[rank::processes]) for rank, run in enumerate(folders)]
    _wait_for_all(children, folders, "The stages of a pipeline")
    found = json.loads((folders[0] / RESULT).read_text(encoding="utf-8"))
    stages = {
        int(count): Stages(**fields | {"messages": [Message(**message) for message in fields["messages"]]})
        for count, fields in found["stages"].items()
    }
    refusals = {int(count): sentence for count, sentence in found["refusals"].items()}
    return Pipelines(stages, refusals, found["averaged_bytes"])


SINGLE: Mapping[str, object] = {"strategy": "single"}


def run_side_by_side(
    work: Work, batch_size: int, processes: int, folder: Path, strategy: Mapping[str, object] = SINGLE
) -> list[RunRecord]:
    """Runs `processes` trainings at the same time, each on its share of the cores; returns their records.

    Args:
        work: the training.
        batch_size: the batch size of each training.
        processes: the number of trainings.
        folder: the folder for the runs.
        strategy: the options of `tfdist train` that select the strategy.

    Raises:
        UsageError: a training failed or took too long.
    """
    folders = [folder / str(rank) for rank in range(processes)]
    limit = min(work.examples, work.steps * batch_size)
    options = {**work.options, **strategy, "batch_size": batch_size, "limit": limit, "epochs": work.epochs}
    children = [_start(options, run, work.cores[rank::processes]) for rank, run in enumerate(folders)]
    _wait_for_all(children, folders, f"A step of {batch_size} examples", str(strategy["strategy"]))
    return [load_record(run) for run in folders]


def _wait_for_all(
    children: Sequence[subprocess.Popen[bytes]], folders: Sequence[Path], what: str, strategy: str = "single"
) -> None:
    """Waits for children; raises `UsageError`, which says `what` they measure, if one failed or took too long."""
    try:
        codes = [child.wait(process, MAX_RUN_SECONDS) for process in children]
    finally:
        for process in children:
            child.kill(process)
    for folder, code in zip(folders, codes, strict=True):
        if code != 0:
            raise UsageError(
                f"{what} could not be measured: {_reason(folder, code)}",
                f"check that `tfdist train --strategy {strategy}` runs with these options",
            )


def _reason(folder: Path, code: int | None) -> str:
    """Why a run in `folder` failed, which took too long if it has no exit `code`."""
    if code is None:
        return f"it took longer than {MAX_RUN_SECONDS:g} s"
    # The outputs of the processes, if there are several, and of the command.
    paths = *sorted((folder / "output").glob("*.log")), folder / OUTPUT
    causes = [terminal.cause(path.read_text(encoding="utf-8", errors="replace")) for path in paths]
    return next((cause for cause in causes if cause.startswith("error: ")), causes[-1]).removeprefix("error: ")


def _start(
    options: dict[str, object], folder: Path, cores: Sequence[int], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True)
    process = start_training([*as_options(options), "--quiet", "--run-dir", str(folder)], folder, environment)
    os.sched_setaffinity(process.pid, cores)  # before TensorFlow counts them
    return process


def _start_stages(settings: dict[str, object], folder: Path, cores: Sequence[int]) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True)
    (folder / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
    files = str(folder / SETTINGS), str(folder / RESULT)
    with open(folder / OUTPUT, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tfdist.advisor.stages", *files],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child.environment({"TF_CPP_MIN_LOG_LEVEL": "3"}),
            start_new_session=True,
        )
    os.sched_setaffinity(process.pid, cores)  # before TensorFlow counts them
    return process
