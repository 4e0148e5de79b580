"""The replica that computes a worker's step while other workers update the same variables."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_patches
from tfdist.internals.keras import tf_variable
from tfdist.parameter_server import sharded_variable


class ClosureReplica:
    """Computes a worker's step on a whole batch; the variables are in this process or on parameter servers.

    Args:
        scope: the context in which an optimizer creates its variables at its first update.
    """

    def __init__(self, scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext):
        self._scope = scope
        self._counter_device: str | None = None  # the device that counts the steps, usually of a server
        self._gradients_done: list[Any] = []  # operations that end when the gradients are computed

    @contextlib.contextmanager
    def updating(self, model: Any) -> Iterator[None]:
        """The context of the step, in which the optimizers of `model` apply gradients with `update`."""
        with contextlib.ExitStack() as stack:
            for optimizer in keras_internals.optimizers(model):
                keras_patches.require_reduced_once(optimizer)
                update = functools.partial(self.update, optimizer)
                stack.enter_context(keras_patches.applying_with(optimizer, update))
            yield

    def update(
        self, optimizer: Any, apply: Callable[..., None], gradients: Sequence[Any], variables: Sequence[Any] | None
    ) -> None:
        """Updates `variables` with Keras' own `apply(gradients, variables)`; `None` means all of the `optimizer`'s."""
        if not optimizer.built and variables is not None:
            with tf.init_scope(), self._scope():
                optimizer.build(list(variables))
        # Without this dependency the servers would count the step as it begins, since nothing else delays the count.
        self._gradients_done = [tf.group(*_known_tensors(gradients))]
        # An update reads other variables besides the gradients, all of them on the servers. On a server's device they
        # need not travel to the worker and back.
        with tf.device(self._counter_device), sharded_variable.by_part(optimizer):
            apply(gradients, variables)

    @contextlib.contextmanager
    def measuring_staleness(self, optimizer: Any) -> Iterator[Callable[[], tf.Tensor]]:
        """Measures the staleness: the updates by others between this step's reads of variables and its own update.

        Yields a function to call at the end of the step, which returns the staleness as an int32 scalar. The count of
        updates is read at the start of the step, concurrently with the variables: waiting for it would cost a third of
        a small step.
        """
        if optimizer is None:
            yield lambda: tf.constant(0)
            return
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        counter = tf_variable(keras_internals.iterations(inner))
        counts: list[tf.Tensor] = []

        def count(variable: Any) -> None:
            with tf.control_dependencies(self._gradients_done):
                counts.append(tf.convert_to_tensor(variable.assign_add(1, read_value=True)))

        def staleness() -> tf.Tensor:
            with tf.device(self._counter_device):
                # A count inside a conditional, as with loss scaling, is out of reach: read it again, a little later.
                in_graph = counts and counts[-1].graph is count_at_start.graph
                count_at_update = counts[-1] if in_graph else counter.read_value()
                return tf.maximum(tf.cast(count_at_update - count_at_start, tf.int32) - 1, 0)

        self._counter_device = counter.device
        with tf.device(self._counter_device):
            count_at_start = tf.identity(counter.read_value())
        with keras_patches.counting(inner, count):
            yield staleness


class LockingReplica(ClosureReplica):
    """Computes a thread's step on a whole batch.

    Args:
        mutex: the handle of a mutex that is locked during an update; `None` for updates without a lock.
    """

    def __init__(self, mutex: tf.Tensor | None):
        super().__init__()
        self._mutex = mutex

    def update(self, optimizer: Any, apply: Callable[..., None], gradients: Sequence[Any], variables: Any) -> None:
        if self._mutex is None:
            super().update(optimizer, apply, gradients, variables)
            return
        graph = tf.compat.v1.get_default_graph()
        with tf.control_dependencies(_known_tensors(gradients)):
            lock = tf.raw_ops.MutexLock(mutex=self._mutex)
        first = len(graph.get_operations())
        with tf.control_dependencies([lock]):
            super().update(optimizer, apply, gradients, variables)
        updates = [operation for operation in graph.get_operations()[first:] if operation.op_def.is_stateful]
        with tf.control_dependencies(updates):
            tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)


def _known_tensors(gradients: Sequence[Any]) -> list[tf.Tensor]:
    known = [gradient for gradient in gradients if gradient is not None]
    flat: list[tf.Tensor] = tf.nest.flatten(known, expand_composites=True)
    return flat
