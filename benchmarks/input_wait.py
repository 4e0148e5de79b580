"""The fraction of a step that waits for input, from `tfdist.profiling.trace`, for every model on synthetic data.

The command trains a small version of each model for an epoch of 40 steps, of which `--profile` traces the last 20.

Example: `python -m benchmarks.input_wait --only cnn resnet20`
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import tfdist.models
from benchmarks import race
from tfdist.profiling import trace

TARGET = 0.02
BATCH_SIZE, STEPS, TRACED = 32, 40, 20
# Images that all models accept; the width reduces a step from seconds to milliseconds.
SHAPE = {"classification": "32,32,3", "segmentation": "64,64,3", "autoencoding": "32,32,3"}
WIDTH = {"vgg11": 0.125, "vgg16": 0.125, "resnet18": 0.125, "resnet50": 0.125, "unet": 0.125, "segnet": 0.125}


def traced(model: str, strategy: str, folder: Path) -> trace.Summary:
    """Trains `model` with `--profile`, and returns the summary of its trace.

    Raises:
        RuntimeError: the command failed.
    """
    task = tfdist.models.tasks(model)[0]
    facts = {"task": task, "train": BATCH_SIZE * STEPS, "validation": 0, "test": BATCH_SIZE, "shape": SHAPE.get(task)}
    data_options = [f"--data-option={name}={value}" for name, value in facts.items() if value is not None]
    command = [sys.executable, "-m", "tfdist.train", "--strategy", strategy, "--dataset", "synthetic", *data_options]
    command += ["--model", model, f"--model-option=width={WIDTH.get(model, 0.25)}", "--batch-size", str(BATCH_SIZE)]
    command += ["--epochs", "1", "--profile", f"{STEPS - TRACED}:{STEPS}", "--quiet", "--run-dir", str(folder)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"`{model}` ended with code {done.returncode}:\n{done.stdout[-2000:]}")
    return trace.summarize(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tfdist.models.names(), default=tfdist.models.names())
    parser.add_argument("--strategy", default="single", help="default: %(default)s")
    arguments = parser.parse_args()
    print(f"{'model':<18}{'ms/step':>9}{'steps':>7}{'waits for input':>17}  (at most {TARGET:.0%})")
    for model in arguments.only:
        with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as folder:
            summary = traced(model, arguments.strategy, Path(folder, "run"))
        assert summary.input_share is not None and summary.step_seconds is not None, "the trace has marked steps"
        verdict = race.verdict(summary.input_share <= TARGET)
        print(
            f"{model:<18}{1000 * summary.step_seconds:>9.2f}{summary.steps:>7}{summary.input_share:>17.2%}  {verdict}",
            flush=True,
        )


if __name__ == "__main__":
    main()
