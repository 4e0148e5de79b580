"""Random numbers inside a step: draws per example differ between replicas, all other draws are the same.

One device draws a mask for each example of the global batch, and one noise for a weight. So a draw whose first axis is
the axis of examples gets a seed of the replica's own, and any other draw gets the same seed on all replicas. On the
first replica seeds are unchanged. The same seeds and the same number of replicas give the same numbers.

To compare steps of one replica and of several (`tfdist.core.verification`), each replica can draw for the whole global
batch instead, with the same seeds, and take the rows of its part: then each example gets the numbers of one device.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.core import replica_context
from tfdist.internals import keras as keras_internals

if TYPE_CHECKING:
    from tfdist.core.replica import Replica
    from tfdist.strategies.base import Strategy

# The distance of the replicas' seeds: a prime, much larger than the offsets that layers add to their seeds.
SEEDS_APART = 15_485_863
# The graph's seed for operations that draw the same on all replicas, if the user has set no seed.
_UNSEEDED = secrets.randbits(31)


def seed_of_random() -> int:
    """A number that follows from the state of Python's `random`, and leaves it as it is.

    So the weights that Keras draws next are those that it would draw without the strategy.
    """
    copy = random.Random()
    copy.setstate(random.getstate())
    return copy.getrandbits(31)


class _OfGlobalBatch:
    """The state of a step that draws for the whole global batch and takes the rows of its part.

    Attributes:
        examples: the number of examples of the part; `None` where it varies.
        unseeded: the seed generator for draws that are given no seed.
        draws: the number of draws by TensorFlow's operations so far.
    """

    def __init__(self, data: Any, unseeded: Any):
        self.unseeded = unseeded
        self.draws = 0
        sized = [one for one in tf.nest.flatten(data) if one is not None and one.shape.rank]
        self.examples = sized[0].shape[0] if sized else None
        self._rows = _rows(sized[0]) if sized else tf.constant(1)
        replica = replica_context.current()
        if replica is None:
            self._begin, self._total = tf.constant(0), self._rows
        else:
            count = tf.where(replica.real, self._rows, 0)
            self._begin, self._total = replica.examples_before(count)

    def draw(self, draw: Callable[[Any], Any], shape: Any) -> tf.Tensor:
        """The rows of this part of `draw(...)` for the global batch; `shape` is that of the part, `[k * rows, ...]`."""
        first = tf.cast(shape[0], tf.int32)
        times = first // self._rows
        # A part without examples has a row that does not count, and takes it from the end.
        begin = tf.minimum(self._begin, self._total - self._rows) * times
        numbers = draw(tf.concat([[self._total * times], tf.cast(shape[1:], tf.int32)], 0))
        rows = numbers[begin : begin + first]
        return tf.ensure_shape(rows, [tf.get_static_value(first), *rows.shape[1:]])


def _rows(tensor: Any) -> tf.Tensor:
    """The length of the first axis of a dense, ragged or sparse tensor, int32."""
    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.nrows(), tf.int32)
    return tf.cast(tensor.dense_shape[0], tf.int32) if isinstance(tensor, tf.SparseTensor) else tf.shape(tensor)[0]


class _Thread(threading.local):
    for_examples = False
    of_global_batch: _OfGlobalBatch | None = None


_thread = _Thread()


@contextlib.contextmanager
def of_global_batch(data: Any, unseeded: Any) -> Iterator[_OfGlobalBatch]:
    """In a step on `data` that runs in this context each example gets the random numbers of one device."""
    before, _thread.of_global_batch = _thread.of_global_batch, _OfGlobalBatch(data, unseeded)
    try:
        yield _thread.of_global_batch
    finally:
        _thread.of_global_batch = before


def is_of_global_batch() -> bool:
    """Whether the present code draws for the whole global batch."""
    return _thread.of_global_batch is not None


def drawn(draw: Callable[[Any], Any], shape: Any) -> Any:
    """The random numbers `draw(shape)`, drawn for the replica that runs the code, or for the global batch."""
    of_global_batch = _thread.of_global_batch
    if of_global_batch is not None and is_for_examples(of_global_batch.examples, shape):
        return of_global_batch.draw(draw, shape if tf.is_tensor(shape) or hasattr(shape, "__iter__") else [shape])
    return drawn_for(lambda: draw(shape), shape)


def drawn_for(draw: Callable[[], Any], shape: Any) -> Any:
    """The result of `draw()`, which draws random numbers of this `shape`, for the replica that runs the code."""
    replica = replica_context.current()
    if replica is None:
        return draw()
    before, _thread.for_examples = _thread.for_examples, is_for_examples(replica.examples, shape)
    try:
        return draw()
    finally:
        _thread.for_examples = before


def mask_shape(inputs: Any, noise_shape: Any) -> list[Any]:
    """The shape of dropout's mask for `inputs`, from its argument `noise_shape`."""
    sizes = [tf.shape(inputs)[axis] if size is None else size for axis, size in enumerate(inputs.shape)]
    return sizes if noise_shape is None else [s if n is None else n for s, n in zip(sizes, noise_shape, strict=True)]


def is_for_examples(examples: int | None, shape: Any) -> bool:
    """Whether numbers of this `shape` are drawn per example, where there are `examples`; `None` if that varies."""
    sizes = tf.get_static_value(shape) if tf.is_tensor(shape) else shape
    if sizes is None:
        return True
    first = next(iter(sizes), 1) if hasattr(sizes, "__iter__") else sizes
    first = tf.get_static_value(first) if tf.is_tensor(first) else first
    return first is None or int(first) == examples


_of_strategies: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def unseeded_of(strategy: Strategy) -> Any:
    """The seed generator for Keras' random functions that are given no seed, the same on all replicas of `strategy`.

    Keras' own generator is made at its first use, which is not possible in a graph, and once per thread.
    """
    if strategy not in _of_strategies:
        with tf.init_scope(), strategy.scope():
            _of_strategies[strategy] = keras_internals.seed_generator(None if strategy.alone else strategy.seed)
    return _of_strategies[strategy]


def unseeded(replica: Replica | None) -> Any:
    """The seed generator for a draw that is given no seed; `None` for Keras' own."""
    if _thread.of_global_batch is not None:
        return _thread.of_global_batch.unseeded
    return None if replica is None else replica.unseeded


def of_keras(replica: Replica, seed: tf.Tensor) -> tf.Tensor:
    """The seed, integers `[2]`, of a draw by a function of Keras on this replica."""
    if not _thread.for_examples or replica.index == 0:
        return seed
    return seed + tf.constant([replica.index * SEEDS_APART, 0], seed.dtype)


def of_operation(seeds: tuple[int | None, int | None], given: int | None) -> tuple[int | None, int | None]:
    """The seeds of the graph and of the operation for a stateful random operation of TensorFlow on this replica.

    Args:
        seeds: the two seeds that TensorFlow would use.
        given: the seed that the user has given for the operation.
    """
    if (verified := _thread.of_global_batch) is not None:
        verified.draws += 1
        return _UNSEEDED if seeds[0] is None else seeds[0], verified.draws if given is None else given
    replica = replica_context.current()
    if replica is None:
        return seeds
    of_graph, of_op = seeds
    if _thread.for_examples:
        return of_graph, of_op if of_op is None else (of_op + replica.index * SEEDS_APART) % (1 << 31)
    # TensorFlow derives the operation's seed from its number in the graph, which several replicas may share.
    replica.draws += 1
    return of_graph if of_graph is not None else _UNSEEDED, given if given is not None else replica.draws
