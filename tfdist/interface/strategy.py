"""The interface between a strategy and the training loop.

Every strategy defines

    scope()                  the context in which variables are created
    mesh                     the replicas that compute the partitioned step; `None` for a single replica
    run(step)                how the single replica runs `step()`
    check(model)             raises an error for a model that cannot be trained

A strategy with replicas in several processes also defines

    exchange(message)         gathers a message from every process
    broadcast(values)         sends the chief's values to all processes
    numbers_of_all(number)    gathers a number from every process, inside a graph
    sum_metrics(...)          sums the state of metrics over all replicas
    coordinate(steps, stop)   agrees on the next call of the inner loop
    guard()                   names the missing process in errors

A strategy with its own algorithm also defines

    program(steps)           the inner loop that runs the steps

The communication between replicas within a step is in `tfdist.spmd.meshes`, the methods that users call are in
`tfdist.training.strategy`, and the loop is in `tfdist.loop.outer_loop`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
import tensorflow as tf

from tfdist.data.input import device_feed, job_feeds
from tfdist.data.input.division import Division
from tfdist.data.input.feed import Feed
from tfdist.errors import DisagreementError, UsageError
from tfdist.groups import Alone, ExchangeTotals, ProcessGroup, parts
from tfdist.interface import devices as device_choice
from tfdist.interface import speeds as replica_speeds
from tfdist.interface import variables as variables_module
from tfdist.interface.bound import Bound
from tfdist.interface.program import Program, Steps
from tfdist.interface.variables import Variables
from tfdist.internals import keras_routes, keras_variables
from tfdist.jobs import consensus
from tfdist.jobs.world import World
from tfdist.spmd import Mesh, Placed


def seed_of_random() -> int:
    """Returns a seed derived from the state of Python's `random`, without changing that state.

    Keras therefore initializes the next weights exactly as it would without a strategy.
    """
    copy = random.Random()
    copy.setstate(random.getstate())
    return copy.getrandbits(31)


BLOCKS = "blocks"


def parse_recompute(option: Any) -> str | tuple[str, ...] | None:
    """Parses the option `recompute`: `None`, "blocks", or layer names as a sequence or separated by commas.

    Raises:
        UsageError: the option has another form.
    """
    if option is None or option == BLOCKS:
        return option
    names = option.split(",") if isinstance(option, str) else option
    if isinstance(names, Sequence) and names and all(isinstance(name, str) and name.strip() for name in names):
        return tuple(name.strip() for name in names)
    raise UsageError(
        f"`recompute` is `{option}`",
        f'use "{BLOCKS}", or the names of the layers whose outputs are kept, or leave it out',
    )


Step = Callable[[], Any]
BatchNorm = Literal["global", "per_replica"]


def _marking_models(scope: Callable[[Any], contextlib.AbstractContextManager[Any]]) -> Callable[[Any], Any]:
    """Wraps a method `scope` so that its context marks the models created in it; see `keras_routes.Scope`."""

    @functools.wraps(scope)
    def method(strategy: Any) -> contextlib.AbstractContextManager[Any]:
        return keras_routes.Scope(strategy.name, scope(strategy))

    return method


class Strategy:
    """Trains, evaluates and predicts with a compiled Keras model on this strategy's replicas.

    Args:
        devices: the number of devices, or their names, such as `"GPU:1"` or `["CPU:0", "CPU:1"]`; `None` uses all GPUs
            that the strategy can use or, without a GPU, `default_cpus` logical CPU devices.
        seed: determines the order of the examples together with the epoch; `None` derives a seed from the state of
            Python's `random` at the first `fit`, so that `keras.utils.set_random_seed` makes it repeatable. A resumed
            run uses the seed of its checkpoint.
        threads: the number of CPU threads per operation; `None` leaves it to TensorFlow, which uses all cores. Small
            steps are faster with one thread. TensorFlow fixes the number when it first runs an operation.
        fused: update each variable with one fused kernel where the optimizer allows it.
        steps_per_call: the largest number of steps per call of the inner loop; `None` chooses it from the measured
            step time.
        device_data_bytes: arrays of examples up to this size are copied to each device once, and every replica gathers
            its examples there. For larger arrays, the host gathers each replica's part and prefetches it to the
            device. `None` means 256 MiB on GPUs; CPU devices read the arrays directly from host memory.
        recompute: "blocks", or the names of the layers whose outputs are kept: activations between them are recomputed
            in the backward pass, which takes less memory and more time. See docs/memory.md.
        batch_norm: "global" normalizes over the global batch, as one device does; "per_replica" normalizes over the
            examples of each replica, as `tf.distribute` and DistributedDataParallel do, without communication per
            layer. Layers with `synchronized=True`, masks or `renorm` stay global.
        compare_first_step: also compute the first training step on one device, and warn if it differs, which would be
            a bug in tfdist. See `tfdist.loop.first_step` and docs/contract.md.
        job_settings: settings that must be equal in all processes of the job.
    """

    name: ClassVar[str]
    default_cpus: ClassVar[int] = 1
    one_device: ClassVar[bool] = False  # trains on one device, even if there are several GPUs
    as_one_device: bool = True  # the replicas compute the same step as one device
    seconds_per_call: ClassVar[float] = 0.5  # duration of an inner-loop call, unless a callback needs shorter calls
    speeds: tuple[int, ...] | None = None  # the relative speeds of the replicas; `None` if they are equal
    steps_at_once: int = 1  # the number of workers in this process that run without waiting for each other
    parallel_steps: int = 10  # the largest number of steps that the inner loop runs in parallel

    def __init__(
        self,
        *,
        devices: int | str | Sequence[str] | None = None,
        seed: int | None = None,
        threads: int | None = None,
        fused: bool = True,
        steps_per_call: int | None = None,
        device_data_bytes: int | None = None,
        recompute: str | Sequence[str] | None = None,
        batch_norm: BatchNorm = "global",
        compare_first_step: bool = True,
        job_settings: Mapping[str, str] | None = None,
    ):
        least = {"device_data_bytes": (device_data_bytes, 0), "seed": (seed, 0), "steps_per_call": (steps_per_call, 1)}
        for option, (value, minimum) in least.items():
            if value is not None and value < minimum:
                raise UsageError(f"`{option}` is {value}", f"use {minimum} or more, or leave it out")
        self.recompute = parse_recompute(recompute)
        self.world = World()
        self.group: ProcessGroup = Alone()
        self.variables = Variables()
        self.seed = seed_of_random() if seed is None else seed
        self.seed_is_given = self.seed_is_settled = seed is not None
        self.fused = fused
        self.steps_per_call = steps_per_call
        self.batch_norm = batch_norm
        # With per-replica batch normalization the step differs from that of one device by design.
        self.compare_first_step = compare_first_step and batch_norm == "global"
        self.device_data_bytes = device_data_bytes
        self.threads = threads
        if threads is not None:
            one_cpu = devices in (None, 1) and self.default_cpus == 1 and not tf.config.get_visible_devices("GPU")
            device_choice.set_threads(threads, self.steps_at_once if threads == 1 and one_cpu else None)
        self.devices = self.choose_devices(devices)
        keras_variables.fill_large_variables_in_place()
        self.set_up()
        if batch_norm != "global" and (self.mesh is None or not self.as_one_device):
            raise UsageError(
                f"`batch_norm` is `{batch_norm}`, and `{self.name}` does not divide a batch among replicas that "
                "compute one step",
                "leave it out: each replica normalizes over the whole batch that it receives",
            )
        if self.world.world_size > 1 and job_settings:
            consensus.require_equal(self, job_settings)

    def __init_subclass__(cls, **named: Any):
        super().__init_subclass__(**named)
        if "scope" in vars(cls):
            cls.scope = _marking_models(vars(cls)["scope"])  # type: ignore[method-assign]

    def __repr__(self) -> str:
        replicas = "1 replica" if self.num_replicas == 1 else f"{self.num_replicas} replicas"
        place = ", ".join(self.devices)
        if self.world.world_size > 1:
            place = f"{self.world.world_size} processes; this is {self.world.named(self.world.rank)} on {place}"
        return f"<tfdist strategy `{self.name}`: {replicas} {'in' if self.world.world_size > 1 else 'on'} {place}>"

    def __reduce__(self) -> Any:
        """Refuses pickling: in another process, a strategy would train without the other processes of its job."""
        raise UsageError(
            f"The strategy `{self.name}` belongs to its process, and cannot be pickled",
            "make it in the process that uses it, with `tfdist.strategy(...)`",
        )

    def __deepcopy__(self, memo: Any) -> Self:
        """The strategy itself, for copies of what refers to it, such as KerasTuner's copies of callbacks."""
        return self

    def divide_by_speeds(self, speeds: str | Sequence[int] | None) -> None:
        """Divides global batches in proportion to `speeds`, see `tfdist.interface.speeds`; for constructors."""
        self.speeds = replica_speeds.resolve(speeds, self, self.devices, self.num_replicas)
        if self.speeds is not None and self.world.world_size > 1:
            self.world = dataclasses.replace(self.world, speeds=self.speeds)

    def set_up(self) -> None:
        """Completes the strategy; called once its devices are known."""

    def choose_devices(self, wanted: int | str | Sequence[str] | None) -> list[str]:
        """Returns the names of the devices on which the replicas of this process run."""
        chosen = device_choice.choose(1 if self.one_device and wanted is None else wanted, self.default_cpus)
        if self.one_device and len(chosen) != 1:
            raise UsageError(
                f"The strategy `{self.name}` uses one device, and {len(chosen)} were set",
                "use `--strategy mirrored` or `--strategy custom` for several devices",
            )
        return chosen

    @property
    def metrics_by_process(self) -> bool:
        """Whether each process keeps its own part of a metric's state, in an ordinary variable."""
        return self.variables.in_parts

    @property
    def bound(self) -> Bound | None:
        """The error bound that `verify` checks for an asynchronous strategy; `None` if there is none."""
        return None

    @property
    def num_replicas(self) -> int:
        """The number of replicas that take part in a step, over all processes."""
        return len(self.replica_devices) * self.world.world_size

    @property
    def division(self) -> Division:
        """How a global batch is divided among the replicas."""
        return Division(self.num_replicas, self.speeds)

    @property
    def replica_devices(self) -> list[str]:
        """The devices on which the replicas of this process read their parts of a batch."""
        return self.devices

    @property
    def servers(self) -> Mapping[str, str]:
        """The addresses, by name, of processes that compute for this process and run no loop themselves."""
        return {}

    @_marking_models
    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which a model and its optimizer are created and compiled."""
        return self.variables.scope()

    def sum_metrics(self, variables: Sequence[Any], name: str) -> list[tf.Tensor]:
        """Sums `variables`, the state of metrics, over all replicas.

        Called in the strategy's scope, inside or outside a graph. `name` identifies the collective operation within a
        step.
        """
        return self.variables.sum_metrics(self.group, variables, name)

    def on_this_process(self) -> Strategy:
        """Returns a strategy with one replica, on the first device of this process."""
        return OnThisProcess(self)

    @property
    def alone(self) -> bool:
        """Whether there is a single replica, which communicates with no other replica."""
        return self.mesh is None and self.num_replicas == 1

    def runs_eagerly(self, model: Any) -> bool:
        """Whether the steps of `model` run operation by operation."""
        return bool(model.run_eagerly)

    @property
    def single_threaded(self) -> bool:
        """Whether one thread computes everything, so that scheduling operations on other threads gains nothing."""
        # Only the first CPU device reads the data directly from memory; for other devices, other threads copy them.
        on_one_cpu = self.num_replicas == 1 and self.devices[0] == "CPU:0" and self.device_data_bytes is None
        return on_one_cpu and tf.config.threading.get_intra_op_parallelism_threads() == 1

    @property
    def mesh(self) -> Mesh | None:
        """The replicas that compute the partitioned step; `None` if the strategy does not partition steps."""
        return None

    def tracing(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """The context in which a step of `model` is traced for one device, to be partitioned for the replicas."""
        return self.variables.tracing(model)

    def place_of_update(self, optimizer: Any) -> Callable[[tf.Variable], tf.Variable | None]:
        """Returns a function that maps a variable to the one that a fused kernel of `optimizer` updates in its place.

        The function returns `None` where the kernel updates the variable itself.
        """
        del optimizer
        return lambda variable: None

    def variables_in_parts(self, model: Any) -> Mapping[int, Placed]:
        """Returns the shards that replace variables in a step of `model`; see `tfdist.spmd.compute`."""
        del model
        return {}

    def keep_whole(self, model: Any, handles: Collection[int]) -> None:
        """Gives every process the whole of those `variables_in_parts` that a step needs whole, by their `handles`."""

    def run(self, step: Step) -> Any:
        """Returns `step()`, computed on the device of this process's only replica; called inside a graph."""
        with tf.device(self.devices[0]):
            return step()

    def unseeded(self) -> Any:
        """Returns the generator for Keras' unseeded draws, created outside of graphs; `None` for Keras' own."""
        return None

    def exchange(self, message: bytes) -> list[bytes]:
        """Returns the messages of all processes of the job, by rank; all processes must call it."""
        return self.group.exchange(message)

    def exchanged(self) -> ExchangeTotals | None:
        """Returns the traffic of this process so far; `None` if it is not counted."""
        return self.group.exchanged() if self.world.world_size > 1 else None

    def coordinate(self, steps: int, stop: bool) -> tuple[int, bool]:
        """Agrees with all processes on the next call of the inner loop.

        A strategy whose processes do not run in lock-step overrides it.

        Args:
            steps: the number of steps that this process wants to run.
            stop: whether a callback of this process wants to stop.

        Returns:
            The smallest number of steps that a process wants, and whether any process wants to stop.

        Raises:
            DisagreementError: the processes received different batches.
        """
        if self.world.world_size == 1:
            return steps, stop
        fingerprint = job_feeds.batch_fingerprint(self)
        try:
            return consensus.next_call(self, steps, stop, str(fingerprint))
        except DisagreementError:
            fingerprint.reset()  # the error reports the difference, and a later call has other data
            raise

    def numbers_of_all(self, number: tf.Tensor) -> tf.Tensor:
        """All-gathers `number`, an int32 scalar: int32 `[world_size]`, by rank; inside or outside a graph."""
        return self.group.numbers_of_all(number)

    def placed(self, feed: Feed) -> Feed:
        """Returns `feed` as the replicas of this strategy read it."""
        return device_feed.placed(feed, self.replica_devices, self.world.rank, self.division, self.device_data_bytes)

    def program(self, steps: Steps) -> Program:
        """Returns the inner loop that runs `steps`."""
        raise NotImplementedError

    def broadcast(self, values: np.ndarray) -> np.ndarray:
        """Broadcasts the chief's `values`, `[n]` uint8; each process passes an array of this length."""
        return self.group.broadcast_bytes(values) if self.group.size > 1 else values

    def broadcast_variables(self, variables: Sequence[Any], unless_equal: bool = False) -> None:
        """Broadcasts the chief's values of Keras `variables`, except for variables that are sharded over the processes.

        Args:
            variables: the variables of this process.
            unless_equal: compare checksums first, and send nothing if they are equal. New variables usually have the
                same values in all processes, and are broadcast before the first step in any case.

        Raises:
            DisagreementError: the variables of the processes have different shapes or dtypes.
        """
        if self.world.world_size > 1:
            described = variables_module.described(variables)
            consensus.require_equal_variables(self, described)
            whole = [variable for variable in variables if parts.part_of(variable) is None]
            if not unless_equal or variables_module.differ(whole, self, "compares its variables"):
                variables_module.broadcast_variables(whole, self.broadcast, self.world.is_chief)

    def build_optimizer(self, model: Any, optimizer: Any, variables: Sequence[Any]) -> None:
        """Creates the variables of an `optimizer` of `model` that updates `variables`."""
        del model
        optimizer.build(list(variables))

    def divide_optimizers(self, model: Any) -> None:
        """Shards the optimizer state of a built `model`, if the strategy does; called before its steps are traced."""

    def is_divided(self, optimizer: Any) -> bool:
        """Whether the state of `optimizer` was sharded, so that its variables are plain `tf.Variable`s."""
        del optimizer
        return False

    def finalize_variables(self, model: Any) -> None:
        """Lets the optimizer of `model` finalize its variables at the end of training."""
        model.optimizer.finalize_variable_values(model.trainable_weights)

    def before_checkpoint(self, model: Any) -> None:
        """Called before a checkpoint within an epoch; the next step must be the one that a resumed run would take."""

    def whole_state(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """The context in which the chief can save `model` with its optimizers; all processes must enter it."""
        del model
        return contextlib.nullcontext()

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """The context of all work that involves several processes; errors raised in it name the missing process."""
        return contextlib.nullcontext()

    def check_callbacks(self, callbacks: Iterable[Any]) -> None:
        """Raises `UsageError` if one of `callbacks` cannot be used with this strategy."""

    def check(self, model: Any) -> None:
        """Raises `UsageError` if this strategy cannot train `model`."""
        self.variables.check(model, self.is_divided)

    def stages_of(self, model: Any) -> list[dict[str, Any]]:
        """Returns the device, layers and parameters of each pipeline stage of `model`; empty without stages."""
        del model
        return []

    def options(self) -> dict[str, Any]:
        """Returns the options in effect, for the run's record."""
        recompute = list(self.recompute) if isinstance(self.recompute, tuple) else self.recompute
        options = {"devices": self.devices, "threads": self.threads, "fused": self.fused, "seed": self.seed}
        speeds = self.speeds and list(self.speeds)
        return options | {"batch_norm": self.batch_norm, "recompute": recompute, "speeds": speeds}


class OnThisProcess(Strategy):
    """One replica on the first device of another strategy, with that strategy's options."""

    batch_norm = "global"

    def __init__(self, strategy: Strategy):
        self.name = strategy.name  # type: ignore[misc]
        self.world, self.devices = World(), strategy.devices[:1]
        self.group, self.variables = Alone(), Variables()
        self.fused, self.steps_per_call = strategy.fused, strategy.steps_per_call
        self.device_data_bytes = strategy.device_data_bytes
        self.recompute = strategy.recompute
        self.seed, self.seed_is_given, self.seed_is_settled = strategy.seed, strategy.seed_is_given, True
        # Variables that are created while it runs must be equal in all processes.
        self.broadcast_variables = strategy.broadcast_variables  # type: ignore[method-assign]
