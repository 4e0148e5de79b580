"""The plan of a pipeline: the operations of a model, in their order, are divided into stages of balanced cost.

The cost is measured time, or bytes of memory. `place` moves the variables of each stage to its device, and `on_stages`
runs the operations there, with names by which `tfdist.pipeline_parallel.schedule` finds the stage of each.

Synopsis:

    >>> balanced([1.0, 1.0, 1.0, 3.0], 2)
    [0, 3]
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from tfdist.loop.recomputation import UNKNOWN_LENGTH
from tfdist.profiling import stages as stage_names

Balance = Literal["time", "memory"]
# The first layer of each stage after the first; separated by commas on the command line.
LayerNames = Annotated[
    Sequence[str] | None, BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)
]
_RUNS = 3


@dataclass(frozen=True)
class Plan:
    """The stages of a model.

    Attributes:
        functional: Keras' graph of the model's operations.
        calls: the calls of the operations, in order.
        begins: the index of the first call of each stage.
        costs: the cost of each call in milliseconds or bytes; empty if the stages were specified by layer names.
    """

    functional: Any
    calls: Sequence[keras_stages.Call]
    begins: Sequence[int]
    costs: Sequence[float] = ()

    def stage_of(self, call: int) -> int:
        """Returns the stage of call number `call`."""
        return sum(begin <= call for begin in self.begins) - 1

    def calls_of(self, stage: int) -> Sequence[keras_stages.Call]:
        """Returns the calls of a stage."""
        end = self.begins[stage + 1] if stage + 1 < len(self.begins) else len(self.calls)
        return self.calls[self.begins[stage] : end]

    def variables_of(self, stage: int) -> list[Any]:
        """Returns the variables of a stage's layers, without layers that an earlier stage has called too."""
        earlier = {id(call.operation) for call in self.calls[: self.begins[stage]]}
        layers = {id(call.operation): call.operation for call in self.calls_of(stage)}
        own = [layer for key, layer in layers.items() if key not in earlier and isinstance(layer, keras.Layer)]
        return list({id(variable): variable for layer in own for variable in layer.variables}.values())

    def parameters_of(self, stage: int) -> int:
        """Returns the number of parameters of a stage."""
        return sum(math.prod(variable.shape) for variable in self.variables_of(stage))

    def layers_of(self, stage: int) -> list[str]:
        """Returns the names of a stage's layers, with the names of the models that contain them."""
        return list(dict.fromkeys("/".join(call.path) for call in self.calls_of(stage)))

    def described(self, devices: Sequence[str]) -> list[dict[str, Any]]:
        """Returns the device, layers and parameters of each stage; `devices` has one device per stage."""
        return [
            {"device": device, "layers": self.layers_of(stage), "parameters": self.parameters_of(stage)}
            for stage, device in enumerate(devices)
        ]

    def bytes_across(self, cut: int) -> int:
        """Returns the bytes per example that a forward pass sends across the cut before stage number `cut`."""
        begin = self.begins[cut]
        used = {id(tensor) for call in self.calls[begin:] for tensor in call.inputs}
        used |= {id(tensor) for tensor in self.functional.outputs}
        sent = {id(tensor): tensor for call in self.calls[:begin] for tensor in call.outputs if id(tensor) in used}
        return sum(bytes_of(tensor, 1) for tensor in sent.values())


def make(
    model: Any,
    stages: int,
    named: Sequence[str] | None,
    balance: str,
    batch_size: int,
    micro_batches: int,
    all_train: bool = False,
) -> Plan:
    """Divides a model into stages.

    Args:
        model: a functional or sequential model that is built.
        stages: the number of stages.
        named: the first layer of each stage after the first; `None` lets `balance` choose.
        balance: "time" minimizes the time of the slowest stage, "memory" the memory of the largest one.
        batch_size: the number of examples in a micro-batch.
        micro_batches: the number of micro-batches whose activations a stage stores.
        all_train: whether `balance` chooses only stages that have something to train, if the model has enough of them.

    Raises:
        UsageError: the model cannot be cut, has fewer layers, or the named layers are not in order.
        UnknownNameError: the model has no layer with a name in `named`.
    """
    require_cuttable(model, stages)
    functional = keras_stages.functional_of(model)
    if functional is None:
        raise UsageError(
            f"The model `{model.name}` would be built in its first eager step, and must be cut before that",
            "begin it with `keras.Input(shape)`, or compile it without `run_eagerly`",
        )
    calls = keras_stages.calls(model)
    if named is not None:
        return Plan(functional, calls, _begins(model, calls, named))
    if stages == 1:
        return Plan(functional, calls, [0])
    return cut(functional, calls, measured(calls, batch_size, micro_batches, balance, model), stages, all_train)


def cut(functional: Any, calls: Sequence[Call], costs: Sequence[float], stages: int, all_train: bool) -> Plan:
    """Divides calls with these costs into balanced stages, see `make`."""
    trains = [bool(getattr(call.operation, "trainable_variables", ())) for call in calls]
    required = trains if all_train and sum(trains) >= stages else None
    return Plan(functional, calls, balanced(costs, stages, required), costs)


