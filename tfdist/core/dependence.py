"""How a tensor depends on the examples of a batch, read from its graph.

    ALIKE    not on their values, nor on their number
    LENGTH   on their number alone
    PLACES   the place of each example in the batch, perhaps beside rows of it, as indices of `tf.gather_nd` have it
    ROWS     a row per example, of that example alone
    TOTAL    linear in sums and means over the examples of such rows
    MIXED    the sum of rows and totals
    JOINT    anything else: a root of a mean, the largest of all, products of each example with each other

What replicas compute of their own parts adds up to the value of the global batch unless it is `JOINT`. A joint value
has to be computed of all examples, see `tfdist.core.joint_values`.

Of an operation that is not listed here, rows make rows if they have an axis of examples still; so do convolutions,
recurrent layers, and whatever else works on each example by itself.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.core import dependencies
from tfdist.core.example_axes import BY_ELEMENTS, ExampleAxes, length_of, summed_axes


class Dependence(enum.Enum):
    """See above."""

    ALIKE = enum.auto()
    LENGTH = enum.auto()
    PLACES = enum.auto()
    ROWS = enum.auto()
    TOTAL = enum.auto()
    MIXED = enum.auto()
    JOINT = enum.auto()


ALIKE, LENGTH, PLACES, ROWS, TOTAL, MIXED, JOINT = Dependence


class Dependences:
    """How the tensors of a graph depend on the examples.

    Args:
        axes: of the examples.
        examples: the tensors of a part of a batch.
    """

    def __init__(self, axes: ExampleAxes, examples: Sequence[tf.Tensor]):
        self._axes = axes
        self._blocks = {dependencies.key(one): 1 for one in examples}
        self._known = {dependencies.key(one): ROWS for one in examples}

    def know(self, alike: Sequence[tf.Tensor], means: Sequence[tf.Tensor]) -> None:
        """Notes tensors that are the same on all replicas, and scalars that count as means, whatever made them."""
        self._known |= {dependencies.key(one): TOTAL for one in means}
        self._known |= {dependencies.key(one): ALIKE for one in alike}

    def of(self, tensor: tf.Tensor) -> Dependence:
        """How `tensor` depends on the examples."""
        return dependencies.evaluated(tensor, self._known, dependencies.before, self._of)

    def _of(self, tensor: tf.Tensor) -> Dependence:
        kind = tensor.op.type
        found = [self._known[dependencies.key(one)] for one in dependencies.before(tensor)]
        if kind in ("Shape", "Size", "ShapeN", "Rank"):
            return self._of_length(tensor, found[0])
        if dependencies.draws(tensor.op):
            return ROWS if self._axes.of(tensor) else ALIKE
        if all(one in (ALIKE, LENGTH) for one in found):
            return self._without_values(tensor, found)
        return self._with_values(tensor, found)

    def _with_values(self, tensor: tf.Tensor, found: Sequence[Dependence]) -> Dependence:
        kind = tensor.op.type
        if _OF_CTC_LOSS in tensor.op.name and JOINT not in found:
            return ROWS
        if PLACES in found:  # those in a part are not those in the batch, but find the same row
            return _of_places(tensor, found)
        if ROWS in found and kind in _MIXES and _MIXES[kind](self, tensor):
            return JOINT
        result = _RULES.get(kind, _of_each_example)(self, tensor, found)
        lost = result in (ROWS, MIXED) and not self._axes.of(tensor)  # such as the first example
        return JOINT if lost and tensor.dtype != tf.variant else result  # lists of tensors do not show their axes

    def _of_length(self, tensor: tf.Tensor, found: Dependence) -> Dependence:
        return JOINT if found is JOINT else LENGTH if self._axes.of(tensor.op.inputs[0]) else ALIKE

    def _without_values(self, tensor: tf.Tensor, found: Sequence[Dependence]) -> Dependence:
        """Of what no values of examples enter into, but perhaps their number."""
        if LENGTH not in found or dependencies.is_length_of_other_axis(tensor):
            return ALIKE
        if not self._axes.of(tensor):
            return LENGTH
        return PLACES if tensor.op.type == "Range" else ROWS

    def unchanged(self, tensor: tf.Tensor, found: Sequence[Dependence]) -> Dependence:
        """Of an operation that is linear in its first input, and has others that say how."""
        linear = tensor.dtype.is_floating or found[0] not in (TOTAL, MIXED)  # a cast to whole numbers is not
        return found[0] if linear and all(one in (ALIKE, LENGTH) for one in found[1:]) else JOINT

    def passed_on(self, tensor: tf.Tensor, found: Sequence[Dependence]) -> Dependence:
        """Of an operation with as many outputs as inputs."""
        return found[tensor.value_index]

    def addition(self, tensor: tf.Tensor, found: Sequence[Dependence]) -> Dependence:
        """Of a sum, or of tensors that are put side by side."""
        kinds = {one for one in found if one not in (ALIKE, LENGTH)}
        return JOINT if JOINT in kinds else kinds.pop() if len(kinds) == 1 else MIXED

    def product(self, tensor: tf.Tensor, found: Sequence[Dependence]) -> Dependence:
        """Of a product by elements, or of matrices."""
        kinds = [one for one in found if one not in (ALIKE, LENGTH)]
        if len(kinds) == 1:
            return kinds[0]
        return ROWS if set(kinds) == {ROWS} else JOINT

    def matrices(self, tensor: tf.Tensor, found: Sequence[Dependence]) -> Dependence:
        """Of a product of matrices: over the axis of the examples it is a sum of products of each example."""
        result = self.product(tensor, found)
        return TOTAL if result is ROWS and self._axes.contracts(tensor) and not self._axes.of(tensor) else result

    def chosen_by_indices(self, tensor: tf.Tensor, found: Sequence[Dependence]) -> Dependence:
        """Of `tf.gather_nd` without places: of another row than the example's own, perhaps."""
        return JOINT if self._axes.of(tensor.op.inputs[0]) else _of_each_example(self, tensor, found)

    def quotient(self, tensor: tf.Tensor, found: Sequence[Dependence]) -> Dependence:
        """Of a division."""
        above, below = found
        if below in (ALIKE, LENGTH):
            return above
        return ROWS if below is ROWS and above in (ALIKE, LENGTH, ROWS) else JOINT

    def reduction(self, tensor: tf.Tensor, found: Sequence[Dependence]) -> Dependence:
        """Of a sum or mean over axes."""
        source = tensor.op.inputs[0]
        gone = summed_axes(*tensor.op.inputs)
        if found[0] not in (ROWS, MIXED):
            return found[0]
        if gone is None:
            return JOINT
        return TOTAL if self._axes.of(source) <= gone else found[0]

    def of_squares(self, tensor: tf.Tensor, found: Sequence[Dependence]) -> Dependence:
        """Of the sum of all squares."""
        return TOTAL if found[0] is ROWS else JOINT

    def choice(self, tensor: tf.Tensor, found: Sequence[Dependence]) -> Dependence:
        """Of `tf.where`: by what is the same everywhere, a sum of two; by examples, of their rows alone."""
        if found[0] in (ALIKE, LENGTH):
            return self.addition(tensor, found[1:])
        return _of_each_example(self, tensor, found)

    def of_pairs(self, tensor: tf.Tensor) -> bool:
        """Whether one input has its examples along another axis than the other, so that each meets each."""
        rank = tensor.shape.rank
        if rank is None:
            return False
        axes = [
            {axis + rank - one.shape.rank for axis in self._axes.of(one)}
            for one in tensor.op.inputs
            if one.shape.rank is not None and self._axes.of(one)
        ]
        return len(axes) > 1 and not set.intersection(*axes)

    def of_pairs_of_matrices(self, tensor: tf.Tensor) -> bool:
        """The same, of a product of matrices."""
        rank = tensor.shape.rank
        return rank is not None and {rank - 2, rank - 1} <= self._axes.of(tensor)

    def of_labelled_pairs(self, tensor: tf.Tensor) -> bool:
        """The same, of `tf.einsum`."""
        return self._axes.pairs(tensor)

    def along_the_last_axis(self, tensor: tf.Tensor) -> bool:
        """Whether the last axis, along which it works, is that of the examples."""
        source = tensor.op.inputs[0]
        return source.shape.rank is not None and source.shape.rank - 1 in self._axes.of(source)

    def along_an_axis(self, tensor: tf.Tensor) -> bool:
        """Whether the axis that the second input names is that of the examples."""
        source, axis = tensor.op.inputs[:2]
        if tensor.op.type == "Cumsum" and source.dtype.is_integer:  # where rows of ragged tensors begin
            return False
        named = tf.get_static_value(axis)
        if named is None or source.shape.rank is None:
            return bool(self._axes.of(source))
        return any(int(one) % source.shape.rank in self._axes.of(source) for one in named.reshape(-1))

    def chosen(self, tensor: tf.Tensor) -> bool:
        """Whether rows of examples are chosen, other than in an order drawn at random."""
        table, indices, axis = tensor.op.inputs
        named = tf.get_static_value(axis)
        if not self._axes.of(table) or table.shape.rank is None:
            return False
        if named is not None and int(named) % table.shape.rank not in self._axes.of(table):
            return False
        return not dependencies.is_random(indices)

    def split(self, tensor: tf.Tensor) -> bool:
        """Whether examples are divided, other than into the blocks that were joined before."""
        return self._divides_examples(tensor) and self.blocks(_divided(tensor)[0]) == 1

    def sliced(self, tensor: tf.Tensor) -> bool:
        """Whether some of the examples are left out, other than blocks that were joined before."""
        source = tensor.op.inputs[0]
        return self.blocks(source) == 1 and self._axes.cut(tensor)

    def always(self, tensor: tf.Tensor) -> bool:
        """Of an operation that mixes whatever has an axis of examples."""
        return any(self._axes.of(one) for one in tensor.op.inputs)

    def blocks(self, tensor: tf.Tensor) -> int:
        """How many times the examples follow each other along their axis; 0 if the graph does not show it."""
        return dependencies.evaluated(tensor, self._blocks, self._with_examples, self._number_of_blocks)

    def _with_examples(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Those of the tensors before `tensor` that have an axis of examples, if it has one itself."""
        before = dependencies.before(tensor) if self._axes.of(tensor) else []
        return [one for one in before if self._axes.of(one)]

    def _number_of_blocks(self, tensor: tf.Tensor) -> int:
        before = self._with_examples(tensor)
        found = [self._blocks[dependencies.key(one)] for one in before]
        if 0 in found:
            return 0
        kind = tensor.op.type
        if kind == "ConcatV2" and len(before) > 1:
            axis = tf.get_static_value(tensor.op.inputs[-1])
            along = axis is None or any(int(axis) % one.shape.rank in self._axes.of(one) for one in before)
            return sum(found) if along else max(found)
        if kind == "Split" and found and self._divides_examples(tensor):
            number = len(tensor.op.outputs)
            return max(found) // number if max(found) % number == 0 else 0
        if kind == "StridedSlice" and found and self._axes.cut(tensor):
            return self._blocks_of_slice(tensor, found[0])
        return 0 if kind in ("SplitV", "Tile") else max(found, default=1)

    def _blocks_of_slice(self, tensor: tf.Tensor, number: int) -> int:
        """How many of the blocks of its source a slice such as `[:tf.shape(x)[0]]` has; 0 where it is not known."""
        bounds = self._axes.bounds_along_examples(tensor)
        if bounds is None:
            return 0
        begin, end = (self._length_in_blocks(one) for one in bounds)
        begin, end = (0 if bounds[0] is None else begin), (number if bounds[1] is None else end)
        return end - begin if begin is not None and end is not None else 0

    def _length_in_blocks(self, scalar: tf.Tensor | None) -> int | None:
        """The number of blocks that have as many examples as `scalar` says; `None` where it is not known."""
        if scalar is None:
            return None
        while scalar.op.type in ("Identity", "Cast"):
            scalar = scalar.op.inputs[0]
        if scalar.op.type in ("Mul", "FloorDiv"):
            one, other = scalar.op.inputs
            if tf.get_static_value(one) is not None and scalar.op.type == "Mul":
                one, other = other, one
            blocks, times = self._length_in_blocks(one), tf.get_static_value(other)
            if blocks is None or times is None:
                return None
            if scalar.op.type == "Mul":
                return blocks * int(times)
            return blocks // int(times) if blocks % int(times) == 0 else None
        axis = length_of(scalar)
        is_of_examples = axis is not None and self._axes.of(axis[0]) == {axis[1]}
        return self.blocks(axis[0]) or None if axis is not None and is_of_examples else None

    def _divides_examples(self, tensor: tf.Tensor) -> bool:
        source, axis = _divided(tensor)
        return axis is None or source.shape.rank is None or int(axis) % source.shape.rank in self._axes.of(source)


def _divided(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
    """What `tf.split` divides, and along which axis, if the graph says it."""
    inputs = tensor.op.inputs
    source, axis = (inputs[0], inputs[2]) if tensor.op.type == "SplitV" else (inputs[1], inputs[0])
    return source, tf.get_static_value(axis)


def _of_places(tensor: tf.Tensor, found: Sequence[Dependence]) -> Dependence:
    others = {one for one in found if one is not PLACES}
    known = tensor.op.type in _PLACED and others <= {ALIKE, LENGTH, ROWS}
    return _PLACED[tensor.op.type] if known else JOINT


def _of_each_example(_: Dependences, tensor: tf.Tensor, found: Sequence[Dependence]) -> Dependence:
    """Of an operation that does not mix rows, but may be anything else than linear."""
    return ROWS if all(one in (ALIKE, LENGTH, ROWS) for one in found) else JOINT


_RULES = {
    **dict.fromkeys(("Identity", "Cast", "Neg", "StopGradient", "PreventGradient"), Dependences.unchanged),
    **dict.fromkeys(("Reshape", "Squeeze", "ExpandDims", "Transpose", "BroadcastTo", "Tile"), Dependences.unchanged),
    **dict.fromkeys(("StridedSlice", "Slice", "Unpack"), Dependences.unchanged),
    **dict.fromkeys(("AddV2", "Add", "AddN", "Sub", "Pack", "ConcatV2"), Dependences.addition),
    **dict.fromkeys(("Mul", "MulNoNan"), Dependences.product),
    **dict.fromkeys(("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"), Dependences.matrices),
    **dict.fromkeys(("RealDiv", "Div", "DivNoNan"), Dependences.quotient),
    **dict.fromkeys(("Sum", "Mean"), Dependences.reduction),
    "IdentityN": Dependences.passed_on,
    "GatherNd": Dependences.chosen_by_indices,
    "L2Loss": Dependences.of_squares,
    "SelectV2": Dependences.choice,
}
_MIXES = {
    **dict.fromkeys(BY_ELEMENTS, Dependences.of_pairs),
    **dict.fromkeys(("MatMul", "BatchMatMulV2", "BatchMatMulV3"), Dependences.of_pairs_of_matrices),
    **dict.fromkeys(("Softmax", "LogSoftmax", "TopKV2"), Dependences.along_the_last_axis),
    **dict.fromkeys(("Cumsum", "Cumprod", "ReverseV2", "ArgMax", "ArgMin"), Dependences.along_an_axis),
    **dict.fromkeys(("Split", "SplitV"), Dependences.split),
    **dict.fromkeys(("StridedSlice", "Slice"), Dependences.sliced),
    **dict.fromkeys(("Where", "Roll", "MatrixDiag", "MatrixDiagV3"), Dependences.always),
    "Einsum": Dependences.of_labelled_pairs,
    "GatherV2": Dependences.chosen,
}
# TensorFlow's CTC loss, of each example alone, computes with places.
_OF_CTC_LOSS = "ctc_loss_dense/"
# What operations that have places among their inputs give.
_PLACED = {
    **dict.fromkeys(("Identity", "Reshape", "ExpandDims", "Squeeze", "Tile", "BroadcastTo", "StridedSlice"), PLACES),
    **dict.fromkeys(("Pack", "ConcatV2", "Transpose"), PLACES),
    **dict.fromkeys(("GatherNd", "ScatterNd", "TensorScatterUpdate", "TensorScatterAdd", "SparseToDense"), ROWS),
}
