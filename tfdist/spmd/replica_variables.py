"""Variables with a value per replica: accumulators, and sharded variables.

The value of an accumulator, such as the state of a metric, is the sum of one variable per replica. When a step adds to
it, each replica adds its own term, and nothing is exchanged until the sum is needed. Reading an accumulator gives a
partial sum like any other: linear operations are computed on the terms, and all other operations on their sum.

Sharded variables are such as the slots of an optimizer whose state is sharded (ZeRO):

    variable.assign_sub(rate * slot)       each replica computes its rows, and the rows are gathered

Reading such a variable gives a shard, which rules handle as any other; assigned values are resharded to match. A fused
optimizer kernel updates its shard of each variable, if all variables that it updates are sharded in the same way. Other
operations need the whole variable; `variables_needed_whole` lists such variables before a step is partitioned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.internals import tensorflow_graphs
from tfdist.spmd import control_flow
from tfdist.spmd.flattening import Flat, Slot, flatten
from tfdist.spmd.linear import ADDITIVE
from tfdist.spmd.placements import REPLICATE, Partial, Placed, Placement, Shard

READ = "ReadVariableOp"
# The second input is added or assigned, and each replica can have a term or a shard of it.
_ASSIGN = frozenset(("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"))
# Optimizers whose kernels compute each element from the same element of the gradient and of the variables.
_OPTIMIZERS = """
    AdaMax Adadelta Adagrad AdagradV2 Adam AdamWithAmsgrad CenteredRMSProp Ftrl FtrlV2 GradientDescent KerasMomentum
    Momentum RMSProp
"""
_KERNELS = frozenset(f"ResourceApply{name}" for name in _OPTIMIZERS.split())


def placements(operation: tf.Operation, values: Sequence[Placed]) -> list[Placement] | None:
    """The placements of the inputs of an operation on a variable with a value per replica; `None` for others."""
    if operation.type != READ and operation.type not in _ASSIGN | _KERNELS:
        return None
    placement = values[0].placement
    if isinstance(placement, Partial):
        return None if operation.type in _KERNELS else [Partial()] * len(values)
    if isinstance(placement, Shard):
        return [
            placement if tensor.dtype == tf.resource or tensor.shape.rank != 0 else REPLICATE
            for tensor in operation.inputs
        ]
    return None


def is_accumulated(operation: tf.Operation, inputs: Sequence[Placed]) -> bool:
    """Whether an operation on partial values returns the terms of such a variable, or of a sum that contains it."""
    return operation.type == READ or (operation.type in ADDITIVE and any(value.is_accumulated for value in inputs))


def usable_as_accumulators(traced: tf.types.experimental.ConcreteFunction, handles: Collection[int]) -> set[int]:
    """The handles, by `id`, of variables that a step only reads and assigns whole, outside of loops and conditions.

    Args:
        traced: the step of one device.
        handles: the `id`s of handles that it may capture.
    """
    flat, captured = _flattened(traced, handles)
    for node in flat.nodes:
        if node.operation.type != READ and (node.operation.type not in _ASSIGN or node.inputs[1] in captured):
            for slot in node.inputs:
                captured.pop(slot, None)
    return set(captured.values())


def only_added_to(traced: tf.types.experimental.ConcreteFunction, handles: Collection[int]) -> set[int]:
    """Those of `usable_as_accumulators` whose variables a step reads for nothing but to add to them.

    The sum of what is added can be added to their values after the step.
    """
    flat, captured = _flattened(traced, handles)
    only_added = set(captured.values())
    sums: dict[Slot, Slot] = {}  # from a value to the variable that it is read from, plus what was added to it
    for node in flat.nodes:
        kind, inputs = node.operation.type, node.inputs
        variables = [sums[slot] for slot in inputs if slot in sums]
        if kind == READ and inputs[0] in captured:
            sums[node.outputs[0]] = inputs[0]
        elif kind in ADDITIVE and len(variables) == 1 and (kind != "Sub" or inputs[0] in sums):
            sums[node.outputs[0]] = variables[0]
        elif kind in _ASSIGN and inputs[0] in captured:
            if variables != ([inputs[0]] if kind == "AssignVariableOp" else []):
                only_added.discard(captured[inputs[0]])
                only_added.difference_update(captured[variable] for variable in variables)
        else:
            only_added.difference_update(captured[variable] for variable in variables)
    return only_added - {captured[sums[slot]] for slot in flat.outputs if slot in sums}


def _flattened(
    traced: tf.types.experimental.ConcreteFunction, handles: Collection[int]
) -> tuple[Flat, dict[Slot, int]]:
    ids = tensorflow_graphs.captured_ids(traced.graph)
    slots = [Slot() for _ in ids]
    captured = {slot: key for slot, key in zip(slots, ids, strict=True) if key is not None and key in handles}
    return flatten(traced.graph, slots), captured


def require_none_sharded(operation: tf.Operation, values: Sequence[Placed]) -> None:
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
    handles = tensorflow_graphs.captured_ids(traced.graph)
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
                needed |= _needed_whole(tensorflow_graphs.body(node.operation, name), arguments, sharded)
        elif kind in _KERNELS:
            shards = {
                None if handle is None else sharded.get(handle)
                for handle, tensor in zip(reads, node.operation.inputs, strict=True)
                if tensor.dtype == tf.resource
            }
            needed |= used if len(shards) > 1 else set()
        elif kind != READ and kind not in _ASSIGN:
            needed |= used
    return needed
