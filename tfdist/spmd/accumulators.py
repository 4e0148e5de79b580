"""Variables whose value is the sum of one variable per replica, as the states of metrics are.

A step that adds to such a variable adds its own terms on each replica. Nothing is exchanged until the sum is wanted.
Reading the variable gives terms of a sum like any others: what is linear is computed on them, and all else from their
sum.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tensorflow as tf

from tfdist.internals import tensorflow_functions
from tfdist.spmd.flattening import Flat, Slot, flatten
from tfdist.spmd.linear import ADDITIVE
from tfdist.spmd.placements import Partial, Placed, Placement

READ = "ReadVariableOp"
# Their second input is added, or is the new value, of which each replica can have a term.
ASSIGN = frozenset(("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"))


def usable(traced: tf.types.experimental.ConcreteFunction, handles: Collection[int]) -> set[int]:
    """The handles, by `id`, whose variables a step reads and assigns as wholes alone, outside of loops and conditions.

    Args:
        traced: the step of one device.
        handles: the `id`s of handles that it may capture.
    """
    flat, found = _flattened(traced, handles)
    for node in flat.nodes:
        if node.operation.type != READ and (node.operation.type not in ASSIGN or node.inputs[1] in found):
            for slot in node.inputs:
                found.pop(slot, None)
    return set(found.values())


def added_to_alone(traced: tf.types.experimental.ConcreteFunction, handles: Collection[int]) -> set[int]:
    """Those of `usable` handles whose variables a step adds to, and reads for nothing else.

    What is added to them can be added to their values afterwards.
    """
    flat, found = _flattened(traced, handles)
    alone = set(found.values())
    sums: dict[Slot, Slot] = {}  # the variable of which a value is, or to which something is added in it
    for node in flat.nodes:
        kind, inputs = node.operation.type, node.inputs
        owners = [sums[slot] for slot in inputs if slot in sums]
        if kind == READ and inputs[0] in found:
            sums[node.outputs[0]] = inputs[0]
        elif kind in ADDITIVE and len(owners) == 1 and (kind != "Sub" or inputs[0] in sums):
            sums[node.outputs[0]] = owners[0]
        elif kind in ASSIGN and inputs[0] in found:
            if owners != ([inputs[0]] if kind == "AssignVariableOp" else []):
                alone.discard(found[inputs[0]])
                alone.difference_update(found[owner] for owner in owners)
        else:
            alone.difference_update(found[owner] for owner in owners)
    return alone - {found[sums[slot]] for slot in flat.outputs if slot in sums}


def _flattened(
    traced: tf.types.experimental.ConcreteFunction, handles: Collection[int]
) -> tuple[Flat, dict[Slot, int]]:
    """A flattened step, and of the slots of its inputs those that are one of `handles`."""
    graph = traced.graph
    outside, inside = tensorflow_functions.captured(graph)
    ids = {id(placeholder): id(tensor) for tensor, placeholder in zip(outside, inside, strict=True)}
    slots = {id(placeholder): Slot() for placeholder in graph.inputs}
    found = {slot: ids[key] for key, slot in slots.items() if ids.get(key) in handles}
    return flatten(graph, [slots[id(placeholder)] for placeholder in graph.inputs]), found


def placements(operation: tf.Operation, values: Sequence[Placed]) -> list[Placement] | None:
    """Where the inputs of an operation must be that reads or assigns such a variable; `None` for other operations."""
    if operation.type != READ and operation.type not in ASSIGN:
        return None
    return [Partial()] * len(values) if isinstance(values[0].placement, Partial) else None


def is_accumulated(operation: tf.Operation, inputs: Sequence[Placed]) -> bool:
    """Whether an operation on terms returns those of such a variable, or of a sum with it."""
    return operation.type == READ or (operation.type in ADDITIVE and any(value.is_accumulated for value in inputs))
