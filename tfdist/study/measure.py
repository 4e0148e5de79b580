"""Measures the cells of a study: each run is a new `tfdist train`, and the cells take turns within a round.

Next to the files of the training, `measured.json` records the cell, the round, and what only the parent process can
measure.

Meanwhile, NVIDIA's `nvidia-smi` reports the use of this machine's GPUs. Source: the fields `utilization.gpu`, the
percentage of a sampling period in which a kernel ran, and `memory.used` of NVIDIA's management library (NVML),
https://docs.nvidia.com/deploy/nvml-api.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tfdist import files, redaction
from tfdist.doctor import child, readiness
from tfdist.errors import UsageError
from tfdist.study import conditions, looks
from tfdist.study.plan import Case, Cell, Plan

PROGRAM = "nvidia-smi"
SAMPLING_MILLISECONDS = 500
QUERY = (
    "--query-gpu=index,utilization.gpu,memory.used",
    "--format=csv,noheader,nounits",
    f"--loop-ms={SAMPLING_MILLISECONDS}",
)


@dataclass
class GpuUse:
    """The use of GPUs during a run; `None` without a GPU, or if its driver does not report it.

    Attributes:
        busy: the mean number of busy GPUs; 1.5 of two GPUs means 75 % utilization.
        memory_bytes: the peak memory in use on a single GPU, by all processes.
    """

    busy: float | None = None
    memory_bytes: int | None = None


@contextlib.contextmanager
def gpu_monitor() -> Iterator[GpuUse]:
    """Samples the use of GPUs within the context; the yielded object is filled at the end."""
    use = GpuUse()
    if shutil.which(PROGRAM) is None:
        yield use
        return
    with tempfile.TemporaryFile("w+") as output:
        monitor = subprocess.Popen(
            [PROGRAM, *QUERY], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL
        )
        try:
            yield use
        finally:
            monitor.kill()
            monitor.wait()
            output.seek(0)
            sampled = gpu_use(output)
            use.busy, use.memory_bytes = sampled.busy, sampled.memory_bytes


def gpu_use(samples: Iterable[str]) -> GpuUse:
    """Summarizes samples, lines with the index of a GPU, its utilization in percent, and its used memory in MiB.

    >>> gpu_use(["0, 100, 1000", "1, 50, 10", "0, 80, 2000", "1, 30, 10", "0, 9"])
    GpuUse(busy=1.3, memory_bytes=2097152000)
    >>> gpu_use(["0, [N/A], [N/A]", "Unable to determine the device handle"])
    GpuUse(busy=None, memory_bytes=None)
    """
    percentages: dict[str, list[float]] = {}
    memory: list[int] = []
    for line in samples:
        with contextlib.suppress(ValueError):  # such as an unfinished last line
            index, busy, mebibytes = (part.strip() for part in line.split(","))
            percentages.setdefault(index, []).append(float(busy))
            memory.append(int(mebibytes) * 2**20)
    if not memory:
        return GpuUse()
    return GpuUse(sum(map(statistics.mean, percentages.values())) / 100, max(memory))


MEASURED, PLAN, OUTPUT = "measured.json", "study.json", "output.txt"
REPORT = "report.html"  # the results of a study, which are known once this file is there
MOST_MEASURED_BYTES = 1 << 24  # of each of the first two files
TRACED_STEPS = "2:12"
TIMED_OUT = 124  # the exit code of timeout(1)
LAST_LINES = 15  # lines of a failed run's output that the report shows


class Measured(BaseModel):
    """The content of `measured.json`.

    Attributes:
        model, dataset, batch_size, input, strategy, workers, label: the cell.
        position: the position of the cell in the plan.
        study: when the study was started, which distinguishes the rounds of several studies.
        round: the number of the round, from 0.
        seed: the seed of weights, order and random layers.
        traced: whether some of its steps were traced, so that its times do not count.
        command: the command of the run.
        started: when the command was started, ISO 8601, UTC.
        wall_seconds: from the start of the command to its end.
        cpu_seconds: processor time of all processes of the run, in user and system mode.
        gpus_busy: the mean number of busy GPUs of this machine; `None` without a GPU.
        gpu_memory_bytes: the peak memory in use on a single GPU, by all processes; `None` without a GPU.
        exit_code: the exit code of the command; minus the signal's number if a signal ended it; `TIMED_OUT` if it took
            too long.
        cores: the number of cores on which the run could compute.
        load_before: the mean number of runnable threads of other programs just before the run.
        cores_of_others: the mean number of cores that other programs used during the run.
        loop_seconds: the processor time of a fixed loop, before and after the run.
        looks: when the study looks at its results, see `tfdist.study.looks`; () in a study of an earlier version.
        error: for a failed run, why its strategy cannot run here, if `tfdist doctor` knows, and the end of its output;
            otherwise "".
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 2
    model: str
    dataset: str
    batch_size: int
    input: str = "real"
    strategy: str
    workers: int
    label: str
    position: int = 0
    study: str
    round: int
    seed: int
    traced: bool = False
    command: list[str]
    started: str
    wall_seconds: float
    cpu_seconds: float
    gpus_busy: float | None = None
    gpu_memory_bytes: int | None = None
    cores: int | None = None
    load_before: float | None = None
    cores_of_others: float | None = None
    loop_seconds: tuple[float, ...] = ()
    looks: tuple[tuple[int, float], ...] = ()
    exit_code: int
    error: str = ""

    @property
    def cell(self) -> Cell:
        case = Case(self.model, self.dataset, self.batch_size, self.input)
        return Cell(case, self.strategy, self.workers, self.label)


