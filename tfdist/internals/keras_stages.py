"""The operations of functional and sequential Keras models, one by one, and variables that move to another device.

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
from tfdist.internals.attached import Attached
from tfdist.internals.keras import optimizers, set_tf_variable, tf_variable


@dataclass(frozen=True)
class Call:
    """One call of an operation in a model; a shared layer has several.

    Attributes:
        operation: a layer, or a function of `keras.ops` on symbolic tensors.
        path: the names of the models around it, from the outside in, and its own.
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
        """Calls the operation on tensors in the place of its symbolic inputs."""
        values = {id(one): value for one, value in zip(self.node.input_tensors, inputs, strict=True)}
        arguments, fixed = self.node.arguments.fill_in(values)
        return self.operation(*arguments, **fixed | named)


def takes_training(operation: Any) -> bool:
    """Whether the operation is a layer that is told whether it is trained."""
    return isinstance(operation, keras.Layer) and bool(operation._call_has_training_arg)


def functional_of(operation: Any) -> Any:
    """The graph of operations behind a functional or sequential model; `None` if Keras knows none."""
    if isinstance(operation, keras.Sequential) and type(operation).call is keras.Sequential.call:
        return operation._functional
    is_plain = isinstance(operation, Functional) and type(operation).call is Functional.call
    return operation if is_plain else None


def calls(model: Any) -> list[Call]:
    """The calls of a functional or sequential model in the order in which it makes them; nested models are opened."""
    found: list[Call] = []

    def visit(functional: Any, path: tuple[str, ...], known: dict[int, Any]) -> list[Any]:
        for node in _nodes(functional):
            inputs = [known[id(one)] for one in node.input_tensors]
            inner = functional_of(node.operation)
            outputs = list(node.outputs)
            if inner is None:
                where = (*path, node.operation.name)
                found.append(Call(node.operation, where, tuple(inputs), tuple(outputs), node))
            else:
                begun = dict(zip(map(id, inner.inputs), inputs, strict=True))
                outputs = visit(inner, (*path, node.operation.name), begun)
            known.update(zip(map(id, node.outputs), outputs, strict=True))
        return [known[id(one)] for one in functional.outputs]

    functional = functional_of(model)
    visit(functional, (), {id(one): one for one in functional.inputs})
    return found


def _nodes(functional: Any) -> Iterator[Any]:
    """The calls of a functional model itself, in Keras' order."""
    for depth in sorted(functional._nodes_by_depth, reverse=True):
        yield from (node for node in functional._nodes_by_depth[depth] if node.operation and not node.is_input)


# `around(functional, operation, run)` calls `run()`, one operation of a functional model.
Around = Callable[[Any, Any, Callable[[], Any]], Any]


@contextlib.contextmanager
def around_operations(begin: Callable[[Any], None], around: Around) -> Iterator[None]:
    """In this context each run of a functional model calls `begin(functional)`, and `around` for its operations."""
    original = Function._run_through_graph

    @functools.wraps(original)
    def run(
        functional: Any, inputs: Any, operation_fn: Callable[[Any], Any] = lambda one: one, call_fn: Any = None
    ) -> Any:
        if call_fn is not None:  # Keras only looks whether the outputs are connected
            return original(functional, inputs, operation_fn, call_fn)
        begin(functional)

        def surrounded(operation: Any) -> Callable[..., Any]:
            call = operation_fn(operation)
            return lambda *arguments, **named: around(functional, operation, lambda: call(*arguments, **named))

        return original(functional, inputs, surrounded)

    Function._run_through_graph = run
    try:
        yield
    finally:
        Function._run_through_graph = original


