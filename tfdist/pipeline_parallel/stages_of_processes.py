"""`pipeline` in a job of several processes: one stage of the model in each of them.

A process has the variables of its own stage, their gradients and their slots. The step of one device is partitioned for
the micro-batches, and each process computes the operations of its stage (`tfdist.pipeline_parallel.stage_mesh`).

A step is traced as if a process had all variables and slots, and each computes its part of that
(`tfdist.pipeline_parallel.cut`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
from tfdist.internals.attached import Attached
from tfdist.jobs import consensus
from tfdist.jobs.world import World
from tfdist.loop.partitioned_program import PartitionedPredictProgram, PartitionedProgram
from tfdist.optimizers.divided import DividedOptimizer, divide, local
from tfdist.options import Count
from tfdist.pipeline_parallel import delayed, placement, plan, previous_weights
from tfdist.pipeline_parallel.delayed import DelayedProgram
from tfdist.pipeline_parallel.exchange import Exchange
from tfdist.pipeline_parallel.local_stages import examples_of_part, require_examples
from tfdist.pipeline_parallel.plan import Balance, LayerNames, Plan
from tfdist.pipeline_parallel.regions import ONE_PROCESS
from tfdist.pipeline_parallel.schedule import Schedule
from tfdist.pipeline_parallel.stage_mesh import StageMesh
from tfdist.training.job_strategy import JobStrategy, needs_whole_state

if TYPE_CHECKING:
    from tfdist.interface.program import Program, Steps


def whole_part(shape: Sequence[int], owner: int, rank: int, ranks: int) -> Part:
    """The part of process `rank` in a variable of which process `owner` has all elements."""
    length = shape[0] if len(shape) else 1
    return Part(tuple(shape), tuple(length if one == owner else 0 for one in range(ranks)), rank)


def free_others(plan: Plan, world: World, shared: Sequence[Any]) -> None:
    """Marks whose the variables are, and frees those of other stages; stage number `rank` is in process `rank`.

    The `shared` ones, of metrics, stay in all processes.
    """
    kept = {id(variable) for variable in shared}
    for stage in range(world.world_size):
        place = f"in stage {stage} of the pipeline, which is in {world.named(stage)}"
        for variable in plan.variables_of(stage):
            if id(variable) in kept:
                continue
            parts.mark(variable, whole_part(variable.shape, stage, world.rank, world.world_size))
            if stage != world.rank:
                keras_stages.evict(variable, place)


def gather(model: Any, exchange: Callable[[bytes], list[bytes]], is_chief: bool) -> list[tuple[Any, str]]:
    """Gives the chief the variables of the other stages; returns these in the chief, with their places.

    All processes call it. They are freed again by `keras_stages.evict(variable, place)`.
    """
    found = []
    for variable in model.variables:
        part = parts.part_of(variable)
        if part is None:
            continue
        value = parts.gathered(variable, exchange)
        if is_chief and not part.size:
            found.append((variable, keras_stages.restore(variable, value)))
    return found


OTHER_OPTIMIZER = "use an optimizer of Keras, or train in one process"


class StageOptimizer(DividedOptimizer):
    """The part of one optimizer that the process of a stage has.

    Args:
        optimizer: of Keras; built for `variables`, or not built.
        variables: all that it updates; `tfdist.groups.parts` says which are of this process.
        group: of the processes.
        meet: is called with what this process is about to do, and raises an error if another one does something else.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], group: ProcessGroup, meet: Callable[[str], None]):
        super().__init__(optimizer, group, meet)
        self._parts = {id(variable): _part(variable) for variable in variables}
        self.own = [variable for variable in variables if self._parts[id(variable)].size]
        self._stand_ins: dict[int, tf.Variable] = {}
        self._make_slots(list(variables))

    def _make_slots(self, variables: list[Any]) -> None:
        if not self.optimizer.built:
            # An optimizer that computes by elements has slots of the shapes of what it is built for.
            by_element = type(keras_optimizers.inner(self.optimizer)) in keras_optimizers.ELEMENTWISE
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
                divide(slot, part if tuple(slot.shape) in (part.shape, part.whole_shape) else _alike(part, slot))

    def _slots(self) -> list[list[Any]]:
        """The slots of each variable."""
        try:
            return keras_optimizers.slots_of(self.optimizer)
        except LookupError as error:
            raise UsageError(
                f"The variable `{error.args[0]}` of the optimizer `{self.optimizer.name}` belongs to none of the "
                "variables that it updates",
                OTHER_OPTIMIZER,
            ) from error

    @contextlib.contextmanager
    def as_if_whole(self) -> Iterator[None]:
        """The context in which an update of all variables is traced, with slots that other processes have."""
        elsewhere = [slot for slots in self._slots() for slot in slots if not _has(slot)]
        with keras_variables.backed_by(elsewhere, [self._stand_in(one) for one in elsewhere]):
            yield

    def _stand_in(self, slot: Any) -> tf.Variable:
        """A variable without a value, of the shape of a slot of another process."""
        if id(slot) not in self._stand_ins:
            held, part = local(slot), parts.part_of(slot)
            assert part is not None
            self._stand_ins[id(slot)] = tensorflow_variables.without_value(part.whole_shape, held.dtype, held.device)
        return self._stand_ins[id(slot)]

    def finalize(self) -> None:
        """What the optimizer does to the variables of this process at the end of a training."""
        values = [local(variable) for variable in self.own]
        updating = keras_optimizers.updating(self.optimizer, self.own, values)
        with tensorflow_internals.without_strategy(), updating:
            self.optimizer.finalize_variable_values(self.own)


