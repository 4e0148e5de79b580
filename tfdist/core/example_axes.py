"""Which axes of a tensor are as long as there are examples, read from its graph.

The first axis of each tensor of a batch is the axis of its examples. Operations move it (a transposition), join it with
others (a reshape of `[n, steps]` to `[n * steps]`) or reduce it. Other axes may have unknown lengths too, such as the
steps of sequences; these are not axes of examples.

Only axes whose length is unknown when the graph is traced are looked at, so batches must be traced for any length
(`Batches.of_any_length`). Of an operation that is not listed here, the first such axis counts as that of the examples,
if the operation has examples as input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.core import dependencies

Axes = frozenset[int]
_NONE: Axes = frozenset()


class ExampleAxes:
    """The axes of examples of a graph's tensors.

    Args:
        examples: the tensors of a part of a batch, `[n, ...]`.
    """

    def __init__(self, examples: Sequence[tf.Tensor]):
        self._known = {dependencies.key(one): _first(one, range(1)) for one in examples}
        self._uncertain: set[tuple[int, str]] = set()

    def know(self, alike: Sequence[tf.Tensor]) -> None:
        """Notes tensors whose lengths do not depend on the part."""
        self._known |= {dependencies.key(one): _NONE for one in alike}

    def of(self, tensor: tf.Tensor) -> Axes:
        """The axes of `tensor` that are as long as there are examples."""
        return dependencies.evaluated(tensor, self._known, _needed, self._of)

    def _of(self, tensor: tf.Tensor) -> Axes:
        unknown = _unknown(tensor)
        if not unknown:
            return _NONE
        rule = _RULES.get(tensor.op.type)
        found = None if rule is None or tensor.shape.rank is None else rule(self, tensor)
        with_examples = [one for one in dependencies.before(tensor) if self._known[dependencies.key(one)]]
        guessed = found is None and rule is not None and len(unknown) > 1
        if with_examples and (guessed or not all(map(self.is_certain, with_examples))):
            self._uncertain.add(dependencies.key(tensor))
        if found is None:
            found = _first(tensor, unknown) if with_examples else _NONE
        return frozenset(axis for axis in found if axis in unknown)

    def is_certain(self, tensor: tf.Tensor) -> bool:
        """Whether the graph says which axes are those of examples, where there are several of unknown length."""
        return dependencies.key(tensor) not in self._uncertain

    def aligned(self, tensor: tf.Tensor) -> Axes | None:
        """Of an operation by elements: the axes of its inputs, which are aligned at the last one."""
        rank = tensor.shape.rank
        if any(one.shape.rank is None for one in tensor.op.inputs):
            return None
        return frozenset(axis + rank - one.shape.rank for one in tensor.op.inputs for axis in self.of(one))

    def unchanged(self, tensor: tf.Tensor) -> Axes | None:
        """Of an operation that keeps the axes of its first input."""
        return self.of(tensor.op.inputs[0])

    def reduced(self, tensor: tf.Tensor) -> Axes | None:
        """Of a reduction over axes."""
        source, kept = tensor.op.inputs[0], tensor.op.get_attr("keep_dims")
        gone = summed_axes(*tensor.op.inputs)
        if gone is None:
            return None
        left = [axis for axis in range(source.shape.rank) if kept or axis not in gone]
        return frozenset(left.index(axis) for axis in self.of(source) if axis not in gone)

    def transposed(self, tensor: tf.Tensor) -> Axes | None:
        """Of a transposition."""
        order = tf.get_static_value(tensor.op.inputs[1])
        if order is None:
            return None
        return frozenset(list(order).index(axis) for axis in self.of(tensor.op.inputs[0]))

    def expanded(self, tensor: tf.Tensor) -> Axes | None:
        """Of a new axis of length 1."""
        at = tf.get_static_value(tensor.op.inputs[1])
        if at is None:
            return None
        new = int(at) % tensor.shape.rank
        return frozenset(axis + (axis >= new) for axis in self.of(tensor.op.inputs[0]))

    def squeezed(self, tensor: tf.Tensor) -> Axes | None:
        """Of axes of length 1 that are left out."""
        source = tensor.op.inputs[0]
        if source.shape.rank is None:
            return None
        named = tensor.op.get_attr("squeeze_dims")
        gone = {axis % source.shape.rank for axis in named} or {i for i, n in enumerate(source.shape) if n == 1}
        left = [axis for axis in range(source.shape.rank) if axis not in gone]
        return frozenset(left.index(axis) for axis in self.of(source) if axis in left)

    def stacked(self, tensor: tf.Tensor) -> Axes | None:
        """Of several tensors that are stacked along a new axis."""
        new = tensor.op.get_attr("axis") % tensor.shape.rank
        return frozenset(axis + (axis >= new) for one in tensor.op.inputs for axis in self.of(one))

    def product(self, tensor: tf.Tensor) -> Axes | None:
        """Of a product of matrices: those of the first but its last one, those of the second but its last but one."""
        one, other = tensor.op.inputs
        rank = tensor.shape.rank
        if one.shape.rank != rank or other.shape.rank != rank:
            return None
        (rows, _), (_, columns) = _rows_and_columns(tensor)
        found = {axis for each in (one, other) for axis in self.of(each) if axis < rank - 2}
        found |= {rank - 2} if rows in self.of(one) else set()
        found |= {rank - 1} if columns in self.of(other) else set()
        return frozenset(found)

    def labelled(self, tensor: tf.Tensor) -> Axes | None:
        """Of `tf.einsum`: the axes whose letters are those of the examples."""
        letters = _letters(tensor)
        if letters is None:
            return None
        found = self._letters_of_examples(tensor)
        return frozenset(axis for axis, letter in enumerate(letters[-1]) if any(letter in one for one in found))

    def pairs(self, tensor: tf.Tensor) -> bool:
        """Whether in `tf.einsum` each example of one input meets each of another."""
        found = [one for one in self._letters_of_examples(tensor) if one]
        return len(found) > 1 and not set.intersection(*found)

    def _letters_of_examples(self, tensor: tf.Tensor) -> list[set[str]]:
        """For each input, the letters of its axes of examples."""
        letters = _letters(tensor) or []
        return [
            {of_one[axis] for axis in self.of(one)} for one, of_one in zip(tensor.op.inputs, letters[:-1], strict=False)
        ]

    def contracts(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is a product of matrices that is summed over the examples."""
        if tensor.op.type == "Einsum":
            found = self._letters_of_examples(tensor)
            return len(found) > 1 and bool(set.intersection(*found)) and not self.of(tensor)
        if tensor.op.type not in _TURNS:
            return False
        one, other = tensor.op.inputs
        if one.shape.rank is None or other.shape.rank is None:
            return False
        (_, columns), (rows, _) = _rows_and_columns(tensor)
        return columns in self.of(one) and rows in self.of(other)

    def looked_up(self, tensor: tf.Tensor) -> Axes | None:
        """Of rows of a table that are looked up along its first axis."""
        indices = tensor.op.inputs[1]
        if indices.shape.rank is None or (tensor.op.type == "GatherV2" and not _is_first(tensor.op.inputs[2])):
            return None
        of_table = self.of(tensor.op.inputs[0]) if tensor.op.type == "GatherV2" else _NONE
        return self.of(indices) | {axis + indices.shape.rank - 1 for axis in of_table if axis}

    def sliced(self, tensor: tf.Tensor) -> Axes | None:
        """Of a slice by Python's brackets, which may leave out axes and add new ones of length 1."""
        source = tensor.op.inputs[0]
        entries = _entries(tensor)
        if entries is None:
            return None
        gone = tensor.op.get_attr("shrink_axis_mask")
        left = [axis for bit, axis in entries if axis is None or not bit & gone]
        return frozenset(left.index(axis) for axis in self.of(source) if axis in left)

    def cut(self, tensor: tf.Tensor) -> bool:
        """Whether a slice may leave out some of the examples."""
        source = tensor.op.inputs[0]
        if tensor.op.type == "Slice":
            begin, size = (tf.get_static_value(one) for one in tensor.op.inputs[1:])
            whole = begin is not None and size is not None
            return not whole or any(begin[axis] != 0 or size[axis] != -1 for axis in self.of(source))
        entries = _entries(tensor)
        strides = tf.get_static_value(tensor.op.inputs[3])
        if entries is None or strides is None:
            return bool(self.of(source))
        open_at_both_ends = tensor.op.get_attr("begin_mask") & tensor.op.get_attr("end_mask")
        kept = {
            axis for bit, axis in entries if not bit or (bit & open_at_both_ends and strides[bit.bit_length() - 1] == 1)
        }
        return not self.of(source) <= kept

    def bounds_along_examples(self, tensor: tf.Tensor) -> tuple[tf.Tensor | None, tf.Tensor | None] | None:
        """The first example of a slice, and the one after its last; `None` for each that is open.

        Returns:
            `None` where the graph does not say.
        """
        entries, strides = _entries(tensor), tf.get_static_value(tensor.op.inputs[3])
        bits = [bit for bit, axis in entries or () if axis in self.of(tensor.op.inputs[0])]
        if len(bits) != 1 or not bits[0] or strides is None or (bits[0] & tensor.op.get_attr("shrink_axis_mask")):
            return None
        number = bits[0].bit_length() - 1
        found: list[tf.Tensor | None] = []
        for name, bound in zip(("begin_mask", "end_mask"), tensor.op.inputs[1:3], strict=True):
            if tensor.op.get_attr(name) & bits[0]:
                found.append(None)
            elif bound.op.type == "Pack":
                found.append(bound.op.inputs[number])
            else:
                return None
        return (found[0], found[1]) if strides[number] == 1 else None

    def joined(self, tensor: tf.Tensor) -> Axes | None:
        """Of tensors that are concatenated along an axis that they have."""
        return _NONE.union(*(self.of(one) for one in tensor.op.inputs[:-1]))

    def listed(self, tensor: tf.Tensor) -> Axes | None:
        """Of what the steps of a loop have computed, which is stacked along the first axis."""
        return _first(tensor, [axis for axis in _unknown(tensor) if axis > 0] or [0])

    def shaped(self, tensor: tf.Tensor) -> Axes | None:
        """Of a tensor that is given its shape: the lengths that are those of axes of examples."""
        lengths = self._lengths(tensor.op.inputs[_SHAPED[tensor.op.type]])
        if lengths is None:
            return None
        found = {axis for axis, (_, is_length) in enumerate(lengths) if is_length}
        if not found and self.of(tensor.op.inputs[0]):  # what a length of -1 stands for has the examples
            found = {axis for axis, (length, _) in enumerate(lengths) if length == -1}
        return frozenset(found) or None

    def _lengths(self, vector: tf.Tensor) -> list[tuple[int | None, bool]] | None:
        """Of a shape: each length, if it is fixed, and whether it is that of examples; `None` if the graph hides it."""
        kind, inputs = vector.op.type, list(vector.op.inputs)
        fixed = tf.get_static_value(vector)
        found: list[tuple[int | None, bool]] | None = None
        if fixed is not None:
            found = [(int(length), False) for length in fixed.reshape(-1)]
        elif kind in ("Identity", "Cast"):
            found = self._lengths(inputs[0])
        elif kind == "Shape" and inputs[0].shape.rank is not None:
            found = [(length, axis in self.of(inputs[0])) for axis, length in enumerate(inputs[0].shape)]
        elif kind == "Pack":
            found = [(None if (one := tf.get_static_value(i)) is None else int(one), self.is_length(i)) for i in inputs]
        elif kind == "ConcatV2":
            parts = [self._lengths(one) for one in inputs[:-1]]
            found = None if None in parts else [length for part in parts for length in part or ()]
        elif kind == "GatherV2" and (chosen := tf.get_static_value(inputs[1])) is not None:
            whole = self._lengths(inputs[0])
            found = None if whole is None else [whole[int(one)] for one in chosen.reshape(-1)]
        return found

    def repeated(self, tensor: tf.Tensor) -> Axes | None:
        """Of a tensor that is repeated along its axes."""
        by_lengths = self.shaped(tensor)
        return None if by_lengths is None else by_lengths | self.of(tensor.op.inputs[0])

    def is_length(self, scalar: tf.Tensor) -> bool:
        """Whether a scalar is the length of an axis of examples, or a product of such a length."""
        while scalar.op.type in ("Identity", "Cast"):
            scalar = scalar.op.inputs[0]
        if scalar.op.type == "Mul":
            return any(map(self.is_length, scalar.op.inputs))
        if scalar.op.type == "Prod":
            return any(is_length for _, is_length in self._lengths(scalar.op.inputs[0]) or ())
        axis = length_of(scalar)
        return axis is not None and axis[1] in self.of(axis[0])

    def ranged(self, tensor: tf.Tensor) -> Axes | None:
        """Of consecutive numbers."""
        return frozenset({0} if any(map(self.is_length, tensor.op.inputs)) else ())


