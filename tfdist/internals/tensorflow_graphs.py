"""Reads, copies and changes the operations of graphs, also of graphs that are still being traced.

Written for TensorFlow 2.21.0; `tests/spmd/test_partitioner.py`, `tests/test_recomputation.py` and
`tests/test_memory.py` fail when TensorFlow changes a part that this uses.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import function_def_to_graph, op_def_registry

from tfdist.internals import tensorflow_variables

# Attributes that are valid only in the graph in which an operation was traced.
_GRAPH_ATTRIBUTES = frozenset(
    ("_class", "_output_shapes", "_gradient_op_type", "_XlaMustCompile", "_xla_inferred_shapes")
)


@contextlib.contextmanager
def optimized(**options: bool) -> Iterator[None]:
    """Within this context TensorFlow optimizes graphs with these options of `tf.config.optimizer`.

    By default all options are on, except `disable_meta_optimizer`.
    """
    previous = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options(options)
    try:
        yield
    finally:
        restored = {name: previous.get(name, name != "disable_meta_optimizer") for name in options}
        tf.config.optimizer.set_experimental_options(restored)


def empty_graph(name: str) -> Any:
    """A graph in which a function can be traced; it never runs."""
    return tf.__internal__.FuncGraph(name)


def captured(graph: Any) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The outer tensors that a function's graph captures, and its placeholders for them."""
    return [outside for outside, _ in graph.captures], [inside for _, inside in graph.captures]


def captured_ids(graph: Any) -> list[int | None]:
    """For each input of a function's graph, the `id` of the tensor that it captures; `None` for an argument."""
    outside, inside = captured(graph)
    ids = {id(placeholder): id(tensor) for tensor, placeholder in zip(outside, inside, strict=True)}
    return [ids.get(id(placeholder)) for placeholder in graph.inputs]


def variables_of(graph: Any) -> list[tf.Tensor]:
    """The handles of the variables that a function's graph captures."""
    handles = {id(outside): outside for outside, _ in graph.captures if outside.dtype == tf.resource}
    return [handle for handle in handles.values() if is_variable(handle)]


def _content(handle: tf.Tensor) -> Any:
    """The shape and dtype of the value of a variable; `None` if the handle is not that of a variable."""
    data = getattr(handle, "_handle_data", None)
    return data.shape_and_type[0] if data is not None and data.is_set and len(data.shape_and_type) == 1 else None


def is_variable(handle: tf.Tensor) -> bool:
    """Whether a handle is that of a variable."""
    return _content(handle) is not None


def read(handle: tf.Tensor) -> tf.Tensor:
    """Reads the variable with this handle in the current graph."""
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=_content(handle).dtype)


def size_bytes(handle: tf.Tensor) -> int:
    """The size of the variable with this handle; an axis of unknown length counts as 1."""
    content = _content(handle)
    return math.prod(max(1, axis.size) for axis in content.shape.dim) * tf.as_dtype(content.dtype).size


def shape(handle: tf.Tensor) -> tuple[int, ...]:
    """The shape of the variable with this handle."""
    return tuple(axis.size for axis in _content(handle).shape.dim)


def described(handle: tf.Tensor) -> str:
    """The dtype and shape of the variable with this handle, such as "float32 [4,3]"."""
    return tensorflow_variables.in_words(_content(handle).dtype, shape(handle))


def value(handle: tf.Tensor) -> np.ndarray:
    """A copy of the value of the variable with this handle."""
    content = read(handle)
    return np.array(content.numpy(), content.dtype.as_numpy_dtype)  # NumPy refuses tensors that are bfloat16 scalars


def set_value(handle: tf.Tensor, content: Any) -> None:
    """Sets the value of the variable with this handle."""
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.convert_to_tensor(content, _content(handle).dtype))