def _begins(model: Any, calls: Sequence[keras_stages.Call], named: Sequence[str]) -> list[int]:
    known = list(dict.fromkeys(name for call in calls for name in call.path))
    for name in named:
        registry.require_known(name, f"layer of the model `{model.name}`", known)
    begins = [next(i for i, call in enumerate(calls) if name in call.path) for name in named]
    if [0, *begins] != sorted({0, *begins}):
        raise UsageError(
            f"`stages` is {', '.join(named)}, and these layers do not follow each other in the model `{model.name}`",
            f"name the layers in order, without the first layer; the order is {', '.join(known)}",
        )
    return [0, *begins]


def require_number_of_names(named: Sequence[str] | None, count: int, units: str, change: str) -> None:
    """Raises `UsageError` if `named` has no layer for each of `count` stages after the first.

    Args:
        named: the first layer of each stage after the first; `None` is always accepted.
        count: the number of stages.
        units: the things that there are `count` of, in the message.
        change: how to get another number of them, with `{}` for the number.
    """
    if named is not None and len(named) != count - 1:
        raise UsageError(
            f"`stages` names the first layer of {len(named)} stages after the first, and there are {count} {units}",
            f"name {count - 1} layers, or {change.format(len(named) + 1)}",
        )


def require_cuttable(model: Any, stages: int) -> None:
    """Raises `UsageError` for a model whose operations are unknown, or that has fewer than `stages` layers."""
    functional = keras_stages.functional_of(model)
    if functional is None:
        if isinstance(model, keras.Sequential) and not model.built:
            return
        raise UsageError(
            f"The model `{model.name}` cannot be cut into stages, because it has a custom `call`",
            "build it from layers with `keras.Model(inputs, outputs)` or `keras.Sequential`, or use `devices=1`",
        )
    count = len(keras_stages.calls(model))
    if stages > count:
        raise UsageError(
            f"{stages} stages were requested, and the model `{model.name}` has {count} layers",
            f"use at most `devices={count}`",
        )


def balanced(costs: Sequence[float], stages: int, required: Sequence[bool] | None = None) -> list[int]:
    """Divides operations into contiguous stages so that the most expensive stage is as cheap as possible.

    A dynamic program over (operations, stages), O(stages * operations²).

    Args:
        costs: the cost of each operation, in the order in which they run; 0 or more, in any unit.
        stages: the number of stages, at most the number of operations.
        required: every stage has an operation for which this is true, of which there are at least `stages`; `None` for
            no such requirement.

    Returns:
        The index of the first operation of each stage.
    """
    cumulative = [0.0, *itertools.accumulate(costs)]
    counts = [0, *itertools.accumulate(map(int, required or [True] * len(costs)))]
    operations = len(costs)
    # best[end] is the cost of the most expensive stage when the operations before `end` fill the stages so far.
    best = [0.0] + [math.inf] * operations
    choices: list[list[int]] = []
    for stage in range(1, stages + 1):
        new_best = [math.inf] * (operations + 1)
        begins = [0] * (operations + 1)
        for end in range(stage, operations + 1):
            for begin in range(stage - 1, end):
                slowest = max(best[begin], cumulative[end] - cumulative[begin])
                if slowest < new_best[end] and counts[begin] < counts[end]:
                    new_best[end], begins[end] = slowest, begin
        best = new_best
        choices.append(begins)
    cuts, end = [], operations
    for begins in reversed(choices):
        end = begins[end]
        cuts.append(end)
    return cuts[::-1]


def of_stages(costs: Sequence[float], begins: Sequence[int]) -> list[float]:
    """Returns the cost of each stage; `begins` are the indices of their first operations."""
    ends = [*begins[1:], len(costs)]
    return [sum(costs[begin:end]) for begin, end in zip(begins, ends, strict=True)]


def measured(calls: Sequence[Call], batch_size: int, micro_batches: int, balance: str, model: Any) -> list[float]:
    """Returns the cost of each call.

    Args:
        calls: the calls of a built model.
        batch_size: the number of examples in a micro-batch.
        micro_batches: the number of micro-batches whose activations are stored.
        balance: "time" gives the milliseconds of a forward and a backward pass of a micro-batch; "memory" gives the
            bytes of weights, gradients, optimizer slots and activations.
        model: the model, with its optimizer if it is compiled.
    """
    if balance == "memory":
        return [float(_bytes(call, batch_size, micro_batches, 2 + _slots_per_weight(model))) for call in calls]
    times: dict[Any, float] = {}
    kinds = [_kind(call, batch_size) for call in calls]
    for call, kind in zip(calls, kinds, strict=True):
        if kind not in times:
            times[kind] = milliseconds(call, batch_size)
    return [times[kind] for kind in kinds]


