"""One replica while its step is traced: how it exchanges tensors, applies gradients and writes values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import tensorflow as tf

from tfdist.communicators import opaque
from tfdist.core import gradient_reduction, replica_context, share
from tfdist.errors import UsageError
from tfdist.internals.keras import tf_variable


class Replica:
    """One replica; this class is the only replica of a step, for which every reduction is the identity.

    Attributes:
        index: its number in the step, 0 to `count - 1`.
        count: the number of replicas in the step.
        share: its fraction of the examples of the global batch; a float64 scalar tensor where it varies.
        examples: the number of examples in its part; `None` where it varies.
        part: its part of the global batch.
        data: the tensors of its part.
        graph: the graph in which its step is traced; `None` if it is not traced.
        updates: catches the assignments of its step, see `tfdist.core.assignments`.
        unseeded: the seed generator for Keras' random functions that are given no seed.
        draws: the number of random operations so far that draw the same on all replicas.
        means: tensors that count as means over its part, whatever operation computed them.
        alike: tensors that are known to be the same on all replicas.
        own_statistics: tensors that differ between the replicas by design: what batch normalization that is not
            synchronized takes for the mean and variance.
        reading: of the graph of its step, see `tfdist.core.joint_values.reading`.
        losses: the losses that layers have added by `add_loss`, by the layer's `id`.
        alone: it exchanges nothing with other replicas, so that Keras' own code is exact.
        metrics_in_parts: each replica has a part of a metric's state, and readers sum the parts.
    """

    alone: ClassVar[bool] = True
    metrics_in_parts: ClassVar[bool] = True
    packing: gradient_reduction.Packing = gradient_reduction.Packing()

    def __init__(self, index: int = 0, count: int = 1):
        self.index = index
        self.count = count
        self.share: tf.Tensor | float = 1.0
        self.examples: int | None = None
        self.part: Any = None
        self.data: list[Any] = []
        self.graph: Any = None
        self.updates: Any = None
        self.draws = 0
        self.unseeded: Any = None
        self.alike: list[tf.Tensor] = []
        self.means: list[tf.Tensor] = []
        self.losses: dict[int, list[Any]] = {}
        self.own_statistics: list[tf.Tensor] = []
        self.reading: Any = None
        self._reduced: list[Any] = []

    def begin(self, data: Any, share: tf.Tensor | float, unseeded: Any = None) -> None:
        """Sets the part of the global batch that the step runs on, its share, and the generator of unseeded draws."""
        self.unseeded = unseeded
        if not isinstance(share, tf.Tensor) and share == 0:
            # With a constant 0 TensorFlow would drop what is multiplied by it, exchanges included, on this replica.
            share = opaque(tf.constant(0.0, tf.float64))
        self.part, self.share, self.reading = data, share, None
        self.data = [tensor for tensor in tf.nest.flatten(data, expand_composites=True) if tensor is not None]
        sized = [tensor for tensor in self.data if tensor.shape.rank]
        self.examples = sized[0].shape[0] if sized else None
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    @property
    def real(self) -> bool | tf.Tensor:
        """Whether it has examples of the global batch; if not, it computes on an example that must not count."""
        return self.share > 0

    def only_real(self, tensor: Any) -> Any:
        """`tensor`, or exact zeros on a replica without examples, even where it computed NaN."""
        if self.real is True:
            return tensor
        if isinstance(tensor, tf.IndexedSlices):
            return tf.IndexedSlices(self.only_real(tensor.values), tensor.indices, tensor.dense_shape)
        return tf.where(self.real, tensor, tf.zeros_like(tensor))

    def real_rows(self, tensor: Any) -> Any:
        """`tensor`, or none of its rows on a replica without examples."""
        if self.real is True:
            return tensor
        if isinstance(tensor, tf.SparseTensor):
            kept = tf.sparse.retain(tensor, tf.fill([tf.size(tensor.values)], self.real))
            rows = tf.where(self.real, tensor.dense_shape[:1], 0)
            return tf.SparseTensor(kept.indices, kept.values, tf.concat([rows, tensor.dense_shape[1:]], 0))
        return tensor[: tf.where(self.real, tf.int32.max, 0)]

    def all_reduce(self, tensors: list[Any]) -> list[Any]:
        """The sums of `tensors` over the replicas, on every replica."""
        return tensors

    def all_reduce_packed(self, tensors: list[Any]) -> list[Any]:
        """As `all_reduce`, of many small tensors, in few buffers."""
        return gradient_reduction.packed(self.all_reduce, replace(self.packing, wire_dtype=None))(tensors)

    def all_gather(self, structure: Any) -> Any:
        """`structure` with the examples of all replicas of the job, in the order of the replicas, on every replica."""
        return structure

    def examples_before(self, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The numbers of examples of the replicas before this one, and of all, from this one's `count`, int32."""
        return replica_context.rows_before(self, count[tf.newaxis])

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """The sums of `gradients` over the replicas, sent in few buffers; `None` stays `None`, sparse stays sparse."""
        return gradient_reduction.without_none(gradient_reduction.packed(self.all_reduce, self.packing))(
            list(gradients)
        )

    def know(self, reduced: list[Any]) -> list[Any]:
        """Notes that these gradients are reduced over the replicas already; returns them."""
        self._reduced += reduced
        self.know_alike(reduced)
        return reduced

    def know_alike(self, tensors: Sequence[Any]) -> None:
        """Notes that these tensors are the same on all replicas; of eager ones nothing is asked later."""
        self.alike += [one for one in tensors if isinstance(one, tf.Tensor) and tf.is_symbolic_tensor(one)]

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Called before the first update of an `optimizer` without variables; in eager code it then makes them itself.

        Raises:
            UsageError: the step is traced, and did not use the optimizer when it was rehearsed.
        """
        del variables
        if tf.inside_function():
            raise UsageError(
                f"The optimizer `{optimizer.name}` has no variables yet, and they cannot be made inside a graph",
                "call `optimizer.build(model.trainable_variables)` before training",
            )

    def settle(self) -> None:
        """Writes the assignments of the step so far, so that an optimizer's update reads them."""
        self.updates.write()

    def apply(
        self, apply: Callable[..., None], gradients: Sequence[Any], optimizer: Any, variables: Sequence[Any] | None
    ) -> None:
        """Updates each copy of the variables once by `apply(gradients)`, with the gradients of the global batch.

        Args:
            apply: Keras' update, also as `apply(gradients, variables)` for some of the variables.
            gradients: one per variable; `None` for a variable without one.
            optimizer: whose update it is.
            variables: to be updated; `None` for all that the optimizer was built for.
        """
        del optimizer, variables
        self.update_each_copy(apply, self.of_global_batch(gradients))

    def of_global_batch(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients of the global batch: `gradients`, of which those that are not reduced yet are reduced."""
        known = {id(gradient) for gradient in self._reduced}
        rows = {id(gradient.indices) for gradient in self._reduced if isinstance(gradient, tf.IndexedSlices)}

        def is_rescaled(gradient: Any) -> bool:
            """Whether it has the rows of a reduced gradient, perhaps clipped: the rows are the same on all replicas."""
            return isinstance(gradient, tf.IndexedSlices) and id(gradient.indices) in rows

        local = [None if id(g) in known else g.values if is_rescaled(g) else g for g in gradients]
        summed = self.reduce([share.weigh(self, gradient) for gradient in local])

        def reduced(gradient: Any, total: Any) -> Any:
            if total is None:
                return gradient
            return tf.IndexedSlices(total, gradient.indices, gradient.dense_shape) if is_rescaled(gradient) else total

        return list(map(reduced, gradients, summed))

    def write(self, updates: list[tuple[Any, tf.Tensor]]) -> None:
        """Assigns to Keras variables values that are the same on every replica."""
        variables = [tf_variable(variable) for variable, _ in updates]

        def assign(values: list[tf.Tensor]) -> None:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(tf.cast(value, variable.dtype))

        with replica_context.on_replica(None):
            self.update_each_copy(assign, [value for _, value in updates])

    def read_metric(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        """The values of a metric's variables over all replicas."""
        values = [tf.convert_to_tensor(tf_variable(variable)) for variable in variables]
        return self.all_reduce(values) if self.metrics_in_parts else values

    def write_metric(self, updates: list[tuple[Any, tf.Tensor]]) -> None:
        """Sets a metric's variables, in parts: the first replica gets the values, the others zeros."""
        if self.metrics_in_parts:
            # With a constant index TensorFlow would drop the value's computation, exchanges included, on a replica.
            first = opaque(tf.constant(self.index == 0))
            updates = [(variable, tf.where(first, value, tf.zeros_like(value))) for variable, value in updates]
        self.write(updates)

    def update_each_copy(self, function: Callable[[list[Any]], None], values: list[Any]) -> None:
        """Calls `function(values)` once for each copy of the variables; `values` are the same on every replica."""
        function(values)
