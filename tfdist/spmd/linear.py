"""Linear operations, which can be computed on partial sums before the all-reduce.

    d(sum of x_i) = sum of d x_i, for every linear d

So a gradient that each replica has computed from its shard of the batch is scaled, reshaped and added to other
gradients before the replicas sum it, once.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.spmd.placements import REPLICATE, Partial, Placed, Placement, Replicate

_LINEAR = {
    (0,): """
        BiasAddGrad Cast DivNoNan EluGrad ExpandDims LeakyReluGrad Mean Neg Pad RealDiv Relu6Grad ReluGrad Reshape
        SeluGrad Slice SoftplusGrad SoftsignGrad Squeeze StridedSlice Sum Transpose
    """,
    (1,): "InvGrad ReciprocalGrad RsqrtGrad SigmoidGrad SqrtGrad TanhGrad",
    (0, 1): "BatchMatMulV2 Einsum MatMul Mul",
    (4,): "StridedSliceGrad",
}
# The inputs in which an operation is linear while its other inputs are replicated.
INPUTS: dict[str, frozenset[int]] = {
    kind: frozenset(inputs) for inputs, kinds in _LINEAR.items() for kind in kinds.split()
}
# Operations whose result is never larger than the input.
_NO_LARGER = frozenset(
    ("BiasAddGrad", "ExpandDims", "Mean", "Neg", "Reshape", "Slice", "Squeeze", "StridedSlice", "Sum", "Transpose")
)
# A result of up to this many elements may be larger than the input, because saving an all-reduce is worth more.
_FEW = 1 << 14
# Linear in all inputs jointly, which have the same shape.
ADDITIVE = frozenset(("Add", "AddN", "AddV2", "Sub"))
# Linear in all inputs jointly, except this number of inputs at the end.
_JOINED = {"ConcatV2": 1, "Pack": 0}


def placements(operation: tf.Operation, values: Sequence[Placed]) -> list[Placement] | None:
    """The placements of the inputs if an operation can be computed on partial sums; `None` if it cannot."""
    current = [value.placement for value in values]
    terms = [index for index, placement in enumerate(current) if isinstance(placement, Partial)]
    if len(terms) == 1 and not values[terms[0]].is_accumulated:
        term = values[terms[0]]
        if term.converted(REPLICATE) is not None or term.in_parts() is not None:
            return None  # the terms have been reduced, so that nothing is gained by computing on them
    if not terms or any(current[index] != Partial() for index in terms) or len(operation.outputs) != 1:
        return None
    replicated = all(isinstance(current[n], Replicate) for n in range(len(current)) if n not in terms)
    if operation.type in ADDITIVE:
        shape = values[0].shape
        same = shape.is_fully_defined() and all(value.shape == shape for value in values)
        # A replicated value can become a term of one replica. This is not always allowed: what is added to a weight and
        # then subtracted from it must leave the weight the same, to the last bit.
        summed = len(terms) == len(current) or (replicated and _may_be_term(values, terms))
        return [Partial()] * len(current) if same and summed else None
    if operation.type in _JOINED:
        joined = len(current) - _JOINED[operation.type]
        return current if terms == list(range(joined)) and replicated else None
    single = len(terms) == 1 and replicated
    return current if single and _is_linear(operation, terms[0], values[terms[0]]) else None


def _may_be_term(values: Sequence[Placed], terms: Sequence[int]) -> bool:
    """Whether the replicated inputs may be added to the partial sums `terms` before these are reduced.

    They may be counts that are added to accumulating variables, the zeros with which a loop starts to accumulate
    gradients, and the constant with which Python starts the sum of several losses.
    """
    others = [value for index, value in enumerate(values) if index not in terms]
    if all(value.constant is not None for value in others):
        return True
    return any(values[index].is_gradient or values[index].is_accumulated for index in terms)


def adds_gradients(operation: tf.Operation, inputs: Sequence[Placed]) -> bool:
    """Whether an operation adds something to a gradient."""
    return operation.type in ADDITIVE and any(value.is_gradient for value in inputs)


def _is_linear(operation: tf.Operation, index: int, term: Placed) -> bool:
    """Whether an operation is linear in an input and does not increase what an all-reduce sends by much."""
    result = operation.outputs[0]
    if index not in INPUTS.get(operation.type, ()):
        return False
    if operation.type == "Mean" and result.dtype.is_integer:  # which rounds
        return False
    if operation.type == "Cast":
        source = operation.inputs[0].dtype
        return source.is_floating and result.dtype.is_floating and result.dtype.size >= source.size
    if operation.type in _NO_LARGER:
        return True
    before, after = term.shape.num_elements(), result.shape.num_elements()
    return before is not None and after is not None and after <= max(before, _FEW)
