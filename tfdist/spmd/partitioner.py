"""The partitioner: rewrites the graph of one device's step as that of N replicas.

    the step of one device        x [8, 4] -> MatMul -> SquaredDifference -> Mean -> loss
    on two replicas               x_i [4, 4] -> MatMul -> SquaredDifference -> Mean / 2 -> all-reduce -> loss

Every value has a placement (`tfdist.spmd.placements`): batches are sharded along their first axis, variables are
replicated. For each operation a sharding rule (`tfdist.spmd.rules`) says how replicas compute it on shards of its
inputs, and which placements its outputs then have. An operation without a rule is computed whole, on every replica,
from gathered inputs, so nothing is assumed of unknown operations.

Collectives are deferred until nothing else can be computed, and are then issued together.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfdist.internals import tensorflow_graphs
from tfdist.spmd import constants, control_flow, draws, linear, meshes, replica_variables
from tfdist.spmd.conversions import EMPTY_LISTS, Conversions, empty_list
from tfdist.spmd.cost import Cost
from tfdist.spmd.flattening import ALIASES, Flat, Node, Slot, flatten, runs_once
from tfdist.spmd.meshes import Mesh
from tfdist.spmd.placements import REPLICATE, Lengths, Partial, Placed, Placement, Replicate, Shard, part_shape
from tfdist.spmd.rules import per_replica_sharding
from tfdist.spmd.rules.registry import Operation, OpSharding, is_divisible, placement_of, rule_of

_HALF = (tf.float16, tf.bfloat16)
_TAPE_PREFIX = "gradient_tape/"  # TensorFlow's prefix in the names of operations that a gradient tape adds
# Operations that depend on nothing but the shape of their input, or of the elements of a list.
_OF_SHAPE = frozenset(("Shape", "Size", "TensorListLength", "TensorListElementShape"))
# Operations that depend on the shape of a partial value only; `ZerosLike` of a shard has a rule.
_OF_SHAPE_OF_PARTIAL = frozenset(("ZerosLike", "OnesLike"))


@dataclass(frozen=True)
class Plan:
    """How an operation is computed.

    Attributes:
        placements: the placement in which it reads each input.
        compute: returns the outputs, from the inputs in these placements.
    """

    placements: Sequence[Placement]
    compute: Callable[[list[Placed]], list[Placed]]


class Partitioner:
    """Computes graphs of the one-device step on the replicas of a mesh, in the current graph.

    Args:
        mesh: the replicas.
        rows: the placement of the batch and its number of examples; `None` if it is not sharded.
        cost: counts what the partitioned step computes and exchanges.
        streams: the state of random operations, which all graphs of a step share.
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
        """Counts in `cost` what is computed in this context."""
        previous = self.cost
        self.cost = self.conversions.cost = cost
        try:
            yield
        finally:
            self.cost = self.conversions.cost = previous

    def _compute(self, flat: Flat) -> None:
        order = {node: number for number, node in enumerate(flat.nodes)}
        followers: dict[Node, list[Node]] = {node: [] for node in flat.nodes}
        missing: dict[Node, int] = {}  # the number of predecessors that have not been computed
        for node in flat.nodes:
            predecessors = {slot.node for slot in node.inputs if slot.node is not None} | set(node.before)
            missing[node] = len(predecessors)
            for predecessor in predecessors:
                followers[predecessor].append(node)
        ready = [(order[node], node) for node in flat.nodes if not missing[node]]
        heapq.heapify(ready)
        waiting: list[tuple[Node, Plan]] = []  # for a collective
        while ready or waiting:
            if ready:
                node = heapq.heappop(ready)[1]
                plan = self.plan(node)
                if any(self.conversions.needs_exchange(*pair) for pair in _wanted(node, plan)):
                    waiting.append((node, plan))
                    continue
                planned = [(node, plan)]
            else:
                planned, waiting = waiting, []
                self.conversions.convert(pair for node, plan in planned for pair in _wanted(node, plan))
            for node, plan in planned:
                self._finish(node, plan)
                for follower in followers[node]:
                    missing[follower] -= 1
                    if not missing[follower]:
                        heapq.heappush(ready, (order[follower], follower))

    def _finish(self, node: Node, plan: Plan) -> None:
        values, pairs = [_value(slot) for slot in node.inputs], _wanted(node, plan)
        converted = [value.converted(placement) or value for value, placement in pairs]
        with self.mesh.computing(node.operation, [tensor for value in converted for tensor in value.tensors[:1]]):
            outputs = plan.compute([self.conversions.placed(*pair) for pair in pairs])
        constants.note(node.operation, values, outputs)
        for slot, value in zip(node.outputs, outputs, strict=True):
            slot.value = value

    def plan(self, node: Node) -> Plan:
        """How the operation of `node` is computed, given the placements of its inputs."""
        values = [_value(slot) for slot in node.inputs]
        known = constants.known(node.operation, values)
        if known is not None:
            return Plan([value.placement for value in values], lambda _: known)
        for kind in (replica_variables, linear):
            placements = kind.placements(node.operation, values)
            if placements is not None:
                return Plan(placements, lambda inputs: self._on_each_replica(node, inputs))
        return self._special_plan(node, values) or self._plan_by_rule(node, values)

    def _special_plan(self, node: Node, values: Sequence[Placed]) -> Plan | None:
        """The plan for an operation that is not described by a rule; `None` for other operations."""
        placements, kind = [value.placement for value in values], node.operation.type
        if kind == "PreventGradient" and node.before:
            return Plan(placements, lambda inputs: [self._delayed(node, inputs[0])])
        # Operations that read an alias wait for its control inputs too; shape inference has used an `EnsureShape`.
        if kind in ALIASES or (kind == "EnsureShape" and not isinstance(placements[0], Replicate)):
            return Plan(placements, lambda inputs: inputs)
        if (kind in _OF_SHAPE and not isinstance(placements[0], Replicate)) or (
            kind in _OF_SHAPE_OF_PARTIAL and isinstance(placements[0], Partial)
        ):
            return Plan(placements, lambda inputs: self._of_shape(node, inputs[0]))
        if kind in EMPTY_LISTS:
            return Plan([REPLICATE] * len(values), lambda inputs: [empty_list(self.mesh, node.operation, inputs)])
        plan = control_flow.plan(self, node.operation, values) if kind in control_flow.TYPES else None
        return plan and Plan(*plan)

    def _plan_by_rule(self, node: Node, values: Sequence[Placed]) -> Plan:
        placements = [self.conversions.summed(value) for value in values]  # a nonlinear operation needs the sum
        replica_variables.require_none_sharded(node.operation, values)
        operation = Operation(node.operation, values, placements)
        if self.rows is not None and (per_replica := per_replica_sharding(node.operation)) is not None:
            sharding, shard = per_replica, self.rows[0]
        elif (from_rule := self._sharding_by_rule(operation)) is not None:
            sharding, shard = from_rule
        else:
            return Plan([REPLICATE] * len(values), lambda inputs: self._on_each_copy(node, inputs, values))
        return Plan(
            [placement_of(wanted, shard) for wanted in sharding.inputs],
            lambda inputs: self._sharded_or_replicated(node, operation, sharding, shard, inputs),
        )

    def _sharding_by_rule(self, operation: Operation) -> tuple[OpSharding, Shard] | None:
        """What the operation's rule returns for the largest sharded input for which it returns something."""
        sharded = {n: placement for n, placement in enumerate(operation.placements) if isinstance(placement, Shard)}
        rule = rule_of(operation) if sharded else None
        if rule is None:
            return None
        for index in sorted(sharded, key=operation.elements, reverse=True):
            try:
                sharding = rule(operation, index, sharded[index])
            except Exception as error:  # a rule that fails is ignored
                self.cost.refused.append(f"{operation.type}: {error}")
                continue
            if sharding is not None and is_divisible(operation, sharding, sharded[index]):
                return sharding, sharded[index]
        return None

    def _on_each_replica(self, node: Node, inputs: list[Placed]) -> list[Placed]:
        """Computes an operation on partial values or shards exactly as one device computes it on the whole values."""
        parts = []
        for position in range(len(self.mesh.local)):
            with self.mesh.on_replica(position):
                reads = [self.mesh.read(value, position) for value in inputs]
                parts += tensorflow_graphs.create(node.operation, reads)
        placement = next(value.placement for value in inputs if not isinstance(value.placement, Replicate))
        outputs = [Placed(placement, parts, replica=self.mesh.local[0])] if parts else []
        for output in outputs:
            output.is_gradient = _TAPE_PREFIX in node.operation.name or linear.adds_gradients(node.operation, inputs)
            output.is_accumulated = replica_variables.is_accumulated(node.operation, inputs)
        self.cost.compute(node.operation, inputs, outputs, repeated=False)
        return outputs

    def _sharded_or_replicated(
        self, node: Node, operation: Operation, sharding: OpSharding, shard: Shard, inputs: list[Placed]
    ) -> list[Placed]:
        try:
            return self._sharded(node, operation, sharding, shard, inputs)
        except (ValueError, TypeError) as error:  # from TensorFlow's shape inference
            if node.operation.op_def.is_stateful:
                raise
            return self._refused(node, inputs, f"{operation.type}: {error}")

    def _refused(self, node: Node, inputs: list[Placed], reason: str) -> list[Placed]:
        self.cost.refused.append(reason)
        return self._on_each_copy(node, [self.conversions.placed(value, REPLICATE) for value in inputs], inputs)

    def _sharded(
        self, node: Node, operation: Operation, sharding: OpSharding, shard: Shard, inputs: list[Placed]
    ) -> list[Placed]:
        # Partial sums of half precision stay in float32 until the replicas have added them, as kernels accumulate.
        half = operation.output_dtypes[0] in _HALF and list(sharding.outputs) == ["sum"]
        half = half and "T" in node.operation.node_def.attr
        attributes = dict(sharding.attributes) | ({"T": tf.float32} if half else {})
        dtypes = [tf.float32] if half else operation.output_dtypes
        results = []
        for position, replica in enumerate(self.mesh.local):
            with self.mesh.on_replica(position):
                reads = [self.mesh.read(value, position) for value in inputs]
                for index, entry in sharding.localized.items():
                    reads[index] = meshes.local_lengths(reads[index], inputs[index], entry, shard, replica)
                if half:
                    reads = [tf.cast(tensor, tf.float32) if tensor.dtype in _HALF else tensor for tensor in reads]
                tensors = tensorflow_graphs.create(node.operation, reads, attributes, dtypes)
                if sharding.mean:
                    tensors = [t * tf.constant(shard.sizes[replica] / shard.total, t.dtype) for t in tensors]
                results.append(tensors)
        outputs = []
        for index, output_sharding in enumerate(sharding.outputs):
            parts = [tensors[index] for tensors in results]
            if isinstance(output_sharding, str):
                placement: Placement = Partial(output_sharding, operation.output_dtypes[0] if half else None)
            else:
                placement = placement_of(output_sharding, shard)
            shape = _refined(operation.output_shapes[index], sharding.lengths.get(index))
            if not self._have_global_shape(parts, placement, shape):
                return self._refused(node, inputs, operation.type)
            if isinstance(placement, Replicate):
                parts = parts[: self.mesh.copies]
            element_dtype = _element_dtype(node.operation, inputs) if parts[0].dtype == tf.variant else None
            output = Placed(placement, parts, element_dtype=element_dtype, replica=self.mesh.local[0])
            output.is_gradient = _TAPE_PREFIX in node.operation.name
            output.axes = sharding.lengths.get(index)
            outputs.append(output)
        self.cost.compute(node.operation, inputs, outputs, repeated=False)
        return outputs

    def _have_global_shape(
        self, parts: Sequence[tf.Tensor], placement: Placement, shape: Sequence[int | None] | None
    ) -> bool:
        """Whether all parts imply one global shape, compatible with `shape`; sets the static shapes of the parts."""
        if parts[0].dtype in (tf.variant, tf.resource):
            return True
        common = tf.TensorShape(shape)
        for replica, part in zip(self.mesh.local, parts, strict=True):
            implied = Placed(placement, [part], replica=replica).shape
            if not implied.is_compatible_with(common):
                return False
            common = common.merge_with(implied)
        for replica, part in zip(self.mesh.local, parts, strict=True):
            part.set_shape(part_shape(common, placement, replica))
        return True

    def _on_each_copy(self, node: Node, inputs: list[Placed], originals: Sequence[Placed]) -> list[Placed]:
        """Computes an operation on replicated `inputs`, once per copy; `originals` are the inputs before resharding."""
        operation = node.operation
        repeated = any(value.repeated for value in inputs)
        if draws.has_stateless_equivalent(operation):
            copies = [self._drawn(node, inputs[0])]
        elif runs_once(operation) or _shares_resource(inputs):
            copies = self._once(node, [self.mesh.tensors(value)[0] for value in inputs])
        else:
            results = []
            for copy in range(self.mesh.copies):
                with self.mesh.on_copy(copy):
                    reads = [self.mesh.tensors(value)[copy] for value in inputs]
                    results.append(tensorflow_graphs.create(operation, reads))
            copies = [[tensors[index] for tensors in results] for index in range(len(operation.outputs))]
        outputs = []
        for tensors, output in zip(copies, operation.outputs, strict=True):
            element_dtype = _element_dtype(operation, inputs) if output.dtype == tf.variant else None
            if output.dtype not in (tf.resource, tf.variant):
                for tensor in tensors:
                    tensor.set_shape(output.shape)
            outputs.append(Placed(REPLICATE, tensors, repeated=repeated, element_dtype=element_dtype))
        self.cost.compute(operation, inputs, outputs, repeated=repeated)
        if any(isinstance(value.placement, Shard) for value in originals) or repeated:
            outputs = [self._sharded_again(value) for value in outputs]
        return outputs

    def _drawn(self, node: Node, shape: Placed) -> list[tf.Tensor]:
        """The copies of the random numbers that a seeded operation draws for the whole batch."""
        shapes_by_copy = self.mesh.tensors(shape)
        with self.mesh.on_copy(0):
            counter = self.streams.next_counter(node, shapes_by_copy[0])
        copies = []
        for copy, shape_of_copy in enumerate(shapes_by_copy):
            with self.mesh.on_copy(copy):
                copies.append(draws.draw(node.operation, shape_of_copy, counter))
        return copies

    def _once(self, node: Node, reads: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """The results of an operation that runs once per job, or per process if its copies share a resource."""
        operation = node.operation

        def create() -> list[tf.Tensor]:
            if draws.is_seeded(operation):
                return self.streams.drawn_by_kernel(node, reads)
            return tensorflow_graphs.create(operation, reads)

        if runs_once(operation):
            return self.mesh.once(create, list(operation.outputs))
        with self.mesh.on_copy(0):
            results = create()
        return [[tensor] * self.mesh.copies for tensor in results]

    def _sharded_again(self, value: Placed) -> Placed:
        """Shards a replicated value again if it has a row per example.

        So replicas repeat only the operation without a rule, and not those that follow it.
        """
        if self.rows is None or not value.shape.rank or value.shape[0] != self.rows[1]:
            return value
        return value.keep(self.conversions.split(value, self.rows[0]))

    def _delayed(self, node: Node, value: Placed) -> Placed:
        """A value that waits for operations on which it does not depend, as recomputation needs it."""
        tensors = []
        for tensor in value.tensors:
            earlier = [result for before in node.before for slot in before.outputs for result in _value(slot).tensors]
            on_device = [result.op for result in earlier if result.device == tensor.device]
            awaited = on_device or [result.op for result in earlier]
            with tf.device(tensor.device), tf.control_dependencies(awaited):
                tensors += tensorflow_graphs.create(node.operation, [tensor])
        delayed = Placed(
            value.placement, tensors, value.constant, value.repeated, value.element_dtype, self.mesh.local[0]
        )
        delayed.axes, delayed.lengths = value.axes, value.lengths
        return delayed

    def _of_shape(self, node: Node, value: Placed) -> list[Placed]:
        copies = []
        for copy in range(self.mesh.copies):
            with self.mesh.on_copy(copy):
                part, replica = value.tensors[copy], self.mesh.local[copy]
                tensor = _result_of_shape(node.operation, part, value.placement, replica)
            tensor.set_shape(node.operation.outputs[0].shape)
            copies.append(tensor)
        return [Placed(REPLICATE, copies)]


def _shares_resource(inputs: Sequence[Placed]) -> bool:
    """Whether an operation uses a resource that several copies of replicated values share."""
    resources = [value.tensors for value in inputs if value.tensors and value.tensors[0].dtype == tf.resource]
    return any(len(tensors) > 1 and all(tensor is tensors[0] for tensor in tensors) for tensors in resources)


def _value(slot: Slot) -> Placed:
    assert slot.value is not None, "an operation is computed before its inputs"
    return slot.value


def _wanted(node: Node, plan: Plan) -> list[tuple[Placed, Placement]]:
    """The inputs of an operation, with the placements in which it reads them."""
    return [(_value(slot), placement) for slot, placement in zip(node.inputs, plan.placements, strict=True)]


def _element_dtype(operation: tf.Operation, inputs: Sequence[Placed]) -> tf.DType | None:
    """The dtype of the elements of the list that an operation returns; `None` if it returns no list."""
    if "element_dtype" in operation.node_def.attr:
        return operation.get_attr("element_dtype")
    return next((value.element_dtype for value in inputs if value.element_dtype is not None), None)


def _result_of_shape(operation: tf.Operation, part: tf.Tensor, placement: Placement, replica: int) -> tf.Tensor:
    """The result of an operation that needs only the shape of its input, from the tensor of one replica."""
    is_list = operation.type not in ("Shape", "Size")
    if is_list:
        (result,) = tensorflow_graphs.create(operation, [part])
    else:
        result = tf.shape(part, operation.outputs[0].dtype)
    if isinstance(placement, Shard) and operation.type != "TensorListLength":
        if result.shape.rank != 1:
            raise NotImplementedError("the shape of elements of unknown rank")
        length = result[placement.axis]
        global_length = placement.whole_length(length, replica)
        if is_list:
            global_length = tf.where(length > 0, global_length, length)  # -1 is an unknown length
        result = tf.tensor_scatter_nd_update(result, [[placement.axis]], [global_length])
    return tf.reduce_prod(result) if operation.type == "Size" else result


def _refined(shape: Sequence[int | None] | None, lengths: Lengths | None) -> Sequence[int | None] | None:
    """`shape` with unknown lengths replaced by those of `lengths` that are known."""
    if shape is None or lengths is None:
        return shape
    known = [None if length is None or length.symbols else length.factor for length in lengths]
    return [refinement if length is None else length for length, refinement in zip(shape, known, strict=True)]
