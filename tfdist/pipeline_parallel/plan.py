"""The plan of a pipeline: which operations of a model are in which stage.

The operations of a model, in their order, are cut into stages that are balanced by what operations cost, in measured
time or in bytes.

Synopsis:

    >>> balanced([1.0, 1.0, 1.0, 3.0], 2)
    [0, 3]
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import keras
import tensorflow as tf
from pydantic import BeforeValidator

from tfdist import registry
from tfdist.errors import UsageError
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_stages
from tfdist.internals.keras_stages import Call


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """Cuts operations into contiguous stages such that the most expensive stage is as cheap as can be.

    A dynamic program over (operations, stages), O(stages * operations²).

    Args:
        costs: of each operation, in the order in which they run; 0 or more, in any unit.
        stages: at most as many as there are operations.

    Returns:
        The index of the first operation of each stage.
    """
    until = [0.0, *itertools.accumulate(costs)]
    operations = len(costs)
    # best[end] is the cost of the most expensive stage when the operations before `end` fill the stages so far.
    best = [0.0] + [math.inf] * operations
    choices: list[list[int]] = []
    for stage in range(1, stages + 1):
        found = [math.inf] * (operations + 1)
        begins = [0] * (operations + 1)
        for end in range(stage, operations + 1):
            for begin in range(stage - 1, end):
                slowest = max(best[begin], until[end] - until[begin])
                if slowest < found[end]:
                    found[end], begins[end] = slowest, begin
        best = found
        choices.append(begins)
    cuts, end = [], operations
    for begins in reversed(choices):
        end = begins[end]
        cuts.append(end)
    return cuts[::-1]


def of_stages(costs: Sequence[float], begins: Sequence[int]) -> list[float]:
    """The cost of each stage; `begins` are the indices of their first operations."""
    ends = [*begins[1:], len(costs)]
    return [sum(costs[begin:end]) for begin, end in zip(begins, ends, strict=True)]


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


Balance = Literal["time", "memory"]
# The first layer of each stage but the first; on a command line with commas between.
LayerNames = Annotated[
    Sequence[str] | None, BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given)
]


@dataclass(frozen=True)
class Plan:
    """The stages of a model.

    Attributes:
        functional: Keras' graph of the model's operations.
        calls: the calls of the operations, in the order in which they are made.
        begins: the index of the first call of each stage.
        costs: of each call, in milliseconds or bytes; empty if the cuts were given by name.
    """

    functional: Any
    calls: Sequence[keras_stages.Call]
    begins: Sequence[int]
    costs: Sequence[float] = ()

    def stage_of(self, call: int) -> int:
        """The stage of call number `call`."""
        return sum(begin <= call for begin in self.begins) - 1

    def calls_of(self, stage: int) -> Sequence[keras_stages.Call]:
        """The calls of a stage."""
        end = self.begins[stage + 1] if stage + 1 < len(self.begins) else len(self.calls)
        return self.calls[self.begins[stage] : end]

    def variables_of(self, stage: int) -> list[Any]:
        """The variables of a stage: those of its layers, unless an earlier stage has called the layer too."""
        earlier = {id(call.operation) for call in self.calls[: self.begins[stage]]}
        layers = {id(call.operation): call.operation for call in self.calls_of(stage)}
        found = [
            variable
            for key, layer in layers.items()
            if key not in earlier and isinstance(layer, keras.Layer)
            for variable in layer.variables
        ]
        return list({id(variable): variable for variable in found}.values())

    def parameters_of(self, stage: int) -> int:
        """The number of parameters of a stage."""
        return sum(math.prod(variable.shape) for variable in self.variables_of(stage))

    def layers_of(self, stage: int) -> list[str]:
        """The names of the layers of a stage, with those of the models around them."""
        return list(dict.fromkeys("/".join(call.path) for call in self.calls_of(stage)))

    def bytes_across(self, cut: int) -> int:
        """The bytes of an example that go from stages before stage number `cut` to it or to later ones, forward."""
        begin = self.begins[cut]
        used = {id(one) for call in self.calls[begin:] for one in call.inputs}
        used |= {id(one) for one in self.functional.outputs}
        made = {id(one): one for call in self.calls[:begin] for one in call.outputs if id(one) in used}
        return sum(bytes_of(one, 1) for one in made.values())


def require_cuttable(model: Any, stages: int) -> None:
    """Raises `UsageError` for a model whose operations are not known one by one, or that has fewer than `stages`."""
    functional = keras_stages.functional_of(model)
    if functional is None:
        if isinstance(model, keras.Sequential) and not model.built:
            return
        raise UsageError(
            f"The model `{model.name}` cannot be cut into stages, because its `call` is its own",
            "build it from layers with `keras.Model(inputs, outputs)` or `keras.Sequential`, or use `devices=1`",
        )
    count = len(keras_stages.calls(model))
    if stages > count:
        raise UsageError(
            f"{stages} stages were asked for, and the model `{model.name}` has {count} layers",
            f"use at most `devices={count}`",
        )


def make(
    model: Any, stages: int, named: Sequence[str] | None, balance: str, batch_size: int, micro_batches: int
) -> Plan:
    """Cuts a model into stages.

    Args:
        model: functional or sequential, and built.
        stages: their number.
        named: the first layer of each stage but the first; `None` lets `balance` choose.
        balance: "time" makes the slowest stage as fast as can be, "memory" the fullest one as small as can be.
        batch_size: examples of a micro-batch.
        micro_batches: the number of micro-batches whose activations a stage holds.

    Raises:
        UsageError: the model cannot be cut, has fewer layers, or the named layers are not in order.
        UnknownNameError: the model has no layer of that name.
    """
    require_cuttable(model, stages)
    functional = keras_stages.functional_of(model)
    if functional is None:
        raise UsageError(
            f"The model `{model.name}` is not built before its first step runs eagerly, and is cut before that",
            "begin it with `keras.Input(shape)`, or compile it without `run_eagerly`",
        )
    calls = keras_stages.calls(model)
    if named is not None:
        return Plan(functional, calls, _begins(model, calls, named))
    if stages == 1:
        return Plan(functional, calls, [0])
    costs = measured(calls, batch_size, micro_batches, balance, model)
    return Plan(functional, calls, balanced(costs, stages), costs)


def _begins(model: Any, calls: Sequence[keras_stages.Call], named: Sequence[str]) -> list[int]:
    known = list(dict.fromkeys(name for call in calls for name in call.path))
    for name in named:
        registry.require_known(name, f"layer of the model `{model.name}`", known)
    begins = [next(i for i, call in enumerate(calls) if name in call.path) for name in named]
    if [0, *begins] != sorted({0, *begins}):
        raise UsageError(
            f"`stages` is {', '.join(named)}, and these layers do not follow each other in the model `{model.name}`",
            f"name later layers later, and not the first; the order is {', '.join(known)}",
        )
    return [0, *begins]
