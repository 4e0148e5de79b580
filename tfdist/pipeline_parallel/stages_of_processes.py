"""`pipeline` in a job of several processes: each process computes one stage of the model.

A process has the variables of its stage, their gradients and their slots. Each process traces the step of one device as
if it had all variables and slots. The step is partitioned for the micro-batches, and each process computes the
operations of its stage (`tfdist.pipeline_parallel.stage_mesh`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.data.input.feed import Feed
from tfdist.errors import ClusterError, DisagreementError, UsageError
from tfdist.groups import ProcessGroup, joining, parts
from tfdist.groups.arrays import ArrayGroup
from tfdist.groups.parts import Part
from tfdist.interface.program import AtNan, Outcome, Program, Steps
from tfdist.interface.variables import Variables
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_optimizers, keras_stages, keras_variables, tensorflow_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.patching import Attached
from tfdist.jobs import consensus
from tfdist.jobs.world import World
from tfdist.loop.partitioned_program import PartitionedPredictProgram, PartitionedProgram
from tfdist.optimizers.sharded import DividedOptimizer, divide, local
from tfdist.pipeline_parallel import delayed, plan
from tfdist.pipeline_parallel.delayed import DelayedProgram
from tfdist.pipeline_parallel.local_pipeline import examples_of_part, require_examples
from tfdist.pipeline_parallel.plan import Balance, LayerNames, Plan
from tfdist.pipeline_parallel.schedule import DELAYED, Schedule
from tfdist.pipeline_parallel.stage_mesh import ONE_PROCESS, Exchange, StageMesh
from tfdist.training.job_strategy import JobStrategy, needs_whole_state


def _undivided(shape: Sequence[int], owner: int, rank: int, ranks: int) -> Part:
    """Returns the part of process `rank` in a variable of which process `owner` has all elements."""
    length = shape[0] if len(shape) else 1
    return Part(tuple(shape), tuple(length if other == owner else 0 for other in range(ranks)), rank)


def _free_other_stages(plan: Plan, world: World, shared: Sequence[Any]) -> None:
    """Marks the variables with their owners, and frees those of other stages; stage `rank` is in process `rank`.

    The `shared` variables, those of metrics, remain in all processes.
    """
    kept = {id(variable) for variable in shared}
    for stage in range(world.world_size):
        place = f"in stage {stage} of the pipeline, which is in {world.named(stage)}"
        for variable in plan.variables_of(stage):
            if id(variable) in kept:
                continue
            parts.mark(variable, _undivided(variable.shape, stage, world.rank, world.world_size))
            if stage != world.rank:
                keras_stages.evict(variable, place)


def _gather(model: Any, exchange: Callable[[bytes], list[bytes]], is_chief: bool) -> list[tuple[Any, str]]:
    """Gathers the variables of all stages on the chief; all processes call it.

    Returns:
        On the chief, the variables of other stages with the places to which `keras_stages.evict(variable, place)`
        returns them; empty elsewhere.
    """
    gathered = []
    for variable in model.variables:
        part = parts.part_of(variable)
        if part is None:
            continue
        value = parts.gathered(variable, exchange)
        if is_chief and not part.size:
            gathered.append((variable, keras_stages.restore(variable, value)))
    return gathered


_OTHER_OPTIMIZER = "use an optimizer of Keras, or train in one process"


class StageOptimizer(DividedOptimizer):
    """The part of an optimizer for the stage of this process.

    Args:
        optimizer: a Keras optimizer that is built for `variables`, or not built.
        variables: all variables that it updates; `tfdist.groups.parts` knows which ones this process has.
        group: the processes.
        meet: called with what this process is about to do; raises an error if another process does something else.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], group: ProcessGroup, meet: Callable[[str], None]):
        super().__init__(optimizer, group, meet)
        self._parts = {id(variable): _part(variable) for variable in variables}
        self._local = [variable for variable in variables if self._parts[id(variable)].size]
        self._stand_ins: dict[int, tf.Variable] = {}
        self._make_slots(list(variables))

    def _make_slots(self, variables: list[Any]) -> None:
        if not self.optimizer.built:
            # An elementwise optimizer has slots with the shapes of the variables that it is built for.
            by_element = type(keras_internals.inner(self.optimizer)) in keras_optimizers.ELEMENTWISE
            plain = [
                local(variable)
                if self._parts[id(variable)].size or not by_element
                else tf.Variable(tf.zeros(self._parts[id(variable)].shape, local(variable).dtype), trainable=False)
                for variable in variables
            ]
            with keras_stages.accessible(variables):
                keras_optimizers.build(self.optimizer, variables, plain)
        for variable, slots in zip(variables, self._slots(), strict=True):
            part = self._parts[id(variable)]
            for slot in slots:
                if tuple(slot.shape) not in (part.shape, part.whole_shape):
                    part = _undivided(slot.shape, part.owner, part.rank, len(part.lengths))
                divide(slot, part)

    def _slots(self) -> list[list[Any]]:
        try:
            return keras_optimizers.slots_of(self.optimizer)
        except LookupError as error:
            raise UsageError(
                f"The variable `{error.args[0]}` of the optimizer `{self.optimizer.name}` belongs to none of the "
                "variables that it updates",
                _OTHER_OPTIMIZER,
            ) from error

    @contextlib.contextmanager
    def as_if_whole(self) -> Iterator[None]:
        """The context for tracing an update of all variables, with placeholders for the slots of other processes."""
        slots = [slot for slots in self._slots() for slot in slots]
        remote = [slot for slot in slots if (part := parts.part_of(slot)) is not None and not part.size]
        with keras_variables.backed_by(remote, [self._stand_in(slot) for slot in remote]):
            yield

    def _stand_in(self, slot: Any) -> tf.Variable:
        """Returns a variable without a value, with the shape of a slot of another process."""
        if id(slot) not in self._stand_ins:
            variable, part = local(slot), parts.part_of(slot)
            assert part is not None
            stand_in = tensorflow_variables.without_value(part.whole_shape, variable.dtype, variable.device)
            self._stand_ins[id(slot)] = stand_in
        return self._stand_ins[id(slot)]

    def finalize(self) -> None:
        """Lets the optimizer finalize the variables of this process at the end of a training."""
        values = [local(variable) for variable in self._local]
        updating = keras_optimizers.updating(self.optimizer, self._local, values)
        with tensorflow_internals.without_strategy(), updating:
            self.optimizer.finalize_variable_values(self._local)


