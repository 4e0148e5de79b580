"""Meshes for a step that is computed in rounds, by workers that cannot communicate while they compute.

    round r      each worker computes its part of the step up to exchange r, and stores its terms on the servers; it
                 reads the results of earlier exchanges there
    update       the remainder of the step, which depends only on exchanged values, is computed once

Keras' own step exchanges only its gradients, and so takes one round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist import spmd
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.spmd import replica_variables
from tfdist.spmd.placements import Placed

# Has the user's Python functions, and its output is shown; in other modes too TensorFlow calls the functions there.
_CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


class RoundComplete(Exception):  # noqa: N818 - not an error
    """Raised in a round when its terms are stored on the servers."""


class CannotRunInRounds(Exception):  # noqa: N818 - not an error
    """Raised for a step that exchanges values in a loop or a conditional, or different values in different graphs."""


@dataclass(frozen=True)
class ExchangedValue:
    """A value that replicas exchange.

    Attributes:
        exchange: the number of the exchange.
        how: the reduction, or the axis along which parts are concatenated.
        dtype: the dtype of the value.
        shape: the shape of the whole value, as far as it is known.
    """

    exchange: int
    how: str
    dtype: tf.DType
    shape: tf.TensorShape

    def agrees(self, other: ExchangedValue) -> bool:
        """Whether `other` can be the same value in another graph."""
        same = (self.exchange, self.how, self.dtype) == (other.exchange, other.how, other.dtype)
        return same and self.shape.is_compatible_with(other.shape)


class ExchangeBuffers:
    """Variables on the servers in which the parts store exchanged values, for batches of one size.

    Args:
        device_of: returns the server for the spec of a value.
    """

    def __init__(self, device_of: Callable[[tf.TensorSpec], str]):
        self._device_of = device_of
        self._buffers: dict[int, list[tf.Variable]] = {}

    def of(self, number: int, terms: Sequence[tf.TensorSpec]) -> list[tf.Variable]:
        """Returns the buffers for the terms of the step's exchanged value number `number`."""
        if number not in self._buffers:
            device = self._device_of(terms[0])
            self._buffers[number] = [_buffer(device, term) for term in terms]
        return self._buffers[number]


