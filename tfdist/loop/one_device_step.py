"""The step of one device, traced once as stock Keras would, and computed by the replicas of a strategy."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import spmd
from tfdist.data.input.batch_parts import DIFFERENT, UNEQUAL
from tfdist.data.input.division import WHOLE
from tfdist.errors import CostWarning, UsageError
from tfdist.interface.program import Logs, Steps
from tfdist.internals import (
    keras_batch_norm,
    keras_data,
    keras_patches,
    keras_variables,
    tensorflow_graphs,
    tensorflow_variables,
)
from tfdist.loop import building, captured_variables, metrics
from tfdist.loop.recomputation import Recomputation
from tfdist.optimizers import fused as fused_optimizers
from tfdist.spmd import accumulators
from tfdist.spmd.draws import Streams
from tfdist.spmd.placements import Partial, Placed, Shard
from tfdist.spmd.rules import PER_REPLICA_PREFIX

# The share of a step's operations that may be repeated on every replica without a word.
_MUCH = 0.05
# The numbers of examples of the replicas.
Rows = tuple[int, ...]


class OneDeviceStep:
    """The step of one device, traced once, and computed by the replicas of a strategy.

    Args:
        strategy: whose replicas compute it.
        steps: of a model that is built.
        step: computes a batch.
        read_in_steps: variables of metrics that each process reads between two steps of a call.

    Attributes:
        mesh: the replicas.
        cost: of the step of a full batch.
        terms: by the `id` of a metric's handle, the replicas' own variables whose sum is its value.
        summed: the variables of metrics that are needed in a call as sums over the processes; of others, each process
            adds to its own term.
    """

    def __init__(self, strategy: Any, steps: Steps, step: Callable[[Any], Any], read_in_steps: Sequence[Any] = ()):
        self._strategy = strategy
        self._steps = steps
        self._step = step
        self._read_in_steps = {id(variable) for variable in read_in_steps}
        self._traced: Any = None
        self._said = False
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
        """The step, a `tf.types.experimental.ConcreteFunction`, as one device traces it for these data.

        First called outside of other graphs, to which its tensors would belong.
        """
        if self._traced is None:
            assert tf.executing_eagerly()
            own_batch_norm = self._strategy.batch_norm == "per_replica"
            norms = keras_batch_norm.per_replica(PER_REPLICA_PREFIX) if own_batch_norm else contextlib.nullcontext()
            with building.traced(self._strategy, self._steps.model), keras_variables.looking_up_rows(), norms:
                spec = keras_data.traced_spec(self._steps.spec, self._steps.batches.size)
                self._traced = tf.function(self._step, autograph=False).get_concrete_function(spec)
            captured_variables.broadcast(self._strategy, self._steps.model, self._traced.graph)
            self._divide_metrics()
            self._keep_whole()
        return self._traced

    def _keep_whole(self) -> None:
        """Gives each process the whole of what it has parts of, where the step needs the whole."""
        model = self._steps.model
        placed = self._strategy.variables_in_parts(model)
        shards = {key: one.placement for key, one in placed.items() if isinstance(one.placement, Shard)}
        needed = spmd.variables_needed_whole(self._traced, shards) if shards else set()
        if needed:
            self._strategy.keep_whole(model, needed)

    def _divide_metrics(self) -> None:
        """Finds of which metrics' variables each replica of a process can add to a term of its own."""
        variables = {id(tensorflow_variables.copies(one)[0].handle): one for one in self._steps.model.metrics_variables}
        found = {key: self.mesh.terms(one) for key, one in variables.items() if id(one) not in self._read_in_steps}
        usable = accumulators.usable(self._traced, {key for key, terms in found.items() if terms})
        self.terms = {key: Placed(Partial(), terms) for key, terms in found.items() if terms and key in usable}
        self.summed = [one for key, one in variables.items() if key not in self.terms]

    def compute(self, state: Any, batch: Any, rows: Rows) -> Any:
        """Computes the step of a batch on the replicas of the strategy, in the present graph."""
        return self.compute_together(state, [batch], rows)

    def compute_together(self, state: Any, batches: Sequence[Any], rows: Rows) -> Any:
        """Computes the steps of batches one after the other; returns what the last one returns."""
        placed, costs = [self.placed(state, batch, rows) for batch in batches], [spmd.Cost() for _ in batches]
        sharded = rows if self.is_sharded(rows) else None
        variables = self.terms | dict(self._strategy.variables_in_parts(self._steps.model))

        def write() -> list[Any]:
            return [
                spmd.compute(self.trace(), self.mesh, one, sharded, cost, self._streams, variables)
                for one, cost in zip(placed, costs, strict=True)
            ]

        results = self.mesh.written(write)[-1]
        if costs[0].flops >= self.cost.flops:  # the step of a full batch, and not of the last one
            self.cost = costs[0]
        self._say(costs[0], rows)
        return results

    def _say(self, cost: spmd.Cost, rows: Rows) -> None:
        """Says what the step of a training costs beyond that of one device, if it is much."""
        if self._said or self._steps.kind != "train" or not self._strategy.world.is_chief:
            return
        if not self.is_sharded(rows) or cost.repeated_share <= _MUCH:
            return
        self._said = True
        most = max(cost.repeated, key=lambda one: one[1])[0]
        warnings.warn(
            f"Each replica of `{self._strategy.name}` repeats {cost.repeated_share:.0%} of the computation of a step, "
            f"most of it in {tensorflow_graphs.place(most)}, which is computed of the whole batch\n\n"
            "hint: the result is that of one device; if the training is too slow, compute on all examples before the "
            "batch is sliced or put in another order, and not after, or use fewer replicas",
            CostWarning,
            stacklevel=2,
        )

    def is_sharded(self, rows: Rows) -> bool:
        """Whether each of several replicas has a part of such a batch; else each has the whole.

        A length of 1 may be broadcast, so that TensorFlow infers less of the shapes behind it than of others. Processes
        of which one has a single example, and another one more, would find different ways to compute the same loop.
        """
        in_processes = self.mesh.count > len(self.mesh.local)
        differ = in_processes and 1 in rows and max(rows) > 1
        return 0 not in rows and len(rows) > 1 and not differ

    def rows(self, state: Any, batch: Any) -> Rows:
        """The number of examples of each replica in a batch that was fetched; none for a batch without rows.

        That is one whose tensors have different lengths, such as a graph's nodes and edges.
        """
        lengths = self._steps.batches.lengths_of_parts(state, batch, self._strategy.division)
        found = tuple(int(length) for length in lengths)
        if DIFFERENT in found:
            self._strategy.coordinate(1, False)  # which says that the processes were given different batches
        return () if UNEQUAL in found else found

    def placed(self, state: Any, batch: Any, rows: Rows, mesh: spmd.Mesh | None = None) -> list[Placed]:
        """The tensors of a batch: those with a row per example are sharded, others are replicated.

        A batch with fewer examples than replicas is replicated.
        """
        mesh, batches, division = mesh or self.mesh, self._steps.batches, self._strategy.division
        specs = tf.nest.flatten(keras_data.without_optionals(self._steps.spec))
        parts: list[Any] = []
        sharded = self.is_sharded(rows)
        for position, replica in enumerate(mesh.local if sharded else ()):
            with mesh.on_replica(position):
                own = tf.nest.flatten(batches.part(state, batch, replica, division)[0])
                parts.append([_of_spec(one, spec, rows[replica]) for one, spec in zip(own, specs, strict=True)])
        needed = not parts or not all(map(_is_dense, specs))
        whole = tf.nest.flatten(self.whole_batch(state, batch)) if needed else [None] * len(specs)
        found = []
        for index, spec in enumerate(specs):
            if spec is None:
                continue
            if parts and _is_dense(spec):
                found.append(Placed(Shard.of_rows(rows), [part[index] for part in parts], replica=mesh.local[0]))
                continue
            value = _of_spec(whole[index], spec, sum(rows)) if rows else whole[index]
            for tensor in tf.nest.flatten(value, expand_composites=True):
                found.append(spmd.replicated([tensor] * mesh.copies, repeated=mesh.count > 1))
        return found

    def whole_batch(self, state: Any, batch: Any) -> Any:
        """A global batch, as the step of one device takes it."""
        batches = self._steps.batches
        if batches.in_parts:
            return self.mesh.gathered(batches.local_examples(state, batch, self._strategy.division))
        return batches.part(state, batch, 0, WHOLE)[0]