def _kind(call: Call, batch_size: int) -> Any:
    """Returns a key that is equal for calls that take the same time."""
    if not keras_internals.is_of_keras(type(call.operation)) or not isinstance(call.operation, keras.Layer):
        return id(call)
    settings = {name: value for name, value in call.operation.get_config().items() if name != "name"}
    shapes = tuple((shape(tensor, batch_size), tensor.dtype) for tensor in call.inputs)
    return type(call.operation), repr(settings), shapes


def milliseconds(call: Call, batch_size: int) -> float:
    """Measures a forward and a backward pass through one operation; returns the fastest of a few runs."""
    run = _passes(call, batch_size)
    run()
    best = math.inf
    for _ in range(_RUNS):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return 1000 * best


def _passes(call: Call, batch_size: int) -> Callable[[], Any]:
    inputs = [example(tensor, batch_size) for tensor in call.inputs]
    named = {"training": True} if keras_stages.takes_training(call.operation) else {}
    variables = call.operation.trainable_variables if isinstance(call.operation, keras.Layer) else []

    @tf.function(autograph=False)
    def passes() -> Any:
        # Counters, seeds and moving averages must not change.
        with keras.StatelessScope(), tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = [output for output in tf.nest.flatten(call.run(inputs, **named)) if output.dtype.is_floating]
        sources = [*inputs, *map(keras_internals.tf_variable, variables)]
        gradients = tape.gradient(outputs, sources) if outputs else []
        return outputs, [gradient for gradient in gradients if gradient is not None]

    return passes


def example(tensor: Any, batch_size: int) -> tf.Tensor:
    """Returns an example value of a symbolic tensor for this batch size: normal random numbers, or integer ones."""
    dtype = tf.as_dtype(tensor.dtype)
    size = shape(tensor, batch_size)
    with tf.device("CPU:0"):
        return tf.cast(tf.random.stateless_normal(size, [0, 1]), dtype) if dtype.is_floating else tf.ones(size, dtype)


def shape(tensor: Any, batch_size: int) -> tuple[int, ...]:
    """Returns the shape of a symbolic tensor for this batch size."""
    if not tensor.shape:
        return ()
    first = batch_size if tensor.shape[0] is None else tensor.shape[0]
    return (first, *(UNKNOWN_LENGTH if size is None else size for size in tensor.shape[1:]))


def bytes_of(tensor: Any, batch_size: int) -> int:
    """Returns the size of a symbolic tensor for this batch size."""
    return math.prod(shape(tensor, batch_size)) * max(1, tf.as_dtype(tensor.dtype).size)


def _bytes(call: Call, batch_size: int, micro_batches: int, per_weight: float) -> float:
    variables = call.operation.variables if isinstance(call.operation, keras.Layer) else []
    weights = sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables)
    return per_weight * weights + micro_batches * sum(bytes_of(output, batch_size) for output in call.outputs)


def _slots_per_weight(model: Any) -> float:
    """Returns the number of optimizer slot elements per weight."""
    elements = sum(math.prod(variable.shape) for variable in keras_internals.optimizer_variables(model))
    return elements / max(1, sum(math.prod(weight.shape) for weight in model.trainable_variables))


def place(plan: Plan, devices: Sequence[str], model: Any) -> None:
    """Moves the variables of each stage, and their slots, to its device."""
    moved = False
    for stage, device in enumerate(devices):
        for variable in plan.variables_of(stage):
            moved |= keras_stages.move(variable, device)
    keras_stages.move_slots(model)
    if moved:
        keras_stages.forget_functions(model)


@contextlib.contextmanager
def on_stages(plans: Mapping[int, Plan], devices: Sequence[str]) -> Iterator[None]:
    """Within this context, the models of `plans`, by the `id` of their graphs, run on `devices`, one per stage."""
    previous = dict(vars(_thread))
    _thread.plans, _thread.devices = plans, devices
    try:
        with keras_stages.around_operations(_begin, _around):
            yield
    finally:
        vars(_thread).clear()
        vars(_thread).update(previous)


class _ThreadState(threading.local):
    plans: Mapping[int, Plan] = {}
    plan: Plan | None = None  # the plan of the model that runs
    devices: Sequence[str] = ()
    call = 0


_thread = _ThreadState()


def _begin(functional: Any) -> None:
    if id(functional) in _thread.plans:
        _thread.plan, _thread.call = _thread.plans[id(functional)], 0


def _around(functional: Any, operation: Any, run: Callable[[], Any]) -> Any:
    plan = _thread.plan
    if plan is None or keras_stages.functional_of(operation) is not None:  # its inner operations are passed here too
        return run()
    if _thread.call >= len(plan.calls) or plan.calls[_thread.call].operation is not operation:
        return run()  # an operation of another model
    stage = plan.stage_of(_thread.call)
    _thread.call += 1
    with tf.device(_thread.devices[stage]), tf.name_scope(stage_names.scope(stage, 0)):
        return run()