def can_run_twice(graph: Any) -> bool:
    """Whether a function gives the same results again once its variables are restored, and has no other effects."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    variables = {id(handle) for handle in variables_of(graph)}
    others = [outside for outside, _ in graph.captures if outside.dtype == tf.resource and id(outside) not in variables]
    return not others and not any(map(_has_other_state, {node.op for node in nodes}))


def _has_other_state(kind: str) -> bool:
    """Whether an operation has a state or an effect other than the values of variables."""
    definition = op_def_registry.get(kind)
    if definition is None:
        return True
    return definition.is_stateful and kind not in _ON_VARIABLES and not kind.startswith("Resource")


# Stateful operations that read or change nothing but variables.
_ON_VARIABLES = frozenset(
    (
        *("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "ReadVariableOp", "VarIsInitializedOp"),
        *("RngReadAndSkip", "RngSkip", "StatefulPartitionedCall", "If", "While", "Case", "Assert", "NoOp"),
    )
)


def body(operation: tf.Operation, attribute: str) -> Any:
    """The graph of the function that an attribute of `operation` names, with its `inputs` and `outputs`."""
    return _graph_of(operation, operation.get_attr(attribute).name)


def is_loop(operation: tf.Operation) -> bool:
    """Whether an operation is a while loop, whose attribute "body" is the function of an iteration."""
    return operation.type in ("While", "StatelessWhile")


def most_iterations(loop: tf.Operation) -> int | None:
    """The `maximum_iterations` of a `tf.while_loop`; `None` if there is none, or if it is no constant."""
    limit = tf.get_static_value(loop.inputs[1])  # inputs: a counter, the limit or -1, the variables of the loop
    return int(limit) if limit is not None and limit > 0 else None


def functions(operation: tf.Operation) -> list[Any]:
    """The graphs of the functions that `operation` calls or chooses from: of a call, a loop or an `If`."""
    return [body(operation, attribute) for attribute in _attributes_of_functions(operation.type)]


@functools.cache
def _attributes_of_functions(kind: str) -> tuple[str, ...]:
    definition = op_def_registry.get(kind)
    return tuple(attribute.name for attribute in definition.attr if attribute.type == "func") if definition else ()


def called(operation: tf.Operation) -> Any:
    """The graph of the function that `operation` calls once and unconditionally; `None` if it calls none."""
    if operation.type in ("PartitionedCall", "StatefulPartitionedCall"):
        return body(operation, "f")
    # A function of TensorFlow 1 is called by an operation with its name.
    return _graph_of(operation, operation.type) if operation.graph._is_function(operation.type) else None


def _graph_of(operation: tf.Operation, name: str) -> Any:
    function = operation.graph._get_function(name)
    graph = getattr(function, "graph", None)
    if graph is not None and hasattr(graph, "inputs"):
        return graph
    definition = getattr(function, "cached_definition", None) or function.definition
    shapes = [None if tensor.dtype == tf.resource else tensor.shape for tensor in operation.inputs]
    with operation.graph.as_default():  # which has the functions that the function calls
        return function_def_to_graph.function_def_to_graph(
            definition, input_shapes=shapes, include_library_functions=True
        )


def in_order(
    graph: Any,
    after: Mapping[str, Sequence[tf.Operation]] = types.MappingProxyType({}),
    priority: Callable[[tf.Operation], int] = lambda operation: 0,
) -> list[tf.Operation]:
    """The operations that the outputs and effects of a function need, in topological order.

    Operations are in the order in which they were traced, as far as possible: the inputs of a loop can be younger than
    the loop.

    Args:
        graph: the graph of the function.
        after: additional predecessors, by the name of the operation that waits for them. Operations in a cycle, and
            those that wait for them, are left out.
        priority: among operations that are ready, those with lower values come first.
    """

    def predecessors(operation: tf.Operation) -> list[tf.Operation]:
        return [*sources(operation), *after.get(operation.name, ())]

    needed = ancestors([*(tensor.op for tensor in graph.outputs), *graph.control_outputs], predecessors).values()
    missing: dict[tf.Operation, int] = {}
    followers: dict[tf.Operation, list[tf.Operation]] = {}
    for operation in needed:
        before = set(predecessors(operation))
        missing[operation] = len(before)
        for predecessor in before:
            followers.setdefault(predecessor, []).append(operation)
    ready = [(priority(operation), operation._id, operation) for operation in needed if not missing[operation]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        operation = heapq.heappop(ready)[-1]
        ordered.append(operation)
        for follower in followers.get(operation, ()):
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (priority(follower), follower._id, follower))
    return ordered


def create(
    operation: tf.Operation,
    inputs: Sequence[tf.Tensor],
    attributes: Mapping[str, Any] = types.MappingProxyType({}),
    dtypes: Sequence[tf.DType] | None = None,
) -> list[tf.Tensor]:
    """The outputs of `copied`."""
    return list(copied(operation, inputs, attributes, dtypes).outputs)


def copied(
    operation: tf.Operation,
    inputs: Sequence[tf.Tensor],
    attributes: Mapping[str, Any] = types.MappingProxyType({}),
    dtypes: Sequence[tf.DType] | None = None,
    name: str | None = None,
) -> tf.Operation:
    """A copy of `operation` in the current graph, on other inputs, with some attributes replaced.

    Args:
        operation: an operation of another graph.
        inputs: tensors of the current graph or an outer one, or eager tensors.
        attributes: integers, lists of integers, and dtypes, by name.
        dtypes: the dtypes of the outputs, if they differ from those of `operation`.
        name: the name, if it differs from that of `operation`.
    """
    graph = tf.compat.v1.get_default_graph()
    all_attributes = {key: value for key, value in operation.node_def.attr.items() if key not in _GRAPH_ATTRIBUTES}
    for key, value in attributes.items():
        all_attributes[key] = _attribute(value)
    for value in all_attributes.values():
        for function in [value.func, *value.list.func]:
            if function.name and not graph._is_function(function.name):
                graph._add_function_recursive(operation.graph._get_function(function.name))
    copy = graph._create_op_internal(
        operation.type,
        list(inputs),
        list(dtypes or [tensor.dtype for tensor in operation.outputs]),
        name=name or operation.name,
        attrs=all_attributes,
    )
    for tensor, original in zip(copy.outputs, operation.outputs, strict=True):
        data = getattr(original, "_handle_data", None)
        if data is not None and getattr(tensor, "_handle_data", None) is None:
            tensor._handle_data = data
    return copy


def _attribute(value: Any) -> attr_value_pb2.AttrValue:
    if isinstance(value, tf.DType):
        return attr_value_pb2.AttrValue(type=value.as_datatype_enum)
    if isinstance(value, list):
        return attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(i=value))
    return attr_value_pb2.AttrValue(i=value)


def evaluated(operation: tf.Operation, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a stateless `operation`, which calls no functions, on constant inputs, computed on the host."""
    attributes: list[Any] = []
    for definition in operation.op_def.attr:
        attributes += [definition.name, _eager_attribute(operation.get_attr(definition.name))]
    with tf.init_scope(), tf.device("CPU:0"):
        tensors = [tf.constant(value, tensor.dtype) for value, tensor in zip(inputs, operation.inputs, strict=True)]
        results = execute.execute(
            operation.type.encode(), len(operation.outputs), tensors, tuple(attributes), context.context()
        )
    return [tensor.numpy() for tensor in results]


