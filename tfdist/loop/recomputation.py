"""Recomputation (gradient checkpointing): activations are recomputed when the backward pass needs them.

The step is traced as usual, and its graph is rewritten afterwards: operations of the backward pass that use a tensor of
the forward pass get a copy of it, recomputed from kept tensors once the backward pass has reached it. Only pure
operations are copied. Reads and updates of variables, draws from stateful generators, and communication with other
replicas happen once, and the copies use their results. Therefore losses, masks, random numbers and gradients equal
those of the original step.

A forward pass is divided into segments. Operations are in the order in which they were traced, and a cut at position p
is before operation p. A tensor that is computed before a cut and used by a forward operation after it is kept; all
other tensors that the backward pass uses are recomputed, one segment at a time. The last segment is not recomputed,
since the backward pass begins with it.

Source: Chen et al., Training deep nets with sublinear memory cost, arXiv 1604.06174, 2016.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist import registry
from tfdist.errors import UsageError
from tfdist.interface.strategy import BLOCKS
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_patches
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals import tensorflow_graphs as graphs

# An operation, or the name of an operation, with the index of one of its inputs or outputs.
Place = tuple[tf.Operation, int]
Key = tuple[str, int]

# The assumed length of an axis with unknown length.
UNKNOWN_LENGTH = 32

_SCOPE = "tfdist_recomputing"
_BACKWARD = "tfdist_backward"
# Operations whose results exist before a step.
_OUT_OF_STEP = frozenset(("Const", "ReadVariableOp", "Placeholder"))
_OF_A_TAPE = "gradient_tape/"  # TensorFlow's name prefix for operations of a gradient tape
# Tensors up to this fraction of the largest one are kept: lengths, means and variances cost little.
_SMALL = 1 / 1024
# The number of budgets to try, and the factor from each to the next.
_BUDGETS, _FACTOR = 40, 0.9


class Recomputation:
    """Recomputation in the steps of one model.

    Args:
        wanted: "blocks", or the names of the layers whose outputs are kept; `None` disables recomputation.
        model: the model whose steps are traced.
        examples: the number of examples of a replica; `None` if it varies.
        eager: whether the steps run without a graph.

    Raises:
        UsageError: the steps of the model are not traced.
        UnknownNameError: the model has no layer of that name.
    """

    def __init__(self, wanted: str | Sequence[str] | None, model: Any, examples: int | None, *, eager: bool):
        self.wanted = wanted
        self._model = model
        self._examples = examples or UNKNOWN_LENGTH
        self._outputs: dict[str, list[list[tf.Tensor]]] = {}
        if wanted is None:
            return
        if eager:
            raise UsageError(
                f"`recompute` is set, and the model `{model.name}` runs eagerly, without a graph to recompute in",
                "compile it without `run_eagerly=True`, or leave `recompute` out",
            )
        if wanted != BLOCKS:
            known = list(dict.fromkeys(layer.name for layer in keras_internals.all_layers(model) if layer is not model))
            for name in wanted:
                registry.require_known(name, f"layer of the model `{model.name}`", known)

    def marked(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wraps `step` so that the names of its operations show whether they belong to its gradients."""
        if self.wanted is None:
            return step

        def call(data: Any) -> Any:
            with tf.name_scope(_SCOPE), tensorflow_internals.computing_gradients_in(lambda: tf.name_scope(_BACKWARD)):
                return step(data)

        return call

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """The context in which a step is traced; its graph is rewritten at the end."""
        if self.wanted is None:
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        self._outputs.clear()
        names = () if self.wanted == BLOCKS else self.wanted
        with keras_patches.noting_outputs(names, self._record_outputs):
            yield
        self._rewrite(graph.get_operations()[before:])

    def _record_outputs(self, name: str, outputs: Any) -> None:
        tensors = [output for output in tf.nest.flatten(outputs) if tf.is_symbolic_tensor(output)]
        self._outputs.setdefault(name, []).append(tensors)

    def _rewrite(self, operations: Sequence[tf.Operation]) -> None:
        uses = _Uses(operations)
        has_gradients = False
        for run in _forward_runs(operations):
            forward = ForwardPass(run, uses, self._examples)
            if forward.used:
                has_gradients = True
                _recompute(forward, forward.blocks() if self.wanted == BLOCKS else self._cuts(forward), uses)
        if not has_gradients:
            raise UsageError(
                f"`recompute` is set, and the step of the model `{self._model.name}` computes no gradients in its own "
                "graph",
                "leave out `tf.function` around the model's call and its gradients, or leave `recompute` out",
            )

    def _cuts(self, forward: ForwardPass) -> list[int]:
        cuts = {forward.after(outputs) for name in self.wanted or () for outputs in self._outputs.get(name, ())}
        return sorted(cut for cut in cuts if cut is not None)


