"""Variables whose value is the sum of one variable per replica, as the states of metrics are.

A step that adds to such a variable adds its own terms on each replica. Nothing is exchanged until the sum is wanted.
Reading the variable gives terms of a sum like any others: what is linear is computed on them, and all else from their
sum.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tensorflow as tf

from tfdist.internals import tensorflow_functions
from tfdist.spmd.flattening import Slot, flatten
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
    graph = traced.graph
    outside, inside = tensorflow_functions.captured(graph)
    ids = {id(placeholder): id(tensor) for tensor, placeholder in zip(outside, inside, strict=True)}
    slots = {id(placeholder): Slot() for placeholder in graph.inputs}
    found = {slot: ids[key] for key, slot in slots.items() if ids.get(key) in handles}
    flat = flatten(graph, [slots[id(placeholder)] for placeholder in graph.inputs])
    for node in flat.nodes:
        if node.operation.type != READ and (node.operation.type not in ASSIGN or node.inputs[1] in found):
            for slot in node.inputs:
                found.pop(slot, None)
    return set(found.values())


def placements(operation: tf.Operation, values: Sequence[Placed]) -> list[Placement] | None:
    """Where the inputs of an operation must be that reads or assigns such a variable; `None` for other operations."""
    if operation.type != READ and operation.type not in ASSIGN:
        return None
    return [Partial()] * len(values) if isinstance(values[0].placement, Partial) else None


def is_accumulated(operation: tf.Operation, inputs: Sequence[Placed]) -> bool:
    """Whether an operation on terms returns those of such a variable, or of a sum with it."""
    return operation.type == READ or (operation.type in ADDITIVE and any(value.is_accumulated for value in inputs))
