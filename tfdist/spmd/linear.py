"""Operations that can be computed on the terms of a sum, so that the sum is made after them.

    d(sum of x_i) = sum of d x_i, for every linear d

A gradient that each replica has computed for its part is thus scaled, reshaped and added to others before the replicas
add it up, once.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.spmd.placements import REPLICATE, Partial, Placed, Placement, Replicate

# The inputs in which an operation is linear while the others are replicated.
INPUTS: dict[str, frozenset[int]] = {
    kind: frozenset(inputs)
    for kind, inputs in {
        "BatchMatMulV2": (0, 1),
        "BiasAddGrad": (0,),
        "Cast": (0,),
        "DivNoNan": (0,),
        "Einsum": (0, 1),
        "ExpandDims": (0,),
        "MatMul": (0, 1),
        "Mean": (0,),
        "Mul": (0, 1),
        "Neg": (0,),
        "RealDiv": (0,),
        "Reshape": (0,),
        "Slice": (0,),
        "Squeeze": (0,),
        "StridedSlice": (0,),
        "Sum": (0,),
        "Transpose": (0,),
    }.items()
}
# Their result is never larger than the input.
_NO_LARGER = frozenset(
    ("BiasAddGrad", "ExpandDims", "Mean", "Neg", "Reshape", "Slice", "Squeeze", "StridedSlice", "Sum", "Transpose")
)
# Linear where all inputs are terms of sums, of one shape.
ADDITIVE = frozenset(("Add", "AddN", "AddV2", "Sub"))


def placements(operation: tf.Operation, values: Sequence[Placed]) -> list[Placement] | None:
    """Where the inputs must be so that an operation can be computed on the terms of sums; `None` if it cannot."""
    given = [value.placement for value in values]
    terms = [index for index, one in enumerate(given) if isinstance(one, Partial)]
    if len(terms) == 1 and not values[terms[0]].is_accumulated and _is_summed(values[terms[0]]):
        return None
    if not terms or any(given[index] != Partial() for index in terms) or len(operation.outputs) != 1:
        return None
    replicated = all(isinstance(one, Replicate) for index, one in enumerate(given) if index not in terms)
    if operation.type in ADDITIVE:
        shape = values[0].shape
        same = shape.is_fully_defined() and all(value.shape == shape for value in values)
        # What is added to a variable of terms, such as a count of examples, is one term on one replica; and so is what
        # is added to a number, such as another loss, so that one exchange is made for all of them.
        one_term = replicated and (shape.rank == 0 or any(value.is_accumulated for value in values))
        summed = len(terms) == len(given) or one_term
        return [Partial()] * len(given) if same and summed else None
    alone = len(terms) == 1 and replicated
    return list(given) if alone and _is_linear(operation, terms[0], values[terms[0]]) else None


def _is_summed(term: Placed) -> bool:
    """Whether the sum of the terms was made before, so that nothing is gained from terms."""
    return term.converted(REPLICATE) is not None or term.in_parts() is not None


def _is_linear(operation: tf.Operation, index: int, term: Placed) -> bool:
    """Whether an operation is linear in an input, and its result is no larger, so that no more is sent than before."""
    result = operation.outputs[0]
    if index not in INPUTS.get(operation.type, ()):
        return False
    if operation.type == "Mean" and result.dtype.is_integer:  # it is rounded
        return False
    if operation.type == "Cast":
        return _widens(operation.inputs[0], result)
    elements = term.shape.num_elements(), result.shape.num_elements()
    return operation.type in _NO_LARGER or (None not in elements and elements[1] <= elements[0])


def _widens(source: tf.Tensor, target: tf.Tensor) -> bool:
    return source.dtype.is_floating and target.dtype.is_floating and target.dtype.size >= source.dtype.size