class RoundMesh(spmd.Mesh):
    """The parts of a batch, of which the current graph computes one.

    Args:
        part: the number of this part.
        count: the number of parts.
        expected: the values that a dry run has exchanged; `None` in the dry run itself.

    Attributes:
        exchanges: the number of exchanges so far.
        exchanged: the values that have been exchanged so far.
    """

    def __init__(self, part: int, count: int, expected: Sequence[ExchangedValue] | None = None):
        super().__init__([""])
        self.count, self.local = count, [part]
        self.home = None
        self._part = part
        self.exchanges = 0
        self._in_branch = False  # in a loop or a conditional
        self._in_trial = False
        self._expected = expected
        self.exchanged: list[ExchangedValue] = []

    def on_replica(self, position: int) -> contextlib.AbstractContextManager[Any]:
        del position
        return contextlib.nullcontext()

    def on_copy(self, position: int) -> contextlib.AbstractContextManager[Any]:
        del position
        return contextlib.nullcontext()

    def compute(self) -> None:
        self.exchanges, self._graph = 0, tf.compat.v1.get_default_graph()

    def terms(self, variable: Any) -> list[tf.Tensor] | None:
        return [variable.value.handle]

    @contextlib.contextmanager
    def branches(self) -> Iterator[Callable[[tf.Tensor], None]]:
        previous, self._in_branch = self._in_branch, True
        try:
            yield lambda result: None
        finally:
            self._in_branch = previous

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        if self._in_branch:
            raise CannotRunInRounds
        yield
        if not self._in_trial:
            self.exchanges += 1

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        previous = self._in_trial, self._in_branch
        self._in_trial, self._in_branch = True, False
        try:
            yield
        finally:
            self._in_trial, self._in_branch = previous

    def all_reduce(
        self, values: Sequence[Sequence[tf.Tensor]], reduction: str, gradients: bool = False
    ) -> list[list[tf.Tensor]]:
        del gradients

        def combine(terms: Sequence[tf.Tensor]) -> tf.Tensor:
            return spmd.reduced(terms, reduction)

        return [[self._exchange(reduction, term, term.shape, combine, None)] for (term,) in values]

    def all_gather(self, values: Sequence[Sequence[tf.Tensor]], shards: Sequence[spmd.Shard]) -> list[list[tf.Tensor]]:
        results = []
        for (part,), shard in zip(values, shards, strict=True):

            def combine(parts: Sequence[tf.Tensor], shard: spmd.Shard = shard) -> tf.Tensor:
                return spmd.joined(parts, shard)

            shape = Placed(shard, [part], replica=self._part).shape
            results.append([self._exchange(f"axis {shard.axis}", part, shape, combine, shard)])
        return results

    def once(self, compute: Callable[[], list[tf.Tensor]], like: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        if self._in_trial:
            return [[placeholder] for placeholder in _placeholders(like)]

        def on_chief() -> list[tf.Tensor]:
            with tf.device(_CHIEF):
                return compute()

        with self.exchanging():
            for result in like:
                self._record("once", result.dtype, result.shape)
            return [[result] for result in self._from_first_part(on_chief, like)]

    def _exchange(self, how: str, term: tf.Tensor, shape: tf.TensorShape, *combine_and_shard: Any) -> tf.Tensor:
        if self._in_trial:
            return tf.compat.v1.placeholder(term.dtype, shape)
        self._record(how, term.dtype, shape)
        return self._combine_parts(term, shape, *combine_and_shard)

    def _record(self, how: str, dtype: tf.DType, shape: tf.TensorShape) -> None:
        value = ExchangedValue(self.exchanges, how, dtype, shape)
        self.exchanged.append(value)
        if self._expected is None:
            return
        number = len(self.exchanged) - 1
        if number >= len(self._expected) or not value.agrees(self._expected[number]):
            raise CannotRunInRounds  # other shapes were known in the dry run

    def _combine_parts(
        self,
        term: tf.Tensor,
        shape: tf.TensorShape,
        combine: Callable[[Sequence[tf.Tensor]], tf.Tensor],
        shard: spmd.Shard | None,
    ) -> tf.Tensor:
        """Returns the result of exchanging a value.

        Args:
            term: the term of this part.
            shape: the shape of the result.
            combine: computes the result from the terms of all parts.
            shard: how the value is split; `None` if the terms are reduced.
        """
        raise NotImplementedError

    def _from_first_part(self, compute: Callable[[], list[tf.Tensor]], like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the results of `compute`, which only the first part calls."""
        raise NotImplementedError

    def _buffers_of_once(self, buffers: ExchangeBuffers, like: Sequence[tf.Tensor]) -> list[tf.Variable]:
        """Returns the buffers of the last values of `exchanged`, which one part computes."""
        first = len(self.exchanged) - len(like)
        specs = [tf.TensorSpec(result.shape, result.dtype) for result in like]
        return [buffers.of(first + index, [spec])[0] for index, spec in enumerate(specs)]


class DryRun(RoundMesh):
    """Finds how many exchanges a step needs, and when it changes variables.

    Attributes:
        changed: the numbers of exchanges before the first and the last change of a variable, by its handle's `id`.
    """

    def __init__(self, count: int):
        super().__init__(0, count)
        self.changed: dict[int, tuple[int, int]] = {}

    def computing(self, operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> contextlib.AbstractContextManager[Any]:
        handles = [tensor for tensor in inputs if tensor.dtype == tf.resource] if _changes_variables(operation) else []
        for handle in handles:
            first, _ = self.changed.get(id(handle), (self.exchanges, 0))
            self.changed[id(handle)] = first, self.exchanges
        return contextlib.nullcontext()

    def _combine_parts(self, term: Any, shape: Any, combine: Any, shard: Any) -> tf.Tensor:
        return tf.compat.v1.placeholder(term.dtype, shape)

    def _from_first_part(self, compute: Any, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return _placeholders(like)


class Round(RoundMesh):
    """Computes one part up to an exchange.

    Args:
        part: the number of the part.
        count: the number of parts.
        expected: see `RoundMesh`.
        buffers: the buffers for terms.
        last: the number of the exchange.
    """

    def __init__(self, part: int, count: int, expected: Sequence[ExchangedValue], buffers: ExchangeBuffers, last: int):
        super().__init__(part, count, expected)
        self._buffers, self._last = buffers, last

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        with super().exchanging():
            yield
        if self.exchanges > self._last:
            if len(self.exchanged) != sum(value.exchange <= self._last for value in self._expected or ()):
                raise CannotRunInRounds
            raise RoundComplete

    def _combine_parts(self, term: Any, shape: Any, combine: Any, shard: Any) -> tf.Tensor:
        buffers = self._buffers.of(len(self.exchanged) - 1, _term_specs(term, shape, shard, self.count))
        if self.exchanges < self._last:
            return _combined(buffers, combine, shape)
        buffers[self._part].assign(term)
        return tf.raw_ops.PlaceholderWithDefault(input=term, shape=tf.TensorShape(None))

    def _from_first_part(self, compute: Any, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        buffers = self._buffers_of_once(self._buffers, like)
        if self.exchanges == self._last and self._part == 0:
            for buffer, value in zip(buffers, compute(), strict=True):
                buffer.assign(value)
        return [_read(buffer, result.shape) for buffer, result in zip(buffers, like, strict=True)]


class WholeStep(RoundMesh):
    """Computes a whole step on one worker."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        yield

    def _combine_parts(self, term: tf.Tensor, shape: Any, combine: Any, shard: Any) -> tf.Tensor:
        return term

    def _from_first_part(self, compute: Callable[[], list[tf.Tensor]], like: Any) -> list[tf.Tensor]:
        return compute()


class Update(RoundMesh):
    """Computes the end of a step, which depends only on exchanged values, once and without a batch.

    Args:
        count: the number of parts.
        expected: see `RoundMesh`.
        buffers: the buffers with the terms.
        exchanges: the number of exchanges.
        terms: the handles of variables to which each part has added locally before the last exchange.

    Attributes:
        scratch: the graph for the operations of the parts, which is never run.
    """

    def __init__(
        self,
        count: int,
        expected: Sequence[ExchangedValue],
        buffers: ExchangeBuffers,
        exchanges: int,
        terms: Collection[tf.Tensor],
    ):
        super().__init__(0, count, expected)
        self._buffers, self._last = buffers, exchanges
        self._terms = {id(handle) for handle in terms}
        self.scratch = tf.__internal__.FuncGraph("parts")

    def computing(self, operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> contextlib.AbstractContextManager[Any]:
        if tf.compat.v1.get_default_graph() is not self._graph:
            return contextlib.nullcontext()
        depends_on_batch = any(getattr(tensor, "graph", None) is self.scratch for tensor in inputs)
        adds_locally = self.exchanges < self._last and any(id(tensor) in self._terms for tensor in inputs)
        if not depends_on_batch and not adds_locally:
            return contextlib.nullcontext()
        if self.exchanges == self._last and _changes_variables(operation):
            raise CannotRunInRounds
        return self.scratch.as_default()

    def _combine_parts(self, term: Any, shape: Any, combine: Any, shard: Any) -> tf.Tensor:
        buffers = self._buffers.of(len(self.exchanged) - 1, _term_specs(term, shape, shard, self.count))
        return _combined(buffers, combine, shape)

    def _from_first_part(self, compute: Any, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        buffers = self._buffers_of_once(self._buffers, like)
        return [_read(buffer, result.shape) for buffer, result in zip(buffers, like, strict=True)]


def _placeholders(like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.compat.v1.placeholder(tensor.dtype, tensor.shape) for tensor in like]


def _changes_variables(operation: tf.Operation) -> bool:
    resources = any(tensor.dtype == tf.resource for tensor in operation.inputs)
    reads = operation.type in (replica_variables.READ, "ResourceGather")
    return resources and operation.op_def.is_stateful and not reads


def _term_specs(term: tf.Tensor, shape: tf.TensorShape, shard: spmd.Shard | None, count: int) -> list[tf.TensorSpec]:
    """Returns the spec of each part's term of a value with this `shape`."""
    if shard is None or shape.rank is None or not shape.is_fully_defined():
        return [tf.TensorSpec(shape if shard is None else None, term.dtype)] * count
    specs = []
    for part in range(count):
        part_shape = shape.as_list()
        part_shape[shard.axis] = shard.part(shape[shard.axis], part)
        specs.append(tf.TensorSpec(part_shape, term.dtype))
    return specs


def _combined(
    buffers: Sequence[tf.Variable], combine: Callable[[Sequence[tf.Tensor]], tf.Tensor], shape: tf.TensorShape
) -> tf.Tensor:
    with tf.device(buffers[0].device):
        result = combine([_read(buffer, buffer.shape) for buffer in buffers])
    result.set_shape(shape)
    return result


def _read(buffer: tf.Variable, shape: tf.TensorShape) -> tf.Tensor:
    with tf.device(buffer.device):
        return tf.ensure_shape(buffer.read_value(), shape)


def _buffer(device: str, spec: Any) -> tf.Variable:
    """Returns a variable on `device` with the dtype of `spec`, and its shape if that is fixed, else any shape."""
    fixed = spec.shape.is_fully_defined()
    initial_shape = spec.shape if fixed else []
    with tf.init_scope(), tensorflow_internals.without_strategy(), tf.device(device):
        # A partially known shape crashes a worker (TensorFlow 2.21.0).
        shape = spec.shape if fixed else tf.TensorShape(None)
        return tf.Variable(tf.zeros(initial_shape, spec.dtype), shape=shape, trainable=False)
