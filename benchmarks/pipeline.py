"""The efficiency of a pipeline in one process, compared with its bound, and of its cuts, compared with the best cuts.

    bound      the seconds per step divided by (M + S - 1) times the seconds of the slowest stage for a micro-batch; the
               stages are measured separately, in turn with the step
    balance    the slowest stage of the automatic cut into two stages divided by that of the best cut; complete stages
               are timed, for the cuts near the point where both take the same time

Each stage computes on a logical CPU device, with one thread per operation. SGD without momentum updates the weights,
because the bound does not include the update.
Example: `python -m benchmarks.pipeline`
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

BOUND = ("benchmarks.wide:build", "resnet20")
BALANCE = ("mlp", "cnn", "lenet", "conv_autoencoder", "resnet20", "unet")
# The options of the synthetic data; the other models use the default, 28x28x1.
OPTIONS: dict[str, dict[str, Any]] = {"resnet20": {"shape": (32, 32, 3)}, "unet": {"task": "segmentation"}}
STAGES, MICRO_BATCHES = 2, 4


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.model is not None:
        MEASURES[arguments.what](arguments)
        return
    for what, models in {"bound": BOUND, "balance": BALANCE}.items():
        for model in models if arguments.what in (None, what) else ():
            options = [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in ("batch-size", "turns")]
            command = [sys.executable, "-m", "benchmarks.pipeline", *options, "--what", what, "--model", model]
            subprocess.run(command, check=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--what", choices=MEASURES)
    parser.add_argument("--model", help="measure only this model")
    return parser


def build(name: str, batch_size: int) -> tuple[Any, Any, Any]:
    """Returns a compiled model, and a batch of synthetic examples."""
    import keras

    import tfdist
    from tfdist.data.tools import for_model

    source = for_model.load(name, "synthetic", train=batch_size, **OPTIONS.get(name, {}))
    model = tfdist.models.build(name, source.spec)
    loss = "mse" if source.spec.task == "autoencoding" else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-3), loss, jit_compile=False)
    return model, *source.arrays("train")


def bound(arguments: argparse.Namespace) -> None:
    """Prints the seconds per step divided by the bound."""
    import tfdist

    strategy = tfdist.strategy("pipeline", devices=STAGES, micro_batches=MICRO_BATCHES, threads=1, seed=0)
    with strategy.scope():
        model, x, y = build(arguments.model, arguments.batch_size)
    steps = 20
    strategy.fit(model, x, y, batch_size=arguments.batch_size, epochs=2, verbose=0)  # cuts and traces
    plan = strategy.plan_of(model)
    stages = [stage(plan, number, arguments.batch_size // MICRO_BATCHES) for number in range(STAGES)]
    ratios, slowest = [], []
    for _ in range(arguments.turns):
        begun = time.perf_counter()
        strategy.fit(model, x, y, batch_size=arguments.batch_size, epochs=steps, verbose=0)
        step = (time.perf_counter() - begun) / steps
        slowest.append(max(map(seconds, stages)))
        ratios.append(step / ((MICRO_BATCHES + STAGES - 1) * slowest[-1]))
    print(
        f"bound    {arguments.model:<24}{statistics.median(ratios):6.2f} of (M + S - 1) times the slowest stage, "
        f"{statistics.median(slowest) * 1e3:.1f} ms; turns from {min(ratios):.2f} to {max(ratios):.2f}",
        flush=True,
    )


def balance(arguments: argparse.Namespace) -> None:
    """Prints the seconds of the slowest stage of the automatic cut divided by those of the best cut."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    from dataclasses import replace

    from tfdist.pipeline_parallel import plan as plans

    model, *_ = build(arguments.model, arguments.batch_size)
    part = arguments.batch_size // MICRO_BATCHES
    automatic = plans.make(model, STAGES, None, "time", part, MICRO_BATCHES)
    cuts = range(1, len(automatic.calls))
    low, high = 1, len(cuts)
    while low < high:
        middle = (low + high) // 2
        times = [seconds(stage(replace(automatic, begins=[0, middle]), number, part)) for number in range(STAGES)]
        low, high = (middle + 1, high) if times[0] < times[1] else (low, middle)
    chosen = automatic.begins[1]
    near = {cut for middle in (low, chosen) for cut in range(middle - 2, middle + 3)} & set(cuts)
    timed = {
        cut: [stage(replace(automatic, begins=[0, cut]), number, part) for number in range(STAGES)]
        for cut in near | {chosen}
    }
    turns: dict[int, list[float]] = {cut: [] for cut in timed}
    for _ in range(arguments.turns):
        for cut, passes in timed.items():
            turns[cut].append(max(map(seconds, passes)))
    slowest = {cut: statistics.median(values) for cut, values in turns.items()}
    best = min(slowest, key=slowest.__getitem__)
    print(
        f"balance  {arguments.model:<24}{slowest[chosen] / slowest[best]:6.2f} of the best cut; before operation "
        f"{chosen} of {len(cuts) + 1}, best {best}: {slowest[chosen] * 1e3:.1f} and {slowest[best] * 1e3:.1f} ms",
        flush=True,
    )


MEASURES: dict[str, Callable[[argparse.Namespace], None]] = {"bound": bound, "balance": balance}


def stage(plan: Any, number: int, batch_size: int) -> Callable[[], Any]:
    """Returns a function that runs the forward and backward pass of a micro-batch through one stage."""
    import keras
    import tensorflow as tf

    from tfdist.internals import keras_stages
    from tfdist.internals.keras import tf_variable
    from tfdist.pipeline_parallel.plan import example

    calls: Sequence[Any] = plan.calls_of(number)
    computed = {id(tensor) for call in calls for tensor in call.outputs}
    entering = {id(tensor): tensor for call in calls for tensor in call.inputs if id(tensor) not in computed}
    later = [call for call in plan.calls if call not in calls]
    used = {id(tensor) for call in later for tensor in call.inputs} | {id(each) for each in plan.functional.outputs}
    inputs = [example(tensor, batch_size) for tensor in entering.values()]
    variables = [tf_variable(variable) for variable in plan.variables_of(number) if variable.trainable]

    @tf.function(autograph=False)
    def passes() -> Any:
        with keras.StatelessScope(), tf.GradientTape() as tape:
            tape.watch(inputs)
            values = dict(zip(entering, inputs, strict=True))
            for call in calls:
                options = {"training": True} if keras_stages.takes_training(call.operation) else {}
                results = tf.nest.flatten(call.run([values[id(tensor)] for tensor in call.inputs], **options))
                values.update(zip(map(id, call.outputs), results, strict=True))
            outputs = [value for key, value in values.items() if key in used and key in computed]
        sources = [*variables, *(inputs if number else [])]
        return [gradient for gradient in tape.gradient(outputs, sources) if gradient is not None]

    return passes


def seconds(run: Callable[[], Any]) -> float:
    """The seconds of the fastest of five runs, after a warm-up run."""
    run()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    main()
