"""What the engines share that exchange NumPy arrays: MPI through mpi4py, and sockets.

They match exchanges by their order, so the exchanges of a graph run in the order in which they were traced.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfdist.groups import ProcessGroup, opaque
from tfdist.groups.exchanged import Exchanged
from tfdist.groups.sockets import messages
from tfdist.internals import tensorflow_graphs
from tfdist.profiling import breakdown


class ArrayGroup(ProcessGroup):
    """A process group whose exchanges are functions of arrays."""

    in_order: ClassVar[bool] = True

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._begun = self._ended = 0
        self._exchanged = Exchanged(0, 0.0, 0, 0)
        self.mailbox = messages.Mailbox()

    def counts(self) -> tuple[int, int]:
        return self._begun, self._ended

    def exchanged(self) -> Exchanged:
        return self._exchanged

    @contextlib.contextmanager
    def counted(self, sent_bytes: int = 0) -> Iterator[Callable[[int], None]]:
        """The context of an exchange, in which it says how many bytes it has received.

        Exchanges run one at a time; one that is a part of another is not counted in `exchanged`.
        """
        whole, received_bytes, began = self._begun == self._ended, 0, time.perf_counter()

        def receive(count: int) -> None:
            nonlocal received_bytes
            received_bytes += count

        self._begun += 1
        try:
            yield receive
        finally:
            self._ended += 1
            if whole:
                seconds = time.perf_counter() - began
                before = self._exchanged
                self._exchanged = Exchanged(
                    before.exchanges + 1,
                    before.exchange_seconds + seconds,
                    before.sent_bytes + sent_bytes,
                    before.received_bytes + received_bytes,
                )

    def _send(self, array: Any, to: int, tag: int) -> None:
        values = messages.sendable(array)
        with self.counted(values.nbytes):
            self._post(values, to, tag)

    def _receive(self, from_: int, tag: int) -> np.ndarray:
        with self.counted() as received:
            self._await_message(from_, tag)
            values = self.mailbox.take(from_, tag)
            received(values.nbytes)
        return values

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
            with self.counted(values.nbytes) as received:
                result = function(values)
                received(result.nbytes)
            return result

        if tf.executing_eagerly():
            return tf.convert_to_tensor(exchange(tensor.numpy()))
        with tf.device("CPU:0"), self._after_the_last() as note:
            result = tf.numpy_function(exchange, [tensor], tensor.dtype, name=breakdown.EXCHANGE)
            note(result.op)
        result.set_shape(shape)
        return result

    def send_in_graph(self, tensor: tf.Tensor, to: int, tag: Callable[[], int]) -> tf.Tensor:
        """Sends `tensor` to process `to` when the graph runs, with the tag that `tag()` then returns.

        Unlike collective operations it waits for no earlier exchange: the caller orders it, see `order_messages`.

        Returns:
            An int32 scalar, once the tensor may change.
        """

        def post(values: np.ndarray, after: np.ndarray) -> np.ndarray:
            self.send(values, to, tag())
            return after

        return self._message(post, [opaque(tensor)], [tf.TensorSpec([], tf.int32)])[-1]

    def receive_in_graph(self, spec: tf.TensorSpec, from_: int, tag: Callable[[], int]) -> tuple[tf.Tensor, tf.Tensor]:
        """What process `from_` sends by `send_in_graph` with the same tag, and an int32 scalar to order it by."""

        def take(after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return self.receive(from_, tag()), after

        received, done = self._message(take, [], [spec, tf.TensorSpec([], tf.int32)])
        return received, done

    def _message(
        self, function: Callable[..., Any], inputs: list[Any], specs: Sequence[tf.TensorSpec]
    ) -> list[tf.Tensor]:
        # TensorFlow runs stateful operations in the order in which they were traced, so it is none. And it may drop a
        # control dependency on one that is not, so that the order is one of data.
        with tf.device("CPU:0"):
            found = tf.numpy_function(
                function,
                [*inputs, opaque(tf.constant(0))],
                [spec.dtype for spec in specs],
                stateful=False,
                name=breakdown.MESSAGE,
            )
        for tensor, spec in zip(found, specs, strict=True):
            tensor.set_shape(spec.shape)
        return list(found)

    def begin_messages(self) -> tf.Tensor:
        """An int32 scalar after which the messages come that are traced next, see `order_messages`."""
        # A stateful operation, so that a loop runs it each time, and not once.
        return self._call(lambda values: values, tf.constant(0), [])

    def order_messages(self, begin: tf.Tensor, done: Sequence[tf.Tensor]) -> None:
        """Has the present graph run messages one after the other, and later exchanges after them.

        Args:
            begin: of `begin_messages`, traced before them.
            done: the scalars that `send_in_graph` and `receive_in_graph` have returned.
        """
        for before, after in itertools.pairwise([begin, *done]):
            tensorflow_graphs.set_input(after.op, -1, before)
        if done:
            self._call(lambda values: values, done[-1], [])

    def around_branches(self) -> contextlib.AbstractContextManager[None]:
        last = self._last.get(tf.compat.v1.get_default_graph()) if not tf.executing_eagerly() else None
        return contextlib.nullcontext() if last is None else tf.control_dependencies([last])

    def note_branches(self, result: tf.Tensor) -> None:
        if not tf.executing_eagerly():
            self._last[tf.compat.v1.get_default_graph()] = result.op

    @contextlib.contextmanager
    def _after_the_last(self) -> Iterator[Callable[[Any], None]]:
        graph = tf.compat.v1.get_default_graph()
        before = self._last.get(graph)
        with tf.control_dependencies([] if before is None else [before]):
            yield lambda operation: self._last.__setitem__(graph, operation)
