"""The partitioner: turns the step of one device, traced once for the global batch, into that of N replicas.

Synopsis:

    >>> import tensorflow as tf
    >>> @tf.function(autograph=False)
    ... def step(x):  # as one device computes it
    ...     return tf.reduce_mean(tf.square(x - tf.reduce_mean(x)))
    >>> traced = step.get_concrete_function(tf.TensorSpec([3], tf.float32))
    >>> on_two = partitioned(traced, Mesh(["CPU:0", "CPU:0"]), rows=[2, 1])
    >>> round(float(on_two(tf.constant([1.0, 2.0, 6.0]))), 3)
    4.667
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.internals import tensorflow_graphs
from tfdist.spmd.cost import Cost
from tfdist.spmd.draws import Streams
from tfdist.spmd.meshes import Mesh, broadcast_by_gathering, gathered_by_rows, joined, reduced
from tfdist.spmd.partitioner import Partitioner
from tfdist.spmd.placements import REPLICATE, Partial, Placed, Shard
from tfdist.spmd.replica_variables import variables_needed_whole

__all__ = [
    "Cost",
    "Mesh",
    "Partial",
    "Placed",
    "Shard",
    "broadcast_by_gathering",
    "compute",
    "gathered_by_rows",
    "joined",
    "partitioned",
    "reduced",
    "replicated",
    "variables_needed_whole",
]


def replicated(tensors: Sequence[tf.Tensor], repeated: bool = False) -> Placed:
    """A replicated value from its copies on a mesh; `repeated` if it belongs to the batch."""
    return Placed(REPLICATE, tensors, repeated=repeated)


def compute(
    traced: Any,
    mesh: Mesh,
    batch: Sequence[Placed],
    rows: Sequence[int] | None,
    cost: Cost,
    streams: Streams | None = None,
    variables: Mapping[int, Placed] | None = None,
) -> Any:
    """Computes the step of one device on the replicas of a mesh, in the current graph.

    Args:
        traced: the step, a `tf.types.experimental.ConcreteFunction` for the global batch.
        mesh: the replicas.
        batch: the arguments of the step, flat.
        rows: the number of examples of each replica of the job; `None` if the batch is not sharded.
        cost: counts what is computed and exchanged.
        streams: the state of random operations, which the graphs of a step share; see `tfdist.spmd.draws`.
        variables: by the `id` of a captured handle, the handles of the variables that replace it, one per replica of
            this process; each variable has a term of the value or a shard of it; see
            `tfdist.spmd.replica_variables`.

    Returns:
        The results of the traced function, replicated; the first copy of this process.
    """
    mesh.compute()
    captured, _ = tensorflow_graphs.captured(traced.graph)
    variables = variables or {}
    captures = [variables.get(id(tensor)) or replicated(mesh.captured(tensor)) for tensor in captured]
    sharded = None if rows is None else (Shard.of_rows(rows), sum(rows))
    partitioner = Partitioner(mesh, sharded, cost, streams)
    outputs = partitioner.conversions.replicated(partitioner.run(traced.graph, [*batch, *captures]))
    mesh.computed()
    flat = iter([mesh.tensors(output)[0] for output in outputs])
    return tf.nest.map_structure(
        lambda output: None if output is None else next(flat), traced.structured_outputs, expand_composites=True
    )


def partitioned(traced: Any, mesh: Mesh, rows: Sequence[int], cost: Cost | None = None) -> Callable[..., Any]:
    """The step of one device as a function of the global batch, computed by replicas that have `rows` examples each.

    Tensors of the batch with `sum(rows)` examples are sharded; the others are replicated.
    """
    streams = Streams()
    shard, examples = Shard.of_rows(rows), sum(rows)

    def on_replicas(*batch: Any) -> Any:
        conversions = Partitioner(mesh, None).conversions

        def placed(tensor: Any) -> Placed:
            value = replicated([tf.convert_to_tensor(tensor)] * mesh.copies)
            shape = value.tensors[0].shape
            if not shape.rank or shape[0] != examples:
                return value
            return Placed(shard, conversions.placed(value, shard).tensors, replica=mesh.local[0])

        values = [placed(tensor) for tensor in tf.nest.flatten(batch, True)]
        return compute(traced, mesh, values, rows, cost or Cost(), streams)

    return tf.function(on_replicas, autograph=False)
