"""The accuracy of `tfdist memory`: its estimate, compared with the memory of a process that trains, for ten models.

The measured memory is the peak of the process, minus its memory after training a tiny model. The allocator's share of
the estimate was fitted to the first five models; the others test it.
Example: `python -m benchmarks.estimates`
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks import recomputation

FITTED = {"unet": 16, "resnet50": 16, "resnet20": 256, "vgg16": 64, "transformer": 64}
OTHERS = {"resnet18": 64, "segnet": 32, "bilstm": 128, "textcnn": 256, "seq2seq": 128}
BATCH_SIZES = FITTED | OTHERS
TARGET = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=BATCH_SIZES, default=list(BATCH_SIZES))
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    print(f"{'model':<14}{'batch':>6}{'estimate MiB':>14}{'measured MiB':>14}{'off by':>9}   at most {TARGET:.0%}")
    for model in arguments.models:
        estimate, measured = estimated(model) / 2**20, trained(model, arguments.repeats) / 2**20
        off = f"{estimate / measured - 1:+.0%}"
        print(f"{model:<14}{BATCH_SIZES[model]:>6}{estimate:>14,.0f}{measured:>14,.0f}{off:>9}", flush=True)


def estimated(model: str) -> int:
    """The estimate of `tfdist memory`, in bytes."""
    from tfdist import memory

    return memory.estimate(model, "synthetic", BATCH_SIZES[model], data_options=recomputation.EXAMPLES[model]).total


def trained(model: str, repeats: int) -> float:
    """The median peak memory over `repeats` processes that train, in bytes."""
    options = ["--models", model, "--batch-size", str(BATCH_SIZES[model]), "--epochs", "1"]
    arguments = recomputation.parser().parse_args(options)
    return statistics.median(recomputation.start(arguments, model, "plain")["bytes"] for _ in range(repeats))


if __name__ == "__main__":
    main()
