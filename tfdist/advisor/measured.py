"""The short measurements that a prediction is made from: steps at two batch sizes, and the links between processes.

Steps are those of real runs of `tfdist train --strategy single`. For N processes that share this machine, N of them run
at the same time, each with its part of the cores, so that what they take from each other is in the measurement.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist import terminal
from tfdist.advisor.costs import Compute, Link
from tfdist.doctor import links
from tfdist.errors import UsageError
from tfdist.launcher import limited
from tfdist.run.folder import load_record
from tfdist.run.schema import RunRecord
from tfdist.study.measure import OUTPUT
from tfdist.study.plan import as_options

# Epochs of a run, of which the first one warms up.
EPOCHS = 3
# What an epoch itself costs must not count for much in its steps, and an epoch of a large model must end.
MOST_STEPS, LEAST_STEPS, PROBED_STEPS, SECONDS_OF_AN_EPOCH = 250, 10, 10, 10.0
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
        steps: of an epoch of each run.
    """

    options: dict[str, object]
    batch_size: int
    examples: int
    cores: tuple[int, ...]
    steps: int = PROBED_STEPS

    def with_steps_for(self, folder: Path) -> Work:
        """The same with so many steps that an epoch takes some seconds, by a short run."""
        (record,) = _side_by_side(self, self.batch_size, 1, folder / "probe")
        seconds = record.epochs[-1].step_seconds or SECONDS_OF_AN_EPOCH
        steps = min(max(LEAST_STEPS, round(SECONDS_OF_AN_EPOCH / seconds)), MOST_STEPS)
        return dataclasses.replace(self, steps=steps)


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


def averaging_seconds(work: Work, folder: Path) -> float | None:
    """An averaging of two processes of `mpi_split` on this machine; `None` where they cannot run."""
    options = {**work.options, "strategy": "mpi_split", "workers": 2, "batch_size": work.batch_size}
    process = _begin({**options, "limit": 2 * work.batch_size, "epochs": EPOCHS}, folder, work.cores)
    try:
        code = limited.wait(process, SECONDS_OF_A_RUN)
    finally:
        limited.kill(process)
    if code != 0:
        return None
    # The first epoch's traces the graphs.
    found = [epoch.metrics.get("sync_seconds") for epoch in load_record(folder).epochs[1:]]
    return min((seconds for seconds in found if seconds is not None), default=None)


def _side_by_side(work: Work, size: int, processes: int, folder: Path) -> list[RunRecord]:
    shares = [work.cores[rank::processes] for rank in range(processes)]
    folders = [folder / str(rank) for rank in range(processes)]
    limit = min(work.examples, work.steps * size)
    options = {**work.options, "strategy": "single", "batch_size": size, "limit": limit, "epochs": EPOCHS}
    running = [_begin(options, place, share) for place, share in zip(folders, shares, strict=True)]
    try:
        codes = [limited.wait(process, SECONDS_OF_A_RUN) for process in running]
    finally:
        for process in running:
            limited.kill(process)
    for place, code in zip(folders, codes, strict=True):
        if code != 0:
            said = (place / OUTPUT).read_text(encoding="utf-8", errors="replace")
            told = f"it took longer than {SECONDS_OF_A_RUN:g} s" if code is None else terminal.cause(said)
            raise UsageError(
                f"A step of {size} examples could not be measured: {told.removeprefix('error: ')}",
                "see that `tfdist train --strategy single` runs with these options",
            )
    return [load_record(place) for place in folders]


def _begin(options: dict[str, object], folder: Path, cores: Sequence[int]) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "tfdist.train", *as_options(options), "--quiet", "--run-dir", str(folder)]
    with open(folder / OUTPUT, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    os.sched_setaffinity(process.pid, cores)  # before it has begun to ask for them
    return process
