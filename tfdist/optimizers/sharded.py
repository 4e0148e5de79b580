"""An optimizer whose slots are sharded over the processes of a job; each process updates its part of the variables.

    gradients of the replicas   -> reduce-scatter ->   this process's part of their sum
    part of the variables       -> Keras' update  ->   the same part, updated
    updated parts               -> all-gather     ->   the whole variables, in every process

With N processes, the time of an update and the memory for slots are divided by N, and the two exchanges together send
as many bytes as an all-reduce. The update is traced for one device, with a stand-in of the whole shape for each slot.
For the partitioner a slot is a variable that is sharded along an axis (`tfdist.spmd.replica_variables`), so that every
result that a step computes from it is that of one device.

A kernel that updates a variable in place updates a temporary variable instead, which the partitioner can shard, too; it
has memory only during the update.

Source: Rajbhandari, Rasley, Ruwase and He, ZeRO: Memory optimizations toward training trillion parameter models,
arXiv:1910.02054, 2020; stages 1 and 2.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import spmd
from tfdist.groups import ProcessGroup, parts
from tfdist.groups.parts import Part
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_optimizers, keras_variables, tensorflow_variables
from tfdist.internals import tensorflow as tensorflow_internals


class DividedOptimizer:
    """The part of an optimizer that this process has.

    Args:
        optimizer: a Keras optimizer; built for all variables that it updates, or not built.
        group: the processes.
        meet: is called with the next action of this process; raises an error if the actions of processes differ.
    """

    def __init__(self, optimizer: Any, group: ProcessGroup, meet: Callable[[str], None]):
        self.optimizer = optimizer
        self._group = group
        self._meet = meet
        self._gathered: dict[int, np.ndarray] | None = None  # within `whole`: the values by the `id` of the variable
        # Keras saves an optimizer that scales the loss with the variables of its inner optimizer, and saves that again.
        for saved in keras_internals.with_inner(optimizer):
            keras_optimizers.saving_with(
                saved, functools.partial(self._read, saved), functools.partial(self._write, saved)
            )

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """The context in which a process can save the optimizer without the others; all processes enter it."""
        self._gathered = dict(zip(map(id, self.optimizer.variables), self._read(self.optimizer), strict=True))
        try:
            yield
        finally:
            self._gathered = None

    def _read(self, optimizer: Any) -> list[np.ndarray]:
        """The whole values of an optimizer's variables; outside of `whole`, all processes call it."""
        if self._gathered is not None:
            return [self._gathered[id(variable)] for variable in optimizer.variables]
        self._meet("gathers the state of an optimizer")
        exchange = self._group.exchange
        return [
            np.asarray(variable.numpy()) if parts.part_of(variable) is None else parts.gathered(variable, exchange)
            for variable in optimizer.variables
        ]

    def _write(self, optimizer: Any, values: list[Any]) -> None:
        """Assigns whole values to an optimizer's variables."""
        for variable, value in zip(optimizer.variables, values, strict=True):
            if parts.part_of(variable) is None:
                variable.assign(value)
            else:
                parts.fill(variable, np.asarray(value))


