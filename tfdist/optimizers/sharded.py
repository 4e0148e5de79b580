"""An optimizer of which each process of a job has a part of the slots, and updates the same part of the variables.

    gradients of the replicas   -> reduce-scatter ->   this process' part of their sum
    part of the variables       -> Keras' update  ->   the same part, updated
    updated parts               -> all-gather     ->   the whole variables, in every process

An update costs each of N processes an N-th of the time and of the memory for slots, and the two exchanges together send
as many bytes as the all-reduce in their place. The update is traced as one device computes it, with a stand-in of the
whole shape for each slot. For the partitioner a slot is a variable that is cut along an axis
(`tfdist.spmd.sharded_variables`), so that whatever a step computes of it is that of one device.

A kernel that updates a variable in place does so in a variable beside it, which the partitioner can cut, too; it has
memory only meanwhile.

Source: Rajbhandari, Rasley, Ruwase and He, ZeRO: Memory optimizations toward training trillion parameter models,
arXiv:1910.02054, 2020; stages 1 and 2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist import spmd
from tfdist.groups import ProcessGroup
from tfdist.groups.parts import Part
from tfdist.internals import keras_optimizers, keras_variables, tensorflow_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.optimizers.divided import DividedOptimizer, divide, local, undivide


@dataclass
class _StandIn:
    """What a traced step uses in place of a variable of which each process has a part.

    Attributes:
        whole: has the shape of the whole, and no value.
        shard: how the processes have cut it.
        variable: holds the part of this process; of Keras for a slot.
        is_cut: this process has a part, and not the whole.
    """

    whole: tf.Variable
    shard: spmd.Shard
    variable: Any
    is_cut: bool = True

    @property
    def placed(self) -> spmd.Placed:
        """What this process has."""
        handles = [local(self.variable).handle]
        return spmd.Placed(self.shard, handles) if self.is_cut else spmd.replicated(handles)


class ShardedOptimizer(DividedOptimizer):
    """The parts of one optimizer that this process has.

    Args:
        optimizer: of Keras; built or not.
        variables: that it is to be built for.
        whole_shapes: of variables that every process updates as a whole, as it does their slots.
        group: of the processes.
        meet: is called with what this process is about to do, and raises an error if another one does something else.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        whole_shapes: Collection[tuple[int, ...]],
        group: ProcessGroup,
        meet: Callable[[str], None],
    ):
        super().__init__(optimizer, group, meet)
        self._whole_shapes = set(whole_shapes)
        self._slots: list[_StandIn] = []
        self._places: dict[int, tuple[tf.Tensor, _StandIn | None]] = {}  # by the `id` of the handle, which is held
        shapes = {} if optimizer.built else self._build(variables)
        for slot in optimizer.variables:
            shape = shapes.get(id(slot), tuple(slot.shape))
            shard = self._shard(shape, local(slot).dtype)
            if shard is not None:
                self._divide(slot, shape, shard)

    def _build(self, variables: Sequence[Any]) -> dict[int, tuple[int, ...]]:
        """Builds the optimizer, with slots for parts if it computes by elements; returns their whole shapes by `id`."""
        if type(keras_optimizers.inner(self.optimizer)) not in keras_optimizers.ELEMENTWISE:
            self.optimizer.build(list(variables))
            return {}
        parts = []
        for variable in variables:
            own = self._own_shape(tuple(variable.shape), self._shard(tuple(variable.shape), local(variable).dtype))
            parts.append(tensorflow_variables.without_value(own, local(variable).dtype, local(variable).device))
        with tf.init_scope(), tensorflow_internals.without_strategy():
            keras_optimizers.build(self.optimizer, variables, parts)
        slots = keras_optimizers.slots_of(self.optimizer)
        return {id(s): tuple(variable.shape) for variable, own in zip(variables, slots, strict=True) for s in own}

    def _shard(self, shape: tuple[int, ...], dtype: tf.DType) -> spmd.Shard | None:
        """How a variable is cut; `None` if every process has the whole."""
        if shape in self._whole_shapes or not dtype.is_floating:
            return None
        return spmd.Shard.evenly(shape, self._group.size)

    def _own_shape(self, shape: tuple[int, ...], shard: spmd.Shard | None) -> list[int]:
        """The shape of this process' part of a variable."""
        own = list(shape)
        if shard is not None:
            own[shard.axis] = shard.lengths(shape[shard.axis])[self._group.rank]
        return own

    def _divide(self, slot: Any, shape: tuple[int, ...], shard: spmd.Shard) -> None:
        whole = tensorflow_variables.without_value(shape, local(slot).dtype, local(slot).device)
        divide(slot, Part(shape, tuple(shard.lengths(shape[shard.axis])), self._group.rank, shard.axis))
        self._slots.append(_StandIn(whole, shard, slot))

    @property
    def variables(self) -> Mapping[int, spmd.Placed]:
        """What this process has in place of the variables that a traced step uses, by the `id` of their handles."""
        return {id(one.whole.handle): one.placed for one in (*self._slots, *self._places_made)}

    @property
    def _places_made(self) -> list[_StandIn]:
        return [one for _, one in self._places.values() if one is not None]

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """The context in which a step is traced, with stand-ins for the slots of which this process has a part."""
        with keras_variables.backed_by([one.variable for one in self._slots], [one.whole for one in self._slots]):
            yield

    def place(self, variable: tf.Variable) -> tf.Variable | None:
        """Where a kernel updates a variable, of which each process updates a part; `None` for the variable itself."""
        key = id(variable.handle)
        if key not in self._places:
            shape, dtype = tuple(variable.shape), variable.dtype
            shard = self._shard(shape, dtype)
            made = None if shard is None else self._made(shape, dtype, variable.device, shard)
            self._places[key] = variable.handle, made
        _, found = self._places[key]
        return None if found is None else found.whole

    def _made(self, shape: tuple[int, ...], dtype: tf.DType, device: str, shard: spmd.Shard) -> _StandIn:
        held = tensorflow_variables.without_value(self._own_shape(shape, shard), dtype, device)
        return _StandIn(tensorflow_variables.without_value(shape, dtype, device), shard, held)

    def keep_whole(self, handles: Collection[int] | None = None) -> None:
        """Gives every process the whole of what it has a part of; all of them call it alike.

        Args:
            handles: the `id`s of handles in `variables`; `None` is all.
        """
        for one in self._slots:
            if one.is_cut and (handles is None or id(one.whole.handle) in handles):
                undivide(one.variable, self._group.exchange)
                one.is_cut = False
        for one in self._places_made:
            if handles is None or id(one.whole.handle) in handles:
                one.variable, one.is_cut = one.whole, False

    def _write(self, optimizer: Any, values: list[Any]) -> None:
        """As its base class; all processes must call it."""
        self._meet("loads the state of an optimizer")
        super()._write(optimizer, values)