@dataclass(frozen=True)
class Turn:
    """A run to be made."""

    cell: Cell
    round: int
    seed: int
    folder: Path
    traced: bool = False

    @property
    def title(self) -> str:
        """A title such as `round 1: single, cnn on digits, global batch 32`."""
        kind = "traced" if self.traced else f"round {self.round + 1}"
        return f"{kind}: {self.cell.name}, {self.cell.case.title}"


@dataclass(frozen=True)
class Study:
    """A study that has begun: when it was started, and when it looks at its results, see `tfdist.study.looks`."""

    started: str
    looks: looks.Looks


def turns(plan: Plan, study: Study, out: Path) -> list[Turn]:
    """Returns the timed runs of a study by round.

    The order within each round is drawn, differently for each study: whatever a machine does at certain times, such as
    a drift within the rounds or a periodic job, then adds to the noise, and favours no cell.
    """
    timed = []
    for number in range(study.looks[-1][0]):
        cells = plan.cells()
        random.Random(f"{study.started} {number}").shuffle(cells)
        for cell in cells:
            timed.append(Turn(cell, number, number % plan.seeds, out / "runs" / cell.folder / f"round-{number}"))
    return timed


def traced_turns(plan: Plan, out: Path) -> list[Turn]:
    """Returns the traced runs of a study."""
    return [Turn(cell, 0, 0, out / "runs" / cell.folder / "traced", traced=True) for cell in plan.traced()]


def begin(plan: Plan, out: Path, resume: bool) -> Study:
    """Creates the folder of a study, or resumes the study in it.

    Raises:
        UsageError: the folder has a study and `resume` is not set, or the reverse; it has a different study; or it
            cannot be written.
    """
    path = out / PLAN
    wanted = redaction.hide_in_options(json.loads(json.dumps(asdict(plan), default=str)))  # paths are text
    if path.exists():
        if not resume:
            raise UsageError(f"`{out}` has a study already", "continue it with `--resume`, or name another `--out`")
        study, existing = _existing(path)
        # `repeats` may grow: the new rounds follow the existing ones.
        differing = [name for name, value in wanted.items() if name != "repeats" and existing.get(name) != value]
        if differing:
            names = ", ".join(f"`{name}`" for name in differing)
            raise UsageError(f"The study in `{out}` was started with different {names}", "name another `--out`")
        if plan.repeats is not None and plan.repeats != existing.get("repeats"):
            wanted_looks = looks.planned(plan.repeats, plan.seeds)
            is_known = (out / REPORT).exists()
            study = Study(study.started, looks.extended(study.looks, wanted_looks) if is_known else wanted_looks)
            _write(path, study, wanted)
        return study
    if resume:
        raise UsageError(
            f"`--resume` is set, and `{out}` has no study", "correct `--out`; to start a study, leave `--resume` out"
        )
    started = datetime.now(UTC).isoformat(timespec="milliseconds")
    study = Study(started, looks.planned(plan.repeats, plan.seeds))
    try:
        out.mkdir(parents=True, exist_ok=True)
        _write(path, study, wanted)
    except OSError as error:
        raise UsageError(f"The study cannot be written to `{out}`: {error.strerror}", "name another `--out`") from error
    return study


