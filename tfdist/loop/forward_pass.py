"""A forward pass in the graph of a step: which of its tensors a backward pass uses, and where it is best cut.

Operations are in the order in which they were traced. A cut at position p is before operation p. What is computed
before a cut and used by a forward operation after it is held; everything else that the backward pass uses is computed
again, one segment at a time. The last segment is not computed again, since the backward pass begins with it.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from tfdist.internals import tensorflow_graphs as graphs

# An operation of the graph, and the index of one of its inputs or outputs.
Place = tuple[tf.Operation, int]
Key = tuple[str, int]

# Tensors of at most this part of the largest one are held: lengths, means and variances cost little.
_SMALL = 1 / 1024
# The budgets that are tried, each smaller than the one before by this factor.
_BUDGETS, _FACTOR = 40, 0.9


def key(tensor: tf.Tensor) -> Key:
    """The identity of a tensor, of which TensorFlow makes several Python objects."""
    return tensor.op.name, tensor.value_index


@dataclass
class Segment:
    """What of a segment is computed again.

    Attributes:
        used: the tensors that the backward pass uses and that are not held.
        operations: those that compute them, in order.
    """

    used: list[tf.Tensor] = field(default_factory=list)
    operations: list[tf.Operation] = field(default_factory=list)


@dataclass(frozen=True)
class Choice:
    """The segments of a forward pass for some cuts.

    Attributes:
        segments: all but the last.
        peak_bytes: what is held, and the largest segment.
    """

    segments: Sequence[Segment]
    peak_bytes: int


class ForwardPass:
    """The operations of a forward pass.

    Args:
        operations: in order.
        used_forward: for each tensor, the operations that use it and that are in no backward pass.
        used_backward: for each tensor, the operations of a backward pass that use it, and at which input.
        unknown_length: the length of an axis that is not known.
    """

    def __init__(
        self,
        operations: Sequence[tf.Operation],
        used_forward: Mapping[Key, Sequence[tf.Operation]],
        used_backward: Mapping[Key, Sequence[Place]],
        unknown_length: int,
    ):
        self.operations = operations
        self.position = {operation.name: index for index, operation in enumerate(operations)}
        tensors = [tensor for operation in operations for tensor in operation.outputs]
        self._roots = {key(tensor): graphs.root(tensor) for tensor in tensors}
        self._bytes = {key(one): graphs.bytes_of(one, unknown_length) for one in tensors}
        self._last: dict[Key, int] = {}
        for tensor in tensors:
            users = used_forward.get(key(tensor), ())
            last = max((self.position.get(user.name, len(operations)) for user in users), default=-1)
            root = key(self._roots[key(tensor)])
            self._last[root] = max(last, self._last.get(root, -1))
        self.used = [tensor for tensor in tensors if used_backward.get(key(tensor))]
        largest = max((self._bytes[key(one)] for one in self.used), default=0)
        self._small = largest * _SMALL
        self._pure = {operation.name: graphs.is_pure(operation) for operation in operations}
        self._cut_at: list[int] = []

    def blocks(self) -> list[int]:
        """The cuts with the smallest peak, found for a series of budgets for a segment.

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
                peak = self.choose(cuts).peak_bytes
                if best is None or peak < best[0]:
                    best = peak, cuts
        return [] if best is None else best[1]

    def after(self, tensors: Sequence[tf.Tensor]) -> int | None:
        """The cut behind the last of `tensors`; `None` if they are computed elsewhere."""
        found = [self.position[tensor.op.name] for tensor in tensors if tensor.op.name in self.position]
        return max(found) + 1 if found else None

    def choose(self, cuts: Sequence[int]) -> Choice:
        """What is held and what is computed again with these cuts."""
        self._cut_at = sorted(cuts)
        segments = [Segment() for _ in cuts]
        held: dict[Key, int] = {}
        seen: set[str] = set()
        last_bytes = 0
        for tensor in self.used:
            number = self._segment(self.position[tensor.op.name])
            if self._is_held(tensor):
                self._hold(tensor, held)
            elif number == len(cuts):
                last_bytes += self._own_bytes(tensor)
            else:
                segments[number].used.append(tensor)
                self._collect(tensor, segments[number], held, seen)
        for segment in segments:
            segment.operations.sort(key=lambda operation: self.position[operation.name])
        sizes = [sum({key(self._roots[key(t)]): self._own_bytes(t) for t in one.used}.values()) for one in segments]
        return Choice(segments, sum(held.values()) + max([last_bytes, *sizes], default=0))

    def is_held(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is not computed again with the cuts of the last `choose`."""
        return key(tensor) not in self._roots or self._is_held(tensor)

    def _collect(self, tensor: tf.Tensor, segment: Segment, held: dict[Key, int], seen: set[str]) -> None:
        waiting = [tensor.op]
        while waiting:
            operation = waiting.pop()
            if operation.name in seen:
                continue
            seen.add(operation.name)
            segment.operations.append(operation)
            for one in operation.inputs:
                if self.is_held(one):
                    self._hold(one, held)
                else:
                    waiting.append(one.op)

    def _is_held(self, tensor: tf.Tensor) -> bool:
        root = self._roots[key(tensor)]
        if root.op.name not in self.position or not self._pure[root.op.name] or not self._pure[tensor.op.name]:
            return True
        if self._bytes[key(tensor)] <= self._small:
            return True
        begin, last = self._segment(self.position[root.op.name]), self._last[key(root)]
        return last >= len(self.operations) or self._segment(max(last, 0)) > begin

    def _hold(self, tensor: tf.Tensor, held: dict[Key, int]) -> None:
        root = self._roots.get(key(tensor))
        if root is not None and root.op.type != "ReadVariableOp" and root.op.name in self.position:
            held[key(root)] = self._bytes[key(root)]

    def _own_bytes(self, tensor: tf.Tensor) -> int:
        return self._bytes.get(key(self._roots[key(tensor)]), 0)

    def _segment(self, position: int) -> int:
        return bisect.bisect_right(self._cut_at, position)

    def _bytes_by_position(self) -> list[int]:
        """The bytes that the backward pass uses of what each operation computes."""
        found = [0] * len(self.operations)
        roots = {key(root): root for root in (self._roots[key(tensor)] for tensor in self.used)}
        for root in roots.values():
            if root.op.name in self.position and root.op.type != "ReadVariableOp":
                found[self.position[root.op.name]] += self._bytes[key(root)]
        return found

    def _bytes_by_cut(self) -> list[int]:
        """The bytes that a cut before each operation would make held."""
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
    """Cuts at the narrowest places such that segments use about `budget` bytes."""
    cuts: list[int] = []
    begin, filled = 0, 0
    for position, size in enumerate(used):
        filled += size
        if filled > budget and position > begin + 1:
            cut = min(range(begin + 1, position + 1), key=lambda one: (crossing[one], -one))
            cuts.append(cut)
            begin, filled = cut, sum(used[cut : position + 1])
    return cuts
