"""The accuracy of `tfdist memory`: its estimate, compared with the peak of a process that trains, for thirteen models.

The measured memory is `peak_memory_bytes` of the record that `tfdist train` writes. No constant of the estimate was
fitted to these models; TensorFlow's own memory, which the estimate includes, was measured with two others.
Example: `python -m benchmarks.estimates --models mlp resnet20`
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks import recomputation

SMALL = {"mlp": 32, "cnn": 32, "lenet": 32}
LARGE = {
    **{"unet": 16, "resnet50": 16, "resnet20": 256, "vgg16": 64, "transformer": 64},
    **{"resnet18": 64, "segnet": 32, "bilstm": 128, "textcnn": 256, "seq2seq": 128},
}
BATCH_SIZES = SMALL | LARGE
STEPS = 2
TARGET = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=BATCH_SIZES, default=list(BATCH_SIZES))
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    header = f"{'model':<14}{'batch':>6}{'estimate MiB':>14}{'measured MiB':>14}{'off by':>9}{'without base':>14}"
    print(f"{header}   at most {TARGET:.0%}")
    for model in arguments.models:
        print(compared(model, arguments.repeats), flush=True)


def compared(model: str, repeats: int) -> str:
    """A row of the table; "without base" leaves TensorFlow's own memory and the graph out of both figures."""
    from tfdist import memory

    dataset, options = examples(model)
    batch_size = BATCH_SIZES[model]
    estimate = memory.estimate(model, dataset, batch_size, data_options=options)
    measured = statistics.median(memory.trained_bytes(model, dataset, batch_size, options, {}) for _ in range(repeats))
    off = estimate.total / measured - 1
    base = estimate.framework + estimate.graph
    without = (estimate.total - base) / (measured - base) - 1 if model in LARGE else None
    numbers = f"{estimate.total / 2**20:>14,.0f}{measured / 2**20:>14,.0f}{off:>+9.0%}"
    return f"{model:<14}{batch_size:>6}{numbers}{'-' if without is None else f'{without:+.0%}':>14}"


def examples(model: str) -> tuple[str, dict[str, Any]]:
    """The dataset of a model and its options."""
    if model in SMALL:
        return "digits", {}
    options, batch_size = dict(recomputation.EXAMPLES[model]), BATCH_SIZES[model]
    if "classes" in options:  # with 1,000 classes, making synthetic images of 224 x 224 pixels takes 574 MiB
        options["classes"] = min(options["classes"], 100)
    return "synthetic", options | {"train": STEPS * batch_size, "validation": batch_size, "test": batch_size}


if __name__ == "__main__":
    main()
