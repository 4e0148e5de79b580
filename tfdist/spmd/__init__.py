"""The partitioner: the step of one device, traced once for the global batch, as that of N replicas.

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

from tfdist.internals import tensorflow_functions
from tfdist.spmd.cost import Cost
from tfdist.spmd.divided import whole_ones
from tfdist.spmd.draws import Streams
from tfdist.spmd.meshes import Mesh, joined, joined_by_rows, of_one_process, reduced
from tfdist.spmd.partitioner import Partitioner
from tfdist.spmd.placements import REPLICATE, Partial, Placed, Shard

__all__ = [
    "Cost",
    "Mesh",
    "Partial",
    "Placed",
    "Shard",
    "compute",
    "joined",
    "joined_by_rows",
    "of_one_process",
    "partitioned",
    "reduced",
    "replicated",
    "whole_ones",
]


def replicated(tensors: Sequence[tf.Tensor], repeated: bool = False) -> Placed:
    """A value that all replicas have whole, given as the copies of a mesh; `repeated` if it belongs to the batch."""
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
    """Computes the step of one device on the replicas of a mesh, in the present graph.

    Args:
        traced: a `tf.types.experimental.ConcreteFunction` for the whole batch.
        mesh: the replicas.
        batch: its arguments, flat.
        rows: the number of examples of each replica of the job; `None` if the batch is not sharded.
        cost: counts what is computed and exchanged.
        streams: of random draws, which the graphs of a step share; see `tfdist.spmd.draws`.
        variables: by the `id` of a handle that the step captures, the handles of variables in its place, one for each
            replica of this process, which hold terms of the variable's value (`tfdist.spmd.accumulators`), or parts of
            it (`tfdist.spmd.divided`).

    Returns:
        What the traced function returns, replicated; this process' first copy.
    """
    mesh.compute()
    captured, _ = tensorflow_functions.captured(traced.graph)
    variables = variables or {}
    outside = [variables.get(id(tensor)) or replicated(mesh.captured(tensor)) for tensor in captured]
    sharded = None if rows is None else (Shard.of_rows(rows), sum(rows))
    partitioner = Partitioner(mesh, sharded, cost, streams)
    outputs = partitioner.conversions.whole(partitioner.run(traced.graph, [*batch, *outside]))
    mesh.computed()
    flat = iter([partitioner.mesh.tensors(output)[0] for output in outputs])
    return tf.nest.map_structure(
        lambda one: None if one is None else next(flat), traced.structured_outputs, expand_composites=True
    )


def partitioned(traced: Any, mesh: Mesh, rows: Sequence[int], cost: Cost | None = None) -> Callable[..., Any]:
    """The step of one device as a function of the whole batch, computed by replicas that have `rows` examples each.

    Of the batch, tensors with `sum(rows)` examples are sharded; others are replicated.
    """

    streams = Streams()

    def on_replicas(*batch: Any) -> Any:
        whole = [replicated([tf.convert_to_tensor(one)] * mesh.copies) for one in tf.nest.flatten(batch, True)]
        shard, examples = Shard.of_rows(rows), sum(rows)
        conversions = Partitioner(mesh, None).conversions

        def placed(value: Placed) -> Placed:
            shape = value.tensors[0].shape
            if not shape.rank or shape[0] != examples:
                return value
            return Placed(shard, conversions.placed(value, shard).tensors, replica=mesh.local[0])

        return compute(traced, mesh, [placed(value) for value in whole], rows, cost or Cost(), streams)

    return tf.function(on_replicas, autograph=False)
