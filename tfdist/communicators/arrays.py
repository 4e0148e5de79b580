"""What the engines share that exchange NumPy arrays: MPI by mpi4py, and sockets.

They pair exchanges by their order, so that a graph keeps them in the order in which they were traced.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfdist.communicators import Communicator


class ArrayCommunicator(Communicator):
    """A communicator whose exchanges are functions of arrays."""

    in_order: ClassVar[bool] = True

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def _call(self, function: Callable[[np.ndarray], np.ndarray], tensor: tf.Tensor, shape: Any) -> tf.Tensor:
        """`function` of the array of `tensor`, which it leaves as it is, after all that came before; of `shape`."""
        if tf.executing_eagerly():
            return tf.convert_to_tensor(function(tensor.numpy()))
        with tf.device("CPU:0"), self._after_the_last() as note:
            result = tf.numpy_function(function, [tensor], tensor.dtype)
            note(result.op)
        result.set_shape(shape)
        return result

    @contextlib.contextmanager
    def _after_the_last(self) -> Iterator[Callable[[Any], None]]:
        graph = tf.compat.v1.get_default_graph()
        before = self._last.get(graph)
        with tf.control_dependencies([] if before is None else [before]):
            yield lambda operation: self._last.__setitem__(graph, operation)
