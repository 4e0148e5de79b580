"""Steps per second of simulated workers, compared with `single` on batches of the size of a worker's part.

Both train in one process, in turns. The ratio is that of the two in a round, as in `tfdist compare`. Runs of `single`
and of each algorithm have the same number of steps. Example: `python -m benchmarks.simulated --algorithms adpsgd bsp`
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

PART = 5  # examples of a worker's part of a global batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9, help="rounds")
    parser.add_argument("--warmup", type=int, default=2, help="warm-up rounds")
    parser.add_argument("--workers", type=int, default=24)
    parser.add_argument("--batches", type=int, default=10, help="global batches per round")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--dataset", default="fashion_mnist")
    parser.add_argument("--data-dir", type=Path, help="by default TFDS_DATA_DIR")
    parser.add_argument("--algorithms", nargs="+", default=["adpsgd", "average", "bsp", "asp"], metavar="NAME")
    arguments = parser.parse_args()
    turns = contestants(arguments)
    seconds: dict[str, dict[int, float]] = {name: {} for name in turns}
    for number in range(-arguments.warmup, arguments.repeats):
        for name in list(turns)[:: 1 if number % 2 else -1]:
            began = time.perf_counter()
            turns[name]()
            seconds[name][number] = time.perf_counter() - began
    measured = {name: {key: value for key, value in rounds.items() if key >= 0} for name, rounds in seconds.items()}
    report(measured, arguments.workers * arguments.batches)


def contestants(arguments: argparse.Namespace) -> dict[str, Any]:
    """Functions that run a turn, by name."""
    import keras

    import tfdist
    from tfdist import models, tasks
    from tfdist.advisor.costs import Link
    from tfdist.data.tools import for_model
    from tfdist.simulator import simulation
    from tfdist.simulator.links import Links

    workers, batches = arguments.workers, arguments.batches
    examples = workers * PART * batches
    strategy = tfdist.strategy("single", seed=0)
    source = for_model.load(arguments.model, arguments.dataset, arguments.data_dir).limit(examples)
    with strategy.scope():
        model = models.build(arguments.model, source.spec)
        tasks.compile(model, source.spec, keras.optimizers.SGD(0.01))
    feed = source.feed("train", PART, seed=0)
    turns: dict[str, Any] = {"single": lambda: strategy.fit(model, feed, epochs=1, verbose=0)}
    steps, _ = simulation.make_replicas(
        *(arguments.model, arguments.dataset, workers * PART, workers, 0),
        data_dir=arguments.data_dir,
        examples=examples,
        optimizer="sgd",
        learning_rate=0.01,
    )
    links = Links.of(workers, Link(latency_seconds=50e-6, bytes_per_second=1.25e9))
    for name in arguments.algorithms:
        algorithm = simulation.make_algorithm(steps, simulation.Settings(name, (1.0,) * workers, 0.01, links))
        turns[name] = lambda algorithm=algorithm: algorithm.run(batches)
    return turns


def report(seconds: dict[str, dict[int, float]], steps: int) -> None:
    """Prints milliseconds per step, and the steps per second relative to `single`."""
    import statistics

    from tfdist.study import ratios

    for name, rounds in seconds.items():
        ratio = ratios.of_rounds(seconds["single"], rounds)
        assert ratio is not None
        relative = "" if name == "single" else f", steps per second / single {ratio.text}"
        print(f"{name:10} {1e3 * statistics.median(rounds.values()) / steps:7.2f} ms per step{relative}", flush=True)


if __name__ == "__main__":
    main()
