"""A step on one replica among several, such that all of them together do what one would do on the global batch.

on the part of each replica:  step(part)
├─ a tape's gradient          tfdist.gradients: added up over the replicas at once
├─ an assignment              tfdist.updates: agreed on when somebody could tell
├─ a loss, a metric           tfdist.whole_batch, tfdist.keras_internals: of the global batch
├─ a random number            tfdist.randomness: of an example, or alike on all replicas
└─ gather, all_reduce         tfdist.collectives: what the step itself asks of the others
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfdist import collectives, gradients, keras_internals, randomness, tensorflow_internals, updates
from tfdist.strategies.base import Replica


def exactly(replica: Replica, model: Any, step: Callable[[Any], Any]) -> tuple[Any, set[int]]:
    """`step(data)` on one replica, such that all replicas together do what one would do on the global batch.

    Also returns which metrics' variables the step has updated, by their `id`.
    """
    if replica.alone:
        return step(replica.part), set()
    replica.updates = updates.Updates(replica, model.metrics_variables)
    return in_step(replica, step), replica.updates.metrics_updated


def in_step(replica: Replica, step: Callable[[Any], Any]) -> Any:
    """What `step` returns on a replica whose `updates` catch what it assigns."""
    install()
    with collectives.on_replica(replica):
        with replica.updates:
            logs = step(replica.part)
        replica.updates.write()
    return logs


@functools.cache
def install() -> None:
    """Has Keras and TensorFlow ask, from here on, whether code runs in the step of one replica among several."""
    keras_internals.install()
    tensorflow_internals.around_gradients(gradients.of_global_batch)
    tensorflow_internals.around_assignments(updates.of_tf_variable)
    tensorflow_internals.around_draws(randomness.drawn, randomness.of_operation)
    # Replicas that meet in a function inside their graph would wait for each other's trace; and what a function keeps
    # of a step that is only compared would be there in those that train.
    tensorflow_internals.around_functions(lambda: collectives.current() is not None or randomness.is_alike())
