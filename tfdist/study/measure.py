"""Measures the cells of a study: each run is a fresh `tfdist train`, and the cells take turns within a round.

What a run leaves, beside its own files, is `measured.json`: the cell, the round, and what only its parent knows.

NVIDIA's `nvidia-smi` tells how busy the GPUs of this machine are meanwhile. Source: the fields `utilization.gpu`, the
percentage of a sample's time in which a kernel ran, and `memory.used` of NVIDIA's management library (NVML),
https://docs.nvidia.com/deploy/nvml-api.
"""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tfdist import files
from tfdist.doctor import readiness
from tfdist.errors import UsageError
from tfdist.launcher import limited
from tfdist.study.plan import Case, Cell, Plan

PROGRAM = "nvidia-smi"
EVERY_MILLISECONDS = 500
QUERY = (
    "--query-gpu=index,utilization.gpu,memory.used",
    "--format=csv,noheader,nounits",
    f"--loop-ms={EVERY_MILLISECONDS}",
)


@dataclass
class GpuUse:
    """What was seen in a run; `None` where there is no GPU, or its driver does not tell.

    Attributes:
        busy: GPUs that compute at a time, the mean over the run: 1.5 of two is 75 %.
        memory_bytes: the most that was in use on one GPU, by whatever process.
    """

    busy: float | None = None
    memory_bytes: int | None = None


@contextlib.contextmanager
def watched() -> Iterator[GpuUse]:
    """The context of a run; what it yields is filled at its end."""
    found = GpuUse()
    if shutil.which(PROGRAM) is None:
        yield found
        return
    with tempfile.TemporaryFile("w+") as output:
        watcher = subprocess.Popen(
            [PROGRAM, *QUERY], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL
        )
        try:
            yield found
        finally:
            watcher.kill()
            watcher.wait()
            output.seek(0)
            used = of_samples(output)
            found.busy, found.memory_bytes = used.busy, used.memory_bytes


def of_samples(lines: Iterable[str]) -> GpuUse:
    """The use that samples show, each a line of a GPU's index, its utilization in percent, and its memory in MiB.

    >>> of_samples(["0, 100, 1000", "1, 50, 10", "0, 80, 2000", "1, 30, 10", "0, 9"])
    GpuUse(busy=1.3, memory_bytes=2097152000)
    >>> of_samples(["0, [N/A], [N/A]", "Unable to determine the device handle"])
    GpuUse(busy=None, memory_bytes=None)
    """
    percentages: dict[str, list[float]] = {}
    memory: list[int] = []
    for line in lines:
        with contextlib.suppress(ValueError):  # such as the half of a line that was written last
            index, busy, mebibytes = (part.strip() for part in line.split(","))
            percentages.setdefault(index, []).append(float(busy))
            memory.append(int(mebibytes) * 2**20)
    if not memory:
        return GpuUse()
    return GpuUse(sum(map(statistics.mean, percentages.values())) / 100, max(memory))


MEASURED, PLAN, OUTPUT = "measured.json", "study.json", "output.txt"
TRACED_STEPS = "2:12"
LATE = 124  # as of timeout(1)
LAST_LINES = 15  # of what a failed run has said, for the report