def _rows_and_columns(tensor: tf.Tensor) -> list[tuple[int, int]]:
    """Of a product of matrices: the axes of the rows and of the columns of both inputs, one of which may be turned."""
    turned = [tensor.op.get_attr(name) for name in _TURNS[tensor.op.type]]
    ranks = [one.shape.rank for one in tensor.op.inputs]
    return [(rank - 1, rank - 2) if turn else (rank - 2, rank - 1) for rank, turn in zip(ranks, turned, strict=True)]


def length_of(scalar: tf.Tensor) -> tuple[tf.Tensor, int] | None:
    """The tensor and its axis whose length `scalar` is, as `tf.shape(tensor)[axis]`; `None` of another scalar."""
    if scalar.op.type not in ("StridedSlice", "Unpack") or scalar.op.inputs[0].op.type != "Shape" or scalar.shape.rank:
        return None
    begin = [scalar.value_index] if scalar.op.type == "Unpack" else tf.get_static_value(scalar.op.inputs[1])
    tensor = scalar.op.inputs[0].op.inputs[0]
    if begin is None or len(begin) != 1 or tensor.shape.rank is None:
        return None
    return tensor, int(begin[0]) % tensor.shape.rank


def summed_axes(tensor: tf.Tensor, axes: tf.Tensor) -> set[int] | None:
    """The `axes` of `tensor` that a reduction such as `Sum` is over; `None` where the graph does not say."""
    rank, found = tensor.shape.rank, tf.get_static_value(axes)
    return None if rank is None or found is None else {int(axis) % rank for axis in found.reshape(-1)}


