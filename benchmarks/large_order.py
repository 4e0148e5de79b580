"""Time and memory to shuffle a very large dataset, by default with 10⁹ examples, in separate processes.

Example: `python -m benchmarks.large_order`

The first process only computes the order, without TensorFlow: the first batch of an epoch, one of 64 parts of it, and a
batch in the middle. The second process reads batches of an `IndexedSource` through `tf.data`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import race
from tfdist.data.input.division import Division

BATCH_SIZE = 1024
SEED = 1


def of_order(examples: int) -> dict[str, float]:
    """Measures seconds and MiB for the order of two epochs and its parts; for a separate process."""
    from tfdist.data.input import order

    before, batches = peak_mib(), examples // BATCH_SIZE
    results = {}
    for epoch, when in enumerate(("first", "second")):
        parts = order.Parts(order.epoch_order(examples, SEED, epoch), BATCH_SIZE, rank=3, division=Division(64))
        results[f"first batch of the {when} epoch, s"] = seconds(lambda: parts.indices[:BATCH_SIZE])  # noqa: B023
        results[f"its part of rank 3 of 64, {when} epoch, s"] = seconds(lambda: parts.joined(0, 1))  # noqa: B023
    results["a batch in the middle of an epoch, s"] = seconds(lambda: parts.joined(batches // 2, batches // 2 + 1))
    results["a million examples in a row, s"] = seconds(lambda: parts.indices[: 1 << 20])
    return results | {"added by the order, MiB": peak_mib() - before, "peak of the process, MiB": peak_mib()}


def of_source(examples: int) -> dict[str, float]:
    """Measures seconds and MiB for the pipeline of an indexed source; for a separate process."""
    import numpy as np

    from tfdist.data import DataSpec, IndexedSource
    from tfdist.jobs.world import World

    spec = DataSpec("large", "classification", (8,), 10, {"train": examples, "validation": 0, "test": 0})

    def read(split: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.repeat(indices[:, np.newaxis] / examples, 8, axis=1), indices % 10

    def batches(count: int, source: Any = None, **options: Any) -> None:
        world = World(3, 64)
        taken = (source or large).pipeline("train", BATCH_SIZE, world=world, seed=SEED, **options).take(count)
        assert sum(len(y) for _, y in taken) == count * BATCH_SIZE // 64

    small = dataclasses.replace(spec, examples={"train": 100_000, "validation": 0, "test": 0})
    large = IndexedSource(spec, read)
    batches(1, IndexedSource(small, read))  # TensorFlow's initialization for its first pipeline
    before = peak_mib()
    results = {
        "first batch of the first epoch, graph included, s": seconds(lambda: batches(1)),
        "first batch of the second epoch, s": seconds(lambda: batches(1, epoch=1)),
        "first batch from the middle of an epoch, s": seconds(
            lambda: batches(1, first_batch=examples // BATCH_SIZE // 2)
        ),
        "1000 batches of the rank, s": seconds(lambda: batches(1000, epoch=1)),
    }
    return results | {"added by the source, MiB": peak_mib() - before, "peak with TensorFlow, MiB": peak_mib()}


def peak_mib() -> float:
    """The peak resident memory of this process so far, in MiB."""
    return race.memory_mib()[0]


def seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


WHAT = {"order": of_order, "source": of_source}


def measure(what: str, examples: int) -> dict[str, float]:
    """The results of `WHAT[what]`, measured in a separate process."""
    command = [sys.executable, "-m", "benchmarks.large_order", "--examples", str(examples), "--only", what]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10**9, help="examples of the dataset (default: %(default)s)")
    parser.add_argument("--only", choices=WHAT, help="measure in this process, and print JSON")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(WHAT[arguments.only](arguments.examples)))
        return
    for what in WHAT:
        print(f"\nThe {what} of {arguments.examples:,} examples, batches of {BATCH_SIZE}")
        for name, value in measure(what, arguments.examples).items():
            print(f"  {name:<52}{value:>10.4f}" if name.endswith(" s") else f"  {name:<52}{value:>10.1f}")


if __name__ == "__main__":
    main()
