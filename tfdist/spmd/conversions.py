"""Resharding: conversions of values from one placement to another, by collectives or by local slicing.

A sharded list of tensors, which loops read and write, has shards of its elements. An empty list, of whose elements
nothing is known yet, becomes sharded when the first shard is appended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import tensorflow as tf

from tfdist.internals import tensorflow_graphs
from tfdist.spmd import meshes
from tfdist.spmd.cost import Cost
from tfdist.spmd.meshes import Mesh
from tfdist.spmd.placements import REPLICATE, Partial, Placed, Placement, Replicate, Shard

EMPTY_LISTS = frozenset(("EmptyTensorList", "TensorListReserve"))


class Conversions:
    """Converts values to the placements in which they are read, with the collectives of a mesh.

    Args:
        mesh: the replicas.
        cost: counts the collectives.
    """

    def __init__(self, mesh: Mesh, cost: Cost):
        self.mesh = mesh
        self.cost = cost

    def replicated(self, values: Sequence[Placed]) -> list[Placed]:
        """The values, replicated."""
        self.convert([(value, REPLICATE) for value in values])
        return [self.placed(value, REPLICATE) for value in values]

    def placed(self, value: Placed, placement: Placement) -> Placed:
        """`value` in another placement."""
        converted = value.converted(placement)
        if converted is None:
            self.convert([(value, placement)])
            converted = value.converted(placement)
        assert converted is not None
        return converted

    def needs_exchange(self, value: Placed, placement: Placement) -> bool:
        """Whether the conversion of `value` to `placement` takes a collective."""
        if isinstance(value.placement, Replicate) or value.converted(placement) is not None:
            return False
        return value.converted(REPLICATE) is None

    def summed(self, value: Placed) -> Placement:
        """The placement of a value once a partial value is reduced.

        A gradient is reduced to shards if the replicas of the mesh update shards of the variable.
        """
        if not isinstance(value.placement, Partial):
            return value.placement
        parts = None
        if value.converted(REPLICATE) is None and value.is_gradient and value.placement.reduction == "sum":
            parts = self.mesh.parts(value.shape)
        return parts or REPLICATE

    def convert(self, wanted: Iterable[tuple[Placed, Placement]]) -> None:
        """Converts values, with all collectives that this takes issued together."""
        pending = [(value, placement) for value, placement in wanted if value.converted(placement) is None]
        exchanged = {value.number: value for value, placement in pending if self.needs_exchange(value, placement)}
        replicated = {value.number for value, placement in pending if placement == REPLICATE}
        scattered: dict[int, tuple[Placed, Shard]] = {
            value.number: (value, placement)
            for value, placement in pending
            if isinstance(placement, Shard)
            and value.number in exchanged
            and value.number not in replicated
            and (value.placement, placement) == (Partial(), self.mesh.parts(value.shape))
        }
        with self.mesh.exchanging() if exchanged else contextlib.nullcontext():
            self._reduce_scatter(list(scattered.values()))
            values = [value for number, value in exchanged.items() if number not in scattered]
            self._all_reduce([v for v in values if isinstance(v.placement, Partial) and v.in_parts() is None])
            self._all_gather([value for value in values if value.converted(REPLICATE) is None])
        for value, placement in pending:
            if value.converted(placement) is None:
                copies = value.converted(REPLICATE)
                assert copies is not None
                value.keep(self.split(copies, placement))

    def _reduce_scatter(self, values: Sequence[tuple[Placed, Shard]]) -> None:
        terms, shards = [value.tensors for value, _ in values], [shard for _, shard in values]
        results = self.mesh.reduce_scatter(terms, shards) if values else []
        for (value, shard), parts in zip(values, results, strict=True):
            self.cost.reduce(value.tensors[0])
            value.keep(Placed(shard, parts, replica=self.mesh.local[0]))

    def _all_reduce(self, values: Sequence[Placed]) -> None:
        kinds: dict[tuple[str, bool], list[Placed]] = {}
        for value in values:
            assert isinstance(value.placement, Partial)
            kinds.setdefault((value.placement.reduction, value.is_gradient), []).append(value)
        for (reduction, gradients), terms in kinds.items():
            results = self.mesh.all_reduce([term.tensors for term in terms], reduction, gradients)
            for value, copies in zip(terms, results, strict=True):
                assert isinstance(value.placement, Partial)
                self.cost.reduce(copies[0])
                dtype = value.placement.dtype or copies[0].dtype
                value.keep(Placed(REPLICATE, [tf.cast(copy, dtype) for copy in copies]))

    def _all_gather(self, values: Sequence[Placed]) -> None:
        """Gathers sharded values, and partial sums of which a reduce-scatter has already made the shards."""
        dense: list[tuple[Placed, Placed, Shard]] = []
        for value in values:
            parts = value if isinstance(value.placement, Shard) else value.in_parts()
            assert parts is not None and isinstance(parts.placement, Shard)
            if value.element_dtype is not None:
                value.keep(self._gathered_list(value, parts.placement))
            else:
                dense.append((value, parts, parts.placement))
        results = self.mesh.all_gather([p.tensors for _, p, _ in dense], [s for *_, s in dense]) if dense else []
        for (value, _, _), copies in zip(dense, results, strict=True):
            for copy in copies:
                copy.set_shape(value.shape)
            self.cost.gather(copies[0])
            value.keep(Placed(REPLICATE, copies, repeated=isinstance(value.placement, Shard)))

    def split(self, value: Placed, placement: Placement) -> Placed:
        """A replicated value as shards, or as partial values: the value on replica 0, and zeros on the others."""
        if isinstance(placement, Shard) and value.element_dtype is not None:
            return self._split_list(value, placement)
        if any(tensor.dtype == tf.variant for tensor in value.tensors):
            raise NotImplementedError("only tensors and lists of tensors can be sharded")
        parts = []
        for position, replica in enumerate(self.mesh.local):
            tensor = self.mesh.read(value, position)
            if isinstance(placement, Shard):
                with self.mesh.on_copy(self.mesh.copy_of_replica(position)):  # so that only the shard is sent
                    parts.append(meshes.part_of(tensor, placement, replica))
            else:
                with self.mesh.on_replica(position):
                    parts.append(tensor if replica == 0 else tf.zeros_like(tensor))
        return Placed(placement, parts, replica=self.mesh.local[0])

    def _split_list(self, value: Placed, shard: Shard) -> Placed:
        parts = []
        for position, replica in enumerate(self.mesh.local):
            with self.mesh.on_replica(position):
                if isinstance(value, EmptyList):
                    shape, number = (self.mesh.read(entry, position) for entry in value.inputs)
                    constant = value.inputs[0].constant
                    if constant is not None and constant.ndim and constant.size <= shard.axis:
                        raise NotImplementedError("the elements of the list do not have the sharded axis")
                    shape = meshes.local_lengths(shape, value.inputs[0], shard.axis, shard, replica)
                    parts += tensorflow_graphs.create(value.operation, [shape, number])
                else:
                    elements = _elements(self.mesh.read(value, position), value.element_dtype)
                    if elements.shape.rank is None:
                        raise NotImplementedError("a list of elements of unknown rank cannot be sharded")
                    parts.append(_list(meshes.part_of(elements, shard.moved(shard.axis + 1), replica)))
        return Placed(shard, parts, element_dtype=value.element_dtype)

    def _gathered_list(self, value: Placed, shard: Shard) -> Placed:
        parts = []
        for position, tensor in enumerate(value.tensors):
            with self.mesh.on_replica(position):
                parts.append(_elements(tensor, value.element_dtype))
        (copies,) = self.mesh.all_gather([parts], [shard.moved(shard.axis + 1)])
        self.cost.gather(copies[0])
        return Placed(REPLICATE, [_list(copy) for copy in copies], repeated=True, element_dtype=value.element_dtype)


class EmptyList(Placed):
    """A list that has no elements yet."""

    def __init__(self, operation: tf.Operation, inputs: Sequence[Placed], tensors: Sequence[tf.Tensor]):
        super().__init__(REPLICATE, tensors, element_dtype=operation.get_attr("element_dtype"))
        self.operation = operation
        self.inputs = list(inputs)


def empty_list(mesh: Mesh, operation: tf.Operation, inputs: Sequence[Placed]) -> EmptyList:
    """A new list; `inputs` of the `operation` are the shape of an element, and a number of elements."""
    tensors = []
    for copy in range(mesh.copies):
        with mesh.on_copy(copy):
            tensors += tensorflow_graphs.create(operation, [mesh.tensors(value)[copy] for value in inputs])
    return EmptyList(operation, inputs, tensors)


def _elements(handle: tf.Tensor, dtype: tf.DType | None) -> tf.Tensor:
    assert dtype is not None
    return tf.raw_ops.TensorListStack(input_handle=handle, element_shape=-1, element_dtype=dtype)


def _list(elements: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.TensorListFromTensor(tensor=elements, element_shape=tf.shape(elements)[1:])
