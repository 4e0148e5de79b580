"""Estimates the memory of a training step from its graph, before anything is allocated or run.

The step is traced with variables that have a shape but no memory. Its operations are then visited in the order in which
they were traced, which back-propagation also follows: a result is in memory from its operation to the last operation
that uses it. Elementwise operations overwrite an argument that nothing else uses, as TensorFlow's kernels do. A loop,
which `tfdist.loop.while_loops` describes, fills some lists and empties others.

The tensors go to a simulated allocator, since memory is also lost between them. Kernels' own buffers are not counted,
and neither are operations that TensorFlow runs at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.internals import keras as keras_internals
from tfdist.internals import tensorflow_graphs as graphs
from tfdist.internals.keras import tf_variable
from tfdist.loop import traced_step
from tfdist.loop.bfc_allocator import LARGE_BYTES, BfcAllocator, Chunk
from tfdist.loop.recomputation import UNKNOWN_LENGTH, Key, key
from tfdist.loop.while_loops import UPDATES, WhileLoop

# Later steps find the memory as the steps before left it.
_STEPS = 3


@dataclass(frozen=True)
class StepMemory:
    """The memory of the tensors of one replica, in bytes, and the size of its graph.

    Attributes:
        weights: the variables of the model.
        slots: the variables of its optimizers.
        gradients: the gradients of the trainable variables.
        activations: everything else in memory at the peak of a step: the batch, results of the forward pass that the
            backward pass needs, and temporary results.
        allocator: memory between the tensors that TensorFlow's allocator could not use.
        operations: the number of operations in the graph of a step, with those of the functions that it calls.
    """

    weights: int
    slots: int
    gradients: int
    activations: int
    allocator: int
    operations: int


def of_training(strategy: Any, model: Any, batch_size: int, spec: Any) -> StepMemory:
    """Estimates the memory of a training step of `model`.

    Args:
        strategy: a strategy with one replica.
        model: a compiled model, created within `keras_variables.without_memory`.
        batch_size: the number of examples per step.
        spec: the `tf.TensorSpec`s of a batch.
    """
    operations = traced_step.operations(strategy, model, batch_size, spec, UNKNOWN_LENGTH)
    slots = [variable for optimizer in keras_internals.optimizers(model) for variable in optimizer.variables]
    memory = Memory()
    for size in [*_sizes(model.variables), *_sizes(slots)]:
        memory.allocate(size)
    variables = memory.in_use
    step = Execution(operations, graphs.effective(operations), inputs_exist=False)
    for _ in range(_STEPS):
        step.run(memory)
    gradients = sum(_sizes(model.trainable_variables))
    return StepMemory(
        weights=sum(_sizes(model.variables)),
        slots=sum(_sizes(slots)),
        gradients=gradients,
        activations=max(0, memory.peak - variables - gradients),
        allocator=memory.lost,
        operations=step.operations,
    )


def _sizes(variables: Sequence[Any]) -> list[int]:
    """The size of each of the distinct variables, in bytes."""
    distinct = {id(variable): tf_variable(variable) for variable in variables}
    return [math.prod(variable.shape) * variable.dtype.size for variable in distinct.values()]


# Operations whose results are in memory that is counted elsewhere.
_OF_VARIABLES = frozenset(("ReadVariableOp", "VarHandleOp", "Const"))
# Operations that overwrite an argument of the size of their result, if nothing else uses it.
_OVERWRITING = frozenset(
    (
        *("Add", "AddV2", "AddN", "Sub", "Mul", "Div", "RealDiv", "DivNoNan", "MulNoNan", "Maximum", "Minimum", "Neg"),
        *("Sqrt", "Rsqrt", "Square", "SquaredDifference", "Exp", "Log", "Tanh", "Sigmoid", "Relu", "Relu6", "Elu"),
        *("ReluGrad", "Relu6Grad", "TanhGrad", "SigmoidGrad", "EluGrad", "RsqrtGrad", "SqrtGrad", "BiasAdd"),
        *("Softmax", "LogSoftmax", "Erf", "Abs", "Sign", "Softplus", "SoftplusGrad", "Pow", "SelectV2", "Select"),
    )
)


class Memory:
    """The memory of tensors.

    Attributes:
        in_use: the size of all tensors that are in memory, in bytes.
        peak: the largest `in_use` so far.
    """

    def __init__(self) -> None:
        self.in_use = self.peak = 0
        self._large = self._large_peak = 0  # the same for large tensors, which `_allocator` has
        self._allocator = BfcAllocator()

    @property
    def lost(self) -> int:
        """The memory of the allocator that was not in use at the peak, in bytes."""
        return self._allocator.touched_bytes - self._large_peak

    def allocate(self, size: int, parts: int = 1) -> list[Chunk]:
        """Allocates a tensor of `size` bytes, or a list of tensors, its `parts`."""
        self.in_use += size
        self.peak = max(self.peak, self.in_use)
        if size < parts * LARGE_BYTES:
            return []
        self._large += size
        self._large_peak = max(self._large_peak, self._large)
        return [self._allocator.allocate(size // parts) for _ in range(parts)]

    def free(self, size: int, chunks: Sequence[Chunk]) -> None:
        """Frees what `allocate` returned."""
        self.in_use -= size
        self._large -= size if chunks else 0
        for chunk in chunks:
            self._allocator.free(chunk)


class Execution:
    """The execution of a graph or of a function, one operation after the other.

    Args:
        operations: all operations of the graph.
        needed: the names of those that run.
        inputs_exist: whether the inputs of the graph are in memory before, as the arguments of a function.
    """

    def __init__(self, operations: Sequence[tf.Operation], needed: set[str], *, inputs_exist: bool):
        self._existing = _OF_VARIABLES | {"Placeholder"} if inputs_exist else _OF_VARIABLES
        self._loops = {o.name: WhileLoop(o) for o in operations if o.name in needed and graphs.is_loop(o)}
        self._order = [o for o in _in_order(operations, needed) if o.type not in self._existing]
        self._sizes: dict[Key, int] = {}  # of all results, in bytes
        self._uses: dict[Key, int] = {}  # how many operations use each result
        for operation in self._order:
            for root in self._used(operation):
                self._uses[root] = self._uses.get(root, 0) + 1
        self._functions = {
            operation.name: [
                Execution(function.get_operations(), graphs.needed(function), inputs_exist=True)
                for function in graphs.functions(operation)
            ]
            for operation in self._order
        }

    @property
    def operations(self) -> int:
        """The number of operations, with those of the functions that they call."""
        return len(self._order) + sum(function.operations for group in self._functions.values() for function in group)

    def run(self, memory: Memory) -> None:
        """Allocates and frees the results, and those within the functions that the operations call."""
        remaining = dict(self._uses)
        allocated: dict[Key, list[Chunk]] = {}
        for operation in self._order:
            used, results = self._used(operation), self._results(operation)
            self._sizes |= results
            for root in used:
                remaining[root] -= 1
            done = [root for root in dict.fromkeys(used) if remaining[root] == 0 and root in allocated]
            loop = self._loops.get(operation.name)
            self._call(operation, memory)
            for root in self._overwritten(operation, done, results):
                memory.free(self._sizes[root], allocated.pop(root))
            for tensor in operation.outputs:
                if (name := key(tensor)) in results:
                    parts = loop.iterations if loop is not None and tensor.dtype == tf.variant else 1
                    allocated[name] = memory.allocate(results[name], parts)
            if loop is not None:  # its last iteration has other lists in memory than the first one
                self._call(operation, memory)
            for root in [*done, *(name for name in results if not remaining.get(name))]:
                if root in allocated:
                    memory.free(self._sizes[root], allocated.pop(root))
        for root, chunks in allocated.items():
            memory.free(self._sizes[root], chunks)

    def _call(self, operation: tf.Operation, memory: Memory) -> None:
        for function in self._functions[operation.name]:
            function.run(memory)

    def _results(self, operation: tf.Operation) -> dict[Key, int]:
        """The size of each result that has its own memory, in bytes."""
        if operation.name in self._loops:
            of_arguments = [self._sizes.get(self._root(tensor), 0) for tensor in operation.inputs]
            sizes = self._loops[operation.name].result_bytes(of_arguments)
        elif operation.type == "TensorListFromTensor":  # which copies
            sizes = [graphs.bytes_of(operation.inputs[0], UNKNOWN_LENGTH)]
        elif operation.type == "ZerosLike" and operation.outputs[0].dtype == tf.variant:
            sizes = [self._sizes.get(self._root(operation.inputs[0]), 0)]
        else:
            sizes = [graphs.bytes_of(tensor, UNKNOWN_LENGTH) for tensor in operation.outputs]
        pairs = zip(operation.outputs, sizes, strict=True)
        return {key(tensor): size for tensor, size in pairs if self._root(tensor) == key(tensor)}

    def _overwritten(self, operation: tf.Operation, done: Sequence[Key], results: Mapping[Key, int]) -> list[Key]:
        """The arguments whose memory the results take over, among those that nothing else uses."""
        if operation.name in self._loops:  # lists that a loop fills or empties
            lists = dict.fromkeys(self._root(tensor) for tensor in operation.inputs if tensor.dtype == tf.variant)
            return [root for root in lists if root in done]
        if operation.type in _OVERWRITING and results:
            size = next(iter(results.values()))
            return [root for root in done if self._sizes[root] == size][:1]
        return []

    def _used(self, operation: tf.Operation) -> list[Key]:
        """The results whose memory an operation reads."""
        return [] if operation.type in graphs.OF_SHAPE else [self._root(tensor) for tensor in operation.inputs]

    def _root(self, tensor: tf.Tensor) -> Key:
        """The result whose memory a tensor shares."""
        while True:
            tensor = graphs.root(tensor)
            loop, index = self._loops.get(tensor.op.name), tensor.value_index
            if loop is not None and loop.passes_on(index):
                tensor = tensor.op.inputs[index]
            elif tensor.op.type in UPDATES and index == 0:
                tensor = tensor.op.inputs[0]
            else:
                return key(tensor)


def _in_order(operations: Sequence[tf.Operation], needed: set[str]) -> list[tf.Operation]:
    """Returns the operations in traced order, but each before its users, and recomputed copies only when used."""
    ordered: list[tf.Operation] = []
    seen: set[str] = set()
    for last in operations:
        is_copy = last.name.endswith("/again") or "/held_" in last.name  # see `tfdist.loop.recomputation`
        if last.name not in needed or is_copy:
            continue
        waiting = [last]
        while waiting:
            operation = waiting[-1]
            missing = [source for source in graphs.sources(operation) if source.name not in seen]
            if operation.name in seen or not missing:
                waiting.pop()
                if operation.name not in seen:
                    seen.add(operation.name)
                    ordered.append(operation)
            else:
                waiting += missing
    return ordered