class Measured(BaseModel):
    """`measured.json`.

    Attributes:
        model, dataset, batch_size, input, strategy, workers, label: the cell.
        study: when the study was begun, which tells rounds of several studies apart.
        round: the number of the round, from 0.
        seed: the seed of weights, order and random layers.
        traced: some of its steps were traced, so that its times do not count.
        command: what was run.
        started: when, ISO 8601, UTC.
        wall_seconds: from the start of the command to its end.
        cpu_seconds: processor time of all processes of the run, in user and system mode.
        gpus_busy: GPUs of this machine that compute at a time, the mean over the run; `None` without one.
        gpu_memory_bytes: the most that was in use on one of them, by all processes; `None` without one.
        exit_code: of the command; minus a signal's number if one ended it; `LATE` if it took too long.
        error: of a failed run, why its strategy cannot run here, if `tfdist doctor` knows, and the end of what it said;
            otherwise "".
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    model: str
    dataset: str
    batch_size: int
    input: str = "real"
    strategy: str
    workers: int
    label: str
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
    exit_code: int
    error: str = ""

    @property
    def cell(self) -> Cell:
        """The cell, without its options."""
        case = Case(self.model, self.dataset, self.batch_size, self.input)
        return Cell(case, self.strategy, self.workers, self.label)


@dataclass(frozen=True)
class Turn:
    """One run that is to be made."""

    cell: Cell
    round: int
    seed: int
    folder: Path
    traced: bool = False

    @property
    def title(self) -> str:
        """For the display."""
        which = "traced" if self.traced else f"round {self.round + 1}"
        return f"{which}: {self.cell.name}, {self.cell.case.title}"


def turns(plan: Plan, out: Path) -> list[Turn]:
    """All runs of a study, by rounds; each round begins with another cell, so that none is always the first."""
    cells = plan.cells()
    found = []
    for number, seed in plan.rounds:
        first = number % len(cells)
        for cell in [*cells[first:], *cells[:first]]:
            found.append(Turn(cell, number, seed, out / "runs" / cell.folder / f"round-{number}"))
    traced = (Turn(cell, 0, 0, out / "runs" / cell.folder / "traced", traced=True) for cell in plan.traced())
    return [*found, *traced]


def begin(plan: Plan, out: Path, resume: bool) -> str:
    """Makes the folder of a study, or continues in it; returns when the study was begun.

    Raises:
        UsageError: there is a study and `resume` is not set; or it is another one; or the folder cannot be written.
    """
    path = out / PLAN
    wanted = json.loads(json.dumps(asdict(plan), default=str))  # paths are text
    if path.exists():
        if not resume:
            raise UsageError(f"`{out}` has a study already", "continue it with `--resume`, or name another `--out`")
        before = json.loads(path.read_text(encoding="utf-8"))
        # More rounds may be asked for; they come after those that were made.
        differing = [name for name, value in wanted.items() if name != "repeats" and before["plan"].get(name) != value]
        if differing:
            names = ", ".join(f"`{name}`" for name in differing)
            raise UsageError(f"The study in `{out}` was begun with other {names}", "use another `--out` for it")
        return str(before["study"])
    try:
        out.mkdir(parents=True, exist_ok=True)
        study = datetime.now(UTC).isoformat(timespec="milliseconds")
        files.write_text(path, json.dumps({"study": study, "plan": wanted}, indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"The study cannot be written to `{out}`: {error.strerror}", "name another `--out`") from error
    return study


def is_done(turn: Turn) -> bool:
    """Whether that run was made, and did not fail."""
    with suppress(OSError, ValueError):
        return Measured.model_validate_json((turn.folder / MEASURED).read_text(encoding="utf-8")).exit_code == 0
    return False


def run(turn: Turn, plan: Plan, study: str, limit_seconds: float) -> Measured:
    """Makes one run, in processes of its own, and keeps what was measured.

    Args:
        turn: which one.
        plan: of the study.
        study: when it was begun.
        limit_seconds: a run that takes longer is ended, and has failed.
    """
    shutil.rmtree(turn.folder, ignore_errors=True)
    turn.folder.mkdir(parents=True)
    options = [*turn.cell.options(plan.epochs, turn.seed), "--quiet", "--run-dir", str(turn.folder)]
    if turn.traced:
        options += ["--profile", TRACED_STEPS]
    command = [sys.executable, "-m", "tfdist.train", *options]
    started, began = datetime.now(UTC), time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(turn.folder / OUTPUT, "wb") as output, watched() as gpus:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        ended = limited.wait(process, limit_seconds)
    seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = LATE if ended is None else ended
    error = "" if code == 0 else _last_lines(turn.folder) or f"It ended with exit code {code} and said nothing."
    if code and not (there := readiness.of(turn.cell.strategy)).ready:
        error = f"error: {there.reason}\nhint: {there.command}\n{error}"
    if code == LATE:
        error = f"It was ended after {limit_seconds:g} s.\n{error}"
    case = turn.cell.case
    found = Measured(
        **asdict(case),
        strategy=turn.cell.strategy,
        workers=turn.cell.workers,
        label=turn.cell.label,
        study=study,
        round=turn.round,
        seed=turn.seed,
        traced=turn.traced,
        command=["tfdist", "train", *options],
        started=started.isoformat(),
        wall_seconds=seconds,
        cpu_seconds=used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
        gpus_busy=gpus.busy,
        gpu_memory_bytes=gpus.memory_bytes,
        exit_code=code,
        error=error,
    )
    files.write_text(turn.folder / MEASURED, found.model_dump_json(indent=2) + "\n")
    return found


def _last_lines(folder: Path) -> str:
    text = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-LAST_LINES:])


def expected_seconds(left: Sequence[Turn], done: Sequence[Measured]) -> float | None:
    """How long the runs that are left will take: for each cell the median of its runs, else of all."""
    if not done:
        return None
    of_cell: dict[Cell, list[float]] = {}
    for one in done:
        of_cell.setdefault(one.cell, []).append(one.wall_seconds)
    usual = statistics.median(one.wall_seconds for one in done)
    return sum(statistics.median(of_cell.get(turn.cell, [usual])) for turn in left)
