"""Ends the collective operations of this process when one of them has waited too long for other processes.

TensorFlow's own timeout of a collective keeps a thread for all of its length, however soon the collective has ended
(`timeout_seconds` in the documentation of `tf.distribute.experimental.CommunicationOptions`). A thousand collectives a
second that may wait a minute need 60,000 threads, more than a process can have. Here one thread looks on at all.

Synopsis:

    watch = Watch(seconds=60.0, abort=tensorflow_internals.abort_collectives)
    tensorflow_internals.around_collectives(watch.around)
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

LOOKS = 20  # at least, before a collective has waited too long
LONGEST_SECONDS_BETWEEN_LOOKS = 1.0


class Watch:
    """Counts the collectives that began and those that ended, and calls `abort` once nothing moves.

    Args:
        seconds: how long collectives may be under way while none begins or ends.
        abort: what ends them, given a reason.
    """

    def __init__(self, seconds: float, abort: Callable[[str], None]):
        self._seconds = seconds
        self._abort = abort
        self._between_looks = min(seconds / LOOKS, LONGEST_SECONDS_BETWEEN_LOOKS)
        with tf.device("CPU:0"):
            self._begun = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._ended = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="tfdist-waiting", daemon=True)
        self._thread.start()
        # A thread must not read TensorFlow's variables while TensorFlow is taken down.
        atexit.register(self.close)

    def around(self, make: Callable[[], tf.Tensor], inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """What the collective that `make` adds to the graph, or runs at once, gives; it waits for others, not `inputs`.

        The collective begins when its inputs are there: the time to compute them is not spent waiting.
        """
        with tf.control_dependencies(inputs):
            begun = self._count(self._begun)
        with tf.control_dependencies([begun]):
            result = make()
        with tf.control_dependencies([result]):
            self._count(self._ended)
        return result

    def close(self) -> None:
        """Looks no more."""
        self._closed.set()
        self._thread.join()

    def _count(self, variable: tf.Variable) -> Any:
        with tf.device(variable.device):  # and not that of the collective
            return variable.assign_add(1, read_value=False)

    def _look_on(self) -> None:
        # Looks are counted, and not the time: a process that was stopped itself has not waited meanwhile.
        before, looks = (0, 0), 0
        while not self._closed.wait(self._between_looks):
            now = int(self._ended.numpy()), int(self._begun.numpy())
            looks = looks + 1 if now == before and now[0] < now[1] else 0
            before = now
            if looks * self._between_looks >= self._seconds:
                self._abort(f"a collective operation has waited {self._seconds:g} s for the other processes")
                return