class ShardedOptimizer(DividedOptimizer):
    """The shards of an optimizer's slots in this process.

    Args:
        optimizer: a Keras optimizer, built or not.
        variables: the variables for which it is built, if it is not.
        whole_shapes: the shapes of variables that are not sharded, nor are their slots.
        group: the processes.
        meet: is called with the next action of this process; raises an error if the actions of processes differ.
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
        # By the `id` of the handle, to which the tuple keeps a reference; see `place`.
        self._temporaries: dict[int, tuple[tf.Tensor, _StandIn | None]] = {}
        shapes = {} if optimizer.built else self._build(variables)
        for slot in optimizer.variables:
            shape = shapes.get(id(slot), tuple(slot.shape))
            shard = self._shard(shape, local(slot).dtype)
            if shard is not None:
                whole = tensorflow_variables.without_value(shape, local(slot).dtype, local(slot).device)
                divide(slot, self._part(shape, shard))
                self._slots.append(_StandIn(whole, shard, slot))

    def _build(self, variables: Sequence[Any]) -> dict[int, tuple[int, ...]]:
        """Builds the optimizer, with sharded slots if it computes elementwise; returns their whole shapes by `id`."""
        if type(keras_internals.inner(self.optimizer)) not in keras_optimizers.ELEMENTWISE:
            self.optimizer.build(list(variables))
            return {}
        slots_for = []
        for variable in variables:
            tf_variable, shape = local(variable), tuple(variable.shape)
            shard = self._shard(shape, tf_variable.dtype)
            local_shape = shape if shard is None else self._part(shape, shard).shape
            slots_for.append(tensorflow_variables.without_value(local_shape, tf_variable.dtype, tf_variable.device))
        with tf.init_scope(), tensorflow_internals.without_strategy():
            keras_optimizers.build(self.optimizer, variables, slots_for)
        slots = zip(variables, keras_optimizers.slots_of(self.optimizer), strict=True)
        return {id(slot): tuple(variable.shape) for variable, slots_of_variable in slots for slot in slots_of_variable}

    def _shard(self, shape: tuple[int, ...], dtype: tf.DType) -> spmd.Shard | None:
        """How a variable is sharded; `None` if every process has the whole."""
        if shape in self._whole_shapes or not dtype.is_floating:
            return None
        return spmd.Shard.evenly(shape, self._group.size)

    def _part(self, shape: tuple[int, ...], shard: spmd.Shard) -> Part:
        return Part(shape, tuple(shard.lengths(shape[shard.axis])), self._group.rank, shard.axis)

    @property
    def variables(self) -> Mapping[int, spmd.Placed]:
        """The values in this process for the stand-ins in a traced step, by the `id` of a stand-in's handle."""
        stand_ins = (*self._slots, *self._stand_ins_of_temporaries)
        return {id(stand_in.whole.handle): stand_in.placed for stand_in in stand_ins}

    @property
    def _stand_ins_of_temporaries(self) -> list[_StandIn]:
        return [stand_in for _, stand_in in self._temporaries.values() if stand_in is not None]

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """The context in which a step is traced, with stand-ins for the sharded slots."""
        slots = [stand_in.variable for stand_in in self._slots]
        with keras_variables.backed_by(slots, [stand_in.whole for stand_in in self._slots]):
            yield

    def place(self, variable: tf.Variable) -> tf.Variable | None:
        """The temporary variable in which a kernel updates a sharded variable; `None` to update the variable itself."""
        key = id(variable.handle)
        if key not in self._temporaries:
            shape, dtype, device = tuple(variable.shape), variable.dtype, variable.device
            shard = self._shard(shape, dtype)
            stand_in = None
            if shard is not None:
                part = tensorflow_variables.without_value(self._part(shape, shard).shape, dtype, device)
                stand_in = _StandIn(tensorflow_variables.without_value(shape, dtype, device), shard, part)
            self._temporaries[key] = variable.handle, stand_in
        _, stand_in = self._temporaries[key]
        return None if stand_in is None else stand_in.whole

    def keep_whole(self, handles: Collection[int] | None = None) -> None:
        """Gives every process the whole value of sharded variables; all processes call it with the same arguments.

        Args:
            handles: the `id`s of handles in `variables`; `None` is all.
        """
        for stand_in in self._slots:
            if stand_in.is_sharded and (handles is None or id(stand_in.whole.handle) in handles):
                _undivide(stand_in.variable, self._group.exchange)
                stand_in.is_sharded = False
        for stand_in in self._stand_ins_of_temporaries:
            if handles is None or id(stand_in.whole.handle) in handles:
                stand_in.variable, stand_in.is_sharded = stand_in.whole, False

    def _write(self, optimizer: Any, values: list[Any]) -> None:
        """Assigns whole values; all processes call it."""
        self._meet("loads the state of an optimizer")
        super()._write(optimizer, values)


@dataclass
class _StandIn:
    """A variable in a traced step that stands for a sharded variable."""

    whole: tf.Variable  # has the whole shape, and no value
    shard: spmd.Shard
    variable: Any  # has the value of this process's shard; a Keras variable for a slot
    is_sharded: bool = True  # otherwise this process has the whole value

    @property
    def placed(self) -> spmd.Placed:
        """The placement of the variable, with the value in this process."""
        handles = [local(self.variable).handle]
        return spmd.Placed(self.shard, handles) if self.is_sharded else spmd.replicated(handles)


def local(variable: Any) -> tf.Variable:
    """The `tf.Variable` of a Keras variable in this process; the first if there are copies."""
    return tensorflow_variables.copies(variable)[0]


def divide(slot: Any, part: Part) -> None:
    """Reduces a slot to the part of this process, unless it is that part already."""
    if parts.part_of(slot) is None:
        if tuple(slot.shape) != part.shape:
            _replace(slot, part.of(tensorflow_variables.read(local(slot))))
        parts.mark(slot, part)


def _undivide(slot: Any, exchange: Callable[[bytes], list[bytes]]) -> None:
    """Gives every process the whole slot again; all processes call it."""
    value = parts.gathered(slot, exchange)
    parts.mark(slot, None)
    _replace(slot, value)


def _replace(slot: Any, value: np.ndarray) -> None:
    """Gives a slot a value of another shape, in a new plain variable."""
    old = local(slot)
    with tensorflow_internals.without_strategy():
        new = tensorflow_variables.without_value(value.shape, old.dtype, old.device, slot.name)
    tensorflow_variables.fill(new, np.ascontiguousarray(value))
    keras_internals.set_tf_variable(slot, new)
    for copy in tensorflow_variables.copies(old):  # to which there may still be references
        tensorflow_variables.free(copy)
