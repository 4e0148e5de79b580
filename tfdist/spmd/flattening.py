"""A function's graph as one list of operations: functions that it calls are replaced by their bodies.

Loops and conditions stay operations; their bodies are flattened by whoever computes them. So do calls that each replica
makes on its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from tfdist.internals import tensorflow_functions
from tfdist.spmd import per_replica
from tfdist.spmd.placements import Placed

# Their result is their input.
ALIASES = frozenset(("Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot"))


@dataclass(eq=False)
class Slot:
    """A value of the graph, which one node computes, or which is given."""

    node: Node | None = None
    value: Placed | None = None


@dataclass(eq=False)
class Node:
    """An operation of the graph, between slots.

    Attributes:
        operation: as it was traced.
        inputs: the values that it reads.
        outputs: the values that it computes.
        before: the operations that must run before it, because they have effects.
        calls: the names of the calls, one in the other, in whose functions it is.
    """

    operation: tf.Operation
    inputs: list[Slot]
    outputs: list[Slot] = field(default_factory=list)
    before: list[Node] = field(default_factory=list)
    calls: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What tells it from all other operations of a step, in every graph that is made of the step."""
        return "/".join((self.operation.graph.name, *self.calls, self.operation.name))


@dataclass
class Flat:
    """A flattened graph.

    Attributes:
        nodes: in an order in which they can be computed.
        outputs: the values that the function returns.
    """

    nodes: list[Node]
    outputs: list[Slot]


def flatten(graph: tf.Graph, inputs: Sequence[Slot]) -> Flat:
    """The operations that the outputs and effects of `graph` need, called with `inputs`."""
    nodes: list[Node] = []
    outputs, _ = _flatten(graph, inputs, [], nodes, ())
    return Flat(nodes, outputs)


def _flatten(
    graph: tf.Graph, inputs: Sequence[Slot], before: list[Node], nodes: list[Node], calls: tuple[str, ...]
) -> tuple[list[Slot], list[Node]]:
    """Appends the operations of `graph` to `nodes`; returns its outputs, and the nodes that have run when it has."""
    slots: dict[tuple[str, int], Slot] = {}
    done: dict[str, list[Node]] = {}  # the nodes that have run when an operation has
    for placeholder, slot in zip(graph.inputs, inputs, strict=True):
        slots[placeholder.op.name, placeholder.value_index] = slot
        done[placeholder.op.name] = []
    for operation in tensorflow_functions.in_order(graph):
        if operation.name in done:
            continue
        reads = [slots[tensor.op.name, tensor.value_index] for tensor in operation.inputs]
        waits = [node for earlier in operation.control_inputs for node in done[earlier.name]]
        body = None if per_replica.local(operation) else tensorflow_functions.called(operation)
        if body is not None:
            results, done[operation.name] = _flatten(body, reads, [*before, *waits], nodes, (*calls, operation.name))
        elif operation.type == "NoOp":
            results, done[operation.name] = [], waits
        elif operation.type in ALIASES and not waits:
            results = reads
            done[operation.name] = [slot.node for slot in reads if slot.node is not None]
        else:
            stateful = operation.op_def.is_stateful
            node = Node(operation, reads, before=[*waits, *(before if stateful else ())], calls=calls)
            node.outputs = results = [Slot(node) for _ in operation.outputs]
            nodes.append(node)
            done[operation.name] = [node]
        for index, slot in enumerate(results):
            slots[operation.name, index] = slot
    outputs = [slots[tensor.op.name, tensor.value_index] for tensor in graph.outputs]
    return outputs, [node for operation in graph.control_outputs for node in done[operation.name]]