def move(variable: Any, device: str) -> bool:
    """Moves the `tf.Variable` of a Keras variable to `device`, with its value; returns whether it was elsewhere.

    The old one is left without elements: its memory is free, and a graph that still refers to it fails, instead of
    computing with the old value.
    """
    old = tf_variable(variable)
    wanted, found = tf.DeviceSpec.from_string(f"/device:{device}"), tf.DeviceSpec.from_string(old.device)
    if (wanted.device_type, wanted.device_index) == (found.device_type, found.device_index):
        return False
    with tf.init_scope(), tf.device(device):
        # A copy, because two logical CPU devices would share the tensor until one of them is written.
        value = tf.raw_ops.DeepCopy(x=old.value()) if "CPU" in device else tf.identity(old)
        set_tf_variable(variable, tf.Variable(value, trainable=old.trainable, name=variable.name))
        tf.raw_ops.AssignVariableOp(resource=old.handle, value=tf.zeros([0], old.dtype))
    return True


_place: Attached[str] = Attached("place")  # of the value of a variable that this process does not have


def leave(variable: Any, place: str) -> None:
    """Frees the memory of a Keras variable whose value is at another `place`.

    Whoever reads or assigns it afterwards gets a `UsageError` that names the place; `tf_variable` remains, without
    elements. A graph that was traced before fails.
    """
    empty(variable)
    _place.set(variable, place)
    kind: Any = type(variable)
    variable.__class__ = _elsewhere(kind)


def come_back(variable: Any, value: Any) -> str:
    """Gives a variable that was left its `value`, and lets it be read and assigned again; returns the place."""
    variable.__class__ = type(variable).__mro__[1]
    tf.raw_ops.AssignVariableOp(resource=tf_variable(variable).handle, value=tf.constant(value))
    return str(_place.get(variable))


@contextlib.contextmanager
def known(variables: Iterable[Any]) -> Iterator[None]:
    """In this context those of `variables` that were left can be referred to; their values must not be used."""
    left = [(variable, type(variable)) for variable in variables if isinstance(type(variable), _Left)]
    try:
        for variable, kind in left:
            variable.__class__ = kind.__mro__[1]
        yield
    finally:
        for variable, kind in left:
            variable.__class__ = kind


def empty(variable: Any) -> None:
    """Frees the memory of the value of a Keras variable."""
    old = tf_variable(variable)
    with tf.init_scope():
        tf.raw_ops.AssignVariableOp(resource=old.handle, value=tf.zeros([0], old.dtype))


@functools.cache
def _elsewhere(kind: Any) -> type:
    def error(variable: Any) -> UsageError:
        return UsageError(
            f"The variable `{variable.path}` is {_place.get(variable)}",
            "read it in the chief, within `with strategy.whole_state(model):`, which all processes enter; load weights "
            "before the first training, or resume by `tfdist.callbacks.Checkpoint`",
        )

    def value(variable: Any) -> Any:
        if tf.inside_function():  # as in a rehearsal; where such a graph runs, it fails
            return kind.value.fget(variable)
        raise error(variable)

    def assign(variable: Any, value: Any) -> None:
        raise error(variable)

    return _Left(kind.__name__, (kind,), {"value": property(value), "assign": assign})


class _Left(type):
    """The kind of the classes of variables that were left."""


def move_slots(model: Any) -> None:
    """Moves the slots of the optimizers of `model` to the devices of their variables."""
    for outer in optimizers(model):
        for optimizer in (outer, getattr(outer, "inner_optimizer", None)):
            if optimizer is None or not getattr(optimizer, "built", False):
                continue
            variables = optimizer._trainable_variables
            for slots in list(vars(optimizer).values()):
                if isinstance(slots, list) and len(slots) == len(variables) and slots is not variables:
                    for slot, variable in zip(slots, variables, strict=True):
                        if isinstance(slot, keras.Variable):
                            move(slot, _short(tf_variable(variable).device))
            optimizer._trainable_variables_indices = {
                optimizer._var_key(one): index for index, one in enumerate(variables)
            }


def _short(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type}:{spec.device_index}"


def forget_functions(model: Any) -> None:
    """Drops the graphs that Keras keeps of `model` and the models in it, which refer to variables that have moved."""
    for one in model._flatten_layers():
        if isinstance(one, keras.Model):
            one.train_function = one.test_function = one.predict_function = None
