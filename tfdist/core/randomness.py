"""Random numbers inside a step: draws per example differ between replicas, all other draws are the same.

One device draws a mask for each example of the global batch, and one noise for a weight. So a draw whose first axis is
the axis of examples gets a seed of the replica's own, and any other draw gets the same seed on all replicas. On the
first replica seeds are unchanged. The same seeds and the same number of replicas give the same numbers.

To compare steps of one replica and of several (`tfdist.core.verification`), all examples can be given the same numbers
instead: one draw, repeated for each example.
"""

from __future__ import annotations

import contextlib
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


class _Alike:
    """The state of a step that gives all examples the same random numbers.

    Attributes:
        examples: the number of examples of the step; `None` where it varies.
        unseeded: the seed generator for draws that are given no seed.
        draws: the number of draws by TensorFlow's operations so far.
    """

    def __init__(self, examples: int | None, unseeded: Any):
        self.examples = examples
        self.unseeded = unseeded
        self.draws = 0


class _Thread(threading.local):
    for_examples = False
    alike: _Alike | None = None


_thread = _Thread()


@contextlib.contextmanager
def alike_for_all_examples(examples: int | None, unseeded: Any) -> Iterator[_Alike]:
    """In a step that runs in this context all examples get the same random numbers, on all replicas."""
    before, _thread.alike = _thread.alike, _Alike(examples, unseeded)
    try:
        yield _thread.alike
    finally:
        _thread.alike = before


def is_alike() -> bool:
    """Whether the present code draws the same numbers for all examples."""
    return _thread.alike is not None


def drawn(draw: Callable[[Any], Any], shape: Any) -> Any:
    """The random numbers `draw(shape)`, drawn for the replica that runs the code, or once for all examples."""
    if _thread.alike is not None and is_for_examples(_thread.alike.examples, shape):
        if not tf.is_tensor(shape) and not hasattr(shape, "__iter__"):
            shape = [shape]
        count, rest = shape[0], shape[1:]
        return tf.repeat(draw(tf.concat([[1], rest], 0) if tf.is_tensor(shape) else [1, *rest]), count, axis=0)
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


def noise_shape(inputs: Any, shape: Any) -> Any:
    """The shape of dropout's mask for `inputs`, from its argument `noise_shape`."""
    sizes = [tf.shape(inputs)[axis] if size is None else size for axis, size in enumerate(inputs.shape)]
    wanted = sizes if shape is None else [s if w is None else w for s, w in zip(sizes, shape, strict=True)]
    if _thread.alike is not None and is_for_examples(_thread.alike.examples, wanted):
        return [1, *wanted[1:]]
    return shape


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
    if _thread.alike is not None:
        return _thread.alike.unseeded
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
    if _thread.alike is not None:
        _thread.alike.draws += 1
        return _UNSEEDED if seeds[0] is None else seeds[0], _thread.alike.draws if given is None else given
    replica = replica_context.current()
    if replica is None:
        return seeds
    of_graph, of_op = seeds
    if _thread.for_examples:
        return of_graph, of_op if of_op is None else (of_op + replica.index * SEEDS_APART) % (1 << 31)
    # TensorFlow derives the operation's seed from its number in the graph, which several replicas may share.
    replica.draws += 1
    return of_graph if of_graph is not None else _UNSEEDED, given if given is not None else replica.draws
