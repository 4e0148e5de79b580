"""Random numbers inside a step: what is drawn for examples differs from replica to replica; all else is alike.

One device draws a mask for each example of the global batch, and one noise for a weight. So a draw whose first axis is
that of the replica's examples gets a seed of the replica's own, and any other draw the same seed on all replicas. On
the first replica seeds stay what they are. The same seeds and the same number of replicas give the same numbers.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist import collectives

if TYPE_CHECKING:
    from tfdist.strategies.base import Replica

# A prime that is far from what layers add to their seeds.
SEEDS_APART = 15_485_863
# For operations alike on all replicas of a process whose user has set no seed.
_UNSEEDED = secrets.randbits(31)


class _Thread(threading.local):
    for_examples = False


_thread = _Thread()


@contextlib.contextmanager
def drawing(shape: Any) -> Iterator[None]:
    """The context in which random numbers of this `shape` are drawn."""
    replica = collectives.current()
    before, _thread.for_examples = _thread.for_examples, replica is not None and _is_for_examples(replica, shape)
    try:
        yield
    finally:
        _thread.for_examples = before


def _is_for_examples(replica: Replica, shape: Any) -> bool:
    sizes = tf.get_static_value(shape) if tf.is_tensor(shape) else shape
    if sizes is None:
        return True
    first = next(iter(sizes), 1) if hasattr(sizes, "__iter__") else sizes
    first = tf.get_static_value(first) if tf.is_tensor(first) else first
    return first is None or int(first) == replica.examples


def of_keras(replica: Replica, seed: tf.Tensor) -> tf.Tensor:
    """The seed of a draw of Keras, integers `[2]`, on this replica."""
    if not _thread.for_examples or replica.index == 0:
        return seed
    return seed + tf.constant([replica.index * SEEDS_APART, 0], seed.dtype)


def of_operation(seeds: tuple[int | None, int | None], given: int | None) -> tuple[int | None, int | None]:
    """The seeds of a stateful operation of TensorFlow, of its graph and its own, on this replica.

    Args:
        seeds: what TensorFlow would take.
        given: what the user has given for the operation.
    """
    replica = collectives.current()
    if replica is None:
        return seeds
    of_graph, of_op = seeds
    if _thread.for_examples:
        return of_graph, of_op if of_op is None else (of_op + replica.index * SEEDS_APART) % (1 << 31)
    # TensorFlow numbers operations within a graph, which several replicas may share.
    replica.draws += 1
    return of_graph if of_graph is not None else _UNSEEDED, given if given is not None else replica.draws
