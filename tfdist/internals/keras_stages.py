"""The operations of functional and sequential Keras models, and moving variables to another device or process.

Written for Keras 3.15.1; `tests/test_pipeline.py` fails when Keras changes a part that this uses.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional
from keras.src.ops.function import Function

from tfdist.errors import UsageError
from tfdist.internals.keras import optimizers, set_tf_variable, tf_variable, with_inner
from tfdist.internals.patching import Attached, surrounded
from tfdist.internals.tensorflow_variables import free


@dataclass(frozen=True)
class Call:
    """One call of an operation in a model; a shared layer has several.

    Attributes:
        operation: a layer, or a function of `keras.ops` on symbolic tensors.
        path: the names of the models that contain it, from the outside in, and its name.
        inputs: the symbolic tensors that it is called on.
        outputs: the symbolic tensors that it returns.
        node: Keras' record of the call.
    """

    operation: Any
    path: tuple[str, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    node: Any

    def run(self, inputs: list[Any], **named: Any) -> Any:
        """Calls the operation on `inputs` in place of its symbolic inputs."""
        values = dict(zip(map(id, self.node.input_tensors), inputs, strict=True))
        arguments, fixed = self.node.arguments.fill_in(values)
        return self.operation(*arguments, **fixed | named)


def takes_training(operation: Any) -> bool:
    """Whether the operation is a layer whose call has a `training` argument."""
    return isinstance(operation, keras.Layer) and bool(operation._call_has_training_arg)


def functional_of(operation: Any) -> Any:
    """The functional model behind a functional or sequential model; `None` for any other operation."""
    if isinstance(operation, keras.Sequential) and type(operation).call is keras.Sequential.call:
        return operation._functional
    is_plain = isinstance(operation, Functional) and type(operation).call is Functional.call
    return operation if is_plain else None


def calls(model: Any) -> list[Call]:
    """The calls of a functional or sequential model, in the order of execution; nested models are expanded."""
    result: list[Call] = []

    def visit(functional: Any, path: tuple[str, ...], outer: dict[int, Any]) -> list[Any]:
        """Appends the calls of a model; `outer` maps its symbolic inputs to tensors of the outermost model."""
        for node in _nodes(functional):
            inputs = [outer[id(tensor)] for tensor in node.input_tensors]
            inner = functional_of(node.operation)
            outputs = list(node.outputs)
            inner_path = (*path, node.operation.name)
            if inner is None:
                result.append(Call(node.operation, inner_path, tuple(inputs), tuple(outputs), node))
            else:
                outputs = visit(inner, inner_path, dict(zip(map(id, inner.inputs), inputs, strict=True)))
            outer.update(zip(map(id, node.outputs), outputs, strict=True))
        return [outer[id(tensor)] for tensor in functional.outputs]

    functional = functional_of(model)
    visit(functional, (), {id(tensor): tensor for tensor in functional.inputs})
    return result


def _nodes(functional: Any) -> Iterator[Any]:
    """The calls of a functional model, without those in nested models, in Keras' order."""
    for depth in sorted(functional._nodes_by_depth, reverse=True):
        yield from (node for node in functional._nodes_by_depth[depth] if node.operation and not node.is_input)


# `around(functional, operation, run)` calls `run()`, one operation of a functional model.
Around = Callable[[Any, Any, Callable[[], Any]], Any]


@contextlib.contextmanager
def around_operations(begin: Callable[[Any], None], around: Around) -> Iterator[None]:
    """Within this context each run of a functional model calls `begin(functional)`, and `around` for its operations."""

    def run(
        original: Any,
        functional: Any,
        inputs: Any,
        operation_fn: Callable[[Any], Any] = lambda operation: operation,
        call_fn: Any = None,
    ) -> Any:
        if call_fn is not None:  # Keras only checks whether the outputs are connected
            return original(functional, inputs, operation_fn, call_fn)
        begin(functional)

        def surrounded_fn(operation: Any) -> Callable[..., Any]:
            call = operation_fn(operation)
            return lambda *arguments, **named: around(functional, operation, lambda: call(*arguments, **named))

        return original(functional, inputs, surrounded_fn)

    with surrounded(Function, "_run_through_graph", run):
        yield


