"""How the graph of one device's step becomes that of N replicas.

    the step of one device        x [8, 4] -> MatMul -> SquaredDifference -> Mean -> loss
    on two replicas               x_i [4, 4] -> MatMul -> SquaredDifference -> Mean / 2 -> all-reduce -> loss

Every value has a placement (`tfdist.spmd.placements`): batches are sharded along their first axis, variables are
replicated. For each operation a rule (`tfdist.spmd.rules`) says how it is computed on parts of its inputs, and where
its outputs are then. An operation without a rule is computed whole, on every replica, from gathered inputs. So nothing
is assumed of an operation that is not known.

Exchanges are put off until nothing else can be computed, and are then made together.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfdist.internals import tensorflow_functions
from tfdist.spmd import (
    accumulators,
    constants,
    control_flow,
    divided,
    draws,
    effects,
    linear,
    per_replica,
    tensor_lists,
)
from tfdist.spmd import local_shapes as shapes
from tfdist.spmd.conversions import Conversions
from tfdist.spmd.cost import Cost
from tfdist.spmd.flattening import ALIASES, Flat, Node, Slot, flatten
from tfdist.spmd.meshes import Mesh
from tfdist.spmd.operation import Operation
from tfdist.spmd.placements import REPLICATE, Partial, Placed, Placement, Replicate, Shard
from tfdist.spmd.rules import Local, rule_of

_HALF = (tf.float16, tf.bfloat16)
_OF_A_TAPE = "gradient_tape/"  # TensorFlow's, in the names of what a tape computes


@dataclass(frozen=True)
class Plan:
    """How an operation is to be computed.

    Attributes:
        placements: where each input must be.
        compute: given the inputs in these placements, the outputs.
    """

    placements: Sequence[Placement]
    compute: Callable[[list[Placed]], list[Placed]]


class Partitioner:
    """Computes graphs of the one-device step on the replicas of a mesh, in the present graph.

    Args:
        mesh: the replicas.
        rows: the placement of the batch, and the number of its examples, if it is sharded.
        cost: counts what the partitioned step computes and exchanges.
        streams: of random draws, which all graphs of a step share.
    """

    def __init__(
        self,
        mesh: Mesh,
        rows: tuple[Shard, int] | None,
        cost: Cost | None = None,
        streams: draws.Streams | None = None,
    ):
        self.mesh = mesh
        self.streams = streams or draws.Streams()
        self.rows = rows
        self.cost = cost or Cost()
        self.conversions = Conversions(mesh, self.cost)

    def run(self, graph: tf.Graph, inputs: Sequence[Placed]) -> list[Placed]:
        """Computes a function's graph on placed inputs; returns its placed outputs."""
        flat = flatten(graph, [Slot(value=value) for value in inputs])
        self._compute(flat)
        return [_value(slot) for slot in flat.outputs]

    @contextlib.contextmanager
    def counting(self, cost: Cost) -> Iterator[None]:
        """What is computed in this context is counted in `cost`."""
        before = self.cost
        self.cost = self.conversions.cost = cost
        try:
            yield
        finally:
            self.cost = self.conversions.cost = before

    def _compute(self, flat: Flat) -> None:
        order = {node: number for number, node in enumerate(flat.nodes)}
        followers: dict[Node, list[Node]] = {node: [] for node in flat.nodes}
        left: dict[Node, int] = {}
        for node in flat.nodes:
            before = {slot.node for slot in node.inputs if slot.node is not None} | set(node.before)
            left[node] = len(before)
            for earlier in before:
                followers[earlier].append(node)
        ready = [(order[node], node) for node in flat.nodes if not left[node]]
        heapq.heapify(ready)
        waiting: list[tuple[Node, Plan]] = []
        while ready or waiting:
            if ready:
                node = heapq.heappop(ready)[1]
                plan = self.plan(node)
                if any(self.conversions.needs_exchange(value, placement) for value, placement in _wanted(node, plan)):
                    waiting.append((node, plan))
                    continue
                planned = [(node, plan)]
            else:
                planned, waiting = waiting, []
                self.conversions.convert(pair for node, plan in planned for pair in _wanted(node, plan))
            for node, plan in planned:
                self._finish(node, plan)
                for follower in followers[node]:
                    left[follower] -= 1
                    if not left[follower]:
                        heapq.heappush(ready, (order[follower], follower))

    def _finish(self, node: Node, plan: Plan) -> None:
        values, pairs = [_value(slot) for slot in node.inputs], _wanted(node, plan)
        given = [value.converted(placement) or value for value, placement in pairs]
        with self.mesh.computing(node.operation, [tensor for value in given for tensor in value.tensors[:1]]):
            outputs = plan.compute([self.conversions.placed(*pair) for pair in pairs])
        constants.note(node.operation, values, outputs)
        for slot, value in zip(node.outputs, outputs, strict=True):
            slot.value = value

    def plan(self, node: Node) -> Plan:
        """How the operation of `node` is computed, from where its inputs are."""
        values = [_value(slot) for slot in node.inputs]
        given = [value.placement for value in values]
        known = constants.known(node.operation, values)
        if known is not None:
            return Plan(given, lambda _: known)
        for kind in (accumulators, divided, linear):
            placements = kind.placements(node.operation, values)
            if placements is not None:
                return Plan(placements, lambda inputs: self._as_it_is(node, inputs))
        return self._plan_of_its_own(node, values) or self._plan_by_rule(node, values)

    def _plan_of_its_own(self, node: Node, values: Sequence[Placed]) -> Plan | None:
        """The plan for operations that no rule describes."""
        given, kind = [value.placement for value in values], node.operation.type
        if kind == "PreventGradient" and node.before:
            return Plan(given, lambda inputs: [self._held_back(node, inputs[0])])
        if kind in ALIASES:
            return Plan(given, lambda inputs: inputs)  # it waits for an effect, as those that read it do now
        if kind == "EnsureShape" and not isinstance(given[0], Replicate):
            return Plan(given, lambda inputs: inputs)  # the shape of the whole value was inferred from it
        of_shape = shapes.OF_SHAPE | tensor_lists.OF_SHAPE
        if (kind in of_shape and not isinstance(given[0], Replicate)) or (
            kind in _OF_SHAPE_OF_TERMS and isinstance(given[0], Partial)
        ):
            return Plan(given, lambda inputs: self._of_shape(node, inputs))
        if kind in tensor_lists.EMPTY:
            whole = [REPLICATE] * len(values)
            return Plan(whole, lambda inputs: [tensor_lists.empty(self.mesh, node.operation, inputs)])
        found = control_flow.plan(self, node.operation, values) if kind in control_flow.TYPES else None
        return found and Plan(*found)

    def _plan_by_rule(self, node: Node, values: Sequence[Placed]) -> Plan:
        given = [self.conversions.summed(value) for value in values]  # what is not linear needs the sum
        divided.require_none(node.operation, values)
        operation = Operation(node.operation, values, given)
        of_part = per_replica.local(node.operation) if self.rows is not None else None
        local = self._local(operation) if of_part is None or self.rows is None else (of_part, self.rows[0])
        if local is None:
            return Plan([REPLICATE] * len(values), lambda inputs: self._whole(node, inputs, values))
        found, shard = local
        wanted = [shapes.placement(one, shard) for one in found.inputs]
        return Plan(wanted, lambda inputs: self._parts_or_whole(node, operation, found, shard, inputs))

    def _local(self, operation: Operation) -> tuple[Local, Shard] | None:
        """What the operation's rule says of the largest of its sharded inputs of which it says something."""
        sharded = {index: one for index, one in enumerate(operation.placements) if isinstance(one, Shard)}
        rule = rule_of(operation) if sharded else None
        if rule is None:
            return None
        for index in sorted(sharded, key=operation.elements, reverse=True):
            try:
                found = rule(operation, index, sharded[index])
            except Exception as error:  # a rule that does not know its operation is none
                self.cost.refused.append(f"{operation.type}: {error}")
                continue
            if found is not None and shapes.is_possible(operation, found, sharded[index]):
                return found, sharded[index]
        return None

    def _as_it_is(self, node: Node, inputs: list[Placed]) -> list[Placed]:
        """An operation on terms of sums, or on parts, by each replica, as one device computes it on the whole."""
        parts = []
        for position in range(len(self.mesh.local)):
            with self.mesh.on_replica(position):
                reads = [self.mesh.read(value, position) for value in inputs]
                parts += tensorflow_functions.create(node.operation, reads)
        placement = next(value.placement for value in inputs if not isinstance(value.placement, Replicate))
        outputs = [Placed(placement, parts, replica=self.mesh.local[0])] if parts else []
        for output in outputs:
            output.is_gradient = _OF_A_TAPE in node.operation.name or linear.adds_gradients(node.operation, inputs)
            output.is_accumulated = accumulators.is_accumulated(node.operation, inputs)
        self.cost.compute(node.operation, inputs, outputs, repeated=False)
        return outputs

    def _parts_or_whole(
        self, node: Node, operation: Operation, found: Local, shard: Shard, inputs: list[Placed]
    ) -> list[Placed]:
        """An operation on the parts of its inputs, or on the whole if it does not take them."""
        try:
            return self._parts(node, operation, found, shard, inputs)
        except (ValueError, TypeError) as error:  # of TensorFlow, when it infers shapes
            if node.operation.op_def.is_stateful:
                raise
            self.cost.refused.append(f"{operation.type}: {error}")
            return self._whole(node, [self.conversions.placed(value, REPLICATE) for value in inputs], inputs)

    def _parts(
        self, node: Node, operation: Operation, found: Local, shard: Shard, inputs: list[Placed]
    ) -> list[Placed]:
        """An operation on the parts of its inputs."""
        # Sums of half precision stay in float32 until the replicas have added them up, as kernels do it.
        half = operation.output_dtypes[0] in _HALF and list(found.outputs) == ["sum"]
        half = half and "T" in node.operation.node_def.attr
        attributes = dict(found.attributes) | ({"T": tf.float32} if half else {})
        dtypes = [tf.float32] if half else operation.output_dtypes
        results = []
        for position, replica in enumerate(self.mesh.local):
            with self.mesh.on_replica(position):
                reads = [self.mesh.read(value, position) for value in inputs]
                for index, entry in found.localized.items():
                    reads[index] = shapes.localized(reads[index], inputs[index], entry, shard, replica)
                if half:
                    reads = [tf.cast(one, tf.float32) if one.dtype in _HALF else one for one in reads]
                made = tensorflow_functions.create(node.operation, reads, attributes, dtypes)
                if found.mean:
                    made = [one * tf.constant(shard.sizes[replica] / shard.total, one.dtype) for one in made]
                results.append(made)
        outputs = []
        for index, one in enumerate(found.outputs):
            parts = [made[index] for made in results]
            if isinstance(one, str):
                placement: Placement = Partial(one, operation.output_dtypes[0] if half else None)
            else:
                placement = shapes.placement(one, shard)
            shape = shapes.known(operation.output_shapes[index], found.lengths.get(index))
            if not self._add_up(parts, placement, shape):
                self.cost.refused.append(operation.type)
                return self._whole(node, [self.conversions.placed(value, REPLICATE) for value in inputs], inputs)
            if isinstance(placement, Replicate):
                parts = parts[: self.mesh.copies]
            element_dtype = _element_dtype(node.operation, inputs) if parts[0].dtype == tf.variant else None
            outputs.append(Placed(placement, parts, element_dtype=element_dtype, replica=self.mesh.local[0]))
            outputs[-1].is_gradient = _OF_A_TAPE in node.operation.name
            outputs[-1].axes = found.lengths.get(index)
        self.cost.compute(node.operation, inputs, outputs, repeated=False)
        return outputs

    def _add_up(self, parts: Sequence[tf.Tensor], placement: Placement, shape: Sequence[int | None] | None) -> bool:
        """Whether the shapes of parts add up to one whole shape, that of the traced step as far as that is known."""
        if parts[0].dtype in (tf.variant, tf.resource):
            return True
        whole = tf.TensorShape(shape)
        for replica, part in zip(self.mesh.local, parts, strict=True):
            own = Placed(placement, [part], replica=replica).shape
            if not own.is_compatible_with(whole):
                return False
            whole = whole.merge_with(own)
        for replica, part in zip(self.mesh.local, parts, strict=True):
            part.set_shape(shapes.part_shape(whole, placement, replica))
        return True

    def _whole(self, node: Node, inputs: list[Placed], given: Sequence[Placed]) -> list[Placed]:
        """An operation on whole inputs, once for each copy."""
        operation = node.operation
        repeated = any(value.repeated for value in inputs)
        if draws.has_a_place(operation):
            copies = [self._drawn(node, inputs[0])]
        elif effects.once(operation) or _shares_resource(inputs):
            reads = [self.mesh.tensors(value)[0] for value in inputs]
            copies = self._once(node, reads)
        else:
            made = []
            for copy in range(self.mesh.copies):
                with self.mesh.on_copy(copy):
                    reads = [self.mesh.tensors(value)[copy] for value in inputs]
                    made.append(tensorflow_functions.create(operation, reads))
            copies = [[one[index] for one in made] for index in range(len(operation.outputs))]
        results = []
        for tensors, output in zip(copies, operation.outputs, strict=True):
            element_dtype = _element_dtype(operation, inputs) if output.dtype == tf.variant else None
            if output.dtype not in (tf.resource, tf.variant):
                for tensor in tensors:
                    tensor.set_shape(output.shape)
            results.append(Placed(REPLICATE, tensors, repeated=repeated, element_dtype=element_dtype))
        self.cost.compute(operation, inputs, results, repeated=repeated)
        if any(isinstance(value.placement, Shard) for value in given) or repeated:
            results = [self._by_rows(value) for value in results]
        return results

    def _drawn(self, node: Node, shape: Placed) -> list[tf.Tensor]:
        """The copies of the random numbers that an operation with a seed draws for the whole batch."""
        shapes_of_copies = self.mesh.tensors(shape)
        with self.mesh.on_copy(0):
            place = self.streams.next_place(node, shapes_of_copies[0])
        found = []
        for copy, own in enumerate(shapes_of_copies):
            with self.mesh.on_copy(copy):
                found.append(draws.draw(node.operation, own, place))
        return found

    def _once(self, node: Node, reads: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """An operation that runs once in the job, or once in each process whose copies share a resource."""
        operation = node.operation

        def create() -> list[tf.Tensor]:
            if draws.is_seeded(operation):
                return self.streams.drawn_by_kernel(node, reads)
            return tensorflow_functions.create(operation, reads)

        if effects.once(operation):
            return self.mesh.once(create, list(operation.outputs))
        with self.mesh.on_copy(0):
            results = create()
        return [[tensor] * self.mesh.copies for tensor in results]

    def _by_rows(self, value: Placed) -> Placed:
        """A value that was computed whole from examples, cut again where it has a row per example.

        So only this operation is repeated on each replica, and not those that follow.
        """
        if self.rows is None or not value.shape.rank or value.shape[0] != self.rows[1]:
            return value
        return value.keep(self.conversions.cut(value, self.rows[0]))

    def _held_back(self, node: Node, value: Placed) -> Placed:
        """A value that waits for operations that compute something else, as recomputation has it."""
        tensors = []
        for tensor in value.tensors:
            after = [one for earlier in node.before for slot in earlier.outputs for one in _value(slot).tensors]
            own = [one.op for one in after if one.device == tensor.device] or [one.op for one in after]
            with tf.device(tensor.device), tf.control_dependencies(own):
                tensors += tensorflow_functions.create(node.operation, [tensor])
        held = Placed(value.placement, tensors, value.constant, value.repeated, value.element_dtype, self.mesh.local[0])
        held.axes, held.lengths = value.axes, value.lengths
        return held

    def _of_shape(self, node: Node, inputs: list[Placed]) -> list[Placed]:
        """What follows from the shape of a value that is not replicated."""
        (value,) = inputs
        copies = []
        for copy in range(self.mesh.copies):
            position = copy if self.mesh.copies > 1 else 0
            with self.mesh.on_copy(copy):
                of_part = value.tensors[position], value.placement, self.mesh.local[position]
                if node.operation.type in tensor_lists.OF_SHAPE:
                    tensor = tensor_lists.of_shape(node.operation, *of_part)
                else:
                    tensor = shapes.of_shape(node.operation, *of_part)
            tensor.set_shape(node.operation.outputs[0].shape)
            copies.append(tensor)
        return [Placed(REPLICATE, copies)]


# `ZerosLike` of a part has a rule.
_OF_SHAPE_OF_TERMS = frozenset(("ZerosLike", "OnesLike"))


def _shares_resource(inputs: Sequence[Placed]) -> bool:
    """Whether an operation uses a resource of which all copies of replicated values have the same one."""
    resources = [value.tensors for value in inputs if value.tensors and value.tensors[0].dtype == tf.resource]
    return any(len(tensors) > 1 and all(one is tensors[0] for one in tensors) for tensors in resources)


def _value(slot: Slot) -> Placed:
    assert slot.value is not None, "an operation is computed before its inputs"
    return slot.value


def _wanted(node: Node, plan: Plan) -> list[tuple[Placed, Placement]]:
    return [(_value(slot), placement) for slot, placement in zip(node.inputs, plan.placements, strict=True)]


def _element_dtype(operation: tf.Operation, inputs: Sequence[Placed]) -> tf.DType | None:
    """The dtype of the elements of the list that an operation returns; `None` if it returns no list."""
    if "element_dtype" in operation.node_def.attr:
        return operation.get_attr("element_dtype")
    return next((value.element_dtype for value in inputs if value.element_dtype is not None), None)
