"""One operation, as a step of its own, partitioned for inputs that are sharded in every way.

A `Case` is an operation type, its inputs and attributes. An axis can be sharded if its length is a multiple of `ROWS`,
which is divided unevenly over 2 and over 3 replicas; axes of other lengths stay whole.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_library, op_def_registry

from tests.spmd.on_replicas import rows_of
from tfdist import spmd
from tfdist.internals import tensorflow_graphs
from tfdist.spmd.partitioner import Partitioner
from tfdist.spmd.placements import REPLICATE, Partial, Placed, Placement, Replicate, Shard

ROWS = 7
_ARRAY = (np.ndarray, np.generic)


@dataclass(frozen=True, eq=False)
class Case:
    """An operation type on some inputs.

    Attributes:
        kind: TensorFlow's name of the operation.
        inputs: arrays, and lists of arrays, are inputs of the step; everything else is a constant of its graph.
        local: per array, the axes of which one can be sharded without a computation on the whole value: "01 - 2".
        attributes: of the operation.
        function: of the arrays, in place of the operation, where that reads what is no array.
        digits: the relative and absolute difference that is allowed, if it is more than that of the dtype.
        of_known_lengths: the operation fails in a graph that does not know all lengths.
    """

    kind: str
    inputs: tuple[Any, ...]
    local: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    digits: float = 0.0
    of_known_lengths: bool = False

    def __str__(self) -> str:
        shapes = " ".join(_said(one) for one in self.inputs)
        attributes = " ".join(f"{name}={_said(value)}" for name, value in self.attributes.items())
        named = self.function.__name__.strip("<>") if self.function else ""
        return f"{self.kind} {named} {shapes} {attributes}"

    @property
    def arrays(self) -> list[np.ndarray]:
        """The inputs of the step."""
        found: list[np.ndarray] = []
        for one in self.inputs:
            found += [np.asarray(one)] if isinstance(one, _ARRAY) else one if _is_list(one) else []
        return found

    def call(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """The results of the operation."""
        if self.function is not None:
            return tf.nest.flatten(self.function(*tensors))
        left = iter(tensors)
        definition = op_def_registry.get(self.kind)
        arguments = {
            argument.name: [next(left) for _ in given]
            if _is_list(given)
            else next(left)
            if isinstance(given, _ARRAY)
            else given
            for argument, given in zip(definition.input_arg, self.inputs, strict=True)
        }
        return tf.nest.flatten(
            op_def_library.apply_op(self.kind, **arguments, **(defaults(self.kind) | self.attributes))
        )

    def traced(self, unknown: Callable[[int, int], bool] = lambda index, axis: False) -> Any:
        """The graph of the operation; the lengths of `unknown` axes of inputs are not known in it."""
        specs = [
            tf.TensorSpec([None if unknown(index, axis) else n for axis, n in enumerate(array.shape)], array.dtype)
            for index, array in enumerate(self.arrays)
        ]
        return tf.function(self.call, autograph=False).get_concrete_function(*specs)


@functools.cache
def defaults(kind: str) -> dict[str, Any]:
    """The defaults of an operation type's attributes, except for dtypes that follow from inputs."""
    definition = op_def_registry.get(kind)
    inferred = {argument.type_attr for argument in definition.input_arg}
    return {
        attribute.name: _value(attribute.default_value)
        for attribute in definition.attr
        if attribute.HasField("default_value") and attribute.name not in inferred
    }


def _value(attribute: Any) -> Any:
    kind = attribute.WhichOneof("value")
    if kind != "list":
        value = getattr(attribute, kind)
        return tf.as_dtype(value) if kind == "type" else value
    return next((list(values) for _, values in attribute.list.ListFields()), [])