def _has(slot: Any) -> bool:
    part = parts.part_of(slot)
    return part is None or bool(part.size)


def _part(variable: Any) -> Part:
    part = parts.part_of(variable)
    if part is None:
        raise UsageError(
            f"The optimizer updates `{variable.path}`, which belongs to no layer of a stage",
            "leave out layers that the model does not call, or train in one process",
        )
    return part


def _alike(part: Part, slot: Any) -> Part:
    """The part in a slot of another shape than the variable that `part` is of."""
    return whole_part(slot.shape, part.owner, part.rank, len(part.lengths))


# With M micro-batches and S stages, a stage waits (S - 1) / (4 M + S - 1) of the time, and not (S - 1) / (M + S - 1).
# More of them would take longer to trace.
STEPS_TOGETHER = 4


class _OfStage(Program):
    """Tells the messages of a call of the inner loop from those of others."""

    _strategy: Any

    def run(self, state: Any, first: int, count: int) -> Outcome:
        self._strategy.exchange_of_stages.begin_call()
        return super().run(state, first, count)


class StageProgram(_OfStage, PartitionedProgram):
    """Trains or tests a model of which this process computes one stage."""


class StagePredictProgram(_OfStage, PartitionedPredictProgram):
    """Predicts."""


class DelayedStageProgram(_OfStage, DelayedProgram):
    """Trains with the schedule `2bw`: a stage begins a step while later stages still compute the one before."""

    def __init__(self, strategy: Any, steps: Steps):
        super().__init__(strategy, steps)
        optimizer, stages = steps.model.optimizer, strategy.world.world_size
        meets = keras_optimizers.inner(optimizer) is not optimizer or bool(optimizer.global_clipnorm)
        # What a step finds out of its loss is not known before the next one begins.
        if not meets and steps.at_nan is AtNan.NOTHING and strategy.micro_batches >= stages - 1:
            self.steps_together = STEPS_TOGETHER


def require_separate(model: Any, plan: Plan) -> None:
    """Raises `UsageError` if two stages share a layer, or one has nothing to train."""
    seen: dict[int, int] = {}
    for number in range(len(plan.begins)):
        layers = [call.operation for call in plan.calls_of(number) if isinstance(call.operation, keras.Layer)]
        for layer in layers:
            for variable in layer.variables:
                if seen.setdefault(id(variable), number) != number:
                    raise UsageError(
                        f"The layer `{layer.name}` is in stage {seen[id(variable)]} and in stage {number}, and they "
                        "are in different processes",
                        f"name other cuts with `stages`, so that one stage has all its calls, or {ONE_PROCESS}",
                    )
        if model.trainable_variables and not any(layer.trainable_variables for layer in layers):
            raise UsageError(
                f"Stage {number} ({', '.join(plan.layers_of(number))}) has nothing to train",
                "name other cuts with `stages`, or start fewer processes",
            )


_of_stage: Attached[StageOptimizer] = Attached("stage_optimizer")


