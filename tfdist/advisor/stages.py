"""What the stages of a pipeline compute and send: the times of their passes, and the bytes of the tensors between them.

`python -m tfdist.advisor.stages WORK RESULT` is a child process, because the advising process does not import
TensorFlow. WORK is a JSON file with the fields of `Work`; RESULT becomes a JSON file with what `measure` returns.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tfdist
from tfdist import models, registry
from tfdist.advisor.costs import Message, Stages
from tfdist.data.tools import for_model
from tfdist.errors import TfdistError
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_stages
from tfdist.loop import building
from tfdist.pipeline_parallel import plan
from tfdist.pipeline_parallel.plan import Plan
from tfdist.pipeline_parallel.stages_of_processes import require_separate
from tfdist.run import optimizers
from tfdist.run.config import TrainConfig

RUN_SECONDS = 0.1  # of one timing of a pass, which is repeated until then
_MOST_REPEATS = 1000
_TIMINGS = 5


@dataclass(frozen=True)
class Work:
    """What is measured.

    Attributes:
        options: options of `tfdist train` by name, see `tfdist.advisor.measured.Work`.
        batch_size: examples per global batch.
        micro_batches: the number of micro-batches.
        counts: numbers of stages.
    """

    options: dict[str, Any]
    batch_size: int
    micro_batches: int
    counts: Sequence[int]


def measure(work: Work) -> dict[str, Any]:
    """Measures the stages of a model for each number of stages.

    Returns:
        Under "averaged_bytes" the bytes of weights and slots; under "stages", by the number of stages, the fields of
        `Stages`; under "refusals" the sentence that says why a pipeline refuses a number of stages.
    """
    model = _compiled(work)
    weights = [*model.variables, *keras_internals.optimizer_variables(model)]
    floats = [variable for variable in map(keras_internals.tf_variable, weights) if variable.dtype.is_floating]
    result: dict[str, Any] = {"stages": {}, "refusals": {}}
    result["averaged_bytes"] = sum(math.prod(variable.shape) * variable.dtype.size for variable in floats)
    size = max(1, work.batch_size // work.micro_batches)
    costs: list[float] = []
    for count in work.counts:
        try:
            whole = plan.make(model, 1, None, "time", size, work.micro_batches)
            plan.require_cuttable(model, count)
            costs = costs or plan.measured(whole.calls, size, work.micro_batches, "time", model)
            divided = plan.cut(whole.functional, whole.calls, costs, count, all_train=True)
            require_separate(model, divided)
        except TfdistError as error:
            result["refusals"][count] = error.sentence
            continue
        result["stages"][count] = dataclasses.asdict(_measured(divided, size))
    return result


def _compiled(work: Work) -> Any:
    """The model with its optimizer, both built, as in a training."""
    options = work.options
    data_options = registry.parse_options(options.get("data_option", ()), "--data-option")
    folder = Path(options["data_dir"]) if options.get("data_dir") else None
    source = for_model.load(options["model"], options["dataset"], folder, **data_options)
    model_options = registry.parse_options(options.get("model_option", ()), "--model-option")
    strategy = tfdist.strategy("single", seed=0)
    shuffle = models.shuffles(options["model"])
    feed = source.feed("train", work.batch_size, world=strategy.world, seed=0, shuffle=shuffle)
    with strategy.scope():
        model = models.build(options["model"], source.spec, **model_options)
        if not model.compiled:
            config = TrainConfig(
                "single",
                options["model"],
                options["dataset"],
                batch_size=work.batch_size,
                optimizer=options.get("optimizer"),
            )
            optimizers.compile(model, source.spec, config, feed.num_batches)
    building.build(strategy, model, "train", feed.spec)
    return model


def _measured(made: Plan, size: int) -> Stages:
    """Measures stages with micro-batches of `size`, in turns, so that other work on the machine affects all of them."""
    count = len(made.begins)
    passes = [_passes(made, stage, size, backward) for backward in (False, True) for stage in range(count)]
    seconds = _seconds_in_turns(passes)
    forward, both = seconds[:count], seconds[count:]
    return Stages(
        forward_seconds=forward,
        backward_seconds=[max(0.0, all_ - first) for all_, first in zip(both, forward, strict=True)],
        parameters=[made.parameters_of(stage) for stage in range(count)],
        messages=messages(made, size),
    )


def messages(made: Plan, batch_size: int) -> list[Message]:
    """Returns the messages of a micro-batch: a tensor goes from its stage to each stage that uses it.

    In the backward pass, the gradient of a floating-point tensor goes back.
    """
    count = len(made.begins)
    sources = {id(tensor): stage for stage in range(count) for tensor in _outputs(made.calls_of(stage))}
    sizes: dict[tuple[int, int], list[int]] = {}
    for target in range(count):
        used = {id(tensor): tensor for call in made.calls_of(target) for tensor in call.inputs}
        for key, tensor in used.items():
            source = sources.get(key, target)  # an input of the model is in every process
            if source != target:
                sent = plan.bytes_of(tensor, batch_size)
                total = sizes.setdefault((source, target), [0, 0])
                total[0] += sent
                total[1] += sent if tf.as_dtype(tensor.dtype).is_floating else 0
    return [Message(source, target, *total) for (source, target), total in sorted(sizes.items())]


def _passes(made: Plan, stage: int, batch_size: int, backward: bool) -> Callable[[], list[tf.Tensor]]:
    """Returns a function for graphs, which computes the passes of a stage from example inputs.

    The backward pass adds the gradients to others, as those of earlier micro-batches are.
    """
    calls = made.calls_of(stage)
    earlier = {id(tensor) for tensor in _outputs(made.calls[: made.begins[stage]])}
    own = {id(tensor): tensor for tensor in _outputs(calls)}
    inputs = {id(tensor): tensor for call in calls for tensor in call.inputs if id(tensor) not in own}
    later = [tensor for call in made.calls[made.begins[stage] + len(calls) :] for tensor in call.inputs]
    results = [key for key in {id(tensor): 0 for tensor in (*later, *made.functional.outputs)} if key in own]
    examples = {key: plan.example(tensor, batch_size) for key, tensor in inputs.items()}
    layers = {id(call.operation): call.operation for call in calls if isinstance(call.operation, keras.Layer)}
    weights = {id(weight): weight for layer in layers.values() for weight in layer.trainable_variables}
    variables = [keras_internals.tf_variable(weight) for weight in weights.values()]

    def passes() -> list[tf.Tensor]:
        values = dict(examples)
        received = [values[key] for key in values if key in earlier and values[key].dtype.is_floating]
        # Counters, seeds and moving averages must not change.
        with keras.StatelessScope(), tf.GradientTape() as tape:
            tape.watch(received)
            for call in calls:
                named = {"training": True} if keras_stages.takes_training(call.operation) else {}
                outputs = call.run([values[id(tensor)] for tensor in call.inputs], **named)
                values.update(zip(map(id, call.outputs), tf.nest.flatten(outputs), strict=True))
        sent = [values[key] for key in results]
        floats = [value for value in sent if value.dtype.is_floating]
        if not backward or not floats:
            return sent
        gradients = tape.gradient(floats, [*received, *variables])
        sums = zip(gradients[len(received) :], variables, strict=True)
        added = [gradient + variable if isinstance(gradient, tf.Tensor) else gradient for gradient, variable in sums]
        return [*sent, *tf.nest.flatten([*gradients[: len(received)], *added], expand_composites=True)]

    return passes


def _outputs(calls: Sequence[keras_stages.Call]) -> list[Any]:
    return [tensor for call in calls for tensor in call.outputs]


def _seconds_in_turns(passes: Sequence[Callable[[], list[Any]]]) -> list[float]:
    """Measures functions in loops within graphs, as a training runs them; returns the median timing of each."""
    loops = [_loop(function) for function in passes]
    for loop in loops:
        _timed(loop, 1)  # the first run is slower
    repeats = [min(max(1, round(RUN_SECONDS / _timed(loop, 1))), _MOST_REPEATS) for loop in loops]
    turns = [[_timed(*loop) for loop in zip(loops, repeats, strict=True)] for _ in range(_TIMINGS)]
    return [statistics.median(timings) for timings in zip(*turns, strict=True)]


def _loop(passes: Callable[[], list[Any]]) -> Any:
    """Returns a graph that runs `passes` a number of times, one after the other."""

    @tf.function(autograph=False)
    def loop(times: tf.Tensor) -> tf.Tensor:
        def body(index: tf.Tensor, total: tf.Tensor) -> list[tf.Tensor]:
            # The total uses an element of each result; TensorFlow would drop operations whose results nothing uses.
            with tf.control_dependencies([index]):
                elements = [tf.reshape(result, [-1])[0] for result in passes() if result is not None]
            return [index + 1, tf.add_n([total, *(tf.cast(element, tf.float32) for element in elements)])]

        return tf.while_loop(lambda index, _: index < times, body, [0, 0.0], parallel_iterations=1)[1]

    return loop.get_concrete_function(tf.TensorSpec([], tf.int32))


def _timed(loop: Any, times: int) -> float:
    """Returns the seconds of one run in a loop."""
    began = time.perf_counter()
    loop(tf.constant(times)).numpy()
    return (time.perf_counter() - began) / times


def main(work: str, result: str) -> None:
    """Measures the work in the file `work`, and writes the file `result`."""
    measured = measure(Work(**json.loads(Path(work).read_text(encoding="utf-8"))))
    Path(result).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
