"""The short measurements that a prediction is made from: steps at two batch sizes, and the links between processes.

Steps are those of real runs of `tfdist train --strategy single`. For N processes that share this machine, N of them run
at the same time, each with its part of the cores, so that what they take from each other is in the measurement.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.advisor.costs import Compute, Link
from tfdist.doctor import links
from tfdist.errors import UsageError
from tfdist.run.folder import load_record
from tfdist.run.schema import RunRecord
from tfdist.study.plan import as_options

# Of an epoch and of a run, whose first epoch warms up; what an epoch itself costs must not count for much.
STEPS, EPOCHS = 250, 3
SECONDS_OF_A_RUN = 300.0
# An all-reduce of two processes has two hops.
HOPS_OF_TWO = 2


@dataclass(frozen=True)
class Work:
    """What is to be predicted.

    Attributes:
        options: of `tfdist train`, by name, without strategy, batch size and run folder.
        batch_size: examples in a global batch.
        examples: training examples of the dataset.
        cores: those of this machine.
    """

    options: dict[str, object]
    batch_size: int
    examples: int
    cores: tuple[int, ...]


def compute(work: Work, processes: int, folder: Path) -> tuple[Compute, RunRecord]:
    """The cost of computation where so many processes share the machine, and the record of one of the runs."""
    sizes = max(1, work.batch_size // (2 * processes)), -(-work.batch_size // processes)
    if sizes[0] == sizes[1]:
        sizes = sizes[0], 2 * sizes[0]
    points = []
    for size in sizes:
        records = _side_by_side(work, size, processes, folder / f"{processes}-{size}")
        seconds = [epoch.step_seconds for record in records for epoch in record.epochs[1:] if epoch.step_seconds]
        points.append((size, statistics.median(seconds)))
    return Compute.through(*points), records[0]


def link(strategy: str) -> Link | None:
    """Between two processes of this machine, over what `strategy` uses; `None` where that is not there."""
    found = links.between_two_processes(strategy).link
    if found is None:
        return None
    return Link(found.latency_microseconds / 1e6 / HOPS_OF_TWO, found.gigabytes_per_second * 1e9)


def _side_by_side(work: Work, size: int, processes: int, folder: Path) -> list[RunRecord]:
    shares = [work.cores[rank::processes] for rank in range(processes)]
    folders = [folder / str(rank) for rank in range(processes)]
    limit = min(work.examples, STEPS * size)
    options = {**work.options, "strategy": "single", "batch_size": size, "limit": limit, "epochs": EPOCHS}
    running = [_begin(options, place, share) for place, share in zip(folders, shares, strict=True)]
    for process in running:
        try:
            said, _ = process.communicate(timeout=SECONDS_OF_A_RUN)
        except subprocess.TimeoutExpired:
            said = f"it takes longer than {SECONDS_OF_A_RUN:g} s"
            for other in running:
                other.kill()
        if process.returncode:
            lines = [line for line in said.splitlines() if line.strip()]
            told = next((line for line in lines if line.startswith("error: ")), (lines or ["it said nothing"])[-1])
            raise UsageError(
                f"A step of {size} examples could not be measured: {told.removeprefix('error: ')}",
                "see that `tfdist train --strategy single` runs with these options",
            )
    return [load_record(place) for place in folders]


def _begin(options: dict[str, object], folder: Path, cores: Sequence[int]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tfdist.train", *as_options(options), "--quiet", "--run-dir", str(folder)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    os.sched_setaffinity(process.pid, cores)  # before it has begun to ask for them
    return process
