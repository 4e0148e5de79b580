"""Values brought from one placement to another: gathered, added up, cut."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import tensorflow as tf

from tfdist.spmd import meshes, tensor_lists
from tfdist.spmd.cost import Cost
from tfdist.spmd.meshes import Mesh
from tfdist.spmd.placements import REPLICATE, Partial, Placed, Placement, Replicate, Shard


class Conversions:
    """Brings values to the placements in which they are read, with the exchanges of a mesh.

    Args:
        mesh: the replicas.
        cost: counts the exchanges.
    """

    def __init__(self, mesh: Mesh, cost: Cost):
        self.mesh = mesh
        self.cost = cost

    def whole(self, values: Sequence[Placed]) -> list[Placed]:
        """The values, replicated."""
        self.convert([(value, REPLICATE) for value in values])
        return [self.placed(value, REPLICATE) for value in values]

    def placed(self, value: Placed, placement: Placement) -> Placed:
        """`value` in another placement."""
        found = value.converted(placement)
        if found is None:
            self.convert([(value, placement)])
            found = value.converted(placement)
        assert found is not None
        return found

    def needs_exchange(self, value: Placed, placement: Placement) -> bool:
        """Whether replicas must exchange something for `value` to be placed so."""
        if isinstance(value.placement, Replicate) or value.converted(placement) is not None:
            return False
        return value.converted(REPLICATE) is None

    def summed(self, value: Placed) -> Placement:
        """Where a value is that is not read as the terms of a sum: its own placement, or where its sum is made.

        Of a gradient that is the place of a part of it, where the replicas of the mesh update the variable in parts.
        """
        if not isinstance(value.placement, Partial):
            return value.placement
        parts = None
        if value.converted(REPLICATE) is None and value.is_gradient and value.placement.reduction == "sum":
            parts = self.mesh.parts(value.shape)
        return parts or REPLICATE

    def convert(self, wanted: Iterable[tuple[Placed, Placement]]) -> None:
        """Converts values, with the exchanges that this takes made together."""
        todo = [(value, placement) for value, placement in wanted if value.converted(placement) is None]
        exchanged = {value.number: value for value, placement in todo if self.needs_exchange(value, placement)}
        needed_whole = {value.number for value, placement in todo if placement == REPLICATE}
        scattered: dict[int, tuple[Placed, Shard]] = {
            value.number: (value, placement)
            for value, placement in todo
            if isinstance(placement, Shard)
            and value.number in exchanged
            and value.number not in needed_whole
            and (value.placement, placement) == (Partial(), self.mesh.parts(value.shape))
        }
        with self.mesh.exchanging() if exchanged else contextlib.nullcontext():
            self._scatter(list(scattered.values()))
            left = [value for number, value in exchanged.items() if number not in scattered]
            self._reduce([one for one in left if isinstance(one.placement, Partial) and one.in_parts() is None])
            self._gather([one for one in left if one.converted(REPLICATE) is None])
        for value, placement in todo:
            if value.converted(placement) is None:
                whole = value.converted(REPLICATE)
                assert whole is not None
                value.keep(self.cut(whole, placement))

    def _scatter(self, values: Sequence[tuple[Placed, Shard]]) -> None:
        """Makes of each sum the parts of the replicas."""
        terms, shards = [value.tensors for value, _ in values], [shard for _, shard in values]
        parts = self.mesh.reduce_scatter(terms, shards) if values else []
        for (value, shard), own in zip(values, parts, strict=True):
            self.cost.reduce(value.tensors[0])
            value.keep(Placed(shard, own, replica=self.mesh.local[0]))

    def _reduce(self, values: Sequence[Placed]) -> None:
        """Makes the whole of the terms of sums, and of other reductions."""
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

    def _gather(self, values: Sequence[Placed]) -> None:
        """Makes the whole of parts, of which those of a sum may have been made before."""
        plain: list[tuple[Placed, Placed, Shard]] = []
        for value in values:
            parts = value if isinstance(value.placement, Shard) else value.in_parts()
            assert parts is not None and isinstance(parts.placement, Shard)
            if value.element_dtype is not None:
                value.keep(tensor_lists.gathered(self.mesh, self.cost, value, parts.placement))
            else:
                plain.append((value, parts, parts.placement))
        found = self.mesh.all_gather([p.tensors for _, p, _ in plain], [s for *_, s in plain]) if plain else []
        for (value, _, _), copies in zip(plain, found, strict=True):
            for copy in copies:
                copy.set_shape(value.shape)
            self.cost.gather(copies[0])
            value.keep(Placed(REPLICATE, copies, repeated=isinstance(value.placement, Shard)))

    def cut(self, whole: Placed, placement: Placement) -> Placed:
        """The parts, or the terms, of a replicated value."""
        if isinstance(placement, Shard) and whole.element_dtype is not None:
            return tensor_lists.cut(self.mesh, whole, placement)
        if any(tensor.dtype == tf.variant for tensor in whole.tensors):
            raise NotImplementedError("a value of this kind is not cut")
        parts = []
        for position, replica in enumerate(self.mesh.local):
            tensor = self.mesh.read(whole, position)
            if isinstance(placement, Shard):
                with self.mesh.on_copy(self.mesh.copy_of_replica(position)):  # so that only the part is sent
                    parts.append(meshes.cut(tensor, placement, replica))
            else:
                with self.mesh.on_replica(position):
                    parts.append(tensor if replica == 0 else tf.zeros_like(tensor))
        return Placed(placement, parts, replica=self.mesh.local[0])