def is_backward(operation: tf.Operation) -> bool:
    """Whether an operation of a step belongs to the backward pass."""
    return _OF_A_TAPE in operation.name or _BACKWARD in operation.name


def _forward_runs(operations: Sequence[tf.Operation]) -> list[list[tf.Operation]]:
    """Returns the forward passes: consecutive operations of a step that belong to no gradient."""
    runs: list[list[tf.Operation]] = [[]]
    for operation in operations:
        if _SCOPE not in operation.name:
            continue
        if not is_backward(operation):
            runs[-1].append(operation)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


class _Uses:
    """The operations that use each tensor, in the forward passes and in the backward passes.

    Attributes:
        order: the position of each operation, by name.
        forward: for each tensor, the operations outside of backward passes that use it.
        backward: for each tensor, the operations of a backward pass that use it, with the index of the input.
        effective: the names of the operations on which a result of the graph depends.
    """

    def __init__(self, operations: Sequence[tf.Operation]):
        self.order = {operation.name: index for index, operation in enumerate(operations)}
        self.forward: dict[Key, list[tf.Operation]] = {}
        self.backward: dict[Key, list[Place]] = {}
        early = _early(operations, self.order)
        for operation in operations:
            backward = is_backward(operation) and operation.name not in early
            if backward and operation.type in graphs.OF_SHAPE:
                continue  # runs in the forward pass, and keeps no memory
            for index, tensor in enumerate(operation.inputs):
                if backward:
                    self.backward.setdefault(key(tensor), []).append((operation, index))
                else:
                    self.forward.setdefault(key(tensor), []).append(operation)
        self.effective = graphs.effective(operations)


def _early(operations: Sequence[tf.Operation], order: Mapping[str, int]) -> set[str]:
    """Returns the names of operations that are inputs of an operation which was traced before them.

    To differentiate a loop, TensorFlow adds lists to the loop of the forward pass, which store its values.
    """
    early: set[str] = set()
    for operation in operations:
        waiting = [operation]
        while waiting:
            for tensor in waiting.pop().inputs:
                source = tensor.op
                if order.get(source.name, -1) > order[operation.name] and source.name not in early:
                    early.add(source.name)
                    waiting.append(source)
    return early


def _recompute(forward: ForwardPass, cuts: Sequence[int], uses: _Uses) -> None:
    """Copies the segments between the cuts, and makes the backward pass use the copies."""
    segments, _ = forward.choose(cuts)
    copied = {key(tensor) for segment in segments for tensor in segment.used}
    last = [tensor for tensor in forward.used if key(tensor) not in copied and not forward.is_kept(tensor)]
    users = _operations(place for tensor in last for place in uses.backward[key(tensor)])
    for segment in reversed(segments):
        if not segment.used:
            continue
        later_users = users
        users = _operations(place for tensor in segment.used for place in uses.backward[key(tensor)])
        _copy(segment, uses, users, later_users)


def _operations(places: Iterable[Place]) -> dict[str, tf.Operation]:
    return {operation.name: operation for operation, _ in places}


