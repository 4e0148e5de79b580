"""Variables whose value is the sum of one variable per replica, such as the state of metrics.

When a step adds to such a variable, each replica adds its own term. Nothing is exchanged until the sum is needed.
Reading the variable gives a partial sum like any other: linear operations are computed on the terms, and all other
operations on their sum.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tensorflow as tf

from tfdist.internals import tensorflow_functions
from tfdist.spmd.flattening import Flat, Slot, flatten
from tfdist.spmd.linear import ADDITIVE
from tfdist.spmd.placements import Partial, Placed, Placement

READ = "ReadVariableOp"
# The second input is added or assigned, and each replica can have a term of it.
ASSIGN = frozenset(("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"))


def usable(traced: tf.types.experimental.ConcreteFunction, handles: Collection[int]) -> set[int]:
    """The handles, by `id`, of variables that a step only reads and assigns whole, outside of loops and conditions.

    Args:
        traced: the step of one device.
        handles: the `id`s of handles that it may capture.
    """
    flat, captured = _flattened(traced, handles)
    for node in flat.nodes:
        if node.operation.type != READ and (node.operation.type not in ASSIGN or node.inputs[1] in captured):
            for slot in node.inputs:
                captured.pop(slot, None)
    return set(captured.values())


def only_added_to(traced: tf.types.experimental.ConcreteFunction, handles: Collection[int]) -> set[int]:
    """Those of `usable` handles whose variables a step reads for nothing but to add to them.

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
        elif kind in ASSIGN and inputs[0] in captured:
            if variables != ([inputs[0]] if kind == "AssignVariableOp" else []):
                only_added.discard(captured[inputs[0]])
                only_added.difference_update(captured[variable] for variable in variables)
        else:
            only_added.difference_update(captured[variable] for variable in variables)
    return only_added - {captured[sums[slot]] for slot in flat.outputs if slot in sums}


def _flattened(
    traced: tf.types.experimental.ConcreteFunction, handles: Collection[int]
) -> tuple[Flat, dict[Slot, int]]:
    """A flattened step, and the slots of its inputs that are one of `handles`."""
    ids = tensorflow_functions.captured_ids(traced.graph)
    slots = [Slot() for _ in ids]
    captured = {slot: key for slot, key in zip(slots, ids, strict=True) if key is not None and key in handles}
    return flatten(traced.graph, slots), captured


def placements(operation: tf.Operation, values: Sequence[Placed]) -> list[Placement] | None:
    """The placements of the inputs if an operation reads or assigns such a variable; `None` for other operations."""
    if operation.type != READ and operation.type not in ASSIGN:
        return None
    return [Partial()] * len(values) if isinstance(values[0].placement, Partial) else None


def is_accumulated(operation: tf.Operation, inputs: Sequence[Placed]) -> bool:
    """Whether an operation on partial values returns the terms of such a variable, or of a sum that contains it."""
    return operation.type == READ or (operation.type in ADDITIVE and any(value.is_accumulated for value in inputs))
