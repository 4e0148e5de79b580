"""Measures latency and bandwidth of an all-reduce between two processes on this machine, over each available engine.

`python -m tfdist.doctor.links STRATEGY FILE` is what each process of the measured job runs; the chief writes FILE. As
for gradients, the all-reduces run inside a graph, in a loop in which each depends on the one before.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tfdist
from tfdist import terminal
from tfdist.doctor import child, engines
from tfdist.doctor.finding import Finding, ok, problem

SUBJECT = "all-reduce"
SECONDS_TO_MEASURE = 120.0
SECONDS_TO_START = 45.0
# The transport of a strategy's tensors, and the launcher's options for its processes.
ENGINES = {"multiworker": ("sockets", ()), "horovod": ("Gloo", ()), "mpi_split": ("MPI", ("--mpi",))}

SMALL_BYTES, LARGE_BYTES = 4, 16 << 20
SMALL_REPEATS, LARGE_REPEATS = 200, 5
ROUNDS = 5
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Link:
    """The speed of an all-reduce between two processes of this machine, inside a graph as in a training step.

    Attributes:
        engine: "sockets", "Gloo" or "MPI", the transports of `multiworker`, `horovod` and `mpi_split`.
        latency_microseconds: the time of an all-reduce of `small_bytes`.
        gigabytes_per_second: `large_bytes` divided by the time of its all-reduce, in 10^9 bytes per second.
        small_bytes: the size of the small message.
        large_bytes: the size of the large message.
    """

    engine: str
    latency_microseconds: float
    gigabytes_per_second: float
    small_bytes: int
    large_bytes: int


@dataclass(frozen=True)
class Measurement:
    """A measurement, or the reason why it failed.

    Attributes:
        engine: as in `Link`.
        strategy: the strategy that uses the engine.
        link: the result; `None` if the all-reduce failed.
        error: the error of the processes, if it failed.
        hint: what to do, if it failed.
    """

    engine: str
    strategy: str
    link: Link | None
    error: str = ""
    hint: str = ""


def measure() -> list[Measurement]:
    """Measures over sockets, and over Gloo and MPI if Horovod and mpi4py load, one after the other."""
    strategies = []
    if not engines.load("tensorflow").error:
        strategies.append("multiworker")
    if "Gloo" in engines.load("horovod").facts.get("built_with", []):
        strategies.append("horovod")
    if not engines.load("mpi4py").error and "Open MPI" in (engines.mpirun() or ""):
        strategies.append("mpi_split")
    return [between_two_processes(strategy) for strategy in strategies]


def between_two_processes(strategy: str) -> Measurement:
    """Starts a job of two processes of `strategy`, a key of `ENGINES`, and times their all-reduce."""
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return _job(strategy, Path(folder))
    except OSError as error:
        hint = "set `TMPDIR` to a writable folder"
        return Measurement(ENGINES[strategy][0], strategy, None, f"they could not be started: {error.strerror}", hint)


def _job(strategy: str, folder: Path) -> Measurement:
    engine, options = ENGINES[strategy]
    results, logs = folder / "results.json", folder / "logs"
    job = ["--workers", "2", *options, "--log-dir", str(logs), "--start-seconds", f"{SECONDS_TO_START:g}"]
    program = ["-m", "tfdist.doctor.links", strategy, str(results)]
    # These engines exchange tensors in host memory, and two processes may have to share one GPU.
    without_gpus = {"CUDA_VISIBLE_DEVICES": "-1"}
    result = child.run([sys.executable, "-m", "tfdist.launch", *job, *program], SECONDS_TO_MEASURE, without_gpus)
    if result.succeeded:
        return Measurement(engine, strategy, Link(engine=engine, **json.loads(results.read_text(encoding="utf-8"))))
    error, hint = _cause(result, logs)
    # This command shows all messages of the processes.
    command = "python -m tfdist.train --workers 2 --model mlp --dataset digits --epochs 1 --verbose --strategy"
    error = f"their launcher {result.description()}: {error}"
    return Measurement(engine, strategy, None, error, hint or f"{command} {strategy}")


def _cause(result: child.Result, logs: Path) -> tuple[str, str]:
    """The last error of a process of the job, or of its launcher, and the hint of an error of tfdist."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(logs.rglob("*")) if path.is_file()]
    errors = re.findall(
        r"^(?:error|[\w.]+(?:Error|Exception)): .*(?:\n\nhint: .*)?", "\n".join([*texts, result.err]), re.M
    )
    error, _, hint = (errors or [result.last_line()])[-1].partition("\n\nhint: ")
    return error.removeprefix("error: "), hint


def findings(measurements: list[Measurement]) -> Iterator[Finding]:
    """The findings about measurements."""
    for measurement in measurements:
        link = measurement.link
        if link is None:
            yield problem(
                SUBJECT,
                f"Two processes of `{measurement.strategy}` could not all-reduce over {measurement.engine}: "
                f"{measurement.error}",
                measurement.hint,
            )
        else:
            small, large = terminal.counted(link.small_bytes, "byte"), f"{link.large_bytes >> 20} MiB"
            yield ok(
                SUBJECT,
                f"Two processes all-reduce {small} over {link.engine} in {link.latency_microseconds:,.0f} us, and "
                f"{large} at {link.gigabytes_per_second:.2f} GB/s",
            )


def main(strategy: str, file: str) -> None:
    """Times all-reduces between the processes of this job."""
    options: dict[str, Any] = {"communication": "sockets"} if strategy == "multiworker" else {}
    group: Any = getattr(tfdist.strategy(strategy, seed=0, **options), "group", None)
    small = _seconds(group, SMALL_BYTES // FLOAT_BYTES, SMALL_REPEATS)
    large = _seconds(group, LARGE_BYTES // FLOAT_BYTES, LARGE_REPEATS)
    if group.rank == 0:
        link = {
            "latency_microseconds": small * 1e6,
            "gigabytes_per_second": LARGE_BYTES / large / 1e9,
            "small_bytes": SMALL_BYTES,
            "large_bytes": LARGE_BYTES,
        }
        Path(file).write_text(json.dumps(link), encoding="utf-8")
    group.barrier()


def _seconds(group: Any, floats: int, repeats: int) -> float:
    """Returns the median time of an all-reduce of `floats` numbers, over rounds of `repeats` after a warm-up round."""
    import tensorflow as tf

    @tf.function(autograph=False)
    def all_reduce(values: tf.Tensor, times: tf.Tensor) -> tf.Tensor:
        def body(index: tf.Tensor, total: tf.Tensor) -> list[tf.Tensor]:
            return [index + 1, group.all_reduce([total], f"doctor.{floats}")[0]]

        return tf.while_loop(lambda index, _: index < times, body, [0, values], parallel_iterations=1)[1]

    if not bool(tf.reduce_all(all_reduce(tf.ones([floats]), tf.constant(1)) == group.size)):
        raise RuntimeError("The all-reduced sum is wrong")
    values, times = tf.zeros([floats]), tf.constant(repeats)  # repeated sums of ones would overflow
    all_reduce(values, times)
    return statistics.median(_timed(lambda: all_reduce(values, times), group) / repeats for _ in range(ROUNDS))


def _timed(call: Callable[[], Any], group: Any) -> float:
    group.barrier()
    began = time.perf_counter()
    call().numpy()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(*sys.argv[1:])
