"""The inner loops of a model: each is made once and kept with the model, since tracing a graph is slow.

A program is dropped when Keras' own function for the steps is replaced, as by `compile` and
`make_train_function(force=True)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist.data.input.feed import Feed
from tfdist.errors import UsageError
from tfdist.interface.program import Program, Steps
from tfdist.interface.strategy import Strategy
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_data
from tfdist.internals.attached import Attached
from tfdist.loop import building, steps_per_call
from tfdist.loop.inner_loop import PredictProgram, StepProgram
from tfdist.loop.one_replica_program import OneReplicaPredictProgram, OneReplicaProgram
from tfdist.loop.partitioned_program import PartitionedPredictProgram, PartitionedProgram
from tfdist.spmd import Cost


@dataclass
class _Made:
    """The programs for the steps of one kind of a model.

    Attributes:
        function: Keras' own function for these steps.
        built: the variables of the steps were made.
        own_logs: see `tfdist.interface.program.Steps`.
        programs: by strategy, batches and callbacks.
    """

    function: Any
    built: bool = False
    own_logs: Any = None
    programs: dict[Any, Program] = field(default_factory=dict)


def program(strategy: Strategy, model: Any, kind: str, feed: Feed, callbacks: Sequence[Any] = ()) -> Program:
    """The inner loop for the batches of `feed` and for `callbacks`; `kind` is "train", "test" or "predict"."""
    at_nan = steps_per_call.at_nan(callbacks if kind == "train" else ())
    key = (id(strategy), feed.batches, at_nan, strategy.mesh and str(feed.spec))
    programs = _made(model, kind).programs
    if key not in programs:
        build(strategy, model, kind, feed)
        own_logs = _made(model, kind).own_logs
        compares = strategy.compare_first_step and not programs
        programs[key] = strategy.program(Steps(model, kind, feed.batches, at_nan, own_logs, feed.spec, compares))
    return programs[key]


def of_mesh(strategy: Strategy, steps: Steps) -> Program:
    """The inner loop for the replicas of a strategy that has a `mesh`, or for a strategy of one replica."""
    predicts = int(steps.kind == "predict")
    if strategy.alone:
        return (StepProgram, PredictProgram)[predicts](strategy, steps)
    if strategy.mesh is None:
        raise UsageError(
            f"The strategy `{strategy.name}` has {strategy.num_replicas} replicas, and says neither how they exchange "
            "values nor who runs their steps",
            "give it a property `mesh`, or a method `program`; docs/strategies.md tells of both",
        )
    if strategy.runs_eagerly(steps.model):
        return (OneReplicaProgram, OneReplicaPredictProgram)[predicts](strategy, steps)
    return (PartitionedProgram, PartitionedPredictProgram)[predicts](strategy, steps)


def build(strategy: Strategy, model: Any, kind: str, feed: Feed) -> None:
    """Makes the variables that the steps of `kind` need, unless they were made before."""
    made = _made(model, kind)
    strategy.unseeded()  # made here, outside of the graphs that workers trace
    if not made.built:
        spec = feed.spec if strategy.mesh is None else keras_data.traced_spec(feed.spec, feed.batches.size)
        made.own_logs = building.build(strategy, model, kind, spec)
        made.built = True


def any_made(model: Any, kind: str) -> bool:
    """Whether there is a program for the steps of `kind`."""
    return bool(_made(model, kind).programs)


_programs: Attached[dict[str, _Made]] = Attached("programs")  # by the kind of steps


def _made(model: Any, kind: str) -> _Made:
    function = keras_internals.step_function(model, kind)
    kinds = _programs.get(model)
    if kinds is None:
        _programs.set(model, kinds := {})
    if kind not in kinds or kinds[kind].function is not function:
        kinds[kind] = _Made(function)
    return kinds[kind]


def cost(model: Any) -> Cost | None:
    """What the partitioned step of a training of `model` costs; `None` where no step is partitioned."""
    programs = _made(model, "train").programs.values()
    costs = [one.cost for one in programs if isinstance(one, PartitionedProgram)]
    return max(costs, key=lambda one: one.flops, default=None)
