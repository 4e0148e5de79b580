"""Sharded variables, such as the slots of an optimizer whose state is sharded (ZeRO).

    variable.assign_sub(rate * slot)       each replica computes its rows, and the rows are gathered

Reading such a variable gives a shard, which rules handle as any other; assigned values are resharded to match. A fused
optimizer kernel updates its shard of each variable, if all variables that it updates are sharded in the same way. Other
operations need the whole variable; `variables_needed_whole` lists such variables before a step is partitioned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.internals import tensorflow_functions, tensorflow_graphs
from tfdist.spmd import control_flow
from tfdist.spmd.accumulators import ASSIGN, READ
from tfdist.spmd.flattening import Slot, flatten
from tfdist.spmd.placements import REPLICATE, Placed, Placement, Shard

# Optimizers whose kernels compute each element from the same element of the gradient and of the variables.
_OPTIMIZERS = """
    AdaMax Adadelta Adagrad AdagradV2 Adam AdamWithAmsgrad CenteredRMSProp Ftrl FtrlV2 GradientDescent KerasMomentum
    Momentum RMSProp
"""
_KERNELS = frozenset(f"ResourceApply{name}" for name in _OPTIMIZERS.split())


def placements(operation: tf.Operation, values: Sequence[Placed]) -> list[Placement] | None:
    """The placements of the inputs of an operation on sharded variables; `None` for other operations."""
    if operation.type != READ and operation.type not in ASSIGN | _KERNELS:
        return None
    shard = values[0].placement
    if not isinstance(shard, Shard):
        return None
    return [
        shard if tensor.dtype == tf.resource or tensor.shape.rank != 0 else REPLICATE for tensor in operation.inputs
    ]


def require_none(operation: tf.Operation, values: Sequence[Placed]) -> None:
    """Raises `UsageError` if an operation needs a whole sharded variable, which `variables_needed_whole` missed."""
    for value in values:
        if isinstance(value.placement, Shard) and value.tensors and value.tensors[0].dtype == tf.resource:
            raise UsageError(
                f"{tensorflow_graphs.place(operation)} needs the whole of a slot of the optimizer, and each process "
                "has only a shard of it",
                "leave out `shard`; each process then has the whole state of the optimizer",
            )


def variables_needed_whole(traced: tf.types.experimental.ConcreteFunction, shards: Mapping[int, Shard]) -> set[int]:
    """The sharded variables that a step needs whole, by the `id` of the handle.

    Args:
        traced: the step of one device.
        shards: the placement of each sharded variable, by the `id` of the handle.
    """
    handles = tensorflow_functions.captured_ids(traced.graph)
    sharded = dict(shards)
    # A kernel needs its other variables whole if one of them is whole, so this is repeated until nothing changes.
    while needed := _needed_whole(traced.graph, handles, sharded):
        for handle in needed:
            del sharded[handle]
    return set(shards) - set(sharded)


def _needed_whole(graph: tf.Graph, handles: Sequence[int | None], sharded: Mapping[int, Shard]) -> set[int]:
    """The `sharded` variables that a graph needs whole; `handles` are those of its inputs."""
    slots = [Slot() for _ in handles]
    handle_of = dict(zip(slots, handles, strict=True))
    needed: set[int] = set()
    for node in flatten(graph, slots).nodes:
        reads = [handle_of.get(slot) for slot in node.inputs]
        used = {handle for handle in reads if handle is not None and handle in sharded}
        kind = node.operation.type
        if kind in control_flow.TYPES and used:
            for name, arguments in control_flow.arguments(node.operation, reads).items():
                needed |= _needed_whole(tensorflow_functions.body(node.operation, name), arguments, sharded)
        elif kind in _KERNELS:
            shards = {
                None if handle is None else sharded.get(handle)
                for handle, tensor in zip(reads, node.operation.inputs, strict=True)
                if tensor.dtype == tf.resource
            }
            needed |= used if len(shards) > 1 else set()
        elif kind != READ and kind not in ASSIGN:
            needed |= used
    return needed
