"""What the replicas of a `tf.distribute.Strategy` return, and which replica is traced."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def local_results(strategy: tf.distribute.Strategy, results: Any) -> list[Any]:
    """The results of `strategy.run`, as one structure per replica of this process."""
    count = len(strategy.extended.worker_devices)
    flat = [strategy.experimental_local_results(result) for result in tf.nest.flatten(results)]
    flat = [values if len(values) == count else values * count for values in flat]  # one tensor is that of all replicas
    return [tf.nest.pack_sequence_as(results, [values[index] for values in flat]) for index in range(count)]


def current_index() -> int:
    """The number of the replica that is being traced, inside `tf.distribute.Strategy.run`."""
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
