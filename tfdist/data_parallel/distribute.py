"""What the strategies over one of TensorFlow's own strategies share.

The scope of TensorFlow's strategy makes the variables, a copy on each device, and its `run` calls the step on each
device. The processes of a job meet before TensorFlow's servers start.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import spmd
from tfdist.errors import UsageError
from tfdist.groups import tensorflow_results as replica_results
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_routes, tensorflow_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.keras import tf_variable
from tfdist.internals.tensorflow import global_seed, runtime_started
from tfdist.jobs import rendezvous
from tfdist.jobs.world import World
from tfdist.training.strategy import TrainingStrategy

# What must be the same in all processes of a job.
PACKAGES = ("tfdist", "tensorflow", "keras", "numpy")


class MirroredMesh(spmd.Mesh):
    """Replicas of one of TensorFlow's strategies, each of which has a copy of the variables.

    Args:
        strategy: makes the variables, and adds up.
        devices: of the replicas of this process.
    """

    def __init__(self, strategy: tf.distribute.Strategy, devices: Sequence[str]):
        super().__init__(devices)
        self.copies = len(devices)
        self._strategy = strategy

    def begin(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            held = tf_variable(variable)
            if tensorflow_variables.is_sum_of_copies(held):
                # A step reads and changes the first copy alone.
                first, *others = tensorflow_variables.copies(held)
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
        # TensorFlow adds int32 on the host, and does not take them together with others.
        on_host = [terms[0].dtype == tf.int32 for terms in values]
        sums = {
            here: iter(self._sums([terms for terms, one in zip(values, on_host, strict=True) if one is here]))
            for here in set(on_host)
        }
        return [next(sums[here]) for here in on_host]

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
        found = []
        for position in range(self.copies):
            with self.on_copy(position):
                found.append(compute(*arguments))
        return found


class DistributeStrategy(TrainingStrategy):
    """A strategy over one of TensorFlow's synchronous strategies, whose variables its scope makes."""

    tf_strategy: tf.distribute.Strategy

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return _scope(self.tf_strategy)

    @contextlib.contextmanager
    def tracing(self, model: Any) -> Iterator[None]:
        with tensorflow_variables.first_copies(), keras_internals.updating_on_one_device(model):
            yield

    def _in_loop(self, method: str, model: Any, *arguments: Any, **named: Any) -> Any:
        # A callback may call `model.predict`. Keras' own fails in this scope: a replica may have no examples, and the
        # other processes take part in its batches.
        with keras_routes.led_to(model, self), self._outside_of_scope():
            return super()._in_loop(method, model, *arguments, **named)

    def _outside_of_scope(self) -> contextlib.AbstractContextManager[None]:
        """Code runs here as outside of this strategy's scope, in which people may call `fit`."""
        inside = tf.distribute.get_strategy() is self.tf_strategy and tf.distribute.in_cross_replica_context()
        return tensorflow_internals.without_strategy() if inside else contextlib.nullcontext()

    def check(self, model: Any) -> None:
        optimizers = keras_internals.optimizers(model)
        whole = [optimizer for optimizer in optimizers if not self.is_divided(optimizer)]
        variables = [*model.variables, *(v for optimizer in whole for v in optimizer.variables)]
        outside = [v for v in variables if not self.is_ours(v)]
        if model.distribute_strategy is not self.tf_strategy or outside:
            raise self.made_outside(f"variable `{outside[0].path}`" if outside else f"model `{model.name}`")
        for optimizer in optimizers:
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            if keras_internals.strategy_of(inner) is not self.tf_strategy:
                raise UsageError(
                    f"The optimizer `{inner.name}` was made outside the scope of the strategy `{self.name}`",
                    "make the optimizer, or pass its name to `compile`, inside `with strategy.scope():`",
                )

    def made_outside(self, what: str) -> UsageError:
        """The error for a variable or a model, `what`, that was not made in the scope."""
        return UsageError(
            f"The {what} was made outside the scope of the strategy `{self.name}`",
            "make and compile the model, and make its optimizer and metrics, inside `with strategy.scope():`",
        )

    def is_ours(self, variable: Any) -> bool:
        """Whether a variable of Keras was made in the scope."""
        return self.tf_strategy.extended.variable_created_in_scope(variable.value)


@contextlib.contextmanager
def _scope(strategy: tf.distribute.Strategy) -> Iterator[Any]:
    with strategy.scope() as entered, tensorflow_variables.converting_to_numbers():
        yield entered


def seed_tensorflow(strategy: TrainingStrategy) -> None:
    """Sets TensorFlow's global seed, unless the user has: unseeded random operations then agree in all processes."""
    if strategy.world.world_size > 1 and global_seed() is None:
        tf.random.set_seed(strategy.seed)


def meet(world: World, strategy: str, job_settings: Iterable[tuple[str, str]], deadline_seconds: float) -> bool:
    """Waits for all processes of the job, and compares their versions and `job_settings`.

    Returns `False` if the job had already begun.

    Raises:
        UsageError: TensorFlow has already started.
        ClusterError: a process is missing, or differs.
    """
    if runtime_started():
        raise UsageError(
            "TensorFlow has already started, and must know the cluster when it starts",
            "create the strategy before anything else uses TensorFlow",
        )
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return rendezvous.meet(world, versions | {"strategy": strategy} | dict(job_settings), deadline_seconds)


def broadcast(strategy: tf.distribute.Strategy, values: np.ndarray, is_chief: bool) -> np.ndarray:
    """The chief's `values`, `[n]` uint8, in all processes."""
    # Collectives add up no bytes, so four of them are sent as an int32, whose sum with zeros is exact.
    mine = values if is_chief else np.zeros_like(values)
    words = np.append(mine, np.zeros(-len(values) % 4, np.uint8)).view(np.int32)
    return _sum_of_first(strategy)(tf.constant(words)).numpy().view(np.uint8)[: len(values)]


@functools.cache
def _sum_of_first(strategy: tf.distribute.Strategy) -> Callable[..., Any]:
    """The sum of int32 numbers over the first replicas of the processes."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)], autograph=False)
    def sum_of_first(values: tf.Tensor) -> Any:
        def on_replica() -> Any:
            is_first = replica_results.current_index() % len(strategy.extended.worker_devices) == 0
            # A tensor from outside the function has no device to reduce on.
            mine = tf.identity(values) if is_first else tf.zeros_like(values)
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, mine)

        return replica_results.local_results(strategy, strategy.run(on_replica))[0]

    return sum_of_first