def _copy(
    segment: Segment, uses: _Uses, users: Mapping[str, tf.Operation], later_users: Mapping[str, tf.Operation]
) -> None:
    """Copies a segment, to be computed once the backward pass has finished the following segment.

    Args:
        segment: the segment.
        uses: the operations that use each tensor.
        users: the operations of the backward pass that will use the copies.
        later_users: the operations of the backward pass that use the following segment.
    """
    order = uses.order
    in_order = sorted(users.values(), key=lambda user: order[user.name])
    first = order[in_order[0].name]
    upstream = ([t.op for t in user.inputs if is_backward(t.op) and order[t.op.name] < first] for user in in_order)
    begun = next(filter(None, upstream), [])
    # On CPUs, TensorFlow fuses the gradients of a bias and its convolution into one operation, which uses the copies.
    ended = [
        user
        for name, user in later_users.items()
        if order[name] < first and name in uses.effective and user.type != "BiasAddGrad"
    ]
    after = list({operation.name: operation for operation in [*begun, *ended]}.values())
    barriers: dict[Key, tf.Tensor] = {}
    copies: dict[str, tf.Operation] = {}

    def delayed(tensor: tf.Tensor) -> tf.Tensor:
        """Returns a kept tensor that is available once the backward pass has reached this segment."""
        if key(tensor) not in barriers:
            name = f"{_OF_A_TAPE}{tensor.op.name}/held_{tensor.value_index}"
            barriers[key(tensor)] = graphs.barrier(tensor, name, after)
        return barriers[key(tensor)]

    for operation in segment.operations:
        inputs = list(operation.inputs)
        if any(tensor.op.name in copies for tensor in inputs):
            inputs = [
                copies[tensor.op.name].outputs[tensor.value_index] if tensor.op.name in copies else tensor
                for tensor in inputs
            ]
        else:
            of_step = [tensor for tensor in inputs if tensor.op.type not in _OUT_OF_STEP] or inputs
            inputs = [delayed(t) if any(t is other for other in of_step) else t for t in inputs]
        copies[operation.name] = graphs.copy(operation, inputs, f"{_OF_A_TAPE}{operation.name}/again")
    for tensor in segment.used:
        for operation, index in uses.backward[key(tensor)]:
            graphs.set_input(operation, index, copies[tensor.op.name].outputs[tensor.value_index])


def key(tensor: tf.Tensor) -> Key:
    """Returns the identity of a tensor, for which TensorFlow may create several Python objects."""
    return tensor.op.name, tensor.value_index


@dataclass
class Segment:
    """The recomputed part of a segment.

    Attributes:
        used: the tensors that the backward pass uses and that are not kept.
        operations: the operations that compute them, in order.
    """

    used: list[tf.Tensor] = field(default_factory=list)
    operations: list[tf.Operation] = field(default_factory=list)


