"""A step of a worker, while other workers update the same variables."""

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
    """A worker's step on a whole batch; the variables are in this process, or on parameter servers.

    Args:
        scope: the context in which an optimizer makes its variables at its first update.
    """

    def __init__(self, scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext):
        self._scope = scope
        self._home: str | None = None  # the device, mostly of a server, that counts the steps
        self._computed: list[Any] = []  # ends when the gradients are there

    @contextlib.contextmanager
    def updating(self, model: Any) -> Iterator[None]:
        """The context of the step, in which the optimizers of `model` apply gradients by `update`."""
        with contextlib.ExitStack() as stack:
            for optimizer in keras_internals.optimizers(model):
                keras_patches.require_reduced_once(optimizer)
                update = functools.partial(self.update, optimizer)
                stack.enter_context(keras_patches.applying_with(optimizer, update))
            yield

    def update(
        self, optimizer: Any, apply: Callable[..., None], gradients: Sequence[Any], variables: Sequence[Any] | None
    ) -> None:
        """Updates `variables` by `apply(gradients, variables)`, Keras' own; `None` is all of the `optimizer`."""
        if not optimizer.built and variables is not None:
            with tf.init_scope(), self._scope():
                optimizer.build(list(variables))
        # Without it the servers would count the step as it begins, since nothing else makes the count wait.
        known = [gradient for gradient in gradients if gradient is not None]
        self._computed = [tf.group(*tf.nest.flatten(known, expand_composites=True))]
        # An update reads more than the gradients, all of it from the servers; on a server it need not be sent to the
        # worker and back.
        with tf.device(self._home), sharded_variable.by_part(optimizer):
            apply(gradients, variables)

    @contextlib.contextmanager
    def measuring_staleness(self, optimizer: Any) -> Iterator[Callable[[], tf.Tensor]]:
        """Measures the staleness: the updates by others between the reads of variables here and `optimizer`'s update.

        Yields a function that returns it, an int32 scalar, to be called at the end. The count of updates is read as the
        step begins, together with the variables and not before them: waiting for it costs a third of a small step.
        """
        if optimizer is None:
            yield lambda: tf.constant(0)
            return
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        counter = tf_variable(keras_internals.iterations(inner))
        counted: list[tf.Tensor] = []

        def count(variable: Any) -> None:
            with tf.control_dependencies(self._computed):
                counted.append(tf.convert_to_tensor(variable.assign_add(1, read_value=True)))

        def staleness() -> tf.Tensor:
            with tf.device(self._home):
                # A count inside a condition, such as loss scaling's, is out of reach; it is read again, a little later.
                inside = counted and counted[-1].graph is read.graph
                written = counted[-1] if inside else counter.read_value()
                return tf.maximum(tf.cast(written - read, tf.int32) - 1, 0)

        self._home = counter.device
        with tf.device(self._home):
            read = tf.identity(counter.read_value())
        with keras_patches.counting(inner, count):
            yield staleness


class LockingReplica(ClosureReplica):
    """A thread's step on a whole batch.

    Args:
        mutex: a handle of what is locked during an update; `None` if nothing is.
    """

    def __init__(self, mutex: tf.Tensor | None):
        super().__init__()
        self._mutex = mutex

    def update(self, optimizer: Any, apply: Callable[..., None], gradients: Sequence[Any], variables: Any) -> None:
        if self._mutex is None:
            super().update(optimizer, apply, gradients, variables)
            return
        graph = tf.compat.v1.get_default_graph()
        known = [gradient for gradient in gradients if gradient is not None]
        with tf.control_dependencies(tf.nest.flatten(known, expand_composites=True)):
            lock = tf.raw_ops.MutexLock(mutex=self._mutex)
        before = len(graph.get_operations())
        with tf.control_dependencies([lock]):
            super().update(optimizer, apply, gradients, variables)
        updates = [operation for operation in graph.get_operations()[before:] if operation.op_def.is_stateful]
        with tf.control_dependencies(updates):
            tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
