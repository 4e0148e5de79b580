"""Steps per second of `nbow` with two threads of `hogwild`, without and with locks, relative to `single`.

Each measurement is a fresh process; the kinds take turns, and the figures are medians of ratios within a round. Every
operation uses one thread, so that additional cores are only used by additional threads of `hogwild`.
Example: `python -m benchmarks.hogwild --repeats 5`
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

KINDS: dict[str, dict[str, Any]] = {
    "single": {"name": "single"},
    "hogwild": {"name": "hogwild", "workers": 2},
    "with locks": {"name": "hogwild", "workers": 2, "locks": True},
}
EXAMPLES, LENGTH = 12_800, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=100_000, help="number of word vectors")
    parser.add_argument("--embedding", type=int, default=300, help="length of a word vector")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(train(arguments)))
        return
    rounds = [{kind: measure(kind, sys.argv[1:]) for kind in KINDS} for _ in range(arguments.repeats)]
    for kind in KINDS:
        results = [each[kind] for each in rounds]
        rate, loss = (statistics.median(result[what] for result in results) for what in ("steps_per_second", "loss"))
        print(f"{kind:12}{rate:9.0f} steps/s   loss {loss:.4f}   mean staleness {results[-1]['staleness']:.2f}")
    for kind, other in (("hogwild", "single"), ("hogwild", "with locks")):
        ratios = [each[kind]["steps_per_second"] / each[other]["steps_per_second"] for each in rounds]
        print(f"{kind} / {other}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def measure(kind: str, options: list[str]) -> dict[str, float]:
    """The results of one kind, measured in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.hogwild", "--one", kind, *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def train(arguments: argparse.Namespace) -> dict[str, float]:
    """Trains for four epochs in this process, and times the last three."""
    import keras
    import numpy as np

    import tfdist
    from tfdist import models, tasks
    from tfdist.data.spec import DataSpec

    sizes = {"train": EXAMPLES}
    spec = DataSpec("words", "text_classification", (LENGTH,), 2, sizes, vocabulary_size=arguments.rows)
    rng = np.random.default_rng(0)
    x = rng.integers(1, arguments.rows, (EXAMPLES, LENGTH)).astype(np.int32)
    y = (x[:, 0] < arguments.rows // 2).astype(np.int32)
    strategy = tfdist.strategy(**KINDS[arguments.one], seed=0, threads=1)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = models.build("nbow", spec, embedding=arguments.embedding)
        optimizer = keras.optimizers.get({"class_name": arguments.optimizer, "config": {"learning_rate": 0.5}})
        tasks.compile(model, spec, optimizer)
    fit = {"batch_size": arguments.batch_size, "verbose": 0}
    strategy.fit(model, x, y, epochs=1, **fit)
    began = time.perf_counter()
    history = strategy.fit(model, x, y, epochs=3, **fit).history
    seconds = time.perf_counter() - began
    steps = 3 * -(-EXAMPLES // arguments.batch_size)
    staleness = history.get("staleness_mean", [0.0])[-1]
    return {"steps_per_second": steps / seconds, "loss": history["loss"][-1], "staleness": staleness}


if __name__ == "__main__":
    main()