def _eager_attribute(value: Any) -> Any:
    if isinstance(value, tf.DType):
        return value.as_datatype_enum
    if isinstance(value, list):
        return [_eager_attribute(item) for item in value]
    return value


def calls_functions(operation: tf.Operation) -> bool:
    """Whether an attribute of `operation` names functions."""
    return any(value.HasField("func") or value.list.func for value in operation.node_def.attr.values())


@functools.cache
def attribute_names(kind: str) -> frozenset[str] | None:
    """The names of an operation type's attributes that are not dtypes; `None` if TensorFlow does not know the type."""
    definition = op_def_registry.get(kind)
    if definition is None:
        return None
    return frozenset(attribute.name for attribute in definition.attr if attribute.type not in ("type", "list(type)"))


# Operations whose result shares the memory of their first argument.
_ALIASING = frozenset(
    ("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "IdentityN", "EnsureShape")
)
# Operations that read only the shape of their arguments; they run or are folded before the memory is needed.
OF_SHAPE = frozenset(("Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs"))
# Operations without side effects that must not be copied because they belong to the graph itself.
_FRAME = frozenset(("Const", "Placeholder", "PlaceholderWithDefault", "NoOp"))


def is_pure(operation: tf.Operation) -> bool:
    """Whether the operation is deterministic and has no side effects.

    Operations of other packages, such as Horovod's collectives, may have effects that TensorFlow does not know.
    """
    if operation.type in _FRAME or operation.op_def.is_stateful or not hasattr(tf.raw_ops, operation.type):
        return False
    return not any(tensor.dtype == tf.resource for tensor in (*operation.inputs, *operation.outputs))


def root(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor whose memory `tensor` shares; `tensor` if it shares none."""
    while tensor.op.type in _ALIASING:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def bytes_of(tensor: tf.Tensor, unknown_length: int) -> int:
    """The size of a tensor in bytes; an axis of unknown length counts as `unknown_length`, and a variant as nothing."""
    if tensor.shape.rank is None:
        return unknown_length * max(1, tensor.dtype.size)
    lengths = (unknown_length if length is None else length for length in tensor.shape)
    return math.prod(lengths) * tensor.dtype.size


def barrier(tensor: tf.Tensor, name: str, after: Sequence[tf.Operation]) -> tf.Tensor:
    """Returns `tensor` once the operations `after` have run.

    TensorFlow's graph optimizer merges operations with the same inputs even if their control inputs differ, and removes
    `tf.identity`. It keeps this operation, which has the same kernel.
    """
    with (
        tensor.graph.as_default(),
        tf.control_dependencies(None),
        tf.control_dependencies(list(after)),
        tf.name_scope(f"{name}/"),
        tf.device(tensor.device),
    ):
        return tf.raw_ops.PreventGradient(input=tensor, message="held for a recomputation")


def copy(operation: tf.Operation, inputs: Sequence[tf.Tensor], name: str) -> tf.Operation:
    """A copy of the operation on other inputs, in the same graph and on the same device."""
    attributes = {key: value for key, value in operation.node_def.attr.items() if key != "_class"}
    dtypes = [tensor.dtype for tensor in operation.outputs]
    with operation.graph.as_default(), tf.control_dependencies(None):
        result = operation.graph._create_op_internal(
            operation.type, list(inputs), dtypes, name=f"{name}/", attrs=attributes, op_def=operation.op_def
        )
    result._set_device(operation.device)
    return result


def set_input(operation: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Replaces input number `index` of an operation of a graph by a tensor of the same shape and dtype.

    The tensor may have been made after the operation; a negative index counts from the end.
    """
    operation._update_input(index % len(operation.inputs), tensor)


# Operations whose result has the values of an argument.
_PASSING_ON = ("Identity", "Reshape", "SelectV2", "Cast")


def compute_after(tensor: tf.Tensor, earlier: tf.Tensor) -> None:
    """Makes the graph compute `tensor` after `earlier`, unless `earlier` depends on it."""
    operation = tensor.op
    while operation.type in _PASSING_ON:
        same = [value for value in operation.inputs if value.shape.num_elements() == tensor.shape.num_elements()]
        if not same or tensor.shape.num_elements() is None:
            break
        operation = same[0].op
    if operation.name not in ancestors([earlier.op]):
        add_control_input(operation, earlier.op)


def add_control_input(operation: tf.Operation, before: tf.Operation) -> None:
    """Makes an operation of a graph wait for another one, which may have been made after it."""
    operation._add_control_input(before)


def sources(operation: tf.Operation) -> list[tf.Operation]:
    """The operations for which `operation` waits."""
    return [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]


def ancestors(
    operations: Sequence[tf.Operation], predecessors: Callable[[tf.Operation], Sequence[tf.Operation]] = sources
) -> dict[str, tf.Operation]:
    """`operations` of a graph and all operations for which they wait, by name."""
    reached: dict[str, tf.Operation] = {}
    waiting = list(operations)
    while waiting:
        operation = waiting.pop()
        if operation.name not in reached:
            reached[operation.name] = operation
            waiting += predecessors(operation)
    return reached


def needed(graph: Any) -> set[str]:
    """The names of the operations on which the outputs and effects of a function depend."""
    return set(ancestors([*(tensor.op for tensor in graph.outputs), *graph.control_outputs]))


def effective(operations: Sequence[tf.Operation]) -> set[str]:
    """The names of the operations on which a side effect depends, such as the update of a variable."""
    return set(ancestors([operation for operation in operations if operation.op_def.is_stateful]))


def place(operation: tf.Operation) -> str:
    """The type of an operation, and the line of the user's code that made it."""
    frames = [
        frame
        for frame in operation.traceback or ()
        if not any(Path(frame.filename).is_relative_to(folder) for folder in _libraries())
    ]
    where = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return f"`{operation.type}`{where}"


@functools.cache
def _libraries() -> tuple[Path, ...]:
    packages = [Path(module.__file__ or "").parent for module in (tf, keras)]
    return Path(__file__).parents[1], *packages, Path(sys.prefix), Path(sys.base_prefix)
