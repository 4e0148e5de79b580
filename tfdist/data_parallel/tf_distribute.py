"""The replicas and the variables of a `tf.distribute.Strategy`.

MirroredMesh           the replicas on the devices of one process
WorkersMesh            those of several processes, with TensorFlow's collective operations: rings over gRPC, and NCCL
TensorFlowVariables    variables that are made in the scope of the strategy, such as copies on several devices
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tfdist import spmd
from tfdist.errors import UsageError
from tfdist.groups import CARRIED_AS, ProcessGroup, structures
from tfdist.groups import packing as gradient_reduction
from tfdist.groups.packing import summed
from tfdist.groups.socket_group import SocketGroup
from tfdist.groups.tensorflow import gathered_positions
from tfdist.interface.variables import Variables
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_routes, tensorflow_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.keras import tf_variable
from tfdist.jobs import consensus
from tfdist.jobs.world import World
from tfdist.spmd.process_mesh import REDUCTIONS
from tfdist.training.job_strategy import JobStrategy


class MirroredMesh(spmd.Mesh):
    """Replicas of a `tf.distribute.Strategy`, each of which has a copy of the variables.

    Args:
        strategy: makes the variables, and computes the all-reduce.
        devices: the devices of this process's replicas.
    """

    def __init__(self, strategy: tf.distribute.Strategy, devices: Sequence[str]):
        super().__init__(devices)
        self.copies = len(devices)
        self._strategy = strategy

    def begin(self, variables: Sequence[Any]) -> None:
        for first, *others in filter(None, map(copies_of_sum, variables)):
            # A step reads and changes only the first copy.
            first.assign(tf.add_n([copy.read_value() for copy in (first, *others)]))
            for copy in others:
                copy.assign(tf.zeros_like(copy))

    def captured(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        variable = tensorflow_variables.container(tensor)
        if variable is None or tensorflow_variables.is_sum_of_copies(variable):
            return [tensor] * self.copies
        return [copy.handle for copy in tensorflow_variables.copies(variable)]

    def all_reduce(
        self, values: Sequence[Sequence[tf.Tensor]], reduction: str, gradients: bool = False
    ) -> list[list[tf.Tensor]]:
        del gradients
        if reduction != "sum":
            return [self._on_each_copy(spmd.reduced, terms, reduction) for terms in values]
        # TensorFlow adds int32 on the host, and does not reduce it together with other dtypes.
        on_host = [terms[0].dtype == tf.int32 for terms in values]
        sums = {
            key: iter(
                self._sums([terms for terms, is_on_host in zip(values, on_host, strict=True) if is_on_host is key])
            )
            for key in set(on_host)
        }
        return [next(sums[key]) for key in on_host]

    def _sums(self, values: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        with self._strategy.scope():
            per_replica = [tensorflow_internals.per_replica(terms) for terms in values]
            sums = self._strategy.extended.batch_reduce_to(
                tf.distribute.ReduceOp.SUM, [(value, value) for value in per_replica]
            )
        return [list(self._strategy.experimental_local_results(value)) for value in sums]

    def all_gather(self, values: Sequence[Sequence[tf.Tensor]], shards: Sequence[spmd.Shard]) -> list[list[tf.Tensor]]:
        return [self._on_each_copy(spmd.joined, parts, shard) for parts, shard in zip(values, shards, strict=True)]

    def once(self, compute: Callable[[], list[tf.Tensor]], like: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        del like
        with self.on_copy(0):
            results = compute()
        return [self._on_each_copy(tf.identity, result) for result in results]

    def _on_each_copy(self, compute: Callable[..., tf.Tensor], *arguments: Any) -> list[tf.Tensor]:
        results = []
        for position in range(self.copies):
            with self.on_copy(position):
                results.append(compute(*arguments))
        return results


def copies_of_sum(variable: Any) -> list[Any]:
    """The copies of a variable whose value is their sum, such as the state of a metric; empty for other variables."""
    tf_value = tf_variable(variable)
    return tensorflow_variables.copies(tf_value) if tensorflow_variables.is_sum_of_copies(tf_value) else []


class WorkersMesh(MirroredMesh):
    """The replicas of several processes, which exchange values by TensorFlow's collective operations.

    Args:
        strategy: the `tf.distribute.Strategy`.
        devices: the devices of this process's replicas.
        world: the job.
        packing: how tensors are packed for an all-reduce; `wire_dtype` is used for gradients only.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        devices: Sequence[str],
        world: World,
        packing: gradient_reduction.Packing,
    ):
        super().__init__(strategy, devices)
        self.count = len(devices) * world.world_size
        self.local = range(len(devices) * world.rank, len(devices) * (world.rank + 1))
        self._is_chief = world.is_chief
        self._positions = gathered_positions(world.tasks, strategy.extended.worker_devices)
        self._packing = packing

    def begin(self, variables: Sequence[Any]) -> None:
        for copies in filter(None, map(copies_of_sum, variables)):
            (totals,) = self.all_reduce([[copy.read_value() for copy in copies]], "sum")
            for copy, total in zip(copies, totals, strict=True):
                copy.assign(total)

    def end(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            for copy in copies_of_sum(variable)[int(self._is_chief) :]:
                copy.assign(tf.zeros_like(copy))

    def terms(self, variable: Any) -> list[tf.Tensor] | None:
        return [copy.handle for copy in copies_of_sum(variable)] or None

    def all_reduce(
        self, values: Sequence[Sequence[tf.Tensor]], reduction: str, gradients: bool = False
    ) -> list[list[tf.Tensor]]:
        if reduction != "sum":
            rows = [[part[tf.newaxis] for part in parts] for parts in values]
            return [[REDUCTIONS[reduction](copy) for copy in self._gather(parts)] for parts in rows]
        packing = self._packing if gradients else replace(self._packing, wire_dtype=None)
        groups = gradient_reduction.buffers([parts[0] for parts in values], packing.buffer_bytes)
        sums: list[list[tf.Tensor]] = [[] for _ in values]
        for members in groups:
            buffers = [
                gradient_reduction.to_wire(
                    gradient_reduction.joined([values[index][position] for index in members]), packing.wire_dtype
                )
                for position in range(self.copies)
            ]
            (totals,) = super().all_reduce([buffers], "sum")
            like = [values[index][0] for index in members]
            for total in totals:
                pieces = gradient_reduction.split(gradient_reduction.from_wire(total, like[0].dtype), like)
                for index, piece in zip(members, pieces, strict=True):
                    sums[index].append(piece)
        return sums

    def all_gather(self, values: Sequence[Sequence[tf.Tensor]], shards: Sequence[spmd.Shard]) -> list[list[tf.Tensor]]:
        return [spmd.gathered_by_rows(parts, shard, self._gather) for parts, shard in zip(values, shards, strict=True)]

    def gathered(self, structure: Any) -> Any:
        rank = self.local[0] // self.copies
        return structures.gathered(structure, lambda rows: self._gather_from_first_replicas(rows)[0], rank)

    def once(self, compute: Callable[[], list[tf.Tensor]], like: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        with self.on_copy(0):
            results = compute() if self._is_chief else [None] * len(like)
        return [
            spmd.broadcast_by_gathering(result, tensor, self._gather_from_first_replicas)
            for result, tensor in zip(results, like, strict=True)
        ]

    def _gather_from_first_replicas(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """The rows from the first replica of each process, concatenated, on each copy."""
        return self._gather([rows, *[rows[:0]] * (self.copies - 1)])

    def _gather(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The rows of all replicas of the job, concatenated, on each copy."""
        dtype = parts[0].dtype
        sent = [tf.identity(_as_gathered(part)) for part in parts]
        gathered = self._gathered_by_tensorflow(sent)
        if self._positions != sorted(self._positions):
            lengths = self._gathered_by_tensorflow([tf.shape(part)[:1] for part in sent])
            of_replicas = tf.split(gathered, tf.ensure_shape(lengths, [self.count]))
            by_rank = tf.concat([of_replicas[position] for position in self._positions], 0)
            gathered = tf.ensure_shape(by_rank, gathered.shape)
        rows = tf.bitcast(gathered, dtype) if _is_bitcast(parts[0]) else tf.cast(gathered, dtype)
        return self._on_each_copy(tf.identity, rows)

    def _gathered_by_tensorflow(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """The rows of all replicas, concatenated in TensorFlow's order of the replicas."""
        with self._strategy.scope():
            return self._strategy.gather(tensorflow_internals.per_replica(parts), axis=0)


def _as_gathered(tensor: tf.Tensor) -> tf.Tensor:
    """`tensor` in a dtype that collectives can gather, without loss."""
    if _is_bitcast(tensor):
        return tf.bitcast(tensor, CARRIED_AS[tensor.dtype])
    if tensor.dtype in (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64):
        return tensor
    return tf.cast(tensor, tf.float32 if tensor.dtype.is_floating else tf.int32)


def _is_bitcast(tensor: tf.Tensor) -> bool:
    return tensor.dtype != tf.bfloat16 and tensor.dtype in CARRIED_AS


class TensorFlowVariables(Variables):
    """The variables of a `tf.distribute.Strategy`.

    Args:
        strategy: the `tf.distribute.Strategy`.
        name: the name of tfdist's strategy, for messages.
    """

    def __init__(self, strategy: tf.distribute.Strategy, name: str):
        super().__init__()
        self.strategy = strategy
        self._name = name

    @contextlib.contextmanager
    def scope(self) -> Iterator[Any]:
        with self.strategy.scope() as entered, tensorflow_variables.converting_to_numbers():
            yield entered

    @contextlib.contextmanager
    def tracing(self, model: Any) -> Iterator[None]:
        with tensorflow_variables.first_copies(), keras_internals.updating_on_one_device(model):
            yield

    @contextlib.contextmanager
    def calling(self, strategy: Any, model: Any) -> Iterator[None]:
        # A callback may call `model.predict`. Keras' own method fails in this scope: a replica may have no examples,
        # and the other processes would have to take part.
        is_inside = tf.distribute.get_strategy() is self.strategy and tf.distribute.in_cross_replica_context()
        outside_of_scope = tensorflow_internals.without_strategy() if is_inside else contextlib.nullcontext()
        with keras_routes.routed_to(model, strategy), outside_of_scope:
            yield

    def check(self, model: Any, is_divided: Callable[[Any], bool]) -> None:
        optimizers = keras_internals.optimizers(model)
        whole = [optimizer for optimizer in optimizers if not is_divided(optimizer)]
        variables = [*model.variables, *(v for optimizer in whole for v in optimizer.variables)]
        outside = [variable for variable in variables if not self._is_made_in_scope(variable)]
        if model.distribute_strategy is not self.strategy or outside:
            raise self._made_outside(f"variable `{outside[0].path}`" if outside else f"model `{model.name}`")
        for optimizer in optimizers:
            inner = keras_internals.inner(optimizer)
            if keras_internals.strategy_of(inner) is not self.strategy:
                raise UsageError(
                    f"The optimizer `{inner.name}` was made outside the scope of the strategy `{self._name}`",
                    "make the optimizer, or pass its name to `compile`, inside `with strategy.scope():`",
                )

    def _made_outside(self, what: str) -> UsageError:
        return UsageError(
            f"The {what} was made outside the scope of the strategy `{self._name}`",
            "make and compile the model, and make its optimizer and metrics, inside `with strategy.scope():`",
        )

    def _is_made_in_scope(self, variable: Any) -> bool:
        return self.strategy.extended.variable_created_in_scope(variable.value)


class WorkerVariables(TensorFlowVariables):
    """The variables of `tf.distribute.MultiWorkerMirroredStrategy`.

    TensorFlow broadcasts the chief's initial value of each new variable, and waits for processes that make none. So the
    processes first compare what they make, if they can do so fast.

    Args:
        strategy: the `tf.distribute.MultiWorkerMirroredStrategy`.
        job: tfdist's strategy, by which the processes exchange messages.
    """

    def __init__(self, strategy: tf.distribute.Strategy, job: JobStrategy):
        super().__init__(strategy, job.name)
        self._job, self._count = job, 0
        if job.world.world_size > 1:
            tensorflow_internals.around_new_variables(strategy, self._make)

    def _make(self, make: Callable[..., Any], initial_value: Any, **arguments: Any) -> Any:
        # A number in the script, such as a learning rate, has to be equal. Other initial values may be random.
        is_number = not callable(initial_value)
        with self._job.guard():
            if tf.executing_eagerly():
                initial_value = tensorflow_variables.initial(initial_value, arguments.get("dtype"))
                self._require_equal(initial_value, is_number and not initial_value.shape.rank)
            return make(initial_value=initial_value, **arguments)

    def _require_equal(self, value: tf.Tensor, is_number: bool) -> None:
        self._count += 1
        # A message takes milliseconds by TensorFlow's collectives, which compare shapes and types themselves.
        if is_number or self._job.group.carries_tensors:
            described = tensorflow_variables.in_words(value.dtype, value.shape)
            described += f" of {value.numpy()!s}" if is_number else ""
            consensus.require_equal_variable(self._job, self._count, described)

    def sum_metrics(self, group: ProcessGroup, variables: Sequence[Any], name: str) -> list[tf.Tensor]:
        outside = [variable for variable in variables if not self._is_made_in_scope(variable)]
        if outside:  # a plain variable, which does not tell whether its value is the whole state or this process's part
            raise self._made_outside(f"variable `{outside[0].path}` of a metric")
        if not isinstance(group, SocketGroup):
            return super().sum_metrics(group, variables, name)  # reading a sum of copies adds them
        is_sum, local = tensorflow_variables.is_sum_of_copies, self.strategy.experimental_local_results
        tf_variables = list(map(tf_variable, variables))
        parts = [tf.convert_to_tensor(local(variable)[0]) for variable in tf_variables if is_sum(variable)]
        sums = iter(summed(group, parts, name))
        return [next(sums) if is_sum(variable) else tf.convert_to_tensor(variable) for variable in tf_variables]
