"""Creates the inner loops of a model once and caches them with the model, since tracing a graph is slow.

A cached program is dropped when Keras' own step function is replaced, for example by `compile` or
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
from tfdist.internals.patching import Attached
from tfdist.loop import building, steps_per_call
from tfdist.loop.inner_loop import PredictProgram, StepProgram
from tfdist.loop.partitioned_program import (
    OneReplicaPredictProgram,
    OneReplicaProgram,
    PartitionedPredictProgram,
    PartitionedProgram,
)
from tfdist.spmd import Cost


@dataclass
class _Cache:
    """The programs of a model for one kind of steps.

    Attributes:
        function: Keras' own function for these steps.
        built: whether the variables of the steps were created.
        own_logs: see `tfdist.interface.program.Steps`.
        programs: the programs by strategy, batches and callbacks.
    """

    function: Any
    built: bool = False
    own_logs: Any = None
    programs: dict[Any, Program] = field(default_factory=dict)


def program(strategy: Strategy, model: Any, kind: str, feed: Feed, callbacks: Sequence[Any] = ()) -> Program:
    """Returns the inner loop for the batches of `feed` and `callbacks`; `kind` is "train", "test" or "predict"."""
    at_nan = steps_per_call.at_nan(callbacks if kind == "train" else ())
    key = (id(strategy), feed.batches, at_nan, strategy.mesh and str(feed.spec))
    cache = _cache(model, kind)
    if key not in cache.programs:
        build(strategy, model, kind, feed)
        compares = strategy.compare_first_step and not cache.programs
        steps = Steps(model, kind, feed.batches, at_nan, cache.own_logs, feed.spec, compares)
        cache.programs[key] = strategy.program(steps)
    return cache.programs[key]


def of_mesh(strategy: Strategy, steps: Steps) -> Program:
    """Creates the inner loop for a strategy with a `mesh`, or with a single replica."""
    predicts = int(steps.kind == "predict")
    if strategy.alone:
        return (StepProgram, PredictProgram)[predicts](strategy, steps)
    if strategy.mesh is None:
        raise UsageError(
            f"The strategy `{strategy.name}` has {strategy.num_replicas} replicas, and defines neither how they "
            "communicate nor how their steps run",
            "define a property `mesh` or a method `program`; docs/strategies.md describes both",
        )
    if strategy.runs_eagerly(steps.model):
        return (OneReplicaProgram, OneReplicaPredictProgram)[predicts](strategy, steps)
    return (PartitionedProgram, PartitionedPredictProgram)[predicts](strategy, steps)


def build(strategy: Strategy, model: Any, kind: str, feed: Feed) -> None:
    """Creates the variables that the steps of `kind` need, unless they exist."""
    cache = _cache(model, kind)
    strategy.unseeded()  # creates the generator outside of the graphs that workers trace
    if not cache.built:
        spec = feed.spec if strategy.mesh is None else keras_data.traced_spec(feed.spec, feed.batches.size)
        cache.own_logs = building.build(strategy, model, kind, spec)
        cache.built = True


def any_made(model: Any, kind: str) -> bool:
    """Whether there is a program for the steps of `kind`."""
    return bool(_cache(model, kind).programs)


_caches: Attached[dict[str, _Cache]] = Attached("programs")  # by the kind of steps


def _cache(model: Any, kind: str) -> _Cache:
    function = keras_internals.step_function(model, kind)
    caches = _caches.get(model)
    if caches is None:
        _caches.set(model, caches := {})
    if kind not in caches or caches[kind].function is not function:
        caches[kind] = _Cache(function)
    return caches[kind]


def cost(model: Any) -> Cost | None:
    """Returns the cost of the partitioned training step of `model`; `None` if no step is partitioned."""
    programs = _cache(model, "train").programs.values()
    costs = [program.cost for program in programs if isinstance(program, PartitionedProgram)]
    return max(costs, key=lambda cost: cost.flops, default=None)