def _part(variable: Any) -> Part:
    part = parts.part_of(variable)
    if part is None:
        raise UsageError(
            f"The optimizer updates `{variable.path}`, which belongs to no layer of a stage",
            "remove layers that the model does not call, or train in one process",
        )
    return part


# With M micro-batches and S stages, a stage waits (S - 1) / (4 M + S - 1) of the time, and not (S - 1) / (M + S - 1).
# More steps would take longer to trace.
STEPS_TOGETHER = 4


class _WithMessages(Program):
    """Numbers the calls of the inner loop, which distinguishes their messages."""

    _strategy: Any

    def run(self, state: Any, first: int, count: int) -> Outcome:
        self._strategy.exchange_of_stages.begin_call()
        return super().run(state, first, count)


class StageProgram(_WithMessages, PartitionedProgram):
    """Trains or tests a model of which this process computes one stage."""


class StagePredictProgram(_WithMessages, PartitionedPredictProgram):
    """Predicts with a model of which this process computes one stage."""


class DelayedStageProgram(_WithMessages, DelayedProgram):
    """Trains with the schedule `2bw`: a stage begins a step while later stages still compute the previous one."""

    def __init__(self, strategy: Any, steps: Steps):
        super().__init__(strategy, steps)
        optimizer, stages = steps.model.optimizer, strategy.world.world_size
        # With loss scaling or clipping by the global norm, an update needs values from all stages.
        waits = keras_internals.inner(optimizer) is not optimizer or bool(optimizer.global_clipnorm)
        # A step begins before the loss of the previous one is known.
        if not waits and steps.at_nan is AtNan.NOTHING and strategy.micro_batches >= stages - 1:
            self.steps_together = STEPS_TOGETHER


