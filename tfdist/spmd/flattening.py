"""The graph of a function as one list of operations, with the functions that it calls inlined.

Loops and conditions stay operations; their bodies are flattened when they are partitioned. Calls that each replica
computes on its own shard stay operations too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from tfdist.internals import tensorflow_graphs
from tfdist.spmd.placements import Placed
from tfdist.spmd.rules import per_replica_sharding

# Operations whose result is their input.
ALIASES = frozenset(("Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot"))


@dataclass(eq=False)
class Slot:
    """A value of the graph: the output of a node, or an input of the graph."""

    node: Node | None = None
    value: Placed | None = None


@dataclass(eq=False)
class Node:
    """An operation of the graph.

    Attributes:
        operation: as it was traced.
        inputs: the values that it reads.
        outputs: the values that it computes.
        before: the operations that must run before it because they have effects.
        calls: the names of the nested calls that lead to its function, from the outside in.
    """

    operation: tf.Operation
    inputs: list[Slot]
    outputs: list[Slot] = field(default_factory=list)
    before: list[Node] = field(default_factory=list)
    calls: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Identifies the operation of the step, in every graph that is made from the step."""
        return "/".join((self.operation.graph.name, *self.calls, self.operation.name))


@dataclass
class Flat:
    """A flattened graph.

    Attributes:
        nodes: in topological order.
        outputs: the values that the function returns.
    """

    nodes: list[Node]
    outputs: list[Slot]


def flatten(graph: tf.Graph, inputs: Sequence[Slot]) -> Flat:
    """The operations that the outputs and effects of `graph` need when it is called with `inputs`."""
    nodes: list[Node] = []
    outputs, _ = _flatten(graph, inputs, [], nodes, ())
    return Flat(nodes, outputs)


def _flatten(
    graph: tf.Graph, inputs: Sequence[Slot], before: list[Node], nodes: list[Node], calls: tuple[str, ...]
) -> tuple[list[Slot], list[Node]]:
    """Appends the operations of `graph` to `nodes`; returns its outputs, and the nodes that its effects wait for."""
    slots: dict[tuple[str, int], Slot] = {}
    done: dict[str, list[Node]] = {}  # by operation, the nodes that must have run for it to have run
    for placeholder, slot in zip(graph.inputs, inputs, strict=True):
        slots[placeholder.op.name, placeholder.value_index] = slot
        done[placeholder.op.name] = []
    for operation in tensorflow_graphs.in_order(graph):
        if operation.name in done:
            continue
        reads = [slots[tensor.op.name, tensor.value_index] for tensor in operation.inputs]
        waits = [node for earlier in operation.control_inputs for node in done[earlier.name]]
        body = None if per_replica_sharding(operation) else tensorflow_graphs.called(operation)
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


# Stateful operations that each replica may run: assertions, and calls of functions whose operations are tested singly.
_RUN_EVERYWHERE = frozenset(("Assert", "If", "While", "Case", "NoOp"))


def runs_once(operation: tf.Operation) -> bool:
    """Whether an operation must run once per job: `tf.print`, Python functions, and draws without a seed.

    Operations that read or change a variable run once per copy of the variable instead.
    """
    resources = any(tensor.dtype == tf.resource for tensor in (*operation.inputs, *operation.outputs))
    return operation.op_def.is_stateful and not resources and operation.type not in _RUN_EVERYWHERE
