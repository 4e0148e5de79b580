"""A step on one replica among several, such that all of them together do what one would do on the global batch.

on the part of each replica:  step(part)
├─ a tape's gradient          tfdist.core.gradient_tape: added up over the replicas at once
├─ an assignment              tfdist.core.assignments: agreed on when somebody could tell
├─ a loss, a metric           tfdist.core.metrics, tfdist.internals.keras: of the global batch
├─ a random number            tfdist.core.randomness: of an example, or alike on all replicas
└─ gather, all_reduce         tfdist.core.replica_context: what the step itself asks of the others
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfdist.core import assignments, gradient_tape, keras_steps, randomness, replica_context
from tfdist.core.replica import Replica
from tfdist.internals import tensorflow_patches


def exactly(replica: Replica, model: Any, step: Callable[[Any], Any]) -> tuple[Any, set[int]]:
    """`step(data)` on one replica, such that all replicas together do what one would do on the global batch.

    Also returns which metrics' variables the step has updated, by their `id`.
    """
    if replica.alone:
        return step(replica.part), set()
    replica.updates = assignments.Updates(replica, model.metrics_variables)
    return in_step(replica, step), replica.updates.metrics_updated


def in_step(replica: Replica, step: Callable[[Any], Any]) -> Any:
    """What `step` returns on a replica whose `updates` catch what it assigns."""
    install()
    with replica_context.on_replica(replica):
        with replica.updates:
            logs = step(replica.part)
        replica.updates.write()
    return logs


@functools.cache
def install() -> None:
    """Has Keras and TensorFlow ask, from here on, whether code runs in the step of one replica among several."""
    keras_steps.install()
    tensorflow_patches.around_gradients(gradient_tape.of_global_batch)
    tensorflow_patches.around_assignments(assignments.of_tf_variable)
    tensorflow_patches.around_draws(randomness.drawn, randomness.of_operation)
    # Replicas that meet in a function inside their graph would wait for each other's trace; and what a function keeps
    # of a step that is only compared would be there in those that train.
    tensorflow_patches.around_functions(lambda: replica_context.current() is not None or randomness.is_alike())
