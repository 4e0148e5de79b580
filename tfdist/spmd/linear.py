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
        "EluGrad": (0,),
        "ExpandDims": (0,),
        "InvGrad": (1,),
        "LeakyReluGrad": (0,),
        "MatMul": (0, 1),
        "Mean": (0,),
        "Mul": (0, 1),
        "Neg": (0,),
        "Pad": (0,),
        "RealDiv": (0,),
        "ReciprocalGrad": (1,),
        "Relu6Grad": (0,),
        "ReluGrad": (0,),
        "Reshape": (0,),
        "RsqrtGrad": (1,),
        "SeluGrad": (0,),
        "SigmoidGrad": (1,),
        "Slice": (0,),
        "SoftplusGrad": (0,),
        "SoftsignGrad": (0,),
        "SqrtGrad": (1,),
        "Squeeze": (0,),
        "StridedSlice": (0,),
        "StridedSliceGrad": (4,),
        "Sum": (0,),
        "TanhGrad": (1,),
        "Transpose": (0,),
    }.items()
}
# Their result is never larger than the input.
_NO_LARGER = frozenset(
    ("BiasAddGrad", "ExpandDims", "Mean", "Neg", "Reshape", "Slice", "Squeeze", "StridedSlice", "Sum", "Transpose")
)
# A result of so few elements may be larger than the input: one exchange less is worth more.
_FEW = 1 << 14
# Linear in all inputs together, which have one shape.
ADDITIVE = frozenset(("Add", "AddN", "AddV2", "Sub"))
# Linear in all inputs together, but for this many at their end.
_JOINED = {"ConcatV2": 1, "Pack": 0}


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
        # A value that all replicas have may be one term, on one replica. Not in general: what is added to a weight and
        # subtracted from it again must leave it as it was, to the last bit.
        summed = len(terms) == len(given) or (replicated and _may_be_a_term(values, terms))
        return [Partial()] * len(given) if same and summed else None
    if operation.type in _JOINED:
        joined = len(given) - _JOINED[operation.type]
        return list(given) if terms == list(range(joined)) and replicated else None
    alone = len(terms) == 1 and replicated
    return list(given) if alone and _is_linear(operation, terms[0], values[terms[0]]) else None


def _may_be_a_term(values: Sequence[Placed], terms: Sequence[int]) -> bool:
    """Whether what all replicas have can be added to `terms` before their sum is made.

    That are counts that are added to variables of terms, gradients of all iterations of a loop, which begin with zeros,
    and constants, with which Python begins the sum of several losses.
    """
    others = [value for index, value in enumerate(values) if index not in terms]
    if all(value.constant is not None for value in others):
        return True
    return any(values[index].is_gradient or values[index].is_accumulated for index in terms)


def adds_gradients(operation: tf.Operation, inputs: Sequence[Placed]) -> bool:
    """Whether an operation adds something to a gradient, and returns it."""
    return operation.type in ADDITIVE and any(value.is_gradient for value in inputs)


def _is_summed(term: Placed) -> bool:
    """Whether the sum of the terms was made before, so that nothing is gained from terms."""
    return term.converted(REPLICATE) is not None or term.in_parts() is not None


def _is_linear(operation: tf.Operation, index: int, term: Placed) -> bool:
    """Whether an operation is linear in an input, and its result is no larger, so that no more is sent, or small."""
    result = operation.outputs[0]
    if index not in INPUTS.get(operation.type, ()):
        return False
    if operation.type == "Mean" and result.dtype.is_integer:  # it is rounded
        return False
    if operation.type == "Cast":
        return _widens(operation.inputs[0], result)
    if operation.type in _NO_LARGER:
        return True
    sent, would_be = term.shape.num_elements(), result.shape.num_elements()
    return sent is not None and would_be is not None and would_be <= max(sent, _FEW)


def _widens(source: tf.Tensor, target: tf.Tensor) -> bool:
    return source.dtype.is_floating and target.dtype.is_floating and target.dtype.size >= source.dtype.size
