"""A forward pass in the graph of a step: the tensors that its backward pass uses, and where to cut it.

Operations are in the order in which they were traced. A cut at position p is before operation p. A tensor that is
computed before a cut and used by a forward operation after it is kept; all other tensors that the backward pass uses
are recomputed, one segment at a time. The last segment is not recomputed, since the backward pass begins with it.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from tfdist.internals import tensorflow_graphs as graphs

# An operation, or the name of an operation, with the index of one of its inputs or outputs.
Place = tuple[tf.Operation, int]
Key = tuple[str, int]

# Tensors up to this fraction of the largest one are kept: lengths, means and variances cost little.
_SMALL = 1 / 1024
# The number of budgets to try, and the factor from each to the next.
_BUDGETS, _FACTOR = 40, 0.9


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


@dataclass(frozen=True)
class Choice:
    """The segments of a forward pass for some cuts.

    Attributes:
        segments: all segments but the last.
        peak_bytes: the bytes of the kept tensors plus the largest segment.
    """

    segments: Sequence[Segment]
    peak_bytes: int


class ForwardPass:
    """The operations of a forward pass.

    Args:
        operations: the operations in order.
        used_forward: for each tensor, the operations outside of backward passes that use it.
        used_backward: for each tensor, the operations of a backward pass that use it, with the index of the input.
        unknown_length: the assumed length of an axis with unknown length.
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
        self._bytes = {key(tensor): graphs.bytes_of(tensor, unknown_length) for tensor in tensors}
        self._last: dict[Key, int] = {}  # the position of the last forward use
        for tensor in tensors:
            users = used_forward.get(key(tensor), ())
            last = max((self.position.get(user.name, len(operations)) for user in users), default=-1)
            root = key(self._roots[key(tensor)])
            self._last[root] = max(last, self._last.get(root, -1))
        self.used = [tensor for tensor in tensors if used_backward.get(key(tensor))]
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
                peak = self.choose(cuts).peak_bytes
                if best is None or peak < best[0]:
                    best = peak, cuts
        return [] if best is None else best[1]

    def after(self, tensors: Sequence[tf.Tensor]) -> int | None:
        """Returns the cut after the last of `tensors`; `None` if they are computed elsewhere."""
        positions = [self.position[tensor.op.name] for tensor in tensors if tensor.op.name in self.position]
        return max(positions) + 1 if positions else None

    def choose(self, cuts: Sequence[int]) -> Choice:
        """Sets the cuts, and returns the recomputed segments and the peak."""
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
        return Choice(segments, sum(kept.values()) + max([last_bytes, *sizes], default=0))

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
