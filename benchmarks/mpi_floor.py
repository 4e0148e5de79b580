"""The time of the parts of a `horovod` step on two processes over MPI, and the machine's limit for communication.

Each process is pinned to its own core, with one compute thread. The parts of a step run separately, one after the
other; both processes begin each part at the same time. A complete step takes longer because it also waits for the other
process, reads data, computes metrics and schedules operations, and it takes less time if parts of the step overlap.
Example: `python -m benchmarks.mpi_floor`
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import race
from benchmarks.cluster import WIDE
from benchmarks.cluster_contestants import _as_launched, _pin
from benchmarks.mpi_contestants import PROCESSES, RANK

MODELS = ("cnn", WIDE)
BATCH = 128  # global batch size
STEPS = 40
WAITING = "waiting, data, dispatch; less what overlaps"


def measure(job: race.Job, repeats: int) -> None:
    """Measures in one process; rank 0 prints the table."""
    import numpy as np
    import tensorflow as tf

    import tfdist
    from benchmarks import contestants
    from tfdist.groups import opaque
    from tfdist.groups import packing as gradient_reduction
    from tfdist.groups.mpi import MpiGroup
    from tfdist.optimizers import fused as fused_optimizers

    mpi = MpiGroup()
    strategy = tfdist.strategy("horovod", seed=job.seed, timeout_seconds=3600.0)
    x, y = contestants._arrays(job)
    with strategy.scope():
        model = contestants.new_model(job)
        contestants.compile_model(model)
    model.optimizer.build(model.trainable_variables)
    half = BATCH // PROCESSES
    images, labels = tf.constant(x[:half]), tf.constant(y[:half])

    @tf.function(autograph=False)
    def compute() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = model.loss(labels, model(images, training=True))
        return tape.gradient(loss, model.trainable_variables)

    gradients = compute()
    sent: list[Any] = []
    gradient_reduction.packed(lambda buffers: sent.extend(buffers) or buffers, strategy.packing)(gradients)

    @tf.function(autograph=False)
    def pack(gradients: list[Any]) -> list[Any]:
        return gradient_reduction.packed(lambda buffers: [opaque(buffer) for buffer in buffers], strategy.packing)(
            gradients
        )

    @tf.function(autograph=False)
    def communicate(buffers: list[Any]) -> list[Any]:
        return strategy.group.all_reduce(buffers, "floor")

    @tf.function(autograph=False)
    def update(gradients: list[Any]) -> None:
        with fused_optimizers.fused(model.optimizer):
            model.optimizer.apply(gradients, model.trainable_variables)

    def seconds(function: Callable[[], Any]) -> list[float]:
        function()
        times = []
        for _ in range(repeats):
            mpi.barrier()
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
        return times

    everything = np.zeros(sum(int(tf.size(buffer)) for buffer in sent), np.float32)
    parts = {
        "compute: forward and backward": seconds(compute),
        "packing": seconds(lambda: pack(gradients)),
        f"communication: all-reduce of {len(sent)} buffers": seconds(lambda: communicate(sent)),
        "update: Adam in one kernel per variable": seconds(lambda: update(gradients)),
    }
    bound = seconds(lambda: mpi.sum_in_place(everything))

    def epochs(count: int) -> None:
        strategy.fit(model, x, y, batch_size=BATCH, epochs=count, verbose=0)

    epochs(1)
    steps = [epoch_seconds / STEPS for epoch_seconds in seconds(lambda: epochs(1))]
    if strategy.world.is_chief:
        _report(job.model, parts, steps, bound, everything.nbytes)


def _report(model: str, parts: dict[str, list[float]], steps: list[float], bound: list[float], size_bytes: int) -> None:
    step = statistics.median(steps)
    print(f"\n{model}, global batch {BATCH} on two processes, one core each: milliseconds per step\n")
    print(f"{'part':<44}{'median':>9}{'min':>9}{'max':>9}{'of a step':>11}")

    def line(name: str, values: list[float]) -> None:
        numbers = (1e3 * value for value in (statistics.median(values), min(values), max(values)))
        print(f"{name:<44}" + "".join(f"{n:>9.2f}" for n in numbers) + f"{statistics.median(values) / step:>10.0%}")

    for name, values in parts.items():
        line(name, values)
    line(WAITING, [step - sum(statistics.median(values) for values in parts.values())])
    line("step, measured", steps)
    line("bound: MPI all-reduce of the same bytes", bound)
    rate = size_bytes / statistics.median(bound) / 1e9
    print(f"{size_bytes / 1e6:.1f} MB are summed at {rate:.2f} GB/s at best")


def main() -> None:
    arguments = race.parser(__doc__).parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with race.examples(arguments.data_dir) as (folder, _):
        for model in MODELS:
            job = race.Job(model, BATCH, BATCH * STEPS, epochs=0, data=folder)
            values = [json.dumps(dataclasses.asdict(job)), str(arguments.repeats)]
            options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(PROCESSES)]
            if os.spawnvp(os.P_WAIT, "mpirun", ["mpirun", *options, sys.executable, "-m", __spec__.name, *values]):
                sys.exit(1)


if __name__ == "__main__":
    if RANK in os.environ:
        _pin(int(os.environ[RANK]))
        _as_launched()
        measure(race.Job(**json.loads(sys.argv[1])), int(sys.argv[2]))
    else:
        main()
