"""The interface of a strategy: what the loop asks of it.

Every strategy answers

    scope()                  where variables are made
    mesh                     its replicas, which compute the step of one device; `None` if there is one replica
    run(step)                how `step()` runs on that one replica
    check(model)             whether a model can be trained here

one whose replicas are in several processes also

    exchange(message)         the messages of all processes
    broadcast(values)         the chief's values, in all processes
    numbers_of_all(number)    a number of each process, inside a graph
    sum_metrics(...)          the state of metrics, summed over all replicas
    coordinate(steps, stop)   what all processes do next; lock-step, unless it is overridden
    guard()                   says which process is missing when one is

and one with an algorithm of its own

    program(steps)           the inner loop that runs the steps

What replicas exchange in a step is in `tfdist.spmd.meshes`, what users call in `tfdist.training.strategy`, and
the loop in `tfdist.loop.outer_loop`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import tensorflow as tf

from tfdist.data.input import device_feed, together
from tfdist.data.input.division import Division
from tfdist.data.input.feed import Feed
from tfdist.errors import DisagreementError, UsageError
from tfdist.groups import Alone, ProcessGroup, parts
from tfdist.groups.exchanged import Exchanged
from tfdist.interface import devices as device_choice
from tfdist.interface import shared_variables
from tfdist.interface import speeds as speeds_of_replicas
from tfdist.interface.bound import Bound
from tfdist.interface.program import Program, Steps
from tfdist.interface.variables import Variables
from tfdist.internals import keras_routes, keras_variables
from tfdist.jobs import consensus
from tfdist.jobs.world import World
from tfdist.spmd import Mesh, Placed


def seed_of_random() -> int:
    """A number that follows from the state of Python's `random`, and leaves it as it is.

    So the weights that Keras draws next are those that it would draw without the strategy.
    """
    copy = random.Random()
    copy.setstate(random.getstate())
    return copy.getrandbits(31)


BLOCKS = "blocks"


def parsed_recompute(given: Any) -> str | tuple[str, ...] | None:
    """The option `recompute` of a strategy: `None`, "blocks", or the names of layers, also with commas between.

    Raises:
        UsageError: it is something else.
    """
    if given is None or given == BLOCKS:
        return given
    names = given.split(",") if isinstance(given, str) else given
    if isinstance(names, Sequence) and names and all(isinstance(name, str) and name.strip() for name in names):
        return tuple(name.strip() for name in names)
    raise UsageError(
        f"`recompute` is `{given}`",
        f'use "{BLOCKS}", or the names of the layers whose outputs are held, or leave it out',
    )


Step = Callable[[], Any]
BatchNorm = Literal["global", "per_replica"]


class Strategy:
    """Trains, evaluates and predicts with a compiled Keras model on this strategy's replicas.

    Args:
        devices: the number of devices, or their names, such as `"GPU:1"` or `["CPU:0", "CPU:1"]`; `None` is all GPUs
            that the strategy can use or, without a GPU, `default_cpus` logical CPU devices.
        seed: the order of the examples follows from it and the epoch; `None` takes one from the state of Python's
            `random` at the first `fit`, which `keras.utils.set_random_seed` makes repeatable; a run that is resumed
            takes the seed of its checkpoint.
        threads: the number of CPU threads that compute one operation; `None` leaves it to TensorFlow, which takes all
            cores. Small steps are faster with one. TensorFlow fixes the number when it first computes.
        fused: update each variable with one kernel where the optimizer allows.
        steps_per_call: the largest number of steps in one call of the inner loop; `None` chooses it by the clock.
        device_data_bytes: arrays of examples up to this size are copied to each device once, and a replica gathers its
            examples there; of larger ones the host gathers the parts, and copies each to its device ahead of its use.
            `None` is 256 MiB on GPUs; on CPUs, which share the memory of the host, arrays are read where they are.
        recompute: "blocks", or the names of the layers whose outputs are held: what is computed between them is
            computed again in the backward pass, which takes less memory and more time. See docs/memory.md.
        speeds: how large the part of each replica of a global batch is, in proportion to the others, as "3,1"; "auto"
            measures it; `None` makes them equal. See `tfdist.interface.speeds`.
        batch_norm: "global" normalizes over the global batch, as one device does; "per_replica" over the examples of
            each replica, as `tf.distribute` and DistributedDataParallel do, without an exchange per layer. Layers with
            `synchronized=True`, masks or `renorm` stay global.
        compare_first_step: compute the first step of a training on one device too, and warn of a difference, which is
            a fault of tfdist. See `tfdist.loop.first_step`, and docs/contract.md.
        job_settings: settings that must be the same in all processes of the job, if there are several.
    """

    name: ClassVar[str]
    default_cpus: ClassVar[int] = 1
    one_device: ClassVar[bool] = False  # it trains on one device, also where there are several GPUs
    takes_speeds: ClassVar[bool] = False  # its replicas can have parts of different sizes
    as_one_device: bool = True  # N replicas compute what one device does
    seconds_per_call: ClassVar[float] = 0.5  # of the inner loop, while no callback asks for shorter calls
    speeds: tuple[int, ...] | None = None  # of the replicas, where they differ
    steps_at_once: int = 1  # of workers that do not wait for each other, in this process
    parallel_steps: int = 10  # the largest number of steps that the inner loop runs at the same time

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
        speeds: str | Sequence[int] | None = None,
        batch_norm: BatchNorm = "global",
        compare_first_step: bool = True,
        job_settings: Mapping[str, str] | None = None,
    ):
        if device_data_bytes is not None and device_data_bytes < 0:
            raise UsageError(f"`device_data_bytes` is {device_data_bytes}", "use 0 or more, or leave it out")
        if steps_per_call is not None and steps_per_call < 1:
            raise UsageError(f"`steps_per_call` is {steps_per_call}", "use 1 or more, or leave it out")
        self.recompute = parsed_recompute(recompute)
        wanted_speeds = speeds_of_replicas.parsed(speeds)
        self.world = World()
        self.group: ProcessGroup = Alone()
        self.variables = Variables()
        self.seed = seed_of_random() if seed is None else seed
        self.seed_is_given = self.seed_is_settled = seed is not None
        self.fused = fused
        self.steps_per_call = steps_per_call
        self.batch_norm = batch_norm
        self.compare_first_step = compare_first_step and batch_norm == "global"  # it differs by choice
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
                "leave it out: each replica normalizes over the whole batch that it is given",
            )
        if self.world.world_size > 1 and job_settings:
            consensus.require_equal(self, job_settings)
        self.speeds = speeds_of_replicas.settled(
            wanted_speeds,
            self,
            strategy=self.name,
            divides=self.takes_speeds,
            devices=self.devices,
            num_replicas=self.num_replicas,
        )
        if self.speeds is not None and self.world.world_size > 1:
            self.world = dataclasses.replace(self.world, speeds=self.speeds)

    def __init_subclass__(cls, **named: Any):
        super().__init_subclass__(**named)
        if "scope" in vars(cls):
            cls.scope = _noted(vars(cls)["scope"])  # type: ignore[assignment]

    def set_up(self) -> None:
        """Makes what the strategy needs once its devices are known."""

    def choose_devices(self, wanted: int | str | Sequence[str] | None) -> list[str]:
        """The names of the devices that the replicas of this process run on."""
        chosen = device_choice.choose(1 if self.one_device and wanted is None else wanted, self.default_cpus)
        if self.one_device and len(chosen) != 1:
            raise UsageError(
                f"The strategy `{self.name}` uses one device, and {len(chosen)} were set",
                "use `--strategy mirrored` or `--strategy custom` for several devices",
            )
        return chosen

    @property
    def metrics_by_process(self) -> bool:
        """Whether each process has its own part of a metric's state, in an ordinary variable."""
        return self.variables.in_parts

    @property
    def bound(self) -> Bound | None:
        """What the strategy states of steps that are not those of one device; `None` if it states nothing."""
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
        """The device on which each replica of this process begins, and reads its part of the batch."""
        return self.devices

    @property
    def servers(self) -> Mapping[str, str]:
        """The addresses, by name, of processes that compute for this one and run no loop of their own."""
        return {}

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which a model and its optimizer are made and compiled."""
        return self.variables.scope()

    def sum_metrics(self, variables: Sequence[Any], name: str) -> list[tf.Tensor]:
        """The sums over all replicas of `variables`, the state of metrics, of which each replica may have a part.

        Called in the strategy's scope, inside a graph or outside; `name` tells the sum from others of the same step.
        """
        return self.variables.sum_metrics(self.group, variables, name)

    def on_this_process(self) -> Strategy:
        """A strategy of one replica, on the first device of this process."""
        return OnThisProcess(self)

    @property
    def alone(self) -> bool:
        """Whether there is one replica, which exchanges nothing with others."""
        return self.mesh is None and self.num_replicas == 1

    def runs_eagerly(self, model: Any) -> bool:
        """Whether the steps of `model` run operation by operation."""
        return bool(model.run_eagerly)

    @property
    def single_threaded(self) -> bool:
        """Whether one thread computes everything, so that handing operations to other threads gains nothing."""
        # Other threads bring data to a device that does not read them where they are, on the first CPU device.
        on_one_cpu = self.num_replicas == 1 and self.devices[0] == "CPU:0" and self.device_data_bytes is None
        return on_one_cpu and tf.config.threading.get_intra_op_parallelism_threads() == 1

    @property
    def mesh(self) -> Mesh | None:
        """The replicas that compute the partitioned step of one device; `None` if it does not partition steps."""
        return None

    def tracing(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """The context in which a step of `model` is traced for one device, to be partitioned for the replicas."""
        return self.variables.tracing(model)

    def place_of_update(self, optimizer: Any) -> Callable[[tf.Variable], tf.Variable | None]:
        """Where a kernel of `optimizer` updates a variable; returns `None` for the variable itself."""
        del optimizer
        return lambda variable: None

    def variables_in_parts(self, model: Any) -> Mapping[int, Placed]:
        """What replicas have in place of variables that a step uses, see `tfdist.spmd.compute`."""
        del model
        return {}

    def keep_whole(self, model: Any, handles: Collection[int]) -> None:
        """Gives every process the whole of those `variables_in_parts` of which a step needs the whole."""

    def run(self, step: Step) -> Any:
        """The result of `step()`, called where the only replica of this process computes, inside a graph."""
        with tf.device(self.devices[0]):
            return step()

    def unseeded(self) -> Any:
        """The seed generator for draws of Keras without a seed, made outside of graphs; `None` for Keras' own."""
        return None

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all processes of the job, by rank; all processes must call it."""
        return self.group.exchange(message)

    def exchanged(self) -> Exchanged | None:
        """What this process has exchanged with others so far; `None` where nobody counts it."""
        return self.group.exchanged() if self.world.world_size > 1 else None

    def coordinate(self, steps: int, stop: bool) -> tuple[int, bool]:
        """What all processes do next, asked before each call of the inner loop, which all then run alike.

        A strategy whose processes do not run in lock-step overrides it.

        Args:
            steps: how many steps this process would run.
            stop: whether a callback of this process wants to stop.

        Returns:
            The smallest number of steps that a process asks for, and whether any process wants to stop.

        Raises:
            DisagreementError: the processes were given different batches.
        """
        if self.world.world_size == 1:
            return steps, stop
        given = together.given(self)
        try:
            return consensus.next_call(self, steps, stop, str(given))
        except DisagreementError:
            given.forget()  # what differed is told, and a later call has other data
            raise

    def numbers_of_all(self, number: tf.Tensor) -> tf.Tensor:
        """The `number` of each process, an int32 scalar, by rank: int32 `[world_size]`; inside a graph or outside."""
        return self.group.numbers_of_all(number)

    def placed(self, feed: Feed) -> Feed:
        """`feed` as the replicas of this strategy read it."""
        return device_feed.placed(feed, self.replica_devices, self.world.rank, self.division, self.device_data_bytes)

    def before_training(self, model: Any, feed: Feed) -> None:
        """Called by `fit` before the first step; `feed` has the batches of the training."""

    def program(self, steps: Steps) -> Program:
        """The inner loop that runs `steps`."""
        raise NotImplementedError

    def broadcast(self, values: np.ndarray) -> np.ndarray:
        """The chief's `values`, `[n]` uint8, in all processes; each calls it with as many of its own."""
        return self.group.broadcast_bytes(values) if self.group.size > 1 else values

    def broadcast_variables(self, variables: Sequence[Any], unless_equal: bool = False) -> None:
        """Gives Keras `variables` the chief's values in every process, but those of which each has a part.

        Args:
            variables: of this process.
            unless_equal: compare checksums first, and send nothing if they are equal: for variables that were just
                made, which most often are the same everywhere and are sent before the first step in any case.

        Raises:
            DisagreementError: the processes have variables of different shapes or dtypes.
        """
        if self.world.world_size > 1:
            consensus.require_equal_variables(self, shared_variables.described(variables))
            whole = [variable for variable in variables if parts.part_of(variable) is None]
            if unless_equal:
                mine = shared_variables.checksum(whole)
                if len(set(consensus.all_gather_object(self, mine, "compares its variables"))) == 1:
                    return
            shared_variables.broadcast_variables(whole, self.broadcast, self.world.is_chief)

    def build_optimizer(self, model: Any, optimizer: Any, variables: Sequence[Any]) -> None:
        """Makes the variables of an `optimizer` of `model` that updates `variables`."""
        del model
        optimizer.build(list(variables))

    def divide_optimizers(self, model: Any) -> None:
        """Called before the steps of a built `model` are traced, by a strategy that divides what optimizers hold."""

    def is_divided(self, optimizer: Any) -> bool:
        """Whether `divide_optimizers` or `build_optimizer` has divided `optimizer`, whose variables are plain then."""
        del optimizer
        return False

    def finalize_variables(self, model: Any) -> None:
        """What the optimizer of `model` does to its variables at the end of a training."""
        model.optimizer.finalize_variable_values(model.trainable_weights)

    def before_checkpoint(self, model: Any) -> None:
        """Called before a checkpoint within an epoch: the next step is that of a training which is resumed from it."""

    def whole_state(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """The context in which the chief can save `model` with its optimizers; all processes must enter it."""
        del model
        return contextlib.nullcontext()

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """The context of all work of several processes; its errors say which process is missing."""
        return contextlib.nullcontext()

    def check_callbacks(self, callbacks: Iterable[Any]) -> None:
        """Raises `UsageError` when one of `callbacks` cannot be used with this strategy."""

    def check(self, model: Any) -> None:
        """Raises `UsageError` when `model` cannot be trained by this strategy."""
        self.variables.check(model, self.is_divided)

    def stages_of(self, model: Any) -> list[dict[str, Any]]:
        """The device, layers and parameters of each stage of `model`, for the run's record; empty if it is not cut."""
        del model
        return []

    def options(self) -> dict[str, Any]:
        """The options in effect, for the run's record."""
        recompute = list(self.recompute) if isinstance(self.recompute, tuple) else self.recompute
        own: dict[str, Any] = {"devices": self.devices, "threads": self.threads, "fused": self.fused, "seed": self.seed}
        own |= {"batch_norm": self.batch_norm, "recompute": recompute}
        return own | {"speeds": self.speeds and list(self.speeds)}


class OnThisProcess(Strategy):
    """One replica, on the first device of another strategy, with that strategy's options."""

    batch_norm = "global"

    def __init__(self, strategy: Strategy):
        self.name = strategy.name  # type: ignore[misc]
        self.world, self.devices = World(), strategy.devices[:1]
        self.group, self.variables = Alone(), Variables()
        self.fused, self.steps_per_call = strategy.fused, strategy.steps_per_call
        self.device_data_bytes = strategy.device_data_bytes
        self.recompute = strategy.recompute
        self.seed, self.seed_is_given, self.seed_is_settled = strategy.seed, strategy.seed_is_given, True
        # Variables that are made while it runs must be the same in all processes.
        self.broadcast_variables = strategy.broadcast_variables  # type: ignore[method-assign]


def _noted(scope: Callable[[Any], contextlib.AbstractContextManager[Any]]) -> Callable[[Any], Any]:
    """A method `scope` whose context marks the models that are made in it, see `keras_routes.Scope`."""

    @functools.wraps(scope)
    def method(strategy: Any) -> contextlib.AbstractContextManager[Any]:
        return keras_routes.Scope(strategy.name, scope(strategy))

    return method
