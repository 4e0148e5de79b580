"""Functions of a step that each replica calls on its own part, though they compute of several examples together.

So a batch normalization can have the statistics of each replica's examples, as an option: it is the only part of a
step that is not that of one device.

    moments(x)                      the mean over the replicas of the moments of their parts
    normalized(x, gamma, beta)      each part normalized by its own moments
    gradient(x, gamma, upstream)    of each part; the sums over the replicas for gamma and beta
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.spmd.rules import Local

PREFIX = "tfdist_per_replica_"  # of their names
_LOCAL = {
    "moments": Local([0], ["sum", "sum"], mean=True),
    "normalized": Local([0, None, None], [0]),
    "gradient": Local([0, None, 0], [0, "sum", "sum"]),
}


def local(operation: tf.Operation) -> Local | None:
    """How such a call is computed on parts along the first axis; `None` for all other operations."""
    if operation.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return None
    called = operation.get_attr("f").name
    return next((how for name, how in _LOCAL.items() if f"{PREFIX}{name}_" in called), None)
