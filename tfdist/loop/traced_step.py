"""Traces a training step of one device, without running it, so that its operations can be counted."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.data.input.division import Division
from tfdist.data.input.feed import Batches
from tfdist.interface.program import Steps
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals import tensorflow_graphs as graphs
from tfdist.loop import building
from tfdist.loop.inner_loop import StepProgram


class _OneBatch(Batches):
    """Batches of a fixed size, which are never fetched."""

    def __init__(self, spec: Any, batch_size: int):
        self.spec, self.batch_size = spec, batch_size

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, float]:
        del state, batch, index, division
        return tensorflow_internals.placeholders(self.spec), 1.0


def operations(strategy: Any, model: Any, batch_size: int, spec: Any, unknown_length: int) -> list[tf.Operation]:
    """The operations of a training step of `model`, in the order in which they were traced.

    Args:
        strategy: a strategy with one replica.
        model: a compiled model.
        batch_size: the number of examples.
        spec: the `tf.TensorSpec`s of a batch.
        unknown_length: the length of axes of the batch that the spec leaves open.
    """

    def with_lengths(tensor: tf.TensorSpec) -> tf.TensorSpec:
        lengths = [unknown_length if length is None else length for length in tensor.shape[1:]]
        return tf.TensorSpec([batch_size, *lengths], tensor.dtype)

    spec = tf.nest.map_structure(with_lengths, spec)
    building.build(strategy, model, "train", spec)
    program = StepProgram(strategy, Steps(model, "train", _OneBatch(spec, batch_size)))
    with tensorflow_internals.scratch_graph(strategy.scope):
        begin = tf.constant(0)
        program._step(None, None)
        traced: list[tf.Operation] = begin.graph.get_operations()
        return traced


def passes(loop: tf.Operation) -> int | None:
    """How often a loop of TensorFlow, an operation `While`, runs its body; `None` if it depends on the data.

    It is known if a condition of the loop is that a counter, which starts at a constant and grows by one, is less than
    a constant, as in recurrent layers; or if the loop is the gradient of such a loop. If there are several such
    conditions, the first that fails counts.
    """
    condition, body = graphs.body(loop, "cond"), graphs.body(loop, "body")
    arguments = {inner.op.name: index for index, inner in enumerate(condition.inputs)}
    limits = []
    waiting = [condition.outputs[0].op]
    while waiting:
        operation = waiting.pop()
        if operation.type in ("Identity", "LogicalAnd"):
            waiting += [tensor.op for tensor in operation.inputs]
        elif operation.type == "Less" and (counter := arguments.get(operation.inputs[0].op.name)) is not None:
            first = tf.get_static_value(loop.inputs[counter])
            limit = operation.inputs[1]
            end = _constant(loop.inputs[arguments[limit.op.name]] if limit.op.name in arguments else limit)
            if first is not None and end is not None and _grows_by_one(body, counter):
                limits.append(max(0, int(end) - int(first)))
    return min(limits, default=None)


def _constant(tensor: tf.Tensor) -> Any:
    """The value of a tensor that does not depend on the data; `None` for others."""
    tensor = graphs.root(tensor)
    if tensor.op.type in ("While", "StatelessWhile"):  # the gradient of a loop counts the passes of that loop
        return passes(tensor.op) if _grows_by_one(graphs.body(tensor.op, "body"), tensor.value_index) else None
    if tensor.op.type == "Max":  # of Keras' limits of the passes, of which there is one
        return tf.get_static_value(tensor.op.inputs[0])
    return tf.get_static_value(tensor)


def _grows_by_one(body: Any, number: int) -> bool:
    """Whether a pass of a loop adds one to its variable with this number."""
    result = graphs.root(body.outputs[number])
    if result.op.type not in ("Add", "AddV2"):
        return False
    values = [tf.get_static_value(tensor) for tensor in result.op.inputs]
    return graphs.root(result.op.inputs[0]) is body.inputs[number] and values[1] is not None and int(values[1]) == 1
