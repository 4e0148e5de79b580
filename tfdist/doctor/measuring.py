"""`python -m tfdist.doctor.measuring STRATEGY FILE`: times all-reduces in each process of a job; the chief writes FILE.

As for gradients, the all-reduces run inside a graph, in a loop in which each depends on the one before.
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
