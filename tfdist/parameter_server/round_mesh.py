"""The replicas of a step that is computed in rounds, by workers that cannot communicate while they compute.

    round r      each worker computes its part of the step up to the exchange number r, and leaves its terms on the
                 servers; what was exchanged in earlier rounds it reads there
    update       the rest of the step, which follows from what was exchanged, is computed once

A step of Keras' own exchanges its gradients alone, and so takes one round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist import spmd
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.spmd import accumulators
from tfdist.spmd.placements import Placed

# Which has Python's functions, and shows what is printed; TensorFlow calls them there too in other modes.
_CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


class RoundEnds(Exception):  # noqa: N818 - not an error
    """Raised in a round when its terms are left on the servers."""


class NotInRounds(Exception):  # noqa: N818 - not an error
    """Raised for a step that exchanges something in a loop or a condition, or in each round something else."""


@dataclass(frozen=True)
class Sent:
    """A value that is exchanged.

    Attributes:
        exchange: the number of the exchange.
        how: the reduction, or the axis along which parts are joined.
        dtype: of the value.
        shape: of the whole value, as far as it is known.
    """

    exchange: int
    how: str
    dtype: tf.DType
    shape: tf.TensorShape

    def agrees(self, other: Sent) -> bool:
        """Whether `other` can be the same value in another graph."""
        same = (self.exchange, self.how, self.dtype) == (other.exchange, other.how, other.dtype)
        return same and self.shape.is_compatible_with(other.shape)


class Places:
    """Where the parts leave what they exchange, for batches of one size.

    Args:
        device_of: the server for a tensor, the gradient of a variable or something else.
    """

    def __init__(self, device_of: Callable[[tf.TensorSpec], str]):
        self._device_of = device_of
        self._made: dict[int, list[tf.Variable]] = {}

    def of(self, number: int, terms: Sequence[tf.TensorSpec]) -> list[tf.Variable]:
        """The places for the terms of the value that is exchanged as number `number` of a step."""
        if number not in self._made:
            device = self._device_of(terms[0])
            self._made[number] = [_place(device, term) for term in terms]
        return self._made[number]


class RoundMesh(spmd.Mesh):
    """The parts of a batch, of which this graph computes one.

    Args:
        part: its number.
        count: the number of parts.
        expected: what is exchanged; `None` if that is to be found.

    Attributes:
        sent: what has been exchanged.
    """

    def __init__(self, part: int, count: int, expected: Sequence[Sent] | None = None):
        super().__init__([""])
        self.count, self.local = count, [part]
        self.home = None
        self._part = part
        self._exchanges = 0
        self._inside = False  # of a loop or a condition
        self._trying = False
        self._expected = expected
        self.sent: list[Sent] = []

    def on_replica(self, position: int) -> contextlib.AbstractContextManager[Any]:
        del position
        return contextlib.nullcontext()

    def on_copy(self, position: int) -> contextlib.AbstractContextManager[Any]:
        del position
        return contextlib.nullcontext()

    def compute(self) -> None:
        self._exchanges, self._graph = 0, tf.compat.v1.get_default_graph()

    def terms(self, variable: Any) -> list[tf.Tensor] | None:
        return [variable.value.handle]

    @contextlib.contextmanager
    def branches(self) -> Iterator[Callable[[tf.Tensor], None]]:
        before, self._inside = self._inside, True
        try:
            yield lambda result: None
        finally:
            self._inside = before

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        if self._inside:
            raise NotInRounds
        yield
        if not self._trying:
            self._exchanges += 1

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        before = self._trying, self._inside
        self._trying, self._inside = True, False
        try:
            yield
        finally:
            self._trying, self._inside = before

    def all_reduce(
        self, values: Sequence[Sequence[tf.Tensor]], reduction: str, gradients: bool = False
    ) -> list[list[tf.Tensor]]:
        del gradients

        def added(parts: Sequence[tf.Tensor]) -> tf.Tensor:
            return spmd.reduced(parts, reduction)

        return [[self._or_tried(reduction, term, term.shape, added, None)] for (term,) in values]

    def all_gather(self, values: Sequence[Sequence[tf.Tensor]], shards: Sequence[spmd.Shard]) -> list[list[tf.Tensor]]:
        found = []
        for (part,), shard in zip(values, shards, strict=True):

            def joined(parts: Sequence[tf.Tensor], shard: spmd.Shard = shard) -> tf.Tensor:
                return spmd.joined(parts, shard)

            whole = Placed(shard, [part], replica=self._part).shape
            found.append([self._or_tried(f"axis {shard.axis}", part, whole, joined, shard)])
        return found

    def once(self, compute: Callable[[], list[tf.Tensor]], like: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        if self._trying:
            return [[tf.compat.v1.placeholder(one.dtype, one.shape)] for one in like]

        def on_chief() -> list[tf.Tensor]:
            with tf.device(_CHIEF):
                return compute()

        with self.exchanging():
            for one in like:
                self._note("once", one.dtype, one.shape)
            return [[one] for one in self._of_first(on_chief, like)]

    def _or_tried(self, how: str, term: tf.Tensor, shape: tf.TensorShape, *combined: Any) -> tf.Tensor:
        if self._trying:
            return tf.compat.v1.placeholder(term.dtype, shape)
        self._note(how, term.dtype, shape)
        return self._exchanged(term, shape, *combined)

    def _note(self, how: str, dtype: tf.DType, shape: tf.TensorShape) -> None:
        self.sent.append(Sent(self._exchanges, how, dtype, shape))
        if self._expected is None:
            return
        if len(self.sent) > len(self._expected) or not self.sent[-1].agrees(self._expected[len(self.sent) - 1]):
            raise NotInRounds  # what is known of shapes was not the same in the rehearsal

    def _exchanged(
        self,
        term: tf.Tensor,
        shape: tf.TensorShape,
        combined: Callable[[Sequence[tf.Tensor]], tf.Tensor],
        shard: spmd.Shard | None,
    ) -> tf.Tensor:
        """What the parts' terms of a value give together; `shape` is that of the whole, and `shard` where it is cut."""
        raise NotImplementedError

    def _of_first(self, compute: Callable[[], list[tf.Tensor]], like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The results of `compute`, which the first part alone computes, once."""
        raise NotImplementedError

    def _of_once(self, places: Places, like: Sequence[tf.Tensor]) -> list[tf.Variable]:
        """The places of results that one part computes, which are the last values of `sent`."""
        first = len(self.sent) - len(like)
        specs = [tf.TensorSpec(one.shape, one.dtype) for one in like]
        return [places.of(first + index, [spec])[0] for index, spec in enumerate(specs)]


class Rehearsal(RoundMesh):
    """Finds how many exchanges a step needs, and when it changes variables.

    Attributes:
        changed: by the `id` of the handle of a variable, how many exchanges precede its first and its last change.
    """

    def __init__(self, count: int):
        super().__init__(0, count)
        self.changed: dict[int, tuple[int, int]] = {}

    @property
    def exchanges(self) -> int:
        return self._exchanges

    def computing(self, operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> contextlib.AbstractContextManager[Any]:
        for handle in (one for one in inputs if one.dtype == tf.resource and _changes_variables(operation)):
            first, _ = self.changed.get(id(handle), (self._exchanges, 0))
            self.changed[id(handle)] = first, self._exchanges
        return contextlib.nullcontext()

    def _exchanged(self, term: Any, shape: Any, combined: Any, shard: Any) -> tf.Tensor:
        return tf.compat.v1.placeholder(term.dtype, shape)

    def _of_first(self, compute: Any, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [tf.compat.v1.placeholder(one.dtype, one.shape) for one in like]


class Round(RoundMesh):
    """A round: computes one part up to an exchange.

    Args:
        part: its number.
        count: the number of parts.
        expected: see `RoundMesh`.
        places: where terms are left.
        last: the number of the exchange.
    """

    def __init__(self, part: int, count: int, expected: Sequence[Sent], places: Places, last: int):
        super().__init__(part, count, expected)
        self._places, self._last = places, last

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        with super().exchanging():
            yield
        if self._exchanges > self._last:
            if len(self.sent) != sum(one.exchange <= self._last for one in self._expected or ()):
                raise NotInRounds
            raise RoundEnds

    def _exchanged(self, term: Any, shape: Any, combined: Any, shard: Any) -> tf.Tensor:
        places = self._places.of(len(self.sent) - 1, _of_parts(term, shape, shard, self.count))
        if self._exchanges < self._last:
            return _combined(places, combined, shape)
        places[self._part].assign(term)
        return tf.raw_ops.PlaceholderWithDefault(input=term, shape=tf.TensorShape(None))

    def _of_first(self, compute: Any, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        places = self._of_once(self._places, like)
        if self._exchanges == self._last:
            for place, value in zip(places, compute() if self._part == 0 else (), strict=False):
                place.assign(value)
        return [_read(place, one.shape) for place, one in zip(places, like, strict=True)]


class Whole(RoundMesh):
    """A step that one worker computes as a whole."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        yield

    def _exchanged(self, term: tf.Tensor, shape: Any, combined: Any, shard: Any) -> tf.Tensor:
        return term

    def _of_first(self, compute: Callable[[], list[tf.Tensor]], like: Any) -> list[tf.Tensor]:
        return compute()


class Update(RoundMesh):
    """The end of a step: what follows from all exchanges. It is computed once, without a batch.

    Args:
        count: the number of parts.
        expected: see `RoundMesh`.
        places: where terms were left.
        exchanges: the number of exchanges.
        terms: the handles of variables to which the parts have added by themselves before the last exchange.

    Attributes:
        scratch: the graph of all that the parts have computed, which nobody runs.
    """

    def __init__(
        self, count: int, expected: Sequence[Sent], places: Places, exchanges: int, terms: Collection[tf.Tensor]
    ):
        super().__init__(0, count, expected)
        self._places, self._last = places, exchanges
        self._terms = {id(handle) for handle in terms}
        self.scratch = tf.__internal__.FuncGraph("parts")

    def computing(self, operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> contextlib.AbstractContextManager[Any]:
        if tf.compat.v1.get_default_graph() is not self._graph:
            return contextlib.nullcontext()
        of_parts = any(getattr(one, "graph", None) is self.scratch for one in inputs)
        if not of_parts and (self._exchanges == self._last or not any(id(one) in self._terms for one in inputs)):
            return contextlib.nullcontext()
        if self._exchanges == self._last and _changes_variables(operation):
            raise NotInRounds
        return self.scratch.as_default()

    def _exchanged(self, term: Any, shape: Any, combined: Any, shard: Any) -> tf.Tensor:
        places = self._places.of(len(self.sent) - 1, _of_parts(term, shape, shard, self.count))
        return _combined(places, combined, shape)

    def _of_first(self, compute: Any, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [_read(place, one.shape) for place, one in zip(self._of_once(self._places, like), like, strict=True)]


def _changes_variables(operation: tf.Operation) -> bool:
    resources = any(tensor.dtype == tf.resource for tensor in operation.inputs)
    return resources and operation.op_def.is_stateful and operation.type not in (accumulators.READ, "ResourceGather")


def _of_parts(term: tf.Tensor, shape: tf.TensorShape, shard: spmd.Shard | None, count: int) -> list[tf.TensorSpec]:
    """The dtype and shape of what each part leaves."""
    if shard is None or shape.rank is None or not shape.is_fully_defined():
        return [tf.TensorSpec(shape if shard is None else None, term.dtype)] * count
    lengths = [shape.as_list() for _ in range(count)]
    for part, own in enumerate(lengths):
        own[shard.axis] = shard.part(shape[shard.axis], part)
    return [tf.TensorSpec(own, term.dtype) for own in lengths]


def _combined(
    places: Sequence[tf.Variable], combined: Callable[[Sequence[tf.Tensor]], tf.Tensor], shape: tf.TensorShape
) -> tf.Tensor:
    with tf.device(places[0].device):
        found = combined([_read(place, place.shape) for place in places])
    found.set_shape(shape)
    return found


def _read(place: tf.Variable, shape: tf.TensorShape) -> tf.Tensor:
    with tf.device(place.device):
        return tf.ensure_shape(place.read_value(), shape)


def _place(device: str, like: Any) -> tf.Variable:
    """A variable on `device` for tensors of the dtype of `like`, and of its shape if that is fixed, else of any."""
    fixed = like.shape.is_fully_defined()
    shape = like.shape if fixed else []
    with tf.init_scope(), tensorflow_internals.without_strategy(), tf.device(device):
        # With a dimension that is not known, a worker crashes: seen in TensorFlow 2.21.0.
        any_shape = tf.TensorShape(None)
        return tf.Variable(tf.zeros(shape, like.dtype), shape=like.shape if fixed else any_shape, trainable=False)
