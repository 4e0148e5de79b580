"""Peak memory and time per step of `nbow` with a million word vectors, with sparse and with dense gradients.

Three ways, each in a separate process: tfdist's, whose gradient and update use only the rows of a batch's words; Keras'
update of the same sparse gradient (`fused=False`), which computes with the whole table; and a dense gradient, which is
as large as the table.

The minimum for the sparse way is the table and the optimizer's slot, for each copy of the variables, plus the memory of
TensorFlow itself; nothing else has the size of the table (see `keras_variables.fill_large_variables_in_place`, which
helps all ways). With Adam it is the table and two slots.

Example: `python -m benchmarks.sparse --rows 1000000 --embedding 300`
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

STRATEGIES = {"single": 1, "custom": 2, "mirrored": 2}
WAYS = ("sparse", "keras", "dense")
TARGET = 0.5
BATCH_SIZE, LENGTH, STEPS = 32, 32, 10


def measure(strategy_name: str, way: str, rows: int, embedding: int) -> dict[str, float]:
    """Trains in a fresh process, and returns "peak_mib", "before_mib" (TensorFlow alone) and "step_seconds"."""
    arguments = ["--one", strategy_name, way, "--rows", str(rows), "--embedding", str(embedding)]
    command = [sys.executable, "-m", "benchmarks.sparse", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def train(strategy_name: str, way: str, rows: int, embedding: int) -> dict[str, float]:
    """Trains for two epochs of `STEPS` steps in this process, and times the second epoch."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist
    from tfdist import models, tasks
    from tfdist.callbacks import memory
    from tfdist.data.spec import DataSpec

    class DenseAdagrad(keras.optimizers.Adagrad):
        """Adagrad with dense gradients."""

        def apply(self, grads, trainable_variables=None):
            super().apply([tf.convert_to_tensor(gradient) for gradient in grads], trainable_variables)

    spec = DataSpec("words", "text_classification", (LENGTH,), 2, {"train": STEPS * BATCH_SIZE}, vocabulary_size=rows)
    rng = np.random.default_rng(0)
    x = rng.integers(1, rows, (STEPS * BATCH_SIZE, LENGTH)).astype(np.int32)
    y = rng.integers(0, 2, len(x)).astype(np.int32)
    strategy = tfdist.strategy(strategy_name, devices=STRATEGIES[strategy_name], fused=way != "keras")
    with strategy.scope():
        before = memory.peak_resident_bytes()
        model = models.build("nbow", spec, embedding=embedding)
        optimizer = DenseAdagrad if way == "dense" else keras.optimizers.Adagrad
        tasks.compile(model, spec, optimizer(0.05))
    strategy.fit(model, x, y, batch_size=BATCH_SIZE, epochs=1, verbose=0)
    began = time.perf_counter()
    strategy.fit(model, x, y, batch_size=BATCH_SIZE, epochs=1, verbose=0)
    seconds = (time.perf_counter() - began) / STEPS
    peak = memory.peak_resident_bytes()
    return {"peak_mib": peak / 2**20, "before_mib": before / 2**20, "step_seconds": seconds}


def main() -> None:
    """Prints the table, or with `--one` a single measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--embedding", type=int, default=300)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--one", nargs=2, metavar=("STRATEGY", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(train(*arguments.one, arguments.rows, arguments.embedding)))
        return
    print(f"nbow, {arguments.rows:,} word vectors of {arguments.embedding}, Adagrad, batch {BATCH_SIZE}\n")
    print(f"{'strategy':<12}{'way':<10}{'peak MiB':>10}{'without TF':>12}{'ms/step':>11}{'peak / dense':>14}")
    for strategy in arguments.strategies:
        results = {way: measure(strategy, way, arguments.rows, arguments.embedding) for way in WAYS}
        for way, figures in results.items():
            added = figures["peak_mib"] - figures["before_mib"]
            ratio = figures["peak_mib"] / results["dense"]["peak_mib"]
            verdict = f"   {'reached' if ratio <= TARGET else 'missed'}: at most {TARGET}" if way == "sparse" else ""
            line = f"{strategy:<12}{way:<10}{figures['peak_mib']:>10,.0f}{added:>12,.0f}"
            print(f"{line}{1000 * figures['step_seconds']:>11.1f}{ratio:>14.2f}{verdict}", flush=True)


if __name__ == "__main__":
    main()
