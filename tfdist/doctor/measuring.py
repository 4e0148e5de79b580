"""`python -m tfdist.doctor.measuring STRATEGY FILE`: times all-reduces in each process of a job; the chief writes FILE.

The sums are inside a graph, as those of gradients are: a loop of exchanges that follow from each other.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tfdist

SMALL_BYTES, LARGE_BYTES = 4, 16 << 20
SMALL_REPEATS, LARGE_REPEATS = 200, 5
ROUNDS = 5
FLOAT_BYTES = 4


def main(strategy: str, file: str) -> None:
    """Measures between the processes of this job."""
    group: Any = getattr(tfdist.strategy(strategy, **_options(strategy)), "group", None)
    small = _seconds(group, SMALL_BYTES // FLOAT_BYTES, SMALL_REPEATS)
    large = _seconds(group, LARGE_BYTES // FLOAT_BYTES, LARGE_REPEATS)
    if group.rank == 0:
        found = {
            "latency_microseconds": small * 1e6,
            "gigabytes_per_second": LARGE_BYTES / large / 1e9,
            "small_bytes": SMALL_BYTES,
            "large_bytes": LARGE_BYTES,
        }
        Path(file).write_text(json.dumps(found), encoding="utf-8")
    group.barrier()


def _options(strategy: str) -> dict[str, Any]:
    return {"communication": "sockets", "seed": 0} if strategy == "multiworker" else {"seed": 0}


def _seconds(group: Any, floats: int, repeats: int) -> float:
    """The time of an all-reduce of so many floats: the median of rounds of `repeats`, after one that is not counted."""
    import tensorflow as tf

    @tf.function(autograph=False)
    def add_up(values: tf.Tensor, times: tf.Tensor) -> tf.Tensor:
        def once(index: tf.Tensor, total: tf.Tensor) -> list[tf.Tensor]:
            return [index + 1, group.all_reduce([total], f"doctor.{floats}")[0]]

        return tf.while_loop(lambda index, _: index < times, once, [0, values], parallel_iterations=1)[1]

    if not bool(tf.reduce_all(add_up(tf.ones([floats]), tf.constant(1)) == group.size)):
        raise RuntimeError("The sum of the processes is wrong")
    values, times = tf.zeros([floats]), tf.constant(repeats)  # sums of ones would grow without end
    add_up(values, times)
    return statistics.median(_timed(lambda: add_up(values, times), group) / repeats for _ in range(ROUNDS))


def _timed(call: Callable[[], Any], group: Any) -> float:
    group.barrier()
    began = time.perf_counter()
    call().numpy()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(*sys.argv[1:])
