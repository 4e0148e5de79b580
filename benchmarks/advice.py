"""The error of the cost model of `tfdist advise` for two processes on this machine, for ten models in two settings.

    compute         large batches
    communication   batches of a few examples, for which processes mostly exchange gradients

Each round measures what `tfdist advise` measures in a round, and then the jobs, so that other work on the machine
affects both. A line shows the ratio of the measured to the predicted seconds per step, the mean over the rounds,
whether it is within 1.15, and whether the median job is inside the interval that `tfdist advise` would print after
these rounds. The last ratio is that to the formulas alone, without the correction by a measured job of two processes.
Example: `python -m benchmarks.advice --models cnn textcnn --settings compute --strategies multiworker pipeline`
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from tfdist.advisor import costs, measured
from tfdist.advisor import rounds as round_of

SETTINGS = ("compute", "communication")
STRATEGIES = ("multiworker", "pipeline")
EPOCH_SECONDS = 2.0
TOLERANCE = 1.15


@dataclass(frozen=True)
class Case:
    """A model with its synthetic dataset, and the global batch of each setting."""

    compute: int
    communication: int
    data: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


EXAMPLES = 10_000
PICTURES, TEXT = ("shape=32,32,3",), ("task=text_classification",)
CASES = {
    "mlp": Case(1024, 8),
    "cnn": Case(256, 4),
    "lenet": Case(256, 4),
    "resnet20": Case(128, 2, PICTURES),
    "mobilenet_v3_small": Case(128, 2, PICTURES),
    "vgg11": Case(64, 2, PICTURES, ("width=0.25",)),
    "conv_autoencoder": Case(256, 4, ("task=autoencoding",)),
    "textcnn": Case(256, 4, TEXT),
    "bilstm": Case(256, 4, TEXT),
    "transformer": Case(128, 2, TEXT),
    "benchmarks.advice:wide": Case(1024, 8),  # mostly communication, with large dense layers
}


def wide(spec: Any) -> keras.Model:
    """A model with 8.1 million parameters on 28x28 pixels, most of them in dense layers."""
    units = [keras.layers.Dense(count, "relu") for count in (2048, 2048, 1024)]
    return keras.Sequential([keras.Input(spec.input_shape), keras.layers.Flatten(), *units, keras.layers.Dense(10)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES)[:10], metavar="NAME")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES[:1])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for model in arguments.models:
        for setting in arguments.settings:
            compare(model, setting, arguments.strategies, arguments.rounds)


def compare(model: str, setting: str, strategies: list[str], rounds: int) -> None:
    """Measures and predicts in turns, and prints a line per strategy."""
    case = CASES[model]
    data = (*case.data, f"train={EXAMPLES}", "validation=100", "test=100")
    options: dict[str, object] = {"model": model, "dataset": "synthetic"}
    options |= {"data_option": data, "model_option": case.options}
    size = getattr(case, setting)
    # A pipeline divides a batch into micro-batches.
    able = [name for name in strategies if name != "pipeline" or size >= costs.MICRO_BATCHES]
    with tempfile.TemporaryDirectory() as folder:
        work = measured.Work(options, size, EXAMPLES, tuple(sorted(os.sched_getaffinity(0))))
        work = work.with_lengths_for(Path(folder), EPOCH_SECONDS)
        turns = []
        for number in range(rounds):
            here = Path(folder, str(number))
            facts, _ = round_of.measure_once(work, [2], able, None, here)
            facts = dataclasses.replace(facts, steps=work.epoch_steps)
            names = costs.modelled_step_seconds(facts, 2)
            turns.append((facts, {name: measured.job(work, name, 2, here / name)[0] for name in names}))
    for name in strategies:
        print(f"{model}, {setting}, {name}, batch {size}: {line(turns, name, size)}", flush=True)


def line(turns: list[tuple[costs.Facts, dict[str, float]]], name: str, size: int) -> str:
    """Summarizes the predicted, the modelled and the measured seconds of each round."""
    predictions = [[one for one in costs.predict(facts, [2]) if one.strategy == name] for facts, _ in turns]
    if not all(predictions):
        return "refused"
    measured_seconds = [jobs[name] for _, jobs in turns]
    predicted_seconds = [size / one.examples_per_second for (one,) in predictions]
    modelled_seconds = [costs.modelled_step_seconds(facts, 2)[name] for facts, _ in turns]
    (prediction,) = costs.combined(predictions)
    off = prediction.examples_per_second * statistics.median(measured_seconds) / size
    ratio = mean_ratio(measured_seconds, predicted_seconds)
    near = "yes" if max(ratio, 1 / ratio) <= TOLERANCE else "no"
    inside = "yes" if max(off, 1 / off) <= prediction.within else "no"
    milliseconds = " ".join(
        f"{1e3 * one:.2f}/{1e3 * other:.2f}" for one, other in zip(predicted_seconds, measured_seconds, strict=True)
    )
    return (
        f"measured / predicted {ratio:.2f}, within {TOLERANCE} {near}, inside the interval (factor "
        f"{prediction.within:.2f}) {inside}; predicted/measured ms {milliseconds}; measured / modelled "
        f"{mean_ratio(measured_seconds, modelled_seconds):.2f}"
    )


def mean_ratio(values: list[float], others: list[float]) -> float:
    """The geometric mean of the ratios."""
    return math.exp(statistics.fmean(math.log(one / other) for one, other in zip(values, others, strict=True)))


if __name__ == "__main__":
    main()
