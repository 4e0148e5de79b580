"""What the engines share that exchange NumPy arrays: MPI through mpi4py, and sockets.

They match exchanges by their order, so the exchanges of a graph run in the order in which they were traced.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfdist.communicators import Communicator
from tfdist.transport import messages


class ArrayCommunicator(Communicator):
    """A communicator whose exchanges are functions of arrays."""

    in_order: ClassVar[bool] = True

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._begun = self._ended = 0
        self.mailbox = messages.Mailbox()

    def counts(self) -> tuple[int, int]:
        return self._begun, self._ended

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """The context of an exchange; exchanges run one at a time."""
        self._begun += 1
        try:
            yield
        finally:
            self._ended += 1

    def _send(self, array: Any, to: int, tag: int) -> None:
        values = messages.sendable(array)
        with self.counted():
            self._post(values, to, tag)

    def _receive(self, from_: int, tag: int) -> np.ndarray:
        with self.counted():
            self._await_message(from_, tag)
        return self.mailbox.take(from_, tag)

    def _probe(self, tag: int) -> list[int]:
        self._take_in()
        return self.mailbox.senders(tag)

    def _post(self, values: np.ndarray, to: int, tag: int) -> None:
        """Sends a message, and puts those that come meanwhile into the mailbox."""
        raise NotImplementedError

    def _await_message(self, rank: int, tag: int) -> None:
        """Puts the messages that come into the mailbox, until it has one from `rank` with `tag`."""
        raise NotImplementedError

    def _take_in(self) -> None:
        """Puts the messages that have come into the mailbox."""
        raise NotImplementedError

    def _call(self, function: Callable[[np.ndarray], np.ndarray], tensor: tf.Tensor, shape: Any) -> tf.Tensor:
        """Applies `function`, which does not change its argument, to `tensor` after all earlier exchanges.

        The result has the static shape `shape`.
        """

        def exchange(values: np.ndarray) -> np.ndarray:
            with self.counted():
                return function(values)

        if tf.executing_eagerly():
            return tf.convert_to_tensor(exchange(tensor.numpy()))
        with tf.device("CPU:0"), self._after_the_last() as note:
            result = tf.numpy_function(exchange, [tensor], tensor.dtype)
            note(result.op)
        result.set_shape(shape)
        return result

    def around_branches(self) -> contextlib.AbstractContextManager[None]:
        last = self._last.get(tf.compat.v1.get_default_graph()) if not tf.executing_eagerly() else None
        return contextlib.nullcontext() if last is None else tf.control_dependencies([last])

    @contextlib.contextmanager
    def _after_the_last(self) -> Iterator[Callable[[Any], None]]:
        graph = tf.compat.v1.get_default_graph()
        before = self._last.get(graph)
        with tf.control_dependencies([] if before is None else [before]):
            yield lambda operation: self._last.__setitem__(graph, operation)
