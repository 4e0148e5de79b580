"""The step of one device, traced once as in stock Keras, and computed by the replicas of a strategy."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import spmd
from tfdist.data.input.batch_parts import DIFFERENT, UNEQUAL
from tfdist.data.input.division import WHOLE
from tfdist.errors import CostWarning
from tfdist.interface.program import Logs, Steps
from tfdist.internals import (
    keras_batch_norm,
    keras_data,
    keras_patches,
    keras_variables,
    tensorflow_graphs,
    tensorflow_variables,
)
from tfdist.loop import building, metrics
from tfdist.loop.recomputation import Recomputation
from tfdist.optimizers import fused as fused_optimizers
from tfdist.spmd import replica_variables
from tfdist.spmd.draws import Streams
from tfdist.spmd.placements import Partial, Placed, Shard
from tfdist.spmd.rules import PER_REPLICA_PREFIX

# The largest share of a step's operations that may be repeated on every replica without a warning.
_MUCH = 0.05
# The number of examples of each replica.
Rows = tuple[int, ...]


class OneDeviceStep:
    """The step of one device, traced once, and computed by the replicas of a strategy.

    Args:
        strategy: the strategy whose replicas compute the step.
        steps: the steps of a built model.
        step: the function that computes a batch.
        read_in_steps: variables of metrics that each process reads between two steps of a call.

    Attributes:
        mesh: the replicas.
        cost: the cost of the step on a full batch.
        terms: the replicas' variables whose sum is the value of a metric's variable, by the `id` of its handle.
        summed: the variables of metrics whose sums over the processes are needed during a call. For all others, each
            process adds to its own term.
    """

    def __init__(self, strategy: Any, steps: Steps, step: Callable[[Any], Any], read_in_steps: Sequence[Any] = ()):
        self._strategy = strategy
        self._steps = steps
        self._step = step
        self._read_in_steps = {id(variable) for variable in read_in_steps}
        self._traced: Any = None
        self._warned = False
        self._streams = Streams()
        self.terms: dict[int, Placed] = {}
        self.summed: list[Any] = []
        self.mesh: spmd.Mesh = strategy.mesh
        self.cost = spmd.Cost()

    @property
    def spec(self) -> Any:
        """The `tf.TypeSpec`s of a global batch."""
        return self._steps.spec

    def trace(self) -> Any:
        """Returns the step as a `tf.types.experimental.ConcreteFunction`, traced for one device and these data.

        The first call must be outside of other graphs, to which its tensors would belong.
        """
        if self._traced is None:
            assert tf.executing_eagerly()
            own_batch_norm = self._strategy.batch_norm == "per_replica"
            norms = keras_batch_norm.per_replica(PER_REPLICA_PREFIX) if own_batch_norm else contextlib.nullcontext()
            with building.traced(self._strategy, self._steps.model), keras_variables.looking_up_rows(), norms:
                spec = keras_data.traced_spec(self._steps.spec, self._steps.batches.size)
                self._traced = tf.function(self._step, autograph=False).get_concrete_function(spec)
            building.broadcast_captured(self._strategy, self._steps.model, self._traced.graph)
            self._divide_metrics()
            self._keep_whole()
        return self._traced

    def _keep_whole(self) -> None:
        """Gives each process the whole of the sharded variables that the step needs whole."""
        model = self._steps.model
        placed = self._strategy.variables_in_parts(model)
        shards = {key: value.placement for key, value in placed.items() if isinstance(value.placement, Shard)}
        needed = spmd.variables_needed_whole(self._traced, shards) if shards else set()
        if needed:
            self._strategy.keep_whole(model, needed)

    def _divide_metrics(self) -> None:
        """Finds the variables of metrics for which each replica of a process can add to its own term."""
        variables = {id(tensorflow_variables.copies(v)[0].handle): v for v in self._steps.model.metrics_variables}
        divisible = {key: variable for key, variable in variables.items() if id(variable) not in self._read_in_steps}
        terms = {key: tensors for key, variable in divisible.items() if (tensors := self.mesh.terms(variable))}
        usable = replica_variables.usable_as_accumulators(self._traced, set(terms))
        self.terms = {key: Placed(Partial(), tensors) for key, tensors in terms.items() if key in usable}
        self.summed = [variable for key, variable in variables.items() if key not in self.terms]

    def compute(self, state: Any, batches: Sequence[Any], rows: Rows) -> Any:
        """Computes the steps of one or more batches in sequence on the replicas, in the current graph.

        Returns:
            The result of the last step.
        """
        placed, costs = [self.placed(state, batch, rows) for batch in batches], [spmd.Cost() for _ in batches]
        sharded = rows if self.is_sharded(rows) else None
        variables = self.terms | dict(self._strategy.variables_in_parts(self._steps.model))

        def write() -> list[Any]:
            return [
                spmd.compute(self.trace(), self.mesh, tensors, sharded, cost, self._streams, variables)
                for tensors, cost in zip(placed, costs, strict=True)
            ]

        results = self.mesh.written(write)[-1]
        if costs[0].flops >= self.cost.flops:  # a full batch, and not the smaller last batch
            self.cost = costs[0]
        self._warn_if_costly(costs[0], rows)
        return results

    def _warn_if_costly(self, cost: spmd.Cost, rows: Rows) -> None:
        """Warns once if the replicas repeat a large part of a training step."""
        if self._warned or self._steps.kind != "train" or not self._strategy.world.is_chief:
            return
        if not self.is_sharded(rows) or cost.repeated_share <= _MUCH:
            return
        self._warned = True
        costliest = max(cost.repeated, key=lambda repeated: repeated[1])[0]
        warnings.warn(
            f"Each replica of `{self._strategy.name}` repeats {cost.repeated_share:.0%} of the computation of a step, "
            f"most of it in {tensorflow_graphs.place(costliest)}, which is computed for the whole batch\n\n"
            "hint: the result equals that of one device; if the training is too slow, compute on all examples before "
            "the batch is sliced or reordered, and not after, or use fewer replicas",
            CostWarning,
            stacklevel=2,
        )

    def is_sharded(self, rows: Rows) -> bool:
        """Whether each of several replicas gets a part of such a batch; otherwise each gets the whole.

        A length of 1 may be broadcast, so TensorFlow infers less about the shapes that depend on it. If one process had
        a single example and another process had more, they would partition the same loop differently.
        """
        in_processes = self.mesh.count > len(self.mesh.local)
        differ = in_processes and 1 in rows and max(rows) > 1
        return 0 not in rows and len(rows) > 1 and not differ

    def rows(self, state: Any, batch: Any) -> Rows:
        """Returns the number of examples of each replica in a fetched batch; empty for a batch without rows.

        The tensors of a batch without rows have different lengths, such as a graph's nodes and edges.
        """
        lengths = self._steps.batches.lengths_of_parts(state, batch, self._strategy.division)
        rows = tuple(int(length) for length in lengths)
        if DIFFERENT in rows:
            self._strategy.coordinate(1, False)  # raises the error that the processes received different batches
        return () if UNEQUAL in rows else rows

    def placed(self, state: Any, batch: Any, rows: Rows, mesh: spmd.Mesh | None = None) -> list[Placed]:
        """Returns the tensors of a batch: tensors with a row per example are sharded, others are replicated.

        A batch with fewer examples than replicas is replicated.
        """
        mesh, batches, division = mesh or self.mesh, self._steps.batches, self._strategy.division
        specs = tf.nest.flatten(keras_data.without_optionals(self._steps.spec))
        parts: list[Any] = []
        sharded = self.is_sharded(rows)
        for position, replica in enumerate(mesh.local if sharded else ()):
            with mesh.on_replica(position):
                tensors = tf.nest.flatten(batches.part(state, batch, replica, division)[0])
                parts.append([_of_spec(*pair, rows[replica]) for pair in zip(tensors, specs, strict=True)])
        needs_whole = not parts or not all(map(_is_dense, specs))
        whole = tf.nest.flatten(self.whole_batch(state, batch)) if needs_whole else [None] * len(specs)
        placed = []
        for index, spec in enumerate(specs):
            if spec is None:
                continue
            if parts and _is_dense(spec):
                placed.append(Placed(Shard.of_rows(rows), [part[index] for part in parts], replica=mesh.local[0]))
                continue
            value = _of_spec(whole[index], spec, sum(rows)) if rows else whole[index]
            for tensor in tf.nest.flatten(value, expand_composites=True):
                placed.append(spmd.replicated([tensor] * mesh.copies, repeated=mesh.count > 1))
        return placed

    def whole_batch(self, state: Any, batch: Any) -> Any:
        """Returns a global batch, as the step of one device takes it."""
        batches = self._steps.batches
        if batches.in_parts:
            return self.mesh.gathered(batches.local_examples(state, batch, self._strategy.division))
        return batches.part(state, batch, 0, WHOLE)[0]


def _is_dense(spec: Any) -> bool:
    """Whether a value with this spec is a tensor with a row per example."""
    return spec is None or (isinstance(spec, tf.TensorSpec) and bool(spec.shape.rank))


def _of_spec(tensor: Any, spec: Any, length: int) -> Any:
    """Returns a dense `tensor` with the static shape `[length, ...]` of its spec; other values are returned unchanged.

    No further static dimensions are kept, since they could differ between batches or processes.
    """
    if spec is None or not _is_dense(spec):
        return tensor
    shape = [length, *spec.shape[1:]]
    if tensor.shape.as_list() == shape:
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)


def step_of(strategy: Any, model: Any, name: str, recomputation: Recomputation) -> Callable[[Any], Logs]:
    """Returns the step called `name` with fused updates; it returns the logs that are not results of metrics."""

    def step(data: Any) -> Logs:
        marked, optimizer = recomputation.marked(getattr(model, name)), model.optimizer
        if optimizer is not None:
            keras_patches.require_reduced_once(optimizer)
        place = strategy.place_of_update(optimizer)
        with fused_optimizers.fused(optimizer, strategy.fused, place=place), recomputation.traced():
            return own_logs(model, name, marked(data))

    return step


def own_logs(model: Any, step_name: str, logs: Any) -> Logs:
    """Returns the logs of a step; empty if they are the results of metrics, which are read after the steps."""
    return {} if set(metrics.require_logs(model, step_name, logs)) == metrics.names(model) else logs
