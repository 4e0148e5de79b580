"""Variables of which each replica has a part along an axis, as slots of an optimizer whose state is divided.

    variable.assign_sub(rate * slot)       each replica computes the rows that it has, and the rows are gathered

A read gives the part, which rules take further as any other. What is assigned is wanted in the same parts. A kernel of
an optimizer updates its part of each variable, where all of them are cut alike. All else needs the whole variable;
`whole_ones` tells before a step is computed which variables are used so.
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

# They compute each element from the same element of the gradient and of the variables.
_OF_KERNELS = """
    AdaMax Adadelta Adagrad AdagradV2 Adam AdamWithAmsgrad CenteredRMSProp Ftrl FtrlV2 GradientDescent KerasMomentum
    Momentum RMSProp
"""
_KERNELS = frozenset(f"ResourceApply{name}" for name in _OF_KERNELS.split())


def placements(operation: tf.Operation, values: Sequence[Placed]) -> list[Placement] | None:
    """Where the inputs must be of an operation on divided variables; `None` for other operations."""
    if operation.type != READ and operation.type not in ASSIGN | _KERNELS:
        return None
    shard = values[0].placement
    if not isinstance(shard, Shard):
        return None
    return [
        shard if tensor.dtype == tf.resource or tensor.shape.rank != 0 else REPLICATE for tensor in operation.inputs
    ]


def require_none(operation: tf.Operation, values: Sequence[Placed]) -> None:
    """Raises `UsageError` for an operation that needs the whole of a divided variable, which `whole_ones` missed."""
    if any(isinstance(one.placement, Shard) and one.tensors and one.tensors[0].dtype == tf.resource for one in values):
        raise UsageError(
            f"{tensorflow_graphs.place(operation)} needs the whole of a slot of the optimizer, of which each process "
            "has a part",
            "leave out `shard`; each process then has the whole state of the optimizer",
        )


def whole_ones(traced: tf.types.experimental.ConcreteFunction, shards: Mapping[int, Shard]) -> set[int]:
    """The divided variables of which a step needs the whole, by the `id` of the handle.

    Args:
        traced: the step of one device.
        shards: how the variables are cut, by the `id` of the handle.
    """
    outside, inside = tensorflow_functions.captured(traced.graph)
    handles = {id(placeholder): id(tensor) for tensor, placeholder in zip(outside, inside, strict=True)}
    given = [handles.get(id(placeholder)) for placeholder in traced.graph.inputs]
    divided = dict(shards)
    while found := _whole_ones(traced.graph, given, divided):
        for handle in found:
            del divided[handle]
    return set(shards) - set(divided)


def _whole_ones(graph: tf.Graph, given: Sequence[int | None], divided: Mapping[int, Shard]) -> set[int]:
    """Those of the `divided` variables, which a graph is `given` by handles, of which it needs the whole."""
    slots = [Slot() for _ in given]
    handles = dict(zip(slots, given, strict=True))
    found: set[int] = set()
    for node in flatten(graph, slots).nodes:
        reads = [handles.get(slot) for slot in node.inputs]
        own = {one for one in reads if one is not None and one in divided}
        kind = node.operation.type
        if kind in control_flow.TYPES and own:
            for name, arguments in control_flow.arguments(node.operation, reads).items():
                found |= _whole_ones(tensorflow_functions.body(node.operation, name), arguments, divided)
        elif kind in _KERNELS:
            resources = [
                None if one is None else divided.get(one)
                for one, tensor in zip(reads, node.operation.inputs, strict=True)
                if tensor.dtype == tf.resource
            ]
            found |= own if len(set(resources)) > 1 else set()
        elif kind != READ and kind not in ASSIGN:
            found |= own
    return found