def _entries(tensor: tf.Tensor) -> list[tuple[int, int | None]] | None:
    """What the entries between Python's brackets are about.

    Returns:
        For each axis of the source, and for each new one, the bit of its entry in the masks of the operation (0 if no
        entry is about it), and the axis of the source (`None` of a new one); `None` where the graph does not say.
    """
    source, begin = tensor.op.inputs[:2]
    if source.shape.rank is None or begin.shape.rank is None or begin.shape[0] is None:
        return None
    new, rest = tensor.op.get_attr("new_axis_mask"), tensor.op.get_attr("ellipsis_mask")
    bits = [1 << number for number in range(begin.shape[0])]
    named = sum(not bit & (new | rest) for bit in bits)
    found: list[tuple[int, int | None]] = []
    at = 0
    for bit in bits:
        if bit & rest:
            count = source.shape.rank - named
            found += [(0, axis) for axis in range(at, at + count)]
            at += count
        elif bit & new:
            found.append((0, None))
        else:
            found.append((bit, at))
            at += 1
    return found + [(0, axis) for axis in range(at, source.shape.rank)]


def _letters(tensor: tf.Tensor) -> list[str] | None:
    """The letters of the axes of each input of `tf.einsum`, and of its result; `None` where it has an ellipsis."""
    equation = tensor.op.get_attr("equation").decode()
    inputs, _, result = equation.partition("->")
    return None if "." in equation else [*inputs.split(","), result]