def move(variable: Any, device: str) -> bool:
    """Moves the `tf.Variable` of a Keras variable to `device`, with its value; returns whether it was elsewhere.

    The memory of the old one is freed, so that a graph that still refers to it fails instead of computing with the old
    value.
    """
    old = tf_variable(variable)
    wanted, current = tf.DeviceSpec.from_string(f"/device:{device}"), tf.DeviceSpec.from_string(old.device)
    if (wanted.device_type, wanted.device_index) == (current.device_type, current.device_index):
        return False
    with tf.init_scope(), tf.device(device):
        # A copy, because two logical CPU devices would share the tensor until one of them is written.
        value = tf.raw_ops.DeepCopy(x=old.value()) if "CPU" in device else tf.identity(old)
        set_tf_variable(variable, tf.Variable(value, trainable=old.trainable, name=variable.name))
        free(old)
    return True


_place: Attached[str] = Attached("place")  # where the value of an evicted variable is


def evict(variable: Any, place: str) -> None:
    """Frees the memory of a Keras variable whose value is at another `place`, such as another process.

    Reading or assigning it then raises a `UsageError` that names the place; its `tf_variable` remains, without
    elements. A graph that was traced before fails.
    """
    with tf.init_scope():
        free(tf_variable(variable))
    _place.set(variable, place)
    kind: Any = type(variable)
    variable.__class__ = _evicted_class(kind)


def restore(variable: Any, value: Any) -> str:
    """Sets the `value` of an evicted variable, which can then be read and assigned again; returns its place."""
    variable.__class__ = type(variable).__mro__[1]
    tf.raw_ops.AssignVariableOp(resource=tf_variable(variable).handle, value=tf.constant(value))
    return str(_place.get(variable))


@contextlib.contextmanager
def accessible(variables: Iterable[Any]) -> Iterator[None]:
    """Within this context the evicted ones of `variables` can be referred to; their values must not be used."""
    evicted = [(variable, type(variable)) for variable in variables if isinstance(type(variable), _Evicted)]
    try:
        for variable, kind in evicted:
            variable.__class__ = kind.__mro__[1]
        yield
    finally:
        for variable, kind in evicted:
            variable.__class__ = kind


@functools.cache
def _evicted_class(kind: Any) -> type:
    def error(variable: Any) -> UsageError:
        return UsageError(
            f"The variable `{variable.path}` is {_place.get(variable)}",
            "read it in the chief, within `with strategy.whole_state(model):`, which all processes enter; load weights "
            "before the first training, or resume by `tfdist.callbacks.Checkpoint`",
        )

    def value(variable: Any) -> Any:
        if tf.inside_function():  # as in a trial graph; if such a graph runs, it fails
            return kind.value.fget(variable)
        raise error(variable)

    def assign(variable: Any, value: Any) -> None:
        raise error(variable)

    return _Evicted(kind.__name__, (kind,), {"value": property(value), "assign": assign})


class _Evicted(type):
    """The metaclass that marks the classes of evicted variables."""


def move_slots(model: Any) -> None:
    """Moves the slots of the optimizers of `model` to the devices of their variables."""
    for outer in optimizers(model):
        for optimizer in with_inner(outer):
            if not getattr(optimizer, "built", False):
                continue
            variables = optimizer._trainable_variables
            for slots in list(vars(optimizer).values()):
                if isinstance(slots, list) and len(slots) == len(variables) and slots is not variables:
                    for slot, variable in zip(slots, variables, strict=True):
                        if isinstance(slot, keras.Variable):
                            move(slot, _short_name(tf_variable(variable).device))
            optimizer._trainable_variables_indices = {
                optimizer._var_key(variable): index for index, variable in enumerate(variables)
            }


def _short_name(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type}:{spec.device_index}"


def forget_functions(model: Any) -> None:
    """Drops the graphs that Keras caches for `model` and its nested models, because they refer to moved variables."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.Model):
            layer.train_function = layer.test_function = layer.predict_function = None
