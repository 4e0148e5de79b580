"""Traces a training step of one device, without running it, so that its operations can be counted."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.data.input.division import Division
from tfdist.data.input.feed import Batches
from tfdist.interface.program import Steps
from tfdist.internals import tensorflow as tensorflow_internals
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