def require_separate(model: Any, plan: Plan) -> None:
    """Raises `UsageError` if two stages share a layer, or a stage has nothing to train."""
    stages: dict[int, int] = {}  # by the `id`s of variables
    for number in range(len(plan.begins)):
        layers = [call.operation for call in plan.calls_of(number) if isinstance(call.operation, keras.Layer)]
        for layer in layers:
            for variable in layer.variables:
                if stages.setdefault(id(variable), number) != number:
                    raise UsageError(
                        f"The layer `{layer.name}` is in stage {stages[id(variable)]} and in stage {number}, and they "
                        "are in different processes",
                        f"name other cuts with `stages`, so that one stage has all its calls, or {ONE_PROCESS}",
                    )
        if model.trainable_variables and not any(layer.trainable_variables for layer in layers):
            raise UsageError(
                f"Stage {number} ({', '.join(plan.layers_of(number))}) has nothing to train",
                "name other cuts with `stages`, or start fewer processes",
            )


_stage_optimizer: Attached[StageOptimizer] = Attached("stage_optimizer")


class StagesOfProcesses(JobStrategy):
    """Trains one stage of a model in each process of the job; see `tfdist.strategies.pipeline`.

    A subclass sets the attributes before it calls the constructor.

    Args:
        options: see `tfdist.training.job_strategy.JobStrategy`.

    Attributes:
        micro_batches: the number of parts into which a global batch is split.
        schedule: "gpipe", "1f1b" or "2bw", see `tfdist.pipeline_parallel.schedule`.
        balance: what is balanced between the stages: "time", which the chief measures, or "memory".
        first_layers: the name of the first layer of each stage after the first; `None` lets `balance` choose.
    """

    micro_batches: int
    schedule: Schedule
    balance: Balance
    first_layers: LayerNames

    def __init__(self, *, job_settings: Mapping[str, str] | None = None, **options: Any):
        common_settings = {
            "micro_batches": str(self.micro_batches),
            "schedule": self.schedule,
            "balance": self.balance,
            "stages": ",".join(self.first_layers or ()) or "chosen",
        }
        self._examples: int | None = None
        self._plans: dict[int, Plan] = {}  # by the `id` of the graph of the model
        self._layers: list[str] = []  # the layers of each stage of the current model
        self._owners: dict[int, tuple[weakref.ref[tf.Variable], int]] = {}  # by the `id`s of handles
        super().__init__(job_settings=dict(job_settings or {}) | common_settings, **options)
        self.compare_first_step = False  # no process can compute the whole step

    def join(self) -> ProcessGroup:
        self.variables = Variables()
        return joining.join("sockets", self.world, self.name, self.timeout_seconds, self.start_timeout_seconds)

    def set_up(self) -> None:
        super().set_up()
        plan.require_number_of_names(self.first_layers, self.world.world_size, "processes", "start {} processes")

    def make_mesh(self) -> StageMesh:
        assert isinstance(self.group, ArrayGroup)
        self.exchange_of_stages = Exchange(self.group)
        stages = self.world.rank, self.world.world_size
        return StageMesh(
            self.devices[0],
            self.micro_batches,
            self.schedule,
            self.exchange_of_stages,
            *stages,
            self._owner,
            self._require_same_step,
        )

    def _require_same_step(self, traced: str) -> None:
        if len(set(consensus.all_gather_object(self, traced, "compares the step that it has traced"))) > 1:
            raise DisagreementError(
                "The processes of the job trace different steps of the model",
                "build the same model in all processes, and pass data of the same dtypes and shapes to each",
            )

    @property
    def num_replicas(self) -> int:
        return self.micro_batches

    @property
    def replica_devices(self) -> list[str]:
        return [self.devices[0]] * self.micro_batches

    @contextlib.contextmanager
    def tracing(self, model: Any) -> Iterator[None]:
        """The context in which a step is traced as if this process had all variables."""
        functional = keras_stages.functional_of(model)
        with contextlib.ExitStack() as stack:
            stack.enter_context(keras_stages.accessible(model.variables))
            if id(functional) in self._plans:
                stack.enter_context(plan.on_stages(self._plans, [self.devices[0]] * self.world.world_size))
                for optimizer in keras_internals.optimizers(model):
                    stage_optimizer = _stage_optimizer.get(optimizer)
                    if stage_optimizer is not None:
                        stack.enter_context(stage_optimizer.as_if_whole())
                self._note_owners(model)
            yield

    def _note_owners(self, model: Any) -> None:
        slots = keras_internals.optimizer_variables(model)
        for variable in (*model.variables, *slots):
            part = parts.part_of(variable)
            if part is not None:
                versions = [*tensorflow_variables.copies(variable), *delayed.previous_versions(model, variable)]
                self._owners.update({id(copy.handle): (weakref.ref(copy), part.owner) for copy in versions})

    def _owner(self, handle: tf.Tensor) -> int | None:
        """Returns the stage that has the variable with this handle; `None` if all processes have it."""
        reference, owner = self._owners.get(id(handle), (None, None))
        variable = None if reference is None else reference()
        return owner if variable is not None and variable.handle is handle else None

    def placed(self, feed: Feed) -> Feed:
        self._examples = feed.batch_size or self._examples
        return super().placed(feed)

    def check(self, model: Any) -> None:
        plan.require_cuttable(model, self.world.world_size)
        if self.recompute is not None:  # recomputation would repeat messages between stages
            raise UsageError(
                "`recompute` is set, and the stages of the pipeline are in several processes",
                f"remove it, or {ONE_PROCESS}",
            )
        if model.run_eagerly:
            raise UsageError(
                f"The model `{model.name}` is compiled with `run_eagerly=True`, and a pipeline of several processes "
                "runs graphs",
                f"remove it, or {ONE_PROCESS}",
            )
        if self.schedule == DELAYED:
            delayed.require_keras_step(model)

    def program(self, steps: Steps) -> Program:
        if steps.batches.local:
            raise UsageError(
                "Each process has its own part of the data, and the stages of a pipeline work on the same batches",
                "pass the whole data to each process, or use `horovod` or `multiworker`, which accept separate parts",
            )
        require_examples(steps, self.micro_batches, self.micro_batches)
        self._place(steps.model)
        if steps.kind == "predict":
            return StagePredictProgram(self, steps)
        late = delayed.is_delayed(self.schedule, steps.kind)
        return (DelayedStageProgram if late else StageProgram)(self, steps)

    def before_checkpoint(self, model: Any) -> None:
        delayed.before_checkpoint(model)

    def build_optimizer(self, model: Any, optimizer: Any, variables: Sequence[Any]) -> None:
        """Does nothing: the slots are created once the model is cut, by `divide_optimizers`."""

    def divide_optimizers(self, model: Any) -> None:
        self._place(model)

    def is_divided(self, optimizer: Any) -> bool:
        return _stage_optimizer.get(optimizer) is not None

    def finalize_variables(self, model: Any) -> None:
        stage_optimizer = _stage_optimizer.get(model.optimizer)
        if stage_optimizer is not None and keras_internals.inner(model.optimizer).use_ema:
            stage_optimizer.finalize()

    def _place(self, model: Any) -> None:
        """Cuts `model`, and frees the variables of other stages, unless that was done before."""
        functional = keras_stages.functional_of(model)
        optimizers = keras_internals.optimizers(model)
        if id(functional) not in self._plans:
            self.check(model)
            made = self._plan(model)
            require_separate(model, made)
            slots = [variable for optimizer in optimizers if optimizer.built for variable in optimizer.variables]
            super().broadcast_variables([*model.variables, *slots])
            _free_other_stages(made, self.world, model.metrics_variables)
            self._plans[id(functional)] = made
        for optimizer in optimizers:
            if _stage_optimizer.get(optimizer) is None:
                variables = keras_internals.trainable_variables(optimizer) if optimizer.built else None
                variables = model.trainable_variables if variables is None else variables

                def meet(doing: str) -> None:
                    consensus.all_gather_object(self, None, doing)

                _stage_optimizer.set(optimizer, StageOptimizer(optimizer, variables, self.group, meet))
        layers_of = self._plans[id(functional)].layers_of
        self._layers = [", ".join(layers_of(number)) for number in range(self.world.world_size)]

    def _plan(self, model: Any) -> Plan:
        """Returns the plan of the chief, which measures times."""
        count, begins = self.world.world_size, None
        part = examples_of_part(self._examples, self.micro_batches)
        if self.world.is_chief or self.balance != "time" or self.first_layers is not None:
            made = plan.make(model, count, self.first_layers, self.balance, part, self.micro_batches, all_train=True)
            begins = list(made.begins)
        begins = consensus.broadcast_from_chief(self, begins)
        return Plan(keras_stages.functional_of(model), keras_stages.calls(model), begins)

    @contextlib.contextmanager
    def whole_state(self, model: Any) -> Iterator[None]:
        """The context in which the chief has all variables; all processes enter it."""
        gathered: list[Any] = []
        with contextlib.ExitStack() as stack:
            for optimizer in keras_internals.optimizers(model):
                stage_optimizer = _stage_optimizer.get(optimizer)
                if stage_optimizer is not None:
                    stack.enter_context(stage_optimizer.whole())
            if id(keras_stages.functional_of(model)) in self._plans:
                consensus.all_gather_object(self, None, "gathers the variables of all stages")
                gathered = _gather(model, self.exchange, self.world.is_chief)
            try:
                yield
            finally:
                for variable, place in gathered:
                    keras_stages.evict(variable, place)

    def check_callbacks(self, callbacks: Iterable[Any]) -> None:
        for callback in callbacks:
            what = needs_whole_state(callback)
            if getattr(callback, "restore_best_weights", False):
                what = f"`{type(callback).__name__}` with `restore_best_weights`"
            if what is not None:
                raise UsageError(
                    f"{what} needs all weights in one process, and the stages of the pipeline are in several",
                    "use `tfdist.callbacks.Checkpoint` instead",
                )

    def verify(self, model: Any, *arguments: Any, **named: Any) -> Any:
        raise self._no_verification()

    def prepare(self, model: Any, *, verify: bool = False) -> Any:
        if verify:
            raise self._no_verification()
        return super().prepare(model)

    def _no_verification(self) -> UsageError:
        return UsageError(
            "A verification compares the whole model with one device, and no process has the whole model",
            "verify it with `pipeline` in one process",
        )

    def stages_of(self, model: Any) -> list[dict[str, Any]]:
        made = self._plans.get(id(keras_stages.functional_of(model)))
        devices = [f"{self.world.named(number)}, {self.devices[0]}" for number in range(self.world.world_size)]
        return [] if made is None else made.described(devices)

    def named(self, error: ClusterError) -> ClusterError:
        """Returns `error` with the stages and the layers of the processes that it names."""
        stages = [
            f"stage {rank} ({layers})"
            for rank, layers in enumerate(self._layers)
            if self.world.named(rank) in error.sentence and f"stage {rank} (" not in error.sentence
        ]
        if not stages:
            return error
        return type(error)(f"{error.sentence}: {', '.join(stages)} of the pipeline", error.hint)
