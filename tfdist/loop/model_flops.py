"""Counts the FLOPs of a model's training step: those of its matrix products, convolutions and recurrent loops.

These are the model FLOPs of A. Chowdhery and others, "PaLM", arXiv 2204.02311, appendix B: what one device has to
compute for a batch, whatever the strategy repeats or computes again. A multiplication and an addition are two FLOPs.
Element by element operations are not counted, as usual. The operations are those of the traced step, so that a custom
`train_step`, several optimizers and attention are counted as they are computed.

Synopsis:

    >>> import keras, tfdist
    >>> from tfdist.loop import traced_step
    >>> model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(10)])
    >>> model.compile("sgd", "mse")
    >>> batch = tf.TensorSpec([None, 20]), tf.TensorSpec([None, 10])
    >>> operations = traced_step.operations(tfdist.strategy("single"), model, 8, batch, unknown_length=1)
    >>> of_step(operations)  # the input needs no gradient
    6400
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.internals import tensorflow_graphs as graphs
from tfdist.loop import while_loops
from tfdist.spmd.cost import flops_of_product

_BRANCHES = {"If": ("then_branch", "else_branch"), "StatelessIf": ("then_branch", "else_branch")}


def of_step(operations: Sequence[tf.Operation]) -> int | None:
    """The FLOPs of a training step.

    Args:
        operations: those that `tfdist.loop.traced_step.operations` returns.

    Returns:
        The FLOPs; `None` if an operation's FLOPs are not known: a loop whose number of passes depends on the data, or a
        recurrent layer of cuDNN.
    """
    needed = graphs.effective(operations)
    return _sum([operation for operation in operations if operation.name in needed])


def _sum(operations: Sequence[tf.Operation]) -> int | None:
    counts = list(map(_flops, operations))
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _flops(operation: tf.Operation) -> int | None:
    if graphs.is_loop(operation):
        once = _sum(graphs.body(operation, "body").get_operations())
        count = while_loops.iterations(operation) if once else 0
        return None if once is None or count is None else once * count
    if operation.type in _BRANCHES:
        counts = [_sum(graphs.body(operation, name).get_operations()) for name in _BRANCHES[operation.type]]
        return None if None in counts else max(count or 0 for count in counts)
    if (called := graphs.called(operation)) is not None:
        return _sum(_used(operation, called))
    if operation.type.startswith("Cudnn"):
        return None
    return flops_of_product(
        operation, [tensor.shape for tensor in operation.inputs], [tensor.shape for tensor in operation.outputs]
    )


def _used(call: tf.Operation, called: Any) -> list[tf.Operation]:
    """The operations of a called function whose results the caller uses: TensorFlow removes the others."""
    pairs = zip(call.outputs, called.outputs, strict=True)
    outputs = [inside.op for outside, inside in pairs if outside.consumers()]
    return list(graphs.ancestors([*outputs, *called.control_outputs]).values())