def _is_list(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and isinstance(given[0], _ARRAY)


def _said(value: Any) -> str:
    if isinstance(value, _ARRAY):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if _is_list(value):
        return "+".join(map(_said, value))
    return value.name if isinstance(value, tf.DType) else str(value).replace(" ", "")


# For each input of a step, where it is.
Given = tuple[Placement, ...]


def sharded(case: Case, replicas: int, *, pairs: bool = False) -> Iterator[Given]:
    """Ways to shard the inputs: one of them, along each axis; all along the first or last axis, or all `pairs`."""
    sizes = tuple(rows_of(ROWS, replicas))
    whole: list[Placement] = [REPLICATE] * len(case.arrays)
    single: list[tuple[int, Shard]] = []
    for index, array in enumerate(case.arrays):
        for axis, length in enumerate(array.shape):
            single += [
                (index, Shard(axis, sizes, blocks)) for blocks in (1, 2) if length and length % (ROWS * blocks) == 0
            ]
    for index, shard in single:
        yield (*whole[:index], shard, *whole[index + 1 :])
    if pairs:
        for one, other in itertools.combinations(single, 2):
            if one[0] != other[0]:
                pair = dict([one, other])
                yield tuple(pair.get(index, REPLICATE) for index in range(len(whole)))
    elif len(whole) > 1:
        yield tuple(dict(reversed(single)).get(index, REPLICATE) for index in range(len(whole)))
        yield tuple(dict(single).get(index, REPLICATE) for index in range(len(whole)))


def terms(case: Case) -> Iterator[Given]:
    """Each of the inputs as the terms of a sum."""
    for index, array in enumerate(case.arrays):
        if array.dtype.kind in "fci" and array.size:
            yield tuple(Partial() if one == index else REPLICATE for one in range(len(case.arrays)))


@dataclass
class Found:
    """What a partitioned operation gave.

    Attributes:
        given: where its inputs were.
        placements: where its outputs were, before they were made whole.
        cost: of it.
        values: its results.
    """

    given: Given
    placements: list[Placement]
    cost: spmd.Cost
    values: list[np.ndarray] = field(default_factory=list)


def partitioned(case: Case, traced: Any, ways: Sequence[Given], replicas: int) -> list[Found]:
    """The results of a traced operation for inputs in each of several placements."""
    found: list[Found] = []

    def all_ways(*tensors: tf.Tensor) -> list[list[tf.Tensor]]:
        results = []
        parts: dict[tuple[int, Placement], list[tf.Tensor]] = {}
        for given in ways:
            cost = spmd.Cost()
            partitioner = Partitioner(spmd.Mesh(["CPU:0"] * replicas), None, cost)
            for key in enumerate(given):
                if key not in parts:
                    parts[key] = _parts(partitioner, tensors[key[0]], key[1])
            inputs = [Placed(placement, parts[index, placement]) for index, placement in enumerate(given)]
            outside = [spmd.replicated([tensor]) for tensor in tensorflow_graphs.captured(traced.graph)[0]]
            outputs = partitioner.run(traced.graph, [*inputs, *outside])
            found.append(Found(given, [output.placement for output in outputs], cost))
            whole = partitioner.conversions.replicated(outputs)
            results.append([partitioner.mesh.tensors(output)[0] for output in whole])
        return results

    specs = [tensor.shape for tensor in traced.inputs[: len(case.arrays)]]
    signature = [tf.TensorSpec(shape, array.dtype) for shape, array in zip(specs, case.arrays, strict=True)]
    function = tf.function(all_ways, autograph=False, input_signature=signature)
    results = function(*map(tf.constant, case.arrays))
    for one, values in zip(found, results, strict=True):
        one.values = [value.numpy() for value in values]
    return found


def _parts(partitioner: Partitioner, tensor: tf.Tensor, placement: Placement) -> list[tf.Tensor]:
    if isinstance(placement, Replicate):
        return [tensor]
    if isinstance(placement, Shard):
        return partitioner.conversions.split(spmd.replicated([tensor]), placement).tensors
    # Terms of which none is zero.
    others = [tf.cast(number + 2, tensor.dtype) for number in range(partitioner.mesh.count - 1)]
    rest = [tf.ones_like(tensor) * other for other in others]
    return [tensor - tf.add_n(rest), *rest]


_RANDOM = np.random.default_rng(0)


def real(*shape: int, dtype: Any = np.float64) -> np.ndarray:
    """Normal numbers."""
    values = _RANDOM.normal(size=shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * _RANDOM.normal(size=shape)
    return values.astype(dtype)


def between(low: float, high: float, *shape: int, dtype: Any = np.float64) -> np.ndarray:
    """Uniform numbers."""
    return _RANDOM.uniform(low, high, shape).astype(dtype)


def whole(low: int, high: int, *shape: int, dtype: Any = np.int32) -> np.ndarray:
    """Integers from `low` to `high` - 1."""
    return _RANDOM.integers(low, high, shape).astype(dtype)


def truth(*shape: int) -> np.ndarray:
    """Truth values."""
    return _RANDOM.integers(0, 2, shape).astype(bool)
