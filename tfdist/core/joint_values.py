"""Values that a step computes of several examples together, computed of all examples of the global batch.

Most of what a step computes is a mean or a sum of what each example gives, and then the values of the replicas' parts
add up (`tfdist.core.means_and_sums`). Others do not: the root of a mean, a mean over the examples that a mask leaves, a
covariance, the largest of all, products of each example with each other. For these the graph is read backward:

    rows of the examples, totals of them      of this replica; all replicas together have those of the global batch
    └─ the operations between                 made anew, of the rows that were gathered and the totals that were added
       └─ the value                           of the global batch, the same on every replica

Its gradient goes backward through the new operations and the exchange to the rows and totals of each replica, which the
step's own tape has recorded.

The operations between must be plain ones, without variables of the model, random numbers or state: layers would be
repeated for the whole global batch. Otherwise a warning says what differs from one device.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tensorflow as tf

from tfdist.core import dependencies, replica_context, share
from tfdist.core.dependence import ALIKE, JOINT, LENGTH, ROWS, TOTAL, Dependences
from tfdist.core.example_axes import ExampleAxes
from tfdist.core.means_and_sums import Degrees
from tfdist.errors import DifferenceWarning
from tfdist.internals import tensorflow_graphs

if TYPE_CHECKING:
    from tfdist.core.replica import Replica


@dataclass(frozen=True)
class Joint:
    """A value of the global batch.

    Attributes:
        value: the same on every replica.
        sources: the rows and totals of this replica, and whatever else it was computed from.
    """

    value: tf.Tensor
    sources: tuple[tf.Tensor, ...]

    def gradients(self, output_gradient: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """For each source, its gradient; those of all replicas, each of its part, belong together."""
        floats = [one for one in self.sources if one.dtype.is_floating]
        found = tf.gradients(self.value, floats, output_gradient, stop_gradients=floats)
        return [(one, tf.convert_to_tensor(g)) for one, g in zip(floats, found, strict=True) if g is not None]


def reading(replica: Replica) -> Reading:
    """Of the graph of the step of `replica`, as far as it is made."""
    if replica.reading is None:
        replica.reading = Reading(replica)
    replica.reading.update()
    found: Reading = replica.reading
    return found


class _NotPlainError(Exception):
    """Raised where the operations between cannot be made anew."""


class Reading:
    """What is known of the graph of a replica's step.

    Args:
        replica: whose graph is being made.
    """

    def __init__(self, replica: Replica):
        self._replica = replica
        self.axes = ExampleAxes(replica.data)
        self.dependences = Dependences(self.axes, replica.data)
        self.degrees = Degrees(self.axes, self.dependences)
        self._joint: dict[tuple[int, str, bool], Joint | None] = {}
        self._noted = [0, 0, 0]

    def update(self) -> None:
        """Notes what the replica has learned of its tensors meanwhile."""
        lists = self._replica.alike, self._replica.own_statistics, self._replica.means
        alike, own, means = (every[count:] for every, count in zip(lists, self._noted, strict=True))
        self._noted = list(map(len, lists))
        self.axes.know(alike)
        self.degrees.know(alike, means)
        self.dependences.know([*alike, *own], means)

    def is_joint(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is computed of several examples together, and is no sum of their sums and means.

        Neither is a sum that is divided by one less than the number of examples.
        """
        if self.dependences.of(tensor) is JOINT:
            return True
        return not self.axes.of(tensor) and any(one.degree not in (0, 1) for one in self.degrees.summands(tensor))

    def joint(self, tensor: tf.Tensor, *, differentiated: bool) -> Joint | None:
        """`tensor` of the global batch; `None` where it is not joint, or cannot be computed of all examples."""
        key = (*dependencies.key(tensor), differentiated)
        if key not in self._joint:
            self._joint[key] = self._made(tensor, differentiated) if self.is_joint(tensor) else None
        return self._joint[key]

    def whole(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """`tensor` of the global batch, whatever it is made of, if it has no rows; `None` if it cannot be computed."""
        if self.dependences.of(tensor) is ALIKE:
            return tensor
        try:
            if self.axes.of(tensor):
                raise _NotPlainError
            return self._anew(tensor, differentiated=False).value
        except _NotPlainError:
            return None

    def _made(self, tensor: tf.Tensor, differentiated: bool) -> Joint | None:
        if self._replica.alone:  # it trains apart from others, by design
            return None
        try:
            return self._anew(tensor, differentiated)
        except _NotPlainError:
            self.warn(tensor)
            return None

    def _anew(self, tensor: tf.Tensor, differentiated: bool) -> Joint:
        if not replica_context.can_meet(self._replica):
            raise _NotPlainError
        return _Anew(self._replica, self, self._between(tensor, differentiated)).joint(tensor)

    def _between(self, tensor: tf.Tensor, differentiated: bool) -> list[tf.Operation]:
        """The operations between the rows and totals and `tensor`, each after those that it needs."""
        found: dict[str, tf.Operation] = {}
        waiting = [(tensor, False)]
        while waiting:
            one, is_ready = waiting.pop()
            if is_ready:
                found.setdefault(one.op.name, one.op)
            elif one.op.name not in found and not self._is_source(one, differentiated):
                self._require_plain(one.op)
                waiting.append((one, True))
                if not self.is_length_of_rows(one.op):
                    waiting += [(each, False) for each in one.op.inputs]
        return list(found.values())

    def _is_source(self, tensor: tf.Tensor, differentiated: bool) -> bool:
        """Whether the value of the global batch follows from that of each part."""
        kind = self.dependences.of(tensor)
        if kind in (TOTAL, LENGTH):
            return self.degrees.of(tensor) in (0, 1) and not self.axes.of(tensor)
        if self.is_extreme(tensor):
            # Where several are the largest they share a gradient, which takes all of them.
            return not differentiated or not dependencies.reads_variable(tensor)
        return kind in (ALIKE, ROWS)

    def is_extreme(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is the largest, or the like, of rows, which need not be gathered to find that of all."""
        of_rows = tensor.op.type in _EXTREMES and self.dependences.of(tensor.op.inputs[0]) is ROWS
        return of_rows and not self.axes.of(tensor)

    def is_length_of_rows(self, operation: tf.Operation) -> bool:
        """Whether an operation has the lengths of rows of examples, for which these need not be gathered."""
        return operation.type in ("Shape", "Size") and self.dependences.of(operation.inputs[0]) is ROWS

    def _require_plain(self, operation: tf.Operation) -> None:
        kinds = {attribute.WhichOneof("value") for attribute in operation.node_def.attr.values()}
        handles = any(one.dtype in (tf.resource, tf.variant) for one in operation.inputs)
        of_layer = operation.type in _OF_LAYERS and any(map(self._is_weight, operation.inputs))
        if operation.op_def.is_stateful or "func" in kinds or handles or of_layer or not operation.inputs:
            raise _NotPlainError

    def _is_weight(self, tensor: tf.Tensor) -> bool:
        return self.dependences.of(tensor) is ALIKE and dependencies.reads_variable(tensor)

    def warn(self, tensor: tf.Tensor) -> None:
        """Says which line of the user's makes a value that differs from that of one device."""
        if self._replica.index:
            return
        operation = self._first_joint(tensor)
        warnings.warn(
            f"A step computes a value of several examples together ({tensorflow_graphs.place(operation)}), and each "
            "replica computes it of its own part of the batch: the training differs from that of one device\n\n"
            "hint: compute it of `tfdist.gather(...)`, the examples of all replicas; "
            "`strategy.verify(model, ...)` says how much it is",
            DifferenceWarning,
            stacklevel=2,
        )

    def _first_joint(self, tensor: tf.Tensor) -> tf.Operation:
        """The operation where the first joint value on the way to `tensor` is made."""
        while joint := [one for one in tensor.op.inputs if self.dependences.of(one) is JOINT]:
            tensor = joint[0]
        return tensor.op


@dataclass
class _Anew:
    """The operations between, of all examples."""

    replica: Replica
    reading: Reading
    between: list[tf.Operation]

    def joint(self, tensor: tf.Tensor) -> Joint:
        """`tensor`, which the last of the operations makes, if there are any, of all examples."""
        if any(isinstance(one, _COMPOSITE) for one in tf.nest.flatten(self.replica.part)):
            raise _NotPlainError  # rows of several lengths cannot be told from the examples
        self._of_all: dict[tuple[int, str], tf.Tensor] = {}
        self._sources: list[tf.Tensor] = []
        # All replicas exchange in the order of the graph, before the first operation is made.
        names = {operation.name for operation in self.between}
        inputs = [one for each in self.between if not self.reading.is_length_of_rows(each) for one in each.inputs]
        for one in (*inputs, tensor):
            if one.op.name not in names:
                self._exchange(one)
        for operation in self.between:
            self._make(operation)
        return Joint(self._of_all[dependencies.key(tensor)], tuple(self._sources))

    def _make(self, operation: tf.Operation) -> None:
        if self.reading.is_length_of_rows(operation):
            made = [self._length(operation)]
        else:
            inputs = [self._of_all[dependencies.key(one)] for one in operation.inputs]
            made = _again(operation, inputs)
        for before, after in zip(operation.outputs, made, strict=True):
            self._of_all[dependencies.key(before)] = after

    def _exchange(self, tensor: tf.Tensor) -> None:
        key = dependencies.key(tensor)
        if key in self._of_all:
            return
        kind = self.reading.dependences.of(tensor)
        if tensor.op.type != "Const":
            self._sources.append(tensor)
        if self.reading.is_extreme(tensor):
            self._of_all[key] = _EXTREMES[tensor.op.type](self._of_replicas(tensor[tf.newaxis]), axis=0)
        else:
            exchanged = self._gathered if kind is ROWS else self._added
            self._of_all[key] = tensor if kind is ALIKE else exchanged(tensor)

    def _gathered(self, tensor: tf.Tensor) -> tf.Tensor:
        """The rows of all examples, in the order of the global batch."""
        axes, blocks = self.reading.axes.of(tensor), self.reading.dependences.blocks(tensor)
        if len(axes) != 1 or not blocks or tensor.shape.rank is None or not self.reading.axes.is_certain(tensor):
            raise _NotPlainError
        (axis,) = axes
        first = [axis, *(one for one in range(tensor.shape.rank) if one != axis)]
        rows = tf.transpose(tensor, first) if axis else tensor
        rest = tf.shape(rows)[1:]
        if blocks > 1:  # the examples follow each other several times, and have to in the result
            rows = tf.reshape(rows, tf.concat([[blocks, -1], rest], 0))
            rows = tf.transpose(rows, [1, 0, *range(2, tensor.shape.rank + 1)])
        gathered = self._of_replicas(rows)
        if blocks > 1:
            gathered = tf.transpose(gathered, [1, 0, *range(2, tensor.shape.rank + 1)])
            gathered = tf.reshape(gathered, tf.concat([[-1], rest], 0))
        return tf.transpose(gathered, [first.index(one) for one in range(tensor.shape.rank)]) if axis else gathered

    def _of_replicas(self, rows: tf.Tensor) -> tf.Tensor:
        sent = tf.cast(rows, tf.int32) if rows.dtype == tf.bool else rows
        return tf.cast(replica_context.gathered(self.replica, sent), rows.dtype)

    def _added(self, tensor: tf.Tensor) -> tf.Tensor:
        """A total, or a length, of all examples."""
        degree = self.reading.degrees.of(tensor)
        if self.reading.dependences.of(tensor) is LENGTH:
            return tensor if degree == 0 else self._length_of_all(tensor)
        if tensor.dtype.is_integer and degree == 1:
            return tf.reduce_sum(self._of_replicas(tensor[tf.newaxis]), axis=0)
        if not tensor.dtype.is_floating:
            raise _NotPlainError
        part = self.replica.only_real(tensor) if degree == 1 else share.weigh(self.replica, tensor)
        return replica_context.differentiable_sums(self.replica, [part])[0]

    def _length_of_all(self, length: tf.Tensor) -> tf.Tensor:
        if length.shape.rank != 0:
            raise _NotPlainError
        own = tf.cast(self.replica.only_real(length), tf.int32)
        return tf.cast(replica_context.rows_before(self.replica, own[tf.newaxis])[1], length.dtype)

    def _length(self, operation: tf.Operation) -> tf.Tensor:
        """The lengths of all axes of rows, or their product."""
        source, (own,) = operation.inputs[0], operation.outputs
        if source.shape.rank is None:
            raise _NotPlainError
        lengths = tf.unstack(tf.shape(source, own.dtype))
        for axis in self.reading.axes.of(source):
            lengths[axis] = self._length_of_all(lengths[axis])
        return tf.stack(lengths) if operation.type == "Shape" else tf.reduce_prod(tf.stack(lengths))


def _again(operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The outputs of an operation like `operation`, in the same graph, of other inputs."""
    try:
        made = operation.graph.create_op(
            operation.type,
            list(inputs),
            [one.dtype for one in operation.outputs],
            name=f"{operation.name.rpartition('/')[2]}_of_all",
            attrs=dict(operation.node_def.attr),
            op_def=operation.op_def,
        )
    except ValueError as error:  # a shape that is fixed for the part
        raise _NotPlainError from error
    return list(made.outputs)


_EXTREMES = {"Max": tf.reduce_max, "Min": tf.reduce_min, "All": tf.reduce_all, "Any": tf.reduce_any}
_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor)
# Operations that have a layer's weights; a joint value that is made by one would need the layer for all examples.
_OF_LAYERS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv1D", "Conv2D", "Conv3D")