def _write(path: Path, study: Study, plan: dict[str, Any]) -> None:
    content = {"study": study.started, "plan": plan, "looks": study.looks}
    files.write_text(path, json.dumps(content, indent=2) + "\n")


def _existing(path: Path) -> tuple[Study, dict[str, Any]]:
    """The study that is resumed, and its plan."""
    try:
        existing = json.loads(files.read_text(path, MOST_MEASURED_BYTES))
        study = Study(str(existing["study"]), tuple((int(n), float(part)) for n, part in existing["looks"]))
        return study, dict(existing["plan"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"The plan `{path}` of the study cannot be read: {reason}", "name another `--out`") from error


def is_done(turn: Turn) -> bool:
    """Whether the run has been made and did not fail."""
    with contextlib.suppress(OSError, ValueError):
        return Measured.model_validate_json(files.read_text(turn.folder / MEASURED, MOST_MEASURED_BYTES)).exit_code == 0
    return False


def run(turn: Turn, plan: Plan, study: Study, limit_seconds: float) -> Measured:
    """Makes a run in separate processes, and writes what was measured to its folder.

    Args:
        turn: the run.
        plan: the plan of the study.
        study: the study.
        limit_seconds: the time after which the run is ended, and counts as failed.
    """
    shutil.rmtree(turn.folder, ignore_errors=True)
    turn.folder.mkdir(parents=True)
    options = [*turn.cell.options(plan.epochs, turn.seed), "--quiet", "--run-dir", str(turn.folder)]
    if turn.traced:
        options += ["--profile", TRACED_STEPS]
    with conditions.watched() as watched, gpu_monitor() as gpus:
        started, start = datetime.now(UTC), time.perf_counter()
        cpu_seconds = _cpu_seconds_of_children()
        code = child.wait(start_training(options, turn.folder), limit_seconds)
        wall_seconds = time.perf_counter() - start
    measured = Measured(
        **asdict(turn.cell.case),
        strategy=turn.cell.strategy,
        workers=turn.cell.workers,
        label=turn.cell.label,
        **asdict(watched),
        position=plan.cells().index(turn.cell),
        study=study.started,
        looks=tuple(study.looks),
        round=turn.round,
        seed=turn.seed,
        traced=turn.traced,
        command=redaction.hide_in_command(["tfdist", "train", *options]),
        started=started.isoformat(),
        wall_seconds=wall_seconds,
        cpu_seconds=_cpu_seconds_of_children() - cpu_seconds,
        gpus_busy=gpus.busy,
        gpu_memory_bytes=gpus.memory_bytes,
        exit_code=TIMED_OUT if code is None else code,
        error=_error(turn, code, limit_seconds),
    )
    files.write_text(turn.folder / MEASURED, measured.model_dump_json(indent=2) + "\n")
    return measured


def start_training(
    options: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts `tfdist train` as the leader of a process group; its output goes to a file in `folder`.

    Args:
        options: the options of the command.
        folder: an existing folder.
        environment: the environment variables; `None` for those of this process.
    """
    command = [sys.executable, "-m", "tfdist.train", *options]
    with open(folder / OUTPUT, "wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _error(turn: Turn, code: int | None, limit_seconds: float) -> str:
    """The error of a run with this exit code, `None` after a timeout; "" if it did not fail."""
    if code == 0:
        return ""
    output = (turn.folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    shown_code = TIMED_OUT if code is None else code
    error = "\n".join(lines[-LAST_LINES:]) or f"It ended with exit code {shown_code} and no output."
    if not (state := readiness.of(turn.cell.strategy)).ready:
        error = f"error: {state.reason}\nhint: {state.command}\n{error}"
    return f"It was ended after {limit_seconds:g} s.\n{error}" if shown_code == TIMED_OUT else error


def expected_seconds(remaining: Sequence[Turn], done: Sequence[Measured]) -> float | None:
    """Estimates the time of the remaining runs, from the median of each cell's runs, or else of all; `None` if none."""
    if not done:
        return None
    seconds_of: dict[Cell, list[float]] = {}
    for measured in done:
        seconds_of.setdefault(measured.cell, []).append(measured.wall_seconds)
    overall = [statistics.median(measured.wall_seconds for measured in done)]
    return sum(statistics.median(seconds_of.get(turn.cell, overall)) for turn in remaining)
