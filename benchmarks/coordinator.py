"""CPU seconds of the chief of a `parameter_server` job per 1,000 steps, and bytes sent, by the number of workers.

The model is small, so that the workers are fast and the chief is busy. Data are arrays of the program (`arrays`), a
dataset of tfdist (`source`), or a dataset that is read by the indices of the examples (`indexed`). `--before FOLDER`
also measures another checkout of the project, in turns. Bytes are counted on the machine's loopback interface, and
include those of other programs.
Example: `python -m benchmarks.coordinator --workers 1 2 4 --before ../before`
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STEPS, BATCH, WIDTH = 1000, 32, 64
ROLE = "--measured"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--data", nargs="*", default=["arrays"], choices=["arrays", "source", "indexed"])
    parser.add_argument("--before", type=Path, help="another checkout of the project")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    print("medians per 1,000 steps")
    print("data     workers  checkout  chief's CPU s  seconds  MB sent  MB of the first call")
    checkouts = {"before": arguments.before} if arguments.before else {}
    for data in arguments.data:
        for workers in arguments.workers:
            results: dict[str, list[Any]] = {}
            for _ in range(arguments.rounds):
                for name, folder in (checkouts | {"now": ROOT}).items():
                    results.setdefault(name, []).extend(_job(folder, data, workers, arguments.epochs))
            for name, epochs in results.items():
                cpu, seconds, sent, first = (statistics.median(each) for each in zip(*epochs, strict=True))
                print(f"{data:8} {workers:7}  {name:8}  {cpu:13.2f}  {seconds:7.1f}  {sent:7.1f}  {first:20.1f}")


def _job(folder: Path, data: str, workers: int, epochs: int) -> list[list[float]]:
    """The numbers of each measured epoch of one job."""
    command = [sys.executable, "-m", "tfdist.launch", "--workers", str(workers), "--ps", "1"]
    environment = os.environ | {"PYTHONPATH": str(folder), "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory() as start:
        script = shutil.copy(__file__, start)  # not in a checkout, so that `folder` is imported
        command += [script, ROLE, data, str(epochs)]
        done = subprocess.run(command, cwd=start, env=environment, capture_output=True, text=True, check=False)
    lines = [line.partition("MEASURED ")[2] for line in done.stdout.splitlines()]
    if not any(lines):
        sys.exit(f"the job failed:\n{done.stderr}")
    return [json.loads(line) for line in lines if line]


def load(data_dir: Any = None) -> Any:
    """Random examples, as a source of arrays."""
    import numpy as np

    from tfdist.data import Source

    del data_dir
    rng = np.random.default_rng(0)
    examples = STEPS * BATCH
    train = rng.random((examples, WIDTH), "float32"), rng.integers(0, 10, examples)
    return Source.from_arrays("random", classes=10, train=train)


def load_indexed(data_dir: Any = None) -> Any:
    """The same examples, read by index."""
    from tfdist.data import IndexedSource

    whole = load(data_dir)
    x, y = whole.arrays("train")
    return IndexedSource(whole.spec, lambda split, indices: (x[indices], y[indices]))


def _measured(data: str, epochs: int) -> None:
    """The program of all processes of a job; the chief prints."""
    import keras
    import psutil

    import tfdist
    from tfdist.data import load as load_source

    def sent() -> float:
        return psutil.net_io_counters(pernic=True)["lo"].bytes_sent / 1e6

    strategy = tfdist.strategy("parameter_server", seed=1, threads=1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    source = load_source("coordinator:" + ("load_indexed" if data == "indexed" else "load"))
    examples = source.arrays("train") if data == "arrays" else (source.feed("train", BATCH, seed=1),)
    sent_before = sent()
    strategy.fit(model, *examples, batch_size=BATCH, epochs=1, verbose=0)
    first = sent() - sent_before
    for _ in range(epochs):
        sent_before, cpu, began = sent(), time.process_time(), time.perf_counter()
        strategy.fit(model, *examples, batch_size=BATCH, epochs=1, verbose=0)
        numbers = [time.process_time() - cpu, time.perf_counter() - began, sent() - sent_before, first]
        print("MEASURED", json.dumps(numbers), flush=True)


if __name__ == "__main__":
    if ROLE in sys.argv:
        _measured(sys.argv[2], int(sys.argv[3]))
    else:
        main()