class ForwardPass:
    """The operations of a forward pass.

    Args:
        operations: the operations in order.
        uses: the operations that use each tensor.
        unknown_length: the assumed length of an axis with unknown length.
    """

    def __init__(self, operations: Sequence[tf.Operation], uses: _Uses, unknown_length: int):
        self.operations = operations
        self.position = {operation.name: index for index, operation in enumerate(operations)}
        tensors = [tensor for operation in operations for tensor in operation.outputs]
        self._roots = {key(tensor): graphs.root(tensor) for tensor in tensors}
        self._bytes = {key(tensor): graphs.bytes_of(tensor, unknown_length) for tensor in tensors}
        self._last: dict[Key, int] = {}  # the position of the last forward use
        for tensor in tensors:
            users = uses.forward.get(key(tensor), ())
            last = max((self.position.get(user.name, len(operations)) for user in users), default=-1)
            root = key(self._roots[key(tensor)])
            self._last[root] = max(last, self._last.get(root, -1))
        self.used = [tensor for tensor in tensors if uses.backward.get(key(tensor))]
        self._small = _SMALL * max((self._bytes[key(tensor)] for tensor in self.used), default=0)
        self._pure = {operation.name: graphs.is_pure(operation) for operation in operations}
        self._cut_at: list[int] = []

    def blocks(self) -> list[int]:
        """Returns the cuts with the smallest peak among those for a series of budgets per segment.

        Source: Chen et al., Training deep nets with sublinear memory cost, arXiv 1604.06174, algorithm 3.
        """
        used = self._bytes_by_position()
        crossing = self._bytes_by_cut()
        best: tuple[int, list[int]] | None = None
        budget = float(sum(used))
        for _ in range(_BUDGETS):
            budget *= _FACTOR
            cuts = _within(budget, used, crossing)
            if cuts:
                _, peak = self.choose(cuts)
                if best is None or peak < best[0]:
                    best = peak, cuts
        return [] if best is None else best[1]

    def after(self, tensors: Sequence[tf.Tensor]) -> int | None:
        """Returns the cut after the last of `tensors`; `None` if they are computed elsewhere."""
        positions = [self.position[tensor.op.name] for tensor in tensors if tensor.op.name in self.position]
        return max(positions) + 1 if positions else None

    def choose(self, cuts: Sequence[int]) -> tuple[list[Segment], int]:
        """Sets the cuts; returns the recomputed segments, and the bytes of kept tensors plus the largest segment."""
        self._cut_at = sorted(cuts)
        segments = [Segment() for _ in cuts]
        kept: dict[Key, int] = {}
        seen: set[str] = set()
        last_bytes = 0
        for tensor in self.used:
            number = self._segment(self.position[tensor.op.name])
            if self.is_kept(tensor):
                self._keep(tensor, kept)
            elif number == len(cuts):
                last_bytes += self._root_bytes(tensor)
            else:
                segments[number].used.append(tensor)
                self._collect(tensor, segments[number], kept, seen)
        for segment in segments:
            segment.operations.sort(key=lambda operation: self.position[operation.name])
        sizes = [sum({key(self._roots[key(t)]): self._root_bytes(t) for t in s.used}.values()) for s in segments]
        return segments, sum(kept.values()) + max([last_bytes, *sizes], default=0)

    def is_kept(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is not recomputed with the cuts of the last `choose`."""
        if key(tensor) not in self._roots:
            return True
        root = self._roots[key(tensor)]
        if root.op.name not in self.position or not self._pure[root.op.name] or not self._pure[tensor.op.name]:
            return True
        if self._bytes[key(tensor)] <= self._small:
            return True
        begin, last = self._segment(self.position[root.op.name]), self._last[key(root)]
        return last >= len(self.operations) or self._segment(max(last, 0)) > begin

    def _collect(self, tensor: tf.Tensor, segment: Segment, kept: dict[Key, int], seen: set[str]) -> None:
        """Adds to `segment` the operations that recompute `tensor`, and to `kept` the tensors that they need."""
        waiting = [tensor.op]
        while waiting:
            operation = waiting.pop()
            if operation.name in seen:
                continue
            seen.add(operation.name)
            segment.operations.append(operation)
            for source in operation.inputs:
                if self.is_kept(source):
                    self._keep(source, kept)
                else:
                    waiting.append(source.op)

    def _keep(self, tensor: tf.Tensor, kept: dict[Key, int]) -> None:
        root = self._roots.get(key(tensor))
        if root is not None and root.op.type != "ReadVariableOp" and root.op.name in self.position:
            kept[key(root)] = self._bytes[key(root)]

    def _root_bytes(self, tensor: tf.Tensor) -> int:
        return self._bytes.get(key(self._roots[key(tensor)]), 0)

    def _segment(self, position: int) -> int:
        return bisect.bisect_right(self._cut_at, position)

    def _bytes_by_position(self) -> list[int]:
        """Returns the bytes of each operation's results that the backward pass uses."""
        used_bytes = [0] * len(self.operations)
        roots = {key(root): root for root in (self._roots[key(tensor)] for tensor in self.used)}
        for root in roots.values():
            if root.op.name in self.position and root.op.type != "ReadVariableOp":
                used_bytes[self.position[root.op.name]] += self._bytes[key(root)]
        return used_bytes

    def _bytes_by_cut(self) -> list[int]:
        """Returns the bytes that a cut before each operation would keep."""
        change = [0] * (len(self.operations) + 2)
        for name, last in self._last.items():
            begin = self.position.get(name[0])
            if begin is not None and self.operations[begin].type != "ReadVariableOp" and last > begin:
                change[begin + 1] += self._bytes[name]
                change[min(last, len(self.operations)) + 1] -= self._bytes[name]
        for index in range(1, len(change)):
            change[index] += change[index - 1]
        return change


def _within(budget: float, used: Sequence[int], crossing: Sequence[int]) -> list[int]:
    """Returns cuts where the fewest bytes cross them, such that segments use about `budget` bytes."""
    cuts: list[int] = []
    begin, filled = 0, 0
    for position, size in enumerate(used):
        filled += size
        if filled > budget and position > begin + 1:
            cut = min(range(begin + 1, position + 1), key=lambda at: (crossing[at], -at))
            cuts.append(cut)
            begin, filled = cut, sum(used[cut : position + 1])
    return cuts
