"""An all-reduce of two real processes on this machine, over each engine that is there, with latency and bandwidth."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tfdist import terminal
from tfdist.doctor import child, engines
from tfdist.doctor.finding import Finding, ok, problem

SUBJECT = "all-reduce"
SECONDS_TO_MEASURE = 120.0
SECONDS_TO_START = 45.0
# What carries the tensors of a strategy, and the options with which the launcher starts its processes.
ENGINES = {"multiworker": ("sockets", ()), "horovod": ("Gloo", ()), "mpi_split": ("MPI", ("--mpi",))}


@dataclass(frozen=True)
class Link:
    """How fast two processes of this machine add up, by an all-reduce inside a graph as in a training step.

    Attributes:
        engine: "sockets", "Gloo" or "MPI", by which `multiworker`, `horovod` and `mpi_split` exchange tensors.
        latency_microseconds: the time of an all-reduce of `small_bytes`.
        gigabytes_per_second: the size of a large message, `large_bytes`, by the time of its all-reduce, in 10^9 bytes.
        small_bytes: the size of the small message.
        large_bytes: the size of the large message.
    """

    engine: str
    latency_microseconds: float
    gigabytes_per_second: float
    small_bytes: int
    large_bytes: int


@dataclass(frozen=True)
class Tried:
    """A measurement, or why there is none.

    Attributes:
        engine: as of `Link`.
        strategy: the strategy that uses it.
        link: `None` if the two processes could not add up.
        error: what they said then.
        hint: what to do then.
    """

    engine: str
    strategy: str
    link: Link | None
    error: str = ""
    hint: str = ""


def measure() -> list[Tried]:
    """Measures over sockets, and over Gloo and MPI where Horovod and mpi4py load; one after the other."""
    there = []
    if not engines.loaded("tensorflow").error:
        there.append("multiworker")
    if "Gloo" in engines.loaded("horovod").facts.get("built_with", []):
        there.append("horovod")
    if not engines.loaded("mpi4py").error and "Open MPI" in (engines.mpirun() or ""):
        there.append("mpi_split")
    return [between_two_processes(strategy) for strategy in there]


def between_two_processes(strategy: str) -> Tried:
    """Starts a job of two processes of `strategy`, one of `ENGINES`, and times their all-reduce."""
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return _job(strategy, Path(folder))
    except OSError as error:
        hint = "set `TMPDIR` to a folder that can be written"
        return Tried(ENGINES[strategy][0], strategy, None, f"they were not started: {error.strerror}", hint)


def _job(strategy: str, folder: Path) -> Tried:
    """Runs the job, whose files are in `folder`."""
    engine, options = ENGINES[strategy]
    results, logs = folder / "results.json", folder / "logs"
    job = ["--workers", "2", *options, "--log-dir", str(logs), "--start-seconds", f"{SECONDS_TO_START:g}"]
    program = ["-m", "tfdist.doctor.measuring", strategy, str(results)]
    # These engines exchange tensors from the memory of the host, and a machine may have one GPU for both.
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"}
    ended = child.run([sys.executable, "-m", "tfdist.launch", *job, *program], SECONDS_TO_MEASURE, hidden)
    if ended.is_well:
        return Tried(engine, strategy, Link(engine=engine, **json.loads(results.read_text(encoding="utf-8"))))
    error, hint = _cause(ended, logs)
    return Tried(engine, strategy, None, f"their launcher {ended.how()}: {error}", hint or _shown(strategy))


def _shown(strategy: str) -> str:
    """The command that shows all that the processes of a strategy say."""
    return f"python -m tfdist.train --strategy {strategy} --workers 2 --model mlp --dataset digits --epochs 1 --verbose"


def _cause(ended: child.Ended, logs: Path) -> tuple[str, str]:
    """The last error that a process of a job, or its launcher, has told, and its hint if it is one of tfdist's."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(logs.rglob("*")) if path.is_file()]
    told = re.findall(
        r"^(?:error|[\w.]+(?:Error|Exception)): .*(?:\n\nhint: .*)?", "\n".join([*texts, ended.err]), re.M
    )
    error, _, hint = (told or [ended.last_line()])[-1].partition("\n\nhint: ")
    return error.removeprefix("error: "), hint


def findings(tried: list[Tried]) -> Iterator[Finding]:
    """The findings about measurements."""
    for one in tried:
        if one.link is None:
            yield problem(
                SUBJECT,
                f"Two processes of `{one.strategy}` could not add up over {one.engine}: {one.error}",
                one.hint,
            )
        else:
            yield ok(SUBJECT, described(one.link))


def described(link: Link) -> str:
    """A measurement in words."""
    small, large = terminal.counted(link.small_bytes, "byte"), f"{link.large_bytes >> 20} MiB"
    return (
        f"Two processes add up {small} over {link.engine} in {link.latency_microseconds:,.0f} us, and {large} at "
        f"{link.gigabytes_per_second:.2f} GB/s"
    )
