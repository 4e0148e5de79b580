"""The while loops of a graph: the number of their iterations, and the lists that hold a tensor per iteration.

To differentiate a loop, such as a recurrent layer's over the words of a sentence, TensorFlow adds lists to the loop of
the forward pass: each iteration appends what the backward pass needs of it, and the loop of the backward pass removes
it again. The inputs and outputs of each step are lists too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.internals import tensorflow_graphs as graphs
from tfdist.loop.recomputation import UNKNOWN_LENGTH, Key, key

# Operations whose first result is the list that they change.
UPDATES = frozenset(("TensorListPushBack", "TensorListPopBack", "TensorListSetItem"))
# Operations whose result is in the memory of a variable, of a list, or of the graph.
_SHARING = frozenset(("ReadVariableOp", "TensorListGetItem", "TensorListPopBack", "Const", "Placeholder"))


class WhileLoop:
    """A while loop of a graph.

    Args:
        operation: an operation for which `graphs.is_loop` holds.

    Attributes:
        body: the graph of one iteration, whose inputs and outputs correspond to those of the operation.
        iterations: their number, or largest number, if that is a constant of the graph; otherwise the length of the
            longest list that the loop reads, such as the words of a sentence, or what each iteration of another loop
            has left; `UNKNOWN_LENGTH` without any.
    """

    def __init__(self, operation: tf.Operation):
        self._operation = operation
        self.body = graphs.body(operation, "body")
        self._index = {key(tensor): index for index, tensor in enumerate(self.body.inputs)}
        known = iterations(operation) or graphs.most_iterations(operation)
        self.iterations = known or self._longest_list() or UNKNOWN_LENGTH

    def _longest_list(self) -> int:
        made = [graphs.root(tensor).op for tensor in self._operation.inputs if tensor.dtype == tf.variant]
        lengths = [WhileLoop(other).iterations for other in dict.fromkeys(made) if graphs.is_loop(other)]
        lengths += [other.inputs[0].shape[0] or 0 for other in made if other.type == "TensorListFromTensor"]
        return max(lengths, default=0)

    def passes_on(self, index: int) -> bool:
        """Whether result `index` is the argument with that number, unchanged."""
        return self._argument(self.body.outputs[index]) == index

    def result_bytes(self, of_arguments: Sequence[int]) -> list[int]:
        """The size of each result in bytes; a tensor that is in several lists counts once.

        Args:
            of_arguments: the size of each argument in bytes.
        """
        counted: set[Key] = set()
        return [
            self._list_bytes(tensor, of_arguments, counted)
            if tensor.dtype == tf.variant
            else graphs.bytes_of(tensor, UNKNOWN_LENGTH)
            for tensor in self.body.outputs
        ]

    def _list_bytes(self, tensor: tf.Tensor, of_arguments: Sequence[int], counted: set[Key]) -> int:
        """The size of a list of the body after the last iteration."""
        argument = self._argument(tensor)
        if argument is not None:
            return of_arguments[argument]
        operation = graphs.root(tensor).op
        if operation.type in ("TensorListPushBack", "TensorListSetItem"):
            before = self._list_bytes(operation.inputs[0], of_arguments, counted)
            if operation.type == "TensorListPushBack":
                return before + self.iterations * self._new_bytes(operation.inputs[1], counted)
            length = self._length_of(operation.inputs[0])
            # A shorter list has only the items of the last iterations, and other lists those of all.
            item = self._new_bytes(operation.inputs[2], counted if length >= self.iterations else set())
            return max(before, length * item)
        if operation.type == "AddN":  # of the gradients of a list
            return max(self._list_bytes(part, of_arguments, counted) for part in operation.inputs)
        return 0  # emptied by the loop, or made in each iteration

    def _new_bytes(self, tensor: tf.Tensor, counted: set[Key]) -> int:
        """The memory that an element of a list takes in each iteration."""
        root = graphs.root(tensor)
        argument = self._argument(root)
        if argument is not None:  # the result of the previous iteration
            root = graphs.root(self.body.outputs[argument])
        if root.op.type in _SHARING or key(root) in counted:
            return 0
        counted.add(key(root))
        return graphs.bytes_of(root, UNKNOWN_LENGTH)

    def _length_of(self, items: tf.Tensor) -> int:
        argument = self._argument(items)
        return _length(items if argument is None else self._operation.inputs[argument]) or self.iterations

    def _argument(self, tensor: tf.Tensor) -> int | None:
        """The number of the argument whose memory a tensor of the body shares; `None` if it shares none."""
        return self._index.get(key(graphs.root(tensor)))


def _length(items: tf.Tensor) -> int | None:
    """The number of elements of a list that was made with a constant length; `None` for others."""
    operation = graphs.root(items).op
    if operation.type == "TensorListFromTensor":
        return operation.inputs[0].shape[0]
    if operation.type == "TensorListReserve":
        length = tf.get_static_value(operation.inputs[1])
        return None if length is None else int(length)
    return None


def iterations(loop: tf.Operation) -> int | None:
    """How often a while loop runs its body; `None` if that depends on the data.

    It is known if the only conditions are that counters, which start at a constant and grow by one, are less than a
    constant, as in recurrent layers; or if the loop is the gradient of such a loop.
    """
    condition, body = graphs.body(loop, "cond"), graphs.body(loop, "body")
    arguments = {key(inner): index for index, inner in enumerate(condition.inputs)}
    limits = []
    waiting = [condition.outputs[0].op]
    while waiting:
        operation = waiting.pop()
        if operation.type in ("Identity", "LogicalAnd"):
            waiting += [tensor.op for tensor in operation.inputs]
            continue
        if operation.type != "Less" or (counter := arguments.get(key(operation.inputs[0]))) is None:
            return None
        limit = operation.inputs[1]
        argument = arguments.get(key(limit))
        end = _constant(limit if argument is None else loop.inputs[argument])
        begin = tf.get_static_value(loop.inputs[counter])
        if begin is None or end is None or not _grows_by_one(body, counter):
            return None
        limits.append(max(0, int(end) - int(begin)))
    return min(limits, default=None)


def _constant(tensor: tf.Tensor) -> Any:
    """The value of a tensor that does not depend on the data; `None` for others."""
    tensor = graphs.root(tensor)
    if graphs.is_loop(tensor.op):  # the gradient of a loop has as many iterations as that loop
        return iterations(tensor.op) if _grows_by_one(graphs.body(tensor.op, "body"), tensor.value_index) else None
    if tensor.op.type == "Max":  # of Keras' limits of the iterations, of which there is one
        return tf.get_static_value(tensor.op.inputs[0])
    return tf.get_static_value(tensor)


def _grows_by_one(body: Any, number: int) -> bool:
    """Whether an iteration adds one to the loop's variable with this number."""
    result = graphs.root(body.outputs[number])
    if result.op.type not in ("Add", "AddV2"):
        return False
    added = tf.get_static_value(result.op.inputs[1])
    return graphs.root(result.op.inputs[0]) is body.inputs[number] and added is not None and int(added) == 1
