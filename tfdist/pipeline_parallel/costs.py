"""What an operation of a model costs: measured time, or bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_stages
from tfdist.internals.keras_stages import Call

# The length of an axis other than the first that a model leaves open.
OPEN_AXIS = 32
_RUNS = 3


def measured(calls: Sequence[Call], batch_size: int, micro_batches: int, balance: str, model: Any) -> list[float]:
    """The cost of each call.

    Args:
        calls: of a built model.
        batch_size: examples of a micro-batch.
        micro_batches: the number of micro-batches whose activations are held.
        balance: "time" gives milliseconds of a forward and a backward pass of a micro-batch; "memory" gives bytes of
            weights, gradients, slots of the optimizer, and activations.
        model: what the calls are of, with its optimizer if it is compiled.
    """
    if balance == "memory":
        return [float(_bytes(call, batch_size, micro_batches, 2 + _slots_per_weight(model))) for call in calls]
    known: dict[Any, float] = {}
    found = []
    for call in calls:
        key = _kind(call, batch_size)
        if key not in known:
            known[key] = milliseconds(call, batch_size)
        found.append(known[key])
    return found


def _kind(call: Call, batch_size: int) -> Any:
    """Calls of the same kind take the same time."""
    if not keras_internals.is_of_keras(type(call.operation)) or not isinstance(call.operation, keras.Layer):
        return id(call)
    settings = {name: value for name, value in call.operation.get_config().items() if name != "name"}
    shapes = tuple((shape(one, batch_size), one.dtype) for one in call.inputs)
    return type(call.operation), repr(settings), shapes


def milliseconds(call: Call, batch_size: int) -> float:
    """The time of a forward and a backward pass through one operation, the fastest of a few, in milliseconds."""
    run = _passes(call, batch_size)
    run()
    best = math.inf
    for _ in range(_RUNS):
        begun = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begun)
    return 1000 * best


def _passes(call: Call, batch_size: int) -> Callable[[], Any]:
    inputs = [example(one, batch_size) for one in call.inputs]
    named = {"training": True} if keras_stages.takes_training(call.operation) else {}
    variables = call.operation.trainable_variables if isinstance(call.operation, keras.Layer) else []

    @tf.function(autograph=False)
    def passes() -> Any:
        # Counters, seeds and moving averages are not to change.
        with keras.StatelessScope(), tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = [one for one in tf.nest.flatten(call.run(inputs, **named)) if one.dtype.is_floating]
        sources = [*inputs, *(keras_internals.tf_variable(one) for one in variables)]
        gradients = tape.gradient(outputs, sources) if outputs else []
        return outputs, [one for one in gradients if one is not None]

    return passes


def example(tensor: Any, batch_size: int) -> tf.Tensor:
    """Drawn numbers in the shape of a symbolic tensor for a batch of this size; ones for whole numbers."""
    dtype = tf.as_dtype(tensor.dtype)
    size = shape(tensor, batch_size)
    with tf.device("CPU:0"):
        return tf.cast(tf.random.stateless_normal(size, [0, 1]), dtype) if dtype.is_floating else tf.ones(size, dtype)


def shape(tensor: Any, batch_size: int) -> tuple[int, ...]:
    """The shape of a symbolic tensor for a batch of this size."""
    if not tensor.shape:
        return ()
    first = batch_size if tensor.shape[0] is None else tensor.shape[0]
    return (first, *(OPEN_AXIS if size is None else size for size in tensor.shape[1:]))


def bytes_of(tensor: Any, batch_size: int) -> int:
    """The size of a symbolic tensor for a batch of this size."""
    return math.prod(shape(tensor, batch_size)) * max(1, tf.as_dtype(tensor.dtype).size)


def _bytes(call: Call, batch_size: int, micro_batches: int, per_weight: float) -> float:
    variables = call.operation.variables if isinstance(call.operation, keras.Layer) else []
    weights = sum(math.prod(one.shape) * tf.as_dtype(one.dtype).size for one in variables)
    return per_weight * weights + micro_batches * sum(bytes_of(one, batch_size) for one in call.outputs)


def _slots_per_weight(model: Any) -> float:
    """How many numbers the optimizers keep for each weight."""
    kept = sum(math.prod(one.shape) for o in keras_internals.optimizers(model) for one in o.variables)
    return kept / max(1, sum(math.prod(one.shape) for one in model.trainable_variables))