def _is_dense(spec: Any) -> bool:
    """Whether a value of this spec is a tensor with a row per example."""
    return spec is None or (isinstance(spec, tf.TensorSpec) and bool(spec.shape.rank))


def _of_spec(tensor: Any, spec: Any, length: int) -> Any:
    """`tensor` `[length, ...]`, of whose shape no more is known than in every batch, and in every process.

    What is not dense stays as it is.
    """
    if spec is None or not _is_dense(spec):
        return tensor
    shape = [length, *spec.shape[1:]]
    if tensor.shape.as_list() == shape:
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)


def step_of(strategy: Any, model: Any, name: str, recomputed: Recomputation) -> Callable[[Any], Logs]:
    """The step called `name` as it is traced: with fused updates, returning logs that are not results of metrics."""

    def step(data: Any) -> Logs:
        marked, optimizer = recomputed.marked(getattr(model, name)), model.optimizer
        if optimizer is not None:
            keras_patches.require_reduced_once(optimizer)
        place = strategy.place_of_update(optimizer)
        with fused_optimizers.fused(optimizer, strategy.fused, place=place), recomputed.traced():
            return own_logs(model, name, marked(data))

    return step


def own_logs(model: Any, step_name: str, logs: Any) -> Logs:
    """The logs of a step that are not the results of the metrics of `model`, which are read after the steps."""
    if not isinstance(logs, dict):
        raise UsageError(
            f"`{step_name}` of the model `{model.name}` returned `{logs}`",
            "return a dict of metrics and their values",
        )
    return {} if set(logs) == metrics.names(model) else logs
