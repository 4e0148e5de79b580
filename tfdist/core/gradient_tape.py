"""Gradients of the global batch, on every replica, as soon as a `tf.GradientTape` has computed them.

A replica's loss is a mean over its own part of the global batch, so the loss of the global batch is the sum over the
replicas of share * local loss (docs/contract.md). A tape's gradient with respect to variables is therefore computed
from share * loss, and summed over the replicas before the step sees it. Whatever the step does with it next (clipping
by its norm, perturbing the weights along it, passing it to an optimizer that normalizes) is done with the gradient that
one device computes.

Two more cases:

- A target with one value per example stands for its sum, as a tape defines it. `tfdist.core.contributions` lists what
  is differentiated for each kind of target.
- Rows of a table that are looked up by position, not by the content of examples, are the same on all replicas. Their
  gradients are summed by position, instead of being listed once per replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdist.core import contributions, dependencies, replica_context, share
from tfdist.internals import tensorflow as tensorflow_internals

if TYPE_CHECKING:
    from tfdist.core.replica import Replica


def of_global_batch(gradient: Callable[[Any, Any], Any], target: Any, sources: Any, output_gradients: Any) -> Any:
    """`tf.GradientTape.gradient` inside a step.

    Args:
        gradient: TensorFlow's own, as `gradient(target, output_gradients)`, which computes this replica's gradient.
        target: as of `tf.GradientTape.gradient`.
        sources: the same. The gradient with respect to a tensor, which only this replica has, is not reduced.
        output_gradients: the same.
    """
    replica = replica_context.current()
    flat = tf.nest.flatten(sources)
    if replica is None or not any(map(_is_variable, flat)):
        return gradient(target, output_gradients)
    replica_context.require_meeting(replica, "A gradient with respect to variables")
    found = tf.nest.flatten(gradient(*_weighed(replica, target, output_gradients)))
    variables = [index for index, source in enumerate(flat) if _is_variable(source)]
    reduced = _reduced(replica, [found[index] for index in variables])
    for index, one in zip(variables, reduced, strict=True):
        found[index] = one
    return tf.nest.pack_sequence_as(sources, found)


def _is_variable(source: Any) -> bool:
    return isinstance(source, keras.Variable | tf.Variable)


def _weighed(replica: Replica, target: Any, given: Any) -> tuple[Any, Any]:
    """The targets of this replica, and their output gradients, which are multiplied by their factors."""
    targets = tf.nest.flatten(target)
    if share.is_whole(replica):
        return target, given
    begun = map(tf.ones_like, targets) if given is None else tf.nest.flatten(given)
    weighed: list[tuple[Any, Any]] = []
    for one, begin in zip(targets, begun, strict=True):
        weighed += [(one, None)] if begin is None else contributions.to_target(replica, one, begin)
    return [one for one, _ in weighed], [begin for _, begin in weighed]


def _reduced(replica: Replica, gradients: Sequence[Any]) -> list[Any]:
    """The sums of `gradients` over the replicas that have examples."""
    if tensorflow_internals.tape_is_open() and not any(isinstance(one, tf.IndexedSlices) for one in gradients):
        # An outer tape may differentiate these gradients.
        dense = [replica.only_real(one) for one in gradients if one is not None]
        sums = iter(replica_context.differentiable_sums(replica, dense))
        return replica.know([None if one is None else next(sums) for one in gradients])
    pieces = [_pieces(replica, one) for one in gradients]
    sent = [_sent(replica, *piece) for each in pieces for piece in each]
    summed = iter(replica.reduce(sent))
    return replica.know([_joined([_received(next(summed), *piece) for piece in each]) for each in pieces])


# A gradient, or one lookup of a sparse gradient, and whether all replicas have looked up the same rows.
_Piece = tuple[Any, bool]


def _pieces(replica: Replica, gradient: Any) -> list[_Piece]:
    """The lookups that a sparse gradient consists of; a dense gradient is returned whole."""
    if not isinstance(gradient, tf.IndexedSlices):
        return [(gradient, False)]
    return [(slices, _is_by_position(replica, slices.indices)) for slices in _lookups(gradient)]


def _lookups(slices: tf.IndexedSlices) -> list[tf.IndexedSlices]:
    """The slices of each lookup, which TensorFlow has concatenated."""
    if tf.executing_eagerly():
        return [slices]
    values, indices = slices.values.op, slices.indices.op
    if not (values.type == indices.type == "ConcatV2" and len(values.inputs) == len(indices.inputs)):
        return [slices]
    parts = zip(values.inputs[:-1], indices.inputs[:-1], strict=True)
    return [one for v, i in parts for one in _lookups(tf.IndexedSlices(v, i, slices.dense_shape))]


def _is_by_position(replica: Replica, indices: tf.Tensor) -> bool:
    """Whether all replicas have the same `indices`, since they do not depend on the examples."""
    if not tf.executing_eagerly():
        return not dependencies.depends_on(indices, replica.data)
    # There is no graph to read. Indices 0, 1, 2, … on every replica are taken for positions, not for examples' values.
    joined = tf.reshape(replica.all_gather(indices), [replica.count, -1]) if _alike(replica, indices) else None
    return joined is not None and bool(tf.reduce_all(joined == tf.range(tf.size(indices), dtype=indices.dtype)))


def _alike(replica: Replica, indices: tf.Tensor) -> bool:
    sizes = replica.all_gather(tf.reshape(tf.size(indices), [1]))
    return bool(tf.reduce_all(sizes == sizes[0]))


def _sent(replica: Replica, gradient: Any, by_position: bool) -> Any:
    return None if gradient is None else replica.only_real(gradient.values if by_position else gradient)


def _received(summed: Any, gradient: Any, by_position: bool) -> Any:
    return tf.IndexedSlices(summed, gradient.indices, gradient.dense_shape) if by_position else summed


def _joined(pieces: list[Any]) -> Any:
    if len(pieces) == 1:
        return pieces[0]
    values, indices = tf.concat([p.values for p in pieces], 0), tf.concat([p.indices for p in pieces], 0)
    return tf.IndexedSlices(values, indices, pieces[0].dense_shape)
