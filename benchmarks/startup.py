"""Seconds from the command to the first training step, and to the output of `--help`, with a warm disk cache.

Example: `python -m benchmarks.startup --repeats 5`
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import race

TRAIN = [sys.executable, "-m", "tfdist.train"]
RUN = ["--strategy", "mirrored", "--model", "cnn", "--dataset", "digits", "--epochs", "1", "--quiet"]


def first_step() -> float:
    """Seconds from the command to the first step, from the run's record."""
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as folder:
        run = Path(folder, "run")
        _call([*TRAIN, *RUN, "--run-dir", str(run)])
        return json.loads((run / "run.json").read_text())["startup_seconds"]


def whole_run() -> float:
    """Seconds of the whole command, measured from outside, an upper bound of the record's figure."""
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as folder:
        return _seconds([*TRAIN, *RUN, "--run-dir", str(Path(folder, "run"))])


def help_output() -> float:
    """Seconds of `--help`."""
    return _seconds([*TRAIN, "--help"])


CONTESTANTS: dict[str, tuple[Callable[[], float], float | None]] = {
    "first_step": (first_step, 8.0),
    "whole_run": (whole_run, None),
    "help": (help_output, 1.0),
}


def _seconds(command: Sequence[str]) -> float:
    started = time.perf_counter()
    _call(command)
    return time.perf_counter() - started


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"`{' '.join(command)}` ended with code {done.returncode}:\n{done.stderr[-2000:]}")


def main() -> None:
    arguments = race.parser(__doc__, warmup=1).parse_args()
    names = race.chosen({name: name for name in CONTESTANTS}, arguments.only)
    print(f"{' '.join(['python', *TRAIN[1:], *RUN])}\n")
    results: dict[str, list[float]] = {name: [] for name in names}
    for number in range(arguments.warmup + arguments.repeats):
        for name in names:
            seconds = CONTESTANTS[name][0]()
            if number >= arguments.warmup:
                results[name].append(seconds)
    print(f"{'seconds to':<16}{'median':>9}{'min':>8}{'max':>8}{'at most':>9}")
    for name, seconds in results.items():
        median, target = statistics.median(seconds), CONTESTANTS[name][1]
        goal = "" if target is None else f"{target:>9.1f}  {race.verdict(median <= target)}"
        print(f"{name:<16}{median:>9.2f}{min(seconds):>8.2f}{max(seconds):>8.2f}{goal}")


if __name__ == "__main__":
    main()
