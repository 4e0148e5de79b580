"""The interface of a strategy: where variables live, and how a step runs on every replica.

A strategy answers a few questions and nothing else:

    scope()            where models are made
    run(step)          how `step(replica)` runs once on each replica of this process, inside a graph
    Replica            what a replica can do meanwhile: all_reduce, apply gradients, write variables
    check(model)       whether a model can be trained here
    exchange(message)  what the other processes say, where there are any

Everything that can be written once lives elsewhere: the loop over batches in `tfdist.core.outer_loop`, the weighing and
packing of gradients and the fused update in `tfdist.core.gradient_reduction`, Keras' side of exactness in
`tfdist.internals.keras`.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfdist.cluster.world import World
from tfdist.communicators import opaque
from tfdist.core import gradient_reduction, replica_context
from tfdist.errors import UsageError
from tfdist.internals import keras as keras_internals
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.strategies import _devices as device_choice

Step = Callable[["Replica"], Any]


class Replica:
    """One replica while its step is traced; this one is alone, so that every reduction is the identity.

    Attributes:
        index: its number in the step, 0 to `count - 1`.
        count: the number of replicas in the step.
        share: the part of the global batch's examples that this replica has; a float64 scalar where it varies.
        examples: how many examples its part has, `None` where that varies.
        part: its part of the global batch.
        data: the tensors of that.
        graph: the graph in which its step is traced; `None` where there is none.
        updates: catches what its step assigns, see `tfdist.core.assignments`.
        unseeded: what Keras' random functions draw from that are given no seed.
        draws: how many random operations its step has made that are alike on all replicas.
        means: tensors that count as means over its part, whatever they were computed by.
        alike: tensors that its step has found to be the same on all replicas.
        losses: what each layer has added by `add_loss`, by the layer's `id`.
        alone: it never meets other replicas, so Keras' own code is exact as it is.
        metrics_in_parts: each replica has a part of a metric's state, which readers add up.
    """

    alone: ClassVar[bool] = True
    metrics_in_parts: ClassVar[bool] = True
    packing: gradient_reduction.Packing = gradient_reduction.Packing()

    def __init__(self, index: int = 0, count: int = 1):
        self.index = index
        self.count = count
        self.share: tf.Tensor | float = 1.0
        self.examples: int | None = None
        self.part: Any = None
        self.data: list[Any] = []
        self.graph: Any = None
        self.updates: Any = None
        self.draws = 0
        self.unseeded: Any = None
        self.alike: list[tf.Tensor] = []
        self.means: list[tf.Tensor] = []
        self.losses: dict[int, list[Any]] = {}
        self._reduced: list[Any] = []

    def begin(self, data: Any, share: tf.Tensor | float, unseeded: Any = None) -> None:
        """Has the step run on the part `data` of a global batch; see `Strategy.unseeded`."""
        self.unseeded = unseeded
        if not isinstance(share, tf.Tensor) and share == 0:
            # A graph that knew it would leave out what is multiplied by it, exchanges among it, on this replica alone.
            share = opaque(tf.constant(0.0, tf.float64))
        self.part, self.share = data, share
        self.data = [tensor for tensor in tf.nest.flatten(data, expand_composites=True) if tensor is not None]
        sized = [tensor for tensor in self.data if tensor.shape.rank]
        self.examples = sized[0].shape[0] if sized else None
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    @property
    def real(self) -> bool | tf.Tensor:
        """Whether it has examples of the global batch; if not, it computes on one that must not count."""
        return self.share > 0

    def only_real(self, tensor: Any) -> Any:
        """`tensor`; exactly zero on a replica without examples, whatever it computed there."""
        if self.real is True:
            return tensor
        if isinstance(tensor, tf.IndexedSlices):
            return tf.IndexedSlices(self.only_real(tensor.values), tensor.indices, tensor.dense_shape)
        return tf.where(self.real, tensor, tf.zeros_like(tensor))

    def real_rows(self, tensor: Any) -> Any:
        """The rows of `tensor` that belong to examples of the global batch: all, or none."""
        if self.real is True:
            return tensor
        if isinstance(tensor, tf.SparseTensor):
            kept = tf.sparse.retain(tensor, tf.fill([tf.size(tensor.values)], self.real))
            rows = tf.where(self.real, tensor.dense_shape[:1], 0)
            return tf.SparseTensor(kept.indices, kept.values, tf.concat([rows, tensor.dense_shape[1:]], 0))
        return tensor[: tf.where(self.real, tf.int32.max, 0)]

    def all_reduce(self, tensors: list[Any]) -> list[Any]:
        """The sums of `tensors` over the replicas, on every replica."""
        return tensors

    def all_gather(self, structure: Any) -> Any:
        """The examples of `structure` of all replicas of the job, in their order, on every replica."""
        return structure

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """The sums of `gradients` over the replicas, sent in few buffers; `None` stays `None`, sparse stays sparse."""
        return gradient_reduction.without_none(gradient_reduction.packed(self.all_reduce, self.packing))(
            list(gradients)
        )

    def know(self, reduced: list[Any]) -> list[Any]:
        """Notes that these gradients are those of the global batch already; returns them."""
        self._reduced += reduced
        return reduced

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Sees to it that `optimizer`, which has no variables yet, gets them for `variables`: outside of a graph."""
        if tf.inside_function():
            raise keras_internals.Unbuilt(optimizer, variables)

    def settle(self) -> None:
        """Writes what the step has assigned so far, so that an update finds it."""
        self.updates.write()

    def apply(self, apply: Callable[..., None], gradients: Sequence[Any], optimizer: Any) -> None:
        """Has `apply(gradients)` update each copy of the variables once with the gradients of the global batch."""
        del optimizer
        known = {id(gradient) for gradient in self._reduced}
        rows = {id(gradient.indices) for gradient in self._reduced if isinstance(gradient, tf.IndexedSlices)}

        def is_rescaled(gradient: Any) -> bool:
            """Whether it has the rows of a reduced one, clipped perhaps: they are the same on all replicas."""
            return isinstance(gradient, tf.IndexedSlices) and id(gradient.indices) in rows

        local = [None if id(g) in known else g.values if is_rescaled(g) else g for g in gradients]
        summed = self.reduce(gradient_reduction.weigh(local, self.share))
        reduced = [
            tf.IndexedSlices(new, g.indices, g.dense_shape) if is_rescaled(g) and new is not None else new
            for g, new in zip(gradients, summed, strict=True)
        ]
        self.once_per_copy(apply, [g if new is None else new for g, new in zip(gradients, reduced, strict=True)])

    def write(self, updates: list[tuple[Any, tf.Tensor]]) -> None:
        """Assigns to Keras variables values that are the same on every replica."""
        variables = [variable._value for variable, _ in updates]

        def assign(values: list[tf.Tensor]) -> None:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(tf.cast(value, variable.dtype))

        with replica_context.on_replica(None):
            self.once_per_copy(assign, [value for _, value in updates])

    def read_metric(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        """The values that variables of a metric have over all replicas."""
        values = [tf.convert_to_tensor(variable._value) for variable in variables]
        return self.all_reduce(values) if self.metrics_in_parts else values

    def write_metric(self, updates: list[tuple[Any, tf.Tensor]]) -> None:
        """Gives variables of a metric values that are the same on every replica: one has them, the others nothing."""
        if self.metrics_in_parts:
            # A replica that knew its index would leave out what the value comes from, exchanges among it.
            first = opaque(tf.constant(self.index == 0))
            updates = [(variable, tf.where(first, value, tf.zeros_like(value))) for variable, value in updates]
        self.write(updates)

    def once_per_copy(self, function: Callable[[list[Any]], None], values: list[Any]) -> None:
        """Calls `function(values)` once for each copy of the variables; `values` are the same on every replica."""
        function(values)


class Strategy:
    """Trains, evaluates and predicts with a compiled Keras model on this strategy's replicas.

    Args:
        devices: how many, or which, such as `"GPU:1"` or `["CPU:0", "CPU:1"]`; `None` is all GPUs that the strategy can
            use or, without a GPU, as many logical CPU devices as the strategy says.
        seed: the order of the examples follows from it and the epoch; `None` draws one from Python's `random`, which
            `keras.utils.set_random_seed` makes repeatable.
        threads: how many CPU threads compute one operation; `None` leaves it to TensorFlow, which takes all cores.
            Small steps are faster with one. TensorFlow fixes it for the life of the process when it first computes.
        fused: update each variable with one kernel where the optimizer allows.
        steps_per_call: how many steps one call of the inner loop runs at most; `None` chooses by the clock.
    """

    name: ClassVar[str]
    default_cpus: ClassVar[int] = 1
    as_one_device: ClassVar[bool] = True  # N replicas compute what one device does
    metrics_by_process: bool = False  # each has its own part of a metric's state, in an ordinary variable
    seconds_per_call: ClassVar[float] = 0.5  # of the inner loop, while no callback wants to see more
    parallel_steps: int = 10  # how many steps of the inner loop may be begun at a time

    def __init__(
        self,
        *,
        devices: int | str | Sequence[str] | None = None,
        seed: int | None = None,
        threads: int | None = None,
        fused: bool = True,
        steps_per_call: int | None = None,
    ):
        if steps_per_call is not None and steps_per_call < 1:
            raise UsageError(f"`steps_per_call` is {steps_per_call}", "use 1 or more, or leave it out")
        self.world = World()
        self.seed = random.getrandbits(31) if seed is None else seed
        self.fused = fused
        self.steps_per_call = steps_per_call
        self.threads = threads
        if threads is not None:
            device_choice.set_threads(threads, alone=threads == 1 and devices in (None, 1) and self.default_cpus == 1)
        self.devices = self.choose_devices(devices)
        keras_internals.fill_large_variables_in_place()
        self.set_up()

    def set_up(self) -> None:
        """Makes what the strategy needs once its devices are known."""

    def choose_devices(self, wanted: int | str | Sequence[str] | None) -> list[str]:
        """The names of the devices that the replicas of this process run on."""
        return device_choice.choose(wanted, self.default_cpus)

    @property
    def num_replicas(self) -> int:
        """The number of replicas that take part in a step, over all processes."""
        return len(self.devices) * self.world.world_size

    @property
    def servers(self) -> Mapping[str, str]:
        """The addresses, by name, of processes that compute for this one and run no loop of their own."""
        return {}

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which a model and its optimizer are made and compiled."""
        return contextlib.nullcontext()

    def merged(self, variables: Sequence[Any], name: str) -> contextlib.AbstractContextManager[Any]:
        """The context in which `variables` of metrics are read as they are over all replicas; `name` is its own."""
        del variables, name
        return self.scope()

    @property
    def alone(self) -> bool:
        """Whether one replica computes the steps, and never meets others."""
        return False

    def runs_eagerly(self, model: Any) -> bool:
        """Whether the steps of `model` run operation by operation."""
        return bool(model.run_eagerly)

    @property
    def serial(self) -> bool:
        """Whether one thread computes all, so that handing operations from thread to thread gains nothing."""
        on_one_cpu = self.num_replicas == 1 and self.devices[0].startswith("CPU")
        return on_one_cpu and tf.config.threading.get_intra_op_parallelism_threads() == 1

    @functools.cached_property
    def unseeded(self) -> Any:
        """The seed generator of Keras' random functions that are given none, alike on all replicas.

        Keras' own is made at its first use, which a graph does not allow, and anew in each thread.
        """
        with tf.init_scope(), self.scope():
            return keras_internals.seed_generator(None if self.alone else self.seed)

    def run(self, step: Step) -> list[Any]:
        """Calls `step(replica)` for each replica of this process and returns what each of them returned."""
        raise NotImplementedError

    def run_joined(self, step: Step, join: Callable[[list[Any]], Any]) -> Any:
        """What `step` returned on all replicas of the job, joined in their order."""
        return join(self.run(step))

    def exchange(self, message: bytes) -> list[bytes]:
        """What each process of the job says, by rank; all processes must call it."""
        return [message]

    def reset_metrics(self, model: Any) -> None:
        """Has the metrics of `model` begin anew."""
        model.reset_metrics()

    def numbers_of_all(self, number: tf.Tensor) -> tf.Tensor:
        """A whole number of each process, int32 scalar, by rank: int32 `[world_size]`; inside a graph or outside."""
        return number[tf.newaxis]

    @functools.cached_property
    def given(self) -> Any:
        """The batches that this process was given so far; `None` of one that is alone.

        See `tfdist.data.pipeline.together`.
        """
        from tfdist.data.pipeline import together

        return together.Given(self.numbers_of_all) if self.world.world_size > 1 else None

    def seed_tensorflow(self) -> None:
        """Sets TensorFlow's global seed, unless the user has: what draws without a seed is then alike everywhere."""
        if self.world.world_size > 1 and tensorflow_internals.global_seed() is None:
            tf.random.set_seed(self.seed)

    def program(self, model: Any, kind: str, batches: Any, stop_at_nan: bool) -> Any:
        """The inner loop of `kind`: "train", "test" or "predict"; see `tfdist.core.inner_loop`."""
        from tfdist.core import inner_loop

        if kind == "predict":
            return inner_loop.PredictProgram(self, model, batches)
        return inner_loop.StepProgram(self, model, f"{kind}_step", batches, stop_at_nan)

    def share_variables(self, variables: Sequence[Any]) -> None:
        """Gives Keras `variables` the chief's values in every process."""

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """The context of all that processes do together: it says which of them is missing when one is."""
        return contextlib.nullcontext()

    def check(self, model: Any) -> None:
        """Raises `UsageError` when `model` cannot be trained by this strategy."""

    def require_as_one_device(self) -> None:
        """Raises `UsageError` where steps differ from those of one device by design."""
        if not self.as_one_device:
            raise UsageError(
                f"The steps of `{self.name}` differ from those of one device by design, so that there is nothing to "
                "verify",
                "verify the model with `custom`, `mirrored`, `multiworker` or `horovod`",
            )

    def options(self) -> dict[str, Any]:
        """What was chosen, for the run's record."""
        return {"devices": self.devices, "threads": self.threads, "fused": self.fused, "seed": self.seed}

    def fit(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.fit` with this strategy: the same arguments and callbacks; `batch_size` is global."""
        return self._in_loop("fit", model, *arguments, **named)

    def evaluate(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.evaluate` with this strategy: every example once, metrics merged by their state."""
        return self._in_loop("evaluate", model, *arguments, **named)

    def predict(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.predict` with this strategy: one answer an example, in the order of the input."""
        return self._in_loop("predict", model, *arguments, **named)

    def train_on_batch(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.train_on_batch` with this strategy, on a global batch."""
        return self._in_loop("train_on_batch", model, *arguments, **named)

    def test_on_batch(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.test_on_batch` with this strategy, on a global batch."""
        return self._in_loop("test_on_batch", model, *arguments, **named)

    def predict_on_batch(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.predict_on_batch` with this strategy, on a global batch."""
        return self._in_loop("predict_on_batch", model, *arguments, **named)

    def _in_loop(self, method: str, model: Any, *arguments: Any, **named: Any) -> Any:
        from tfdist.core import outer_loop

        with self.guard():
            return getattr(outer_loop, method)(self, model, *arguments, **named)

    def verify(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """Compares a few steps of `model` on one device and on this strategy; `model` stays as it is.

        See `tfdist.core.verification`, which says what is compared and how closely.

        Args:
            model: compiled.
            arguments: `x`, `y`, `batch_size`, `sample_weight` and `class_weight`, as `fit` takes them.
            named: the same by name; and `steps`, the number of global batches, 3 unless set.

        Returns:
            The `tfdist.core.verification.Report`.

        Raises:
            VerificationError: the steps differ by more than rounding; names the layer and the likely cause.
            UsageError: this strategy does not compute what one device does, by design.
        """
        return self._in_loop("verify", model, *arguments, **named)

    def prepare(self, model: Any, *, verify: bool = False) -> Any:
        """Makes Keras' `fit`, `evaluate`, `predict` and `..._on_batch` this strategy's own for `model`; returns it.

        A class' own `fit` that calls `super().fit` so trains with this strategy. With `verify`, the next `fit` calls
        `verify` with its first batches before it trains.
        """
        self.check(model)
        if verify:
            self.require_as_one_device()
        keras_internals.set_strategy(model, self)
        keras_internals.set_to_verify(model, verify)
        return model


class OnThisProcess(Strategy):
    """One replica, on the first device of another strategy, as if there were no others."""

    def __init__(self, strategy: Strategy):  # the options are the other one's
        self.name = strategy.name  # type: ignore[misc]
        self.world, self.devices = World(), strategy.devices[:1]
        self.fused, self.steps_per_call = strategy.fused, strategy.steps_per_call
        self.seed = strategy.seed
        # What is made on the way must be the same in all processes.
        self.share_variables = strategy.share_variables  # type: ignore[method-assign]

    @property
    def alone(self) -> bool:
        return True

    def run(self, step: Step) -> list[Any]:
        with tf.device(self.devices[0]):
            return [step(Replica())]


def local_results(strategy: tf.distribute.Strategy, results: Any) -> list[Any]:
    """What each replica of this process returned from `strategy.run`, one structure a replica."""
    count = len(strategy.extended.worker_devices)
    flat = [strategy.experimental_local_results(result) for result in tf.nest.flatten(results)]
    flat = [values if len(values) == count else values * count for values in flat]  # one tensor for all of them
    return [tf.nest.pack_sequence_as(results, [values[index] for values in flat]) for index in range(count)]


def joined_parts(strategy: tf.distribute.Strategy, *parts: Any) -> list[Any]:
    """The examples of all replicas of this process in one tensor, for each of `parts`; for a merge call."""
    return [keras_internals.join(list(strategy.experimental_local_results(part))) for part in parts]


def current_index() -> int:
    """The number of the replica that is being traced, inside `tf.distribute.Strategy.run`."""
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