def _needed(tensor: tf.Tensor) -> list[tf.Tensor]:
    return dependencies.before(tensor) if _unknown(tensor) else []


def _unknown(tensor: tf.Tensor) -> list[int]:
    """The axes of unknown length; of a tensor whose rank is unknown, the first."""
    rank = tensor.shape.rank
    return [0] if rank is None else [axis for axis in range(rank) if tensor.shape[axis] is None]


def _first(tensor: tf.Tensor, axes: Sequence[int]) -> Axes:
    return frozenset(axis for axis in axes if axis in _unknown(tensor)) & frozenset(list(axes)[:1])


def _is_first(axis: tf.Tensor) -> bool:
    value = tf.get_static_value(axis)
    return value is not None and int(value) == 0


_TURNS = {
    "MatMul": ("transpose_a", "transpose_b"),
    **dict.fromkeys(("BatchMatMulV2", "BatchMatMulV3"), ("adj_x", "adj_y")),
}
# The input that is the shape.
_SHAPED = {
    **dict.fromkeys(("Reshape", "BroadcastTo", "Tile"), 1),
    **dict.fromkeys(("Fill", "RandomUniform", "RandomStandardNormal", "TruncatedNormal"), 0),
    **dict.fromkeys(("StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2"), 0),
}
BY_ELEMENTS = (
    *("AddV2", "Add", "AddN", "Sub", "Mul", "MulNoNan", "RealDiv", "Div", "DivNoNan", "FloorDiv", "FloorMod"),
    *("Pow", "Maximum", "Minimum", "SquaredDifference", "Atan2", "Xlogy", "Xdivy", "SelectV2"),
    *("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "LogicalAnd", "LogicalOr"),
)
_UNARY = (
    *("Identity", "Cast", "Neg", "StopGradient", "CheckNumerics", "Softmax", "LogSoftmax", "Cumsum", "Cumprod"),
    *("Exp", "Log", "Log1p", "Expm1", "Sqrt", "Rsqrt", "Square", "Abs", "Sign", "Tanh", "Sigmoid", "Softplus", "Erf"),
    *("Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Reciprocal", "Inv", "Sin", "Cos", "Floor", "Round", "LogicalNot"),
    *("ClipByValue", "OnesLike", "ZerosLike", "BiasAdd", "IsFinite", "IsNan", "PreventGradient"),
)
_RULES: dict[str, Callable[[ExampleAxes, tf.Tensor], Axes | None]] = {
    **dict.fromkeys(BY_ELEMENTS, ExampleAxes.aligned),
    **dict.fromkeys(_UNARY, ExampleAxes.unchanged),
    **dict.fromkeys(("Sum", "Mean", "Max", "Min", "Prod", "All", "Any"), ExampleAxes.reduced),
    **dict.fromkeys(_TURNS, ExampleAxes.product),
    **dict.fromkeys(_SHAPED, ExampleAxes.shaped),
    **dict.fromkeys(("GatherV2", "ResourceGather"), ExampleAxes.looked_up),
    "ConcatV2": ExampleAxes.joined,
    "Einsum": ExampleAxes.labelled,
    "StridedSlice": ExampleAxes.sliced,
    "Tile": ExampleAxes.repeated,
    "Transpose": ExampleAxes.transposed,
    "ExpandDims": ExampleAxes.expanded,
    "Squeeze": ExampleAxes.squeezed,
    "Pack": ExampleAxes.stacked,
    "TensorListStack": ExampleAxes.listed,
    "Range": ExampleAxes.ranged,
}
