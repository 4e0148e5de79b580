"""The common base of the engines that exchange NumPy arrays: MPI through mpi4py, and sockets.

These engines match exchanges by their order, so the exchanges of a graph run in the order in which they were traced.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.groups import ExchangeTotals, ProcessGroup, opaque
from tfdist.groups.sockets import messages
from tfdist.internals import tensorflow_graphs
from tfdist.profiling import breakdown


class ArrayGroup(ProcessGroup):
    """A process group whose exchanges are functions of arrays."""

    def __init__(self) -> None:
        self._last_exchanges: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by graph
        self._begun = self._ended = 0
        self._totals = ExchangeTotals(0, 0.0, 0, 0)
        self.mailbox = messages.Mailbox()

    def counts(self) -> tuple[int, int]:
        return self._begun, self._ended

    def exchanged(self) -> ExchangeTotals:
        return self._totals

    @contextlib.contextmanager
    def counted(self, sent_bytes: int = 0) -> Iterator[Callable[[int], None]]:
        """The context of an exchange, which calls the function with the number of bytes that it has received.

        Exchanges run one at a time; an exchange that is a part of another one is not counted in `exchanged`.
        """
        is_outermost, received_bytes, began = self._begun == self._ended, 0, time.perf_counter()

        def receive(count: int) -> None:
            nonlocal received_bytes
            received_bytes += count

        self._begun += 1
        try:
            yield receive
        finally:
            self._ended += 1
            if is_outermost:
                totals = self._totals
                self._totals = ExchangeTotals(
                    totals.exchanges + 1,
                    totals.exchange_seconds + time.perf_counter() - began,
                    totals.sent_bytes + sent_bytes,
                    totals.received_bytes + received_bytes,
                )

    def send(self, array: Any, to: int, tag: int = 0) -> None:
        self._check_rank("to", to)
        values = messages.sendable(array)
        with self.counted(values.nbytes):
            self._post(values, to, tag)

    def receive(self, from_: int, tag: int = 0) -> np.ndarray:
        self._check_rank("from_", from_)
        with self.counted() as received:
            self._await_message(from_, tag)
            values = self.mailbox.take(from_, tag)
            received(values.nbytes)
        return values

    def probe(self, tag: int = 0) -> list[int]:
        self._take_in()
        return self.mailbox.senders(tag)

    def _post(self, values: np.ndarray, to: int, tag: int) -> None:
        """Sends a message; messages that arrive in the meantime go to the mailbox."""
        raise NotImplementedError

    def _await_message(self, rank: int, tag: int) -> None:
        """Puts arriving messages into the mailbox until it has one from `rank` with `tag`."""
        raise NotImplementedError

    def _take_in(self) -> None:
        """Puts the messages that have arrived into the mailbox."""
        raise NotImplementedError

    def _call(self, function: Callable[[np.ndarray], np.ndarray], tensor: tf.Tensor, shape: Any) -> tf.Tensor:
        """Applies `function`, which must not change its argument, to `tensor` after all earlier exchanges.

        The result has the static shape `shape`.
        """

        def exchange(values: np.ndarray) -> np.ndarray:
            with self.counted(values.nbytes) as received:
                result = function(values)
                received(result.nbytes)
            return result

        if tf.executing_eagerly():
            return tf.convert_to_tensor(exchange(tensor.numpy()))
        graph = tf.compat.v1.get_default_graph()
        previous = self._last_exchanges.get(graph)
        with tf.device("CPU:0"), tf.control_dependencies([] if previous is None else [previous]):
            result = tf.numpy_function(exchange, [tensor], tensor.dtype, name=breakdown.EXCHANGE)
            self._last_exchanges[graph] = result.op
        result.set_shape(shape)
        return result

    def send_in_graph(self, tensor: tf.Tensor, to: int, tag: Callable[[], int]) -> tf.Tensor:
        """Sends `tensor` to process `to` when the graph runs, with the tag that `tag()` then returns.

        Unlike a collective operation, it waits for no earlier exchange: the caller orders messages by `order_messages`.

        Returns:
            An int32 scalar, which is available once the tensor may change.
        """

        def post(values: np.ndarray, after: np.ndarray) -> np.ndarray:
            self.send(values, to, tag())
            return after

        return self._message(post, [opaque(tensor)], [tf.TensorSpec([], tf.int32)])[-1]

    def receive_in_graph(self, spec: tf.TensorSpec, from_: int, tag: Callable[[], int]) -> tuple[tf.Tensor, tf.Tensor]:
        """The tensor that `from_` sends by `send_in_graph` with the same tag, and an int32 scalar for ordering."""

        def take(after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return self.receive(from_, tag()), after

        received, done = self._message(take, [], [spec, tf.TensorSpec([], tf.int32)])
        return received, done

    def _message(
        self, function: Callable[..., Any], inputs: list[Any], specs: Sequence[tf.TensorSpec]
    ) -> list[tf.Tensor]:
        # TensorFlow runs stateful operations in the order in which they were traced, so this one is stateless. Since
        # TensorFlow may drop a control dependency on a stateless operation, data dependencies order the messages.
        with tf.device("CPU:0"):
            results = tf.numpy_function(
                function,
                [*inputs, opaque(tf.constant(0))],
                [spec.dtype for spec in specs],
                stateful=False,
                name=breakdown.MESSAGE,
            )
        for tensor, spec in zip(results, specs, strict=True):
            tensor.set_shape(spec.shape)
        return list(results)

    def begin_messages(self) -> tf.Tensor:
        """An int32 scalar that precedes the messages that are traced next, see `order_messages`."""
        # A stateful operation, so that a loop runs it in each iteration, and not once.
        return self._call(lambda values: values, tf.constant(0), [])

    def order_messages(self, begin: tf.Tensor, done: Sequence[tf.Tensor]) -> None:
        """Makes the current graph run messages one after the other, and later exchanges after them.

        Args:
            begin: the scalar of `begin_messages`, which was traced before the messages.
            done: the scalars that `send_in_graph` and `receive_in_graph` have returned.
        """
        for before, after in itertools.pairwise([begin, *done]):
            tensorflow_graphs.set_input(after.op, -1, before)
        if done:
            self._call(lambda values: values, done[-1], [])

    def around_branches(self) -> contextlib.AbstractContextManager[None]:
        last = self._last_exchanges.get(tf.compat.v1.get_default_graph()) if not tf.executing_eagerly() else None
        return contextlib.nullcontext() if last is None else tf.control_dependencies([last])

    def note_branches(self, result: tf.Tensor) -> None:
        if not tf.executing_eagerly():
            self._last_exchanges[tf.compat.v1.get_default_graph()] = result.op
