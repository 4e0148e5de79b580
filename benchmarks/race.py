"""A race: contestants do the same work in separate processes, one epoch each in turn: A B C A B C …

    parent                                   worker, one per contestant, alive for the whole race
      ├─ starts them, one after the other      contestant(job, turns): loads, builds, tunes itself
      │                            <- ready    turns.begin()  waits
      ├─ "go"  ->                              one epoch, timed by the worker; all others wait
      │            <- {"seconds", "steps", …}  turns.end(loss, iterations)
      └─ closes the pipe                       ends

Contestants are processes because thread counts, devices and XLA's settings are per process, and because peers must not
warm each other's caches. They take turns because a machine's speed drifts. The parent imports neither TensorFlow nor
PyTorch.

A contestant is a usual training script, as a function of a `Job`, that calls `turns.begin()` before each epoch and
`turns.end(...)` after it; `Turns.callback()` does this for `model.fit`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks import data

# Losses after the same epochs on the same examples differ only because of the order and the initial weights.
LOSS_BAND = 0.2


@dataclass(frozen=True)
class Job:
    """The work of all contestants.

    Attributes:
        model: a model of `tfdist.models`.
        batch_size: examples per step, over all devices.
        examples: the number of training examples.
        epochs: the number of turns.
        data: the folder written by `benchmarks.data`.
        devices: the number of logical CPU devices, if a contestant uses several.
        seed: the seed of weights, dropout and order.
    """

    model: str
    batch_size: int
    examples: int
    epochs: int
    data: str
    devices: int = 2
    seed: int = 0

    @property
    def steps(self) -> int:
        """Optimizer steps per epoch."""
        return math.ceil(self.examples / self.batch_size)


@dataclass(frozen=True)
class Goal:
    """A target for the ratio of the time of `peer` to that of `ours`."""

    peer: str
    ours: str
    target: float | None = None


@dataclass
class Track:
    """The results of a contestant: one entry per measured turn."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    peak_mib: float = 0.0
    resident_mib: float = 0.0


