"""Examples per second with shares in proportion to speed, relative to equal shares, if one process has half a core.

Two processes of `multiworker` are pinned to a core each; a third process computes on the core of the second, and leaves
it half. Each measurement is a fresh job; the kinds take turns, and the last figure is the median of the ratios.
Example: `python -m benchmarks.speeds --repeats 3`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.checkpoints import ROOT

KINDS = ("equal", "auto")
TARGET = 1.25


def main() -> None:
    arguments = _parser().parse_args()
    ratios = []
    for _ in range(arguments.repeats):
        results = {kind: start(arguments, kind) for kind in KINDS}
        ratios.append(results["auto"]["rate"] / results["equal"]["rate"])
        for kind, numbers in results.items():
            print(f"{kind:<8}{numbers['rate']:>10.0f} examples/s   speeds {numbers['speeds']}", flush=True)
    rounds = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"auto / equal {statistics.median(ratios):.2f}, median of {rounds}   at least {TARGET}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=4, help="epochs; the fastest after the first counts")
    parser.add_argument("--examples", type=int, default=6400, help="examples per epoch, of the size of fashion_mnist")
    parser.add_argument("--repeats", type=int, default=3)
    return parser


def start(arguments: argparse.Namespace, kind: str) -> dict[str, object]:
    """Runs a job, and returns its examples per second and the speeds that it has chosen."""
    with socket.create_server(("localhost", 0)) as first, socket.create_server(("localhost", 0)) as second:
        addresses = [f"localhost:{listener.getsockname()[1]}" for listener in (first, second)]
    with tempfile.TemporaryDirectory() as folder, burning(core=1):
        command = [sys.executable, "-m", "tfdist.train", "--strategy", "multiworker", "--model", arguments.model]
        command += ["--dataset", "synthetic", "--data-option", f"train={arguments.examples}"]
        command += ["--epochs", str(arguments.epochs), "--batch-size", str(arguments.batch_size), "--quiet"]
        command += ["--strategy-option", "threads=1", "--run-dir", f"{folder}/run"]
        command += ["--speeds", "auto"] if kind == "auto" else []
        processes = []
        for core in range(2):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": core}}
            environment = os.environ | {"TF_CONFIG": json.dumps(config), "PYTHONPATH": str(ROOT)}
            pinned = ["taskset", "--cpu-list", str(core), *command]
            processes.append(subprocess.Popen(pinned, env=environment, cwd=folder))
        codes = [process.wait() for process in processes]
        if any(codes):
            sys.exit(f"the job with parts `{kind}` failed")
        record = json.loads(Path(folder, "run", "run.json").read_text())
        rates = [epoch["examples_per_second"] for epoch in record["epochs"]]
        return {"rate": max(rates[1:]), "speeds": record["strategy"]["options"]["speeds"]}


@contextlib.contextmanager
def burning(core: int) -> Iterator[None]:
    """Within this context, another process keeps the core busy."""
    process = subprocess.Popen(["taskset", "--cpu-list", str(core), sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
