"""The replica that runs the present code, and the exchanges between replicas that code inside a step can ask for.

A user's own step, loss or metric sees the replica's part of the global batch. To see all of it:

    tfdist.gather(tensor)         the examples of all replicas, in the order of the global batch
    tfdist.all_reduce(tensor)     the sum over the replicas

Both are differentiable: gradients flow back to the replica that each value came from. Outside of a step, and on one
replica, both return their argument, so that the same code runs on one device and in stock Keras.

Synopsis:

    >>> import tensorflow as tf
    >>> gather(tf.constant([1, 2])).numpy().tolist()
    [1, 2]
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.communicators import opaque
from tfdist.core import gradient_reduction
from tfdist.errors import UsageError

if TYPE_CHECKING:
    from tfdist.core.replica import Replica


class _Current(threading.local):
    replica: Replica | None = None
    in_step = False
    asked = False  # `gather` or `all_reduce` was called, see `asks`


_current = _Current()


def current() -> Replica | None:
    """The replica that runs the present code; `None` outside of a step, and in steps of a single replica."""
    return _current.replica


def in_step() -> bool:
    """Whether the present code belongs to a replica's step, also inside `on_replica(None)`."""
    return _current.in_step


@contextlib.contextmanager
def on_replica(replica: Replica | None) -> Iterator[None]:
    """Code in this context, in this thread, runs on `replica`; with `None`, as on a single replica."""
    before = _current.replica, _current.in_step
    _current.replica, _current.in_step = replica, _current.in_step or replica is not None
    try:
        yield
    finally:
        _current.replica, _current.in_step = before


def gather(tensor: Any) -> Any:
    """The examples of `tensor` of all replicas, in the order of the global batch; differentiable.

    Args:
        tensor: `[n, ...]`, dense, ragged or sparse; only `n` may differ between replicas. Replicas that have no example
            of the global batch add no rows.

    Returns:
        `[N, ...]` of the same dtype, the same on every replica: `N` is the sum of `n` over the replicas.

    Raises:
        UsageError: called where replicas cannot meet: in a branch of `tf.cond`, or in a loop of the graph.
    """
    replica = _meeting("tfdist.gather")
    if not isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
        tensor = tf.convert_to_tensor(tensor)
    return tensor if replica is None else gathered(replica, tensor)


def gathered(replica: Replica, tensor: Any) -> Any:
    """The examples of `tensor` of all replicas, to this `replica`; see `gather`."""
    found = _gathered(replica, replica.real_rows(tensor))
    replica.know_alike(tf.nest.flatten(found, expand_composites=True))
    return found


def _gathered(replica: Replica, tensor: Any) -> Any:
    if isinstance(tensor, tf.RaggedTensor):
        lengths = replica.all_gather(tensor.row_lengths())
        return tf.RaggedTensor.from_row_lengths(_gathered(replica, tensor.values), lengths, validate=False)
    if isinstance(tensor, tf.SparseTensor):
        first, rows = rows_before(replica, tensor.dense_shape[:1])
        indices = replica.all_gather(tensor.indices + tf.pad([first], [[0, tf.rank(tensor) - 1]]))
        shape = tf.concat([rows[tf.newaxis], tensor.dense_shape[1:]], 0)
        return tf.SparseTensor(indices, _gathered(replica, tensor.values), shape)
    if not tensor.dtype.is_floating:
        return replica.all_gather(tensor)

    @tf.custom_gradient
    def gathered(local: tf.Tensor) -> Any:
        count = tf.shape(local)[:1]
        begin, _ = rows_before(replica, count)

        def backward(upstream: Any) -> tf.Tensor:
            (total,) = replica.all_reduce([tf.convert_to_tensor(upstream)])  # sparse where rows were looked up
            return total[begin : begin + count[0]]

        return replica.all_gather(local), backward

    return gathered(tensor)


def rows_before(replica: Replica, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The number of rows of the replicas before this one, and of all replicas, from this replica's `count`, `[1]`."""
    counts = replica.all_gather(count)
    # With a constant index TensorFlow would drop the exchange on the first replica, and on it alone.
    before = tf.range(tf.size(counts)) < opaque(tf.constant(replica.index))
    return tf.reduce_sum(tf.where(before, counts, tf.zeros_like(counts))), tf.reduce_sum(counts)


def all_reduce(tensor: Any) -> Any:
    """The sum of `tensor` over the replicas; differentiable.

    Args:
        tensor: of the same shape and dtype on every replica. The tensor of a replica without examples of the global
            batch counts as zero.

    Returns:
        The same shape and dtype, the same value on every replica.

    Raises:
        UsageError: called where replicas cannot meet: in a branch of `tf.cond`, or in a loop of the graph.
    """
    replica = _meeting("tfdist.all_reduce")
    tensor = tf.convert_to_tensor(tensor)
    if replica is None:
        return tensor
    (total,) = differentiable_sums(replica, [replica.only_real(tensor)])
    return total


def differentiable_sums(replica: Replica, tensors: list[Any]) -> list[Any]:
    """The sums of `tensors` over the replicas, with gradients.

    The losses of all replicas add up to the global loss (see `tfdist.core.gradient_tape`), so the gradient of a
    replica's summand is the sum of the upstream gradients of all replicas.
    """

    @tf.custom_gradient
    def sum_of(local: tf.Tensor) -> Any:
        def backward(upstream: Any) -> Any:
            return replica.all_reduce([tf.convert_to_tensor(upstream)])[0]

        return replica.all_reduce([local])[0], backward

    # One function of several tensors would make each sum depend on all of them, and TensorFlow drops what follows.
    found = gradient_reduction.packed(
        lambda buffers: [sum_of(one) for one in buffers], gradient_reduction.Packing(None)
    )(tensors)
    replica.know_alike(found)
    return found


@dataclass
class Asked:
    """Whether code has called `gather` or `all_reduce`; set when the context ends."""

    any: bool = False


@contextlib.contextmanager
def asks() -> Iterator[Asked]:
    """Notes whether code in this context calls `gather` or `all_reduce`."""
    before, _current.asked = _current.asked, False
    asked = Asked()
    try:
        yield asked
    finally:
        asked.any = _current.asked
        _current.asked = before or asked.any


def can_meet(replica: Replica) -> bool:
    """Whether replicas can exchange tensors here: in the graph of the step itself, which all replicas run alike."""
    return replica.graph is None or tf.executing_eagerly() or tf.compat.v1.get_default_graph() is replica.graph


def require_meeting(replica: Replica, what: str) -> None:
    """Raises `UsageError` in a branch of `tf.cond` or a loop of the graph, which some replicas might never run."""
    if not can_meet(replica):
        raise UsageError(
            f"{what} is in a branch of `tf.cond`, or in a loop of the graph, where replicas cannot meet",
            "take it out: choose with `tf.where`, and loop with Python's `for` over a `range`",
        )


def _meeting(what: str) -> Replica | None:
    _current.asked = True
    replica = current()
    if replica is not None:
        require_meeting(replica, f"`{what}`")
    return replica