class Turns:
    """The worker's side of the pipes.

    Attributes:
        note: the contestant's settings, which are printed.
        polls: whether its processes use a core while they wait, and must therefore be paused between turns.
    """

    def __init__(self, job: Job, commands: IO[str], answers: IO[str]):
        self.job = job
        self.note = ""
        self.polls = False
        self._commands = commands
        self._answers = answers
        self._iterations = 0
        self._started = 0.0

    def begin(self, iterations: Any = 0) -> None:
        """Waits for the turn. `iterations` is the optimizer's number of steps so far."""
        self._iterations = int(iterations)
        self.answer({"ready": True, "polls": self.polls})
        if not self._commands.readline():
            sys.exit(0)
        self._started = time.perf_counter()

    def end(self, loss: Any, iterations: Any) -> None:
        """Ends the turn.

        Args:
            loss: the epoch's training loss; reading it waits for the computation.
            iterations: the optimizer's number of steps so far.
        """
        loss = float(loss)
        seconds = time.perf_counter() - self._started
        steps = int(iterations) - self._iterations
        peak, resident = memory_mib()
        self.answer(
            {
                "seconds": seconds,
                "loss": loss,
                "steps": steps,
                "note": self.note,
                "peak_mib": peak,
                "resident_mib": resident,
            }
        )

    def callback(self) -> Any:
        """A Keras callback whose epochs are the turns."""
        import keras

        turns = self

        class Turn(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                turns.begin(self.model.optimizer.iterations.numpy())

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                loss = float(logs["loss"])  # before the model does anything else
                turns.end(loss, _LazyIterations(self.model))

        return Turn()

    def answer(self, message: Mapping[str, Any]) -> None:
        """Sends one line to the parent."""
        print(json.dumps(message), file=self._answers, flush=True)


class _LazyIterations:
    """The optimizer's number of steps, which is read only after the time is taken."""

    def __init__(self, model: Any):
        self._model = model

    def __int__(self) -> int:
        return int(self._model.optimizer.iterations.numpy())


def memory_mib() -> tuple[float, float]:
    """The peak resident memory of this process so far, and its current resident memory, in MiB."""
    resident = psutil.Process().memory_info().rss / 2**20
    with contextlib.suppress(OSError):
        # Counts only this program; `ru_maxrss` of a child starts with the memory of its parent at the fork.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024, resident
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, resident


class Worker:
    """The parent's side: a process that runs the contestant `module:function`, ready for its first turn."""

    def __init__(self, name: str, function: str, job: Job):
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the worker
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.race", function, json.dumps(dataclasses.asdict(job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        )
        self._rest()

    def turn(self) -> dict[str, Any]:
        """Makes the worker run one epoch, and returns its answer when it is ready for the next epoch or has ended."""
        assert self._process.stdin
        self._signal(signal.SIGCONT)
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        answer = self._receive()
        self._rest()
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _rest(self) -> None:
        """Waits until the worker is ready for its next turn or has ended, and pauses it if it polls."""
        if self._receive().get("polls"):
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its descendants."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            for member in [process, *process.children(recursive=True)]:
                member.send_signal(number)

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            tail = "".join(self._log.readlines()[-25:])
            raise RuntimeError(f"`{self.name}` ended with code {self._process.wait()}:\n{tail}")
        return json.loads(line)


def run(job: Job, contestants: Mapping[str, str], *, warmup: int, repeats: int) -> dict[str, Track]:
    """Races `contestants` (name: `module:function`): `warmup` turns each, then `repeats` rounds that count.

    Raises:
        RuntimeError: a contestant failed, or did not do the work of `job`.
    """
    job = dataclasses.replace(job, epochs=warmup + repeats)
    tracks = {name: Track() for name in contestants}
    with contextlib.ExitStack() as stack:
        workers = []
        for name, function in contestants.items():
            workers.append(Worker(name, function, job))
            stack.callback(workers[-1].close)
        for number in range(job.epochs):
            for worker in workers:
                answer = worker.turn()
                _check_work(worker.name, answer, job)
                if number >= warmup:
                    _note(tracks[worker.name], answer)
    return tracks


def _check_work(name: str, answer: Mapping[str, Any], job: Job) -> None:
    if answer["steps"] != job.steps:
        raise RuntimeError(f"`{name}` ran {answer['steps']} optimizer steps in an epoch of {job.steps}")
    if not math.isfinite(answer["loss"]):
        raise RuntimeError(f"`{name}` ended an epoch with loss {answer['loss']}")


def _note(track: Track, answer: Mapping[str, Any]) -> None:
    track.seconds.append(answer["seconds"])
    track.losses.append(answer["loss"])
    track.notes.append(answer["note"])
    track.steps = answer["steps"]
    track.peak_mib, track.resident_mib = answer["peak_mib"], answer["resident_mib"]


def report(title: str, tracks: Mapping[str, Track], goals: Sequence[Goal]) -> None:
    """Prints the times and the ratios."""
    print(f"\n{title}\n")
    print(f"{'contestant':<24}{'median s':>9}{'min':>8}{'max':>8}{'ms/step':>9}{'steps':>7}{'loss':>8}  setting")
    middle = statistics.median(track.losses[-1] for track in tracks.values())
    for name, track in tracks.items():
        seconds, loss = statistics.median(track.seconds), track.losses[-1]
        outside = abs(loss - middle) > LOSS_BAND * middle + 0.01
        print(
            f"{name:<24}{seconds:>9.3f}{min(track.seconds):>8.3f}{max(track.seconds):>8.3f}"
            f"{1000 * seconds / track.steps:>9.3f}{track.steps:>7}{loss:>8.4f}"
            f"{'!' if outside else ' '} {track.notes[-1]}"
        )
        if outside:
            print(f"  ! the loss differs by more than {LOSS_BAND:.0%} from the median: is it the same work?")
    goals = [goal for goal in goals if goal.peer in tracks and goal.ours in tracks]
    if goals:
        print(f"\n{'ratio':<44}{'of medians':>11}{'by round: min':>15}{'max':>7}{'target':>8}")
    for goal in goals:
        _report_goal(goal, tracks)
    sys.stdout.flush()


def _report_goal(goal: Goal, tracks: Mapping[str, Track]) -> None:
    peer, ours = tracks[goal.peer].seconds, tracks[goal.ours].seconds
    ratio = statistics.median(peer) / statistics.median(ours)
    rounds = [peer_seconds / our_seconds for peer_seconds, our_seconds in zip(peer, ours, strict=True)]
    target = ""
    if goal.target is not None:
        target = f"{goal.target:>8.2f}  {verdict(ratio >= goal.target)}"
        if min(rounds) < goal.target <= max(rounds):
            target += ", not in every round" if ratio >= goal.target else ", though not in every round"
    print(f"{goal.peer + ' / ' + goal.ours:<44}{ratio:>11.2f}{min(rounds):>15.2f}{max(rounds):>7.2f}{target}")


def verdict(reached: bool) -> str:
    """ "reached" or "MISSED"."""
    return "reached" if reached else "MISSED"


def parser(description: str | None, *, repeats: int = 5, warmup: int = 2) -> argparse.ArgumentParser:
    """The parser with the common options of the programs."""
    result = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    result.add_argument("--repeats", type=_at_least(1), default=repeats, help="measured turns per contestant")
    result.add_argument("--warmup", type=_at_least(0), default=warmup, help="warm-up turns per contestant")
    result.add_argument(
        "--data-dir",
        default=os.environ.get("TFDS_DATA_DIR"),
        help="prepared TensorFlow Datasets (default: $TFDS_DATA_DIR); synthetic data without them",
    )
    result.add_argument("--only", nargs="+", metavar="NAME", help="race only these contestants")
    return result


def _at_least(minimum: int) -> Any:
    def integer(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"`{text}` is below {minimum}")
        return int(text)

    return integer


def chosen(contestants: Mapping[str, str], only: Sequence[str] | None) -> dict[str, str]:
    """The contestants in `only`, or all contestants if it is empty."""
    unknown = set(only or ()) - set(contestants)
    if unknown:
        names = ", ".join(f"`{name}`" for name in sorted(unknown))
        sys.exit(f"Unknown contestant {names}; the contestants are: {list(contestants)}")
    return {name: function for name, function in contestants.items() if not only or name in only}


def run_models(
    description: str | None,
    contestants: Mapping[str, Mapping[str, str]],
    goals: Mapping[str, Sequence[Goal]],
    batch_sizes: Mapping[str, int],
    examples_of: Mapping[str, int],
) -> None:
    """The program that races the contestants of each model, with one core per process; the mappings are by model."""
    options = parser(description)
    options.add_argument("--models", nargs="+", choices=goals, default=list(goals))
    arguments = options.parse_args()
    with examples(arguments.data_dir) as (folder, _):
        for model in arguments.models:
            racing = chosen(contestants[model], arguments.only)
            job = Job(model, batch_sizes[model], examples_of[model], epochs=0, data=folder)
            tracks = run(job, racing, warmup=arguments.warmup, repeats=arguments.repeats)
            title = (
                f"{model}, batch {job.batch_size}, {job.examples:,} examples, one core per process: seconds per epoch"
            )
            report(title, tracks, goals[model])


@contextlib.contextmanager
def examples(data_dir: str | None) -> Iterator[tuple[str, bool]]:
    """A context with a folder with the arrays, and whether they are the real dataset."""
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as folder:
        yield folder, data.prepare(Path(folder), data_dir)


def main() -> None:
    """The worker: `python -m benchmarks.race MODULE:FUNCTION JOB`."""
    # The contestant's output must not mix with the lines of the protocol.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, function = sys.argv[1].split(":")
    job = Job(**json.loads(sys.argv[2]))
    turns = Turns(job, sys.stdin, answers)
    try:
        getattr(importlib.import_module(module), function)(job, turns)
        turns.answer({"ended": True})
    except Exception:
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    main()
