"""The cost of a checkpoint of a large state: the pause of training, the time until it is written, and memory.

A job of two processes trains one dense layer, saves twice and ends; then it is started again and resumes. The memory of
a process is given relative to its weights and slots: from the start to the first step, and while a checkpoint is copied
and written. `--before FOLDER` also measures another checkout of the project, in turns.
Example: `python -m benchmarks.checkpoints --before ../main`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
GIB = 2**30
BATCH_SIZE, STEPS = 4, 4
# Values per weight in the state: Adam has two slots per weight, SGD has none.
OPTIMIZERS = {"adam": 3, "sgd": 1}


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.folder is not None:
        train(arguments)
        return
    trees = {"now": ROOT} | ({"before": Path(arguments.before).resolve()} if arguments.before else {})
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for _ in range(arguments.repeats):
        for name, tree in trees.items():
            with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
                for phase in ("start", "resume"):
                    start(tree, Path(folder), phase, sys.argv[1:])
                results[name].append({path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")})
    for name, runs in results.items():
        report(name, runs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--parameters", type=float, default=85e6, help="number of weights (default 85e6: 1 GB with Adam)"
    )
    parser.add_argument("--layers", type=int, default=1, help="number of layers with these weights")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--dtype", default="float32", help="dtype of the weights")
    parser.add_argument("--strategy", default="multiworker")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--before", metavar="FOLDER", help="another checkout of the project")
    parser.add_argument("--scratch", metavar="FOLDER", help="folder for the checkpoints")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    return parser


def start(tree: Path, folder: Path, phase: str, options: list[str]) -> None:
    """Runs a job with the package of `tree`."""
    script = [str(Path(__file__).resolve()), *options, "--folder", str(folder), "--phase", phase]
    command = [sys.executable, "-m", "tfdist.launch", "--workers", "2", "--log-dir", str(folder / "logs"), *script]
    environment = os.environ | {"PYTHONPATH": str(tree), "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def train(arguments: argparse.Namespace) -> None:
    """Trains in one process of the job, and writes its numbers to the folder."""
    import keras
    import numpy as np

    import tfdist
    from tfdist.callbacks import Checkpoint

    folder, numbers = Path(arguments.folder), {}
    strategy = tfdist.strategy(arguments.strategy, seed=1)
    keras.config.set_dtype_policy(arguments.dtype)
    width = int((arguments.parameters / arguments.layers) ** 0.5)
    weight_bytes = keras.Variable(np.zeros(1), dtype=arguments.dtype).value.dtype.size
    state = width * width * arguments.layers * OPTIMIZERS[arguments.optimizer] * weight_bytes

    class Timed(Checkpoint):
        """Measures the pause of training, the time until the file is written, and the memory meanwhile."""

        def save_within_epoch(self, logs: dict[str, Any]) -> None:
            before, began, step = reset_peak(), time.perf_counter(), self.step
            super().save_within_epoch(logs)
            stopped = time.perf_counter() - began
            if step % 2 == 0 and step < STEPS + 2:
                saved = self.saved  # waits for the writer
                numbers["stops, s"], numbers["written, s"] = stopped, time.perf_counter() - began
                numbers["save"] = (peak() - before) / state
                numbers["written"] = bool(saved)

    class Begun(keras.callbacks.Callback):
        """Measures the time and memory until the first step."""

        def on_train_begin(self, logs: Any = None) -> None:
            numbers["seconds to share"] = time.perf_counter()

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if "join" not in numbers:
                numbers["join"] = (peak() - before) / state
                numbers["seconds to share"] = time.perf_counter() - numbers["seconds to share"]

    before = reset_peak()
    numbers["state, GB"] = state / 1e9
    with strategy.scope():
        layers = [keras.layers.Dense(width, use_bias=False) for _ in range(arguments.layers)]
        model = keras.Sequential([keras.Input((width,)), *layers])
        optimizer = {"adam": keras.optimizers.Adam, "sgd": keras.optimizers.SGD}[arguments.optimizer](1e-6)
        model.compile(optimizer, "mse", jit_compile=False)
    x = np.ones((BATCH_SIZE * (STEPS - 1), width), "float32")
    keep = Timed(folder / "checkpoints", every_steps=2, keep=1, resume=arguments.phase == "resume")
    epochs = 1 if arguments.phase == "start" else 2
    strategy.fit(model, x, x, batch_size=BATCH_SIZE, epochs=epochs, verbose=0, callbacks=[keep, Begun()])
    numbers["resumed"] = keep.resumed_from is not None
    (folder / f"{arguments.phase} {strategy.world.rank}.json").write_text(json.dumps(numbers))


def reset_peak() -> int:
    """Resets the peak memory of this process, and returns its current memory, in bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """The peak memory of this process since the last reset, in bytes."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def report(name: str, runs: list[dict[str, Any]]) -> None:
    """Prints the numbers of all runs of one checkout in ascending order."""
    first = runs[0]["start 0"]
    print(f"\n{name}: {first['state, GB']:.2f} GB of weights and slots in each of 2 processes\n")
    rows = {
        "pause of training, s": ("start 0", "stops, s"),
        "from the start of the pause until it is written, s": ("start 0", "written, s"),
        "memory added to the chief meanwhile / its state": ("start 0", "save"),
        "memory added to the other process meanwhile": ("start 1", "save"),
        "peak of the chief when it starts / its state": ("start 0", "join"),
        "peak of the other process when it starts": ("start 1", "join"),
        "peak of the chief when it resumes": ("resume 0", "join"),
        "peak of the other process when it resumes": ("resume 1", "join"),
        "time to read and broadcast the checkpoint, s": ("resume 0", "seconds to share"),
    }
    for text, (job, key) in rows.items():
        values = sorted(run[job][key] for run in runs)
        print(f"{text:<56}" + "".join(f"{value:>9.2f}" for value in values), flush=True)


if __name__ == "__main__":
    main()
