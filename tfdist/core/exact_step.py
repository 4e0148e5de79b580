"""A step on one of several replicas, such that all replicas together compute what one device computes.

on the part of each replica:  step(part)
├─ a tape's gradient          tfdist.core.gradient_tape: summed over the replicas at once
├─ an assignment              tfdist.core.assignments: made equal on all replicas before it can be read
├─ a loss, a metric           tfdist.core.keras_steps, tfdist.core.metrics: of the global batch
├─ any other value            tfdist.core.contributions: a mean, a sum, or computed of several examples together
├─ a random number            tfdist.core.randomness: per example, or the same on all replicas
└─ gather, all_reduce         tfdist.core.replica_context: exchanges that the step itself asks for
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfdist.core import assignments, gradient_tape, keras_steps, randomness, replica_context
from tfdist.core.replica import Replica
from tfdist.internals import tensorflow_patches


def exactly(replica: Replica, model: Any, step: Callable[[Any], Any]) -> tuple[Any, set[int]]:
    """Runs `step` on the replica's part, such that all replicas together compute what one device computes.

    Returns:
        The result of the step, and the `id`s of the metrics' variables that it has updated.
    """
    if replica.alone:
        with keras_steps.on_part(replica):
            return step(replica.part), set()
    replica.updates = assignments.Updates(replica, model.metrics_variables)
    install()
    with replica_context.on_replica(replica):
        with replica.updates:
            logs = step(replica.part)
        replica.updates.write()
    return logs, replica.updates.metrics_updated


@functools.cache
def install() -> None:
    """Installs, once, the functions that Keras and TensorFlow call in the step of one of several replicas."""
    keras_steps.install()
    tensorflow_patches.around_gradients(gradient_tape.of_global_batch)
    tensorflow_patches.around_assignments(assignments.of_tf_variable)
    tensorflow_patches.around_draws(randomness.drawn, randomness.of_operation)
    # A `tf.function` inside a step is called without a graph of its own: replicas that exchange tensors in it would
    # wait for each other's trace, and a graph that it kept from a verification would be used in the training.
    tensorflow_patches.around_functions(
        lambda: replica_context.current() is not None or randomness.is_of_global_batch()
    )