class StagesOfProcesses(JobStrategy):
    """Trains one stage of a model in each process of the job; see `tfdist.strategies.pipeline`.

    Args:
        micro_batches: the parts of a global batch that go through the stages one after the other.
        schedule: "gpipe", "1f1b" or "2bw", see `tfdist.pipeline_parallel.schedule`.
        balance: what is made even between the stages: "time", measured by the chief, or "memory".
        stages: the name of the first layer of each stage but the first; `None` lets `balance` choose.
        options: see `tfdist.training.job_strategy.JobStrategy`.
    """

    name = "pipeline"

    def __init__(
        self,
        *,
        micro_batches: Count = 4,
        schedule: Schedule = "gpipe",
        balance: Balance = "time",
        stages: LayerNames = None,
        job_settings: Mapping[str, str] | None = None,
        **options: Any,
    ):
        self.micro_batches, self._schedule, self._balance, self._named = micro_batches, schedule, balance, stages
        alike = {
            "micro_batches": str(micro_batches),
            "schedule": schedule,
            "balance": balance,
            "stages": ",".join(stages or ()) or "chosen",
        }
        self._examples: int | None = None
        self._plans: dict[int, Plan] = {}  # by the `id` of the graph of the model
        self._told: list[str] = []  # the layers of each stage of the model that runs
        self._owners: dict[int, tuple[weakref.ref[tf.Variable], int]] = {}  # by the `id`s of handles
        self.as_one_device = schedule != delayed.NAME
        super().__init__(job_settings=dict(job_settings or {}) | alike, **options)
        self.compare_first_step = False  # no process could compute the whole step

    def join(self) -> ProcessGroup:
        self.variables = Variables()
        return joining.join("sockets", self.world, self.name, self.timeout_seconds, self.start_timeout_seconds)

    def set_up(self) -> None:
        super().set_up()
        count = self.world.world_size
        if self._named is not None and len(self._named) != count - 1:
            raise UsageError(
                f"`stages` names the first layer of {len(self._named)} stages after the first, and there are "
                f"{count} processes",
                f"name {count - 1} layers, or start {len(self._named) + 1} processes",
            )

    def make_mesh(self) -> StageMesh:
        assert isinstance(self.group, ArrayGroup)
        self.exchange_of_stages = Exchange(self.group)
        stages = self.world.rank, self.world.world_size
        return StageMesh(
            self.devices[0],
            self.micro_batches,
            self._schedule,
            self.exchange_of_stages,
            *stages,
            self._owner,
            self._require_same_step,
        )

    def _require_same_step(self, traced: str) -> None:
        if len(set(consensus.all_gather_object(self, traced, "compares the step that it has traced"))) > 1:
            raise DisagreementError(
                "The processes of the job trace different steps of the model, of which each computes its stage",
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
                stack.enter_context(placement.on_stages(self._plans, [self.devices[0]] * self.world.world_size))
                for optimizer in keras_internals.optimizers(model):
                    of_stage = self.of_stage(optimizer)
                    if of_stage is not None:
                        stack.enter_context(of_stage.as_if_whole())
                self._note_owners(model)
            yield

    def _note_owners(self, model: Any) -> None:
        """Finds out which stage has which variable."""
        variables = [*model.variables, *(v for one in keras_internals.optimizers(model) for v in one.variables)]
        for variable in variables:
            part = parts.part_of(variable)
            if part is not None:
                held = [*tensorflow_variables.copies(variable), *previous_weights.held_before(model, variable)]
                self._owners.update({id(one.handle): (weakref.ref(one), part.owner) for one in held})

    def _owner(self, handle: tf.Tensor) -> int | None:
        """The stage that has the variable with this handle; `None` if all processes have it."""
        variable, owner = self._owners.get(id(handle), (None, None))
        held = None if variable is None else variable()
        return owner if held is not None and held.handle is handle else None

    def placed(self, feed: Feed) -> Feed:
        self._examples = feed.batch_size or self._examples
        return super().placed(feed)

    def check(self, model: Any) -> None:
        plan.require_cuttable(model, self.world.world_size)
        if self.recompute is not None:  # messages between stages must not be sent again
            raise UsageError(
                "`recompute` is set, and the stages of the pipeline are in several processes",
                f"leave it out, or {ONE_PROCESS}",
            )
        if model.run_eagerly:
            raise UsageError(
                f"The model `{model.name}` is compiled with `run_eagerly=True`, and a pipeline of several processes "
                "runs graphs",
                f"leave it out, or {ONE_PROCESS}",
            )
        if self._schedule == delayed.NAME:
            delayed.require_steps_of_keras(model)

    def program(self, steps: Steps) -> Program:
        if steps.batches.local:
            raise UsageError(
                "Each process has its own part of the data, and the stages of a pipeline work on the same batches",
                "pass the whole data to each process; `horovod` and `multiworker` train on parts of your own",
            )
        require_examples(steps, self.micro_batches, self.micro_batches)
        self._place(steps.model)
        if steps.kind == "predict":
            return StagePredictProgram(self, steps)
        late = delayed.is_delayed(self._schedule, steps.kind)
        return (DelayedStageProgram if late else StageProgram)(self, steps)

    def before_checkpoint(self, model: Any) -> None:
        delayed.before_checkpoint(model)

    # The model in stages.

    def build_optimizer(self, model: Any, optimizer: Any, variables: Sequence[Any]) -> None:
        """Nothing: its slots are made once the model is cut, by `divide_optimizers`."""

    def divide_optimizers(self, model: Any) -> None:
        self._place(model)

    def is_divided(self, optimizer: Any) -> bool:
        return self.of_stage(optimizer) is not None

    def of_stage(self, optimizer: Any) -> StageOptimizer | None:
        """The part of `optimizer` that this process has; `None` before the model is cut."""
        return _of_stage.get(optimizer)

    def finalize_variables(self, model: Any) -> None:
        of_stage = self.of_stage(model.optimizer)
        if of_stage is not None and keras_optimizers.inner(model.optimizer).use_ema:
            of_stage.finalize()

    def _place(self, model: Any) -> None:
        """Cuts `model`, and frees what is not of this process' stage, unless that was done before."""
        functional = keras_stages.functional_of(model)
        optimizers = keras_internals.optimizers(model)
        if id(functional) not in self._plans:
            self.check(model)
            found = self._plan(model)
            require_separate(model, found)
            built = [variable for one in optimizers if one.built for variable in one.variables]
            super().broadcast_variables([*model.variables, *built])
            free_others(found, self.world, model.metrics_variables)
            self._plans[id(functional)] = found
        for optimizer in optimizers:
            if self.of_stage(optimizer) is None:
                variables = keras_internals.trainable_variables(optimizer) if optimizer.built else None
                variables = model.trainable_variables if variables is None else variables

                def meet(doing: str) -> None:
                    consensus.all_gather_object(self, None, doing)

                _of_stage.set(optimizer, StageOptimizer(optimizer, variables, self.group, meet))
        plan_of_model = self._plans[id(functional)]
        self._told = [", ".join(plan_of_model.layers_of(number)) for number in range(self.world.world_size)]

    def _plan(self, model: Any) -> Plan:
        """The plan of the chief, which measures times."""
        count, begins = self.world.world_size, None
        part = examples_of_part(self._examples, self.micro_batches)
        if self.world.is_chief or self._balance != "time" or self._named is not None:
            found = plan.make(model, count, self._named, self._balance, part, self.micro_batches)
            begins = list(found.begins)
        begins = consensus.broadcast_from_chief(self, begins)
        return Plan(keras_stages.functional_of(model), keras_stages.calls(model), begins)

    @contextlib.contextmanager
    def whole_state(self, model: Any) -> Iterator[None]:
        """The context in which the chief has all variables; all processes enter it."""
        away: list[Any] = []
        with contextlib.ExitStack() as stack:
            for optimizer in keras_internals.optimizers(model):
                of_stage = self.of_stage(optimizer)
                if of_stage is not None:
                    stack.enter_context(of_stage.whole())
            if id(keras_stages.functional_of(model)) in self._plans:
                consensus.all_gather_object(self, None, "gathers the variables of all stages")
                away = gather(model, self.exchange, self.world.is_chief)
            try:
                yield
            finally:
                for variable, place in away:
                    keras_stages.evict(variable, place)

    def check_callbacks(self, callbacks: Iterable[Any]) -> None:
        for callback in callbacks:
            what = needs_whole_state(callback)
            if getattr(callback, "restore_best_weights", False):
                what = f"`{type(callback).__name__}` with `restore_best_weights`"
            if what is not None:
                raise UsageError(
                    f"{what} needs all weights in one process, and the stages of the pipeline are in several",
                    "use `tfdist.callbacks.Checkpoint` in its place",
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
        found = self._plans.get(id(keras_stages.functional_of(model)))
        if found is None:
            return []
        return [
            {
                "device": f"{self.world.named(number)}, {self.devices[0]}",
                "layers": found.layers_of(number),
                "parameters": found.parameters_of(number),
            }
            for number in range(self.world.world_size)
        ]

    def options(self) -> dict[str, Any]:
        own = {"micro_batches": self.micro_batches, "schedule": self._schedule, "balance": self._balance}
        return super().options() | own | {"stages": self._named and list(self._named)}

    # Errors.

    def named(self, error: ClusterError) -> ClusterError:
        """`error` with the stages and the layers of the processes that it names."""
        stages = [
            f"stage {rank} ({layers})"
            for rank, layers in enumerate(self._told)
            if self.world.named(rank) in error.sentence and f"stage {rank} (" not in error.sentence
        ]
        if not stages:
            return error
        return type(error)(f"{error.sentence}: {', '.join(stages)} of the pipeline", error.hint)
