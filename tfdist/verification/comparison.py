"""Compares the steps of a model on several replicas with those of one device, by running both.

    reference    one device                     the whole of each global batch
    nudged       one device, twice              the same, with weights and gradients changed by one bit
    found        the replicas of the strategy   their parts of each global batch

All runs begin with the same variables and random states, which are restored in any case, so that a training is the same
with and without a verification before it. Besides variables and logs, a run records the outputs of layers, the losses
and the gradients, so that the first place where runs differ can be named.

**Tolerance.** The nudged runs measure what rounding can do to a number. It may differ by `TIMES_ROUNDING` times that,
plus its size times the square root of the machine epsilon of the coarsest type that layers compute in, which is half of
its digits. The size of a variable is the largest change that the steps made to it.

**Random numbers** of a partitioned step are those of one device. Operations of `tf.random` keep their state in a graph,
so that each run has a new one.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.checkpointing import random_states
from tfdist.checkpointing import state as training_state
from tfdist.data.input.dataset_feed import BatchFeed
from tfdist.data.input.feed import Feed
from tfdist.errors import UsageError, VerificationError
from tfdist.interface import state as strategy_state
from tfdist.interface.program import Steps
from tfdist.interface.strategy import Strategy, seed_of_random
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_variables, tensorflow_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.keras import tf_variable
from tfdist.jobs import consensus
from tfdist.loop import building, metrics, partitioned_program
from tfdist.loop.inner_loop import StepProgram
from tfdist.terminal import counted
from tfdist.verification.report import Comparison, Entry, Report, Step
from tfdist.verification.watch import MARK, Watch

_WHAT = {
    "batch": "The batch that a step is given, in `{entry.name}`,",
    "output": "The output of the layer `{entry.layer}`",
    "added loss": "A loss that the layer `{entry.layer}` adds",
    "loss": "The loss `{entry.name}`",
    "whole loss": "The result of `compute_loss` of the model `{entry.layer}`",
    "gradient": "The gradient of `{entry.name}`, of the layer `{entry.layer}`,",
    "state": "The variable `{entry.name}`, of the layer `{entry.layer}`,",
    "weight": "The weight `{entry.name}`, of the layer `{entry.layer}`,",
    "optimizer": "The optimizer's variable `{entry.name}`",
    "log": "The value `{entry.name}` in the logs",
}


def explained(strategy: Strategy, entry: Entry) -> tuple[str, str]:
    """The sentence and the hint for the first entry that differs.

    Whatever a model computes, the step of one device is partitioned: what differs is a fault of the partitioner, or of
    a mesh of the user's own.
    """
    if type(strategy.mesh).__module__.partition(".")[0] == "tfdist" and entry.kind != "batch":
        cause = "tfdist divides an operation of the step among the replicas by a wrong rule"
        hint = "this is a fault of tfdist: train with the strategy `single`, and report the layer"
    else:
        cause = f"the strategy `{strategy.name}` divides batches, or adds over its replicas, in another way"
        hint = "this is a fault of the strategy: look at the methods of its `mesh`"
    sentence = (
        f"{_WHAT[entry.kind].format(entry=entry)} differs from one device by {entry.difference:.2g} in step "
        f"{entry.step}, where rounding makes {entry.sensitivity:.2g}; the likely cause: {cause}"
    )
    return sentence, hint


STEPS = 3
_NUDGES = 2


def verify(
    strategy: Strategy,
    model: Any,
    batches: Sequence[Any],
    inside: bool = True,
    in_one_call_from: Feed | None = None,
) -> Report:
    """Compares steps of `model` on one device and on `strategy`, and restores the model.

    Args:
        strategy: in whose scope the model was made.
        model: compiled, and built for training.
        batches: global batches, as `train_step` takes them, the same in all processes of the job.
        inside: compare what happens inside of steps too, and logs; else the variables after each step alone.
        in_one_call_from: a feed whose first batches these are, to run all steps of the strategy in one call of its
            inner loop, and compare the variables after the last one.

    Raises:
        VerificationError: the steps differ, in any of the processes.
    """
    groups = training_state.variables(model)
    variables = [variable for members in groups.values() for variable in members]
    compared = [v for group in ("model", "optimizer") for v in groups[group]]
    held = _held(strategy, model, BatchFeed(batches[0]).spec)
    epsilon = partitioned_program.coarsest(strategy, model)
    watch = Watch(model, sees=inside)
    with _state_kept(held), watch:
        # From which all processes make the generator of draws without a seed, if there is none.
        random.seed(consensus.broadcast_from_chief(strategy, seed_of_random()))
        seen = building.build(strategy, model, "train", BatchFeed(batches[0]).spec)
        if strategy.runs_eagerly(model):  # with variables of the strategy, before those of one device take their place
            _build_eagerly(strategy, model, batches[0], seen)
        with tensorflow_internals.without_strategy(), _plain(model, [*variables, *_of_workers(strategy)]):
            spec = BatchFeed(batches[0]).spec
            steps = Steps(model, "train", BatchFeed.batches, own_logs=seen, spec=spec)
            reference, *nudged = _on_one_device(strategy, steps, batches, compared, held, watch, epsilon)
        feed = in_one_call_from or BatchFeed(batches[0])
        program = strategy.program(Steps(model, "train", feed.batches, own_logs=seen, spec=feed.spec))
        metrics.reset(strategy, model)
        if in_one_call_from is None:
            found = _run(program, batches, compared)
        else:
            with _state_kept(held):
                _in_one_call(program, feed, len(batches), compared)  # in which graphs are built
            reference, nudged = reference[-1:], [run[-1:] for run in nudged]
            found = _in_one_call(program, feed, len(batches), compared)
    if not inside:
        found = [{key: value for key, value in step.items() if key[0] == "variable"} for step in found]
    sizes = {v.path: float(np.max(np.abs(_value(v)), initial=0)) for v in variables}
    of = f"`{strategy.name}` on {counted(strategy.num_replicas, 'replica')}"
    report = Comparison(model, of, groups, sizes, watch.seen, epsilon).report(reference, nudged, found)
    _raise_if_different(strategy, model, report)
    return report


def _build_eagerly(strategy: Strategy, model: Any, batch: Any, own_logs: Any) -> None:
    """Makes the variables that an eager step makes on its way, without a step."""
    feed = BatchFeed(batch)
    program = strategy.program(Steps(model, "train", feed.batches, own_logs=own_logs, spec=feed.spec))
    with keras_variables.assigning_nothing():
        program.run(feed.start(0, 0), 0, 1)


@contextlib.contextmanager
def restored(strategy: Strategy, model: Any, spec: Any) -> Iterator[None]:
    """The context at whose end the variables of `model` and its strategy, and all random states, are as before.

    So are other variables that a step of a batch of `spec` uses.
    """
    before = strategy_state.of(model)
    with _state_kept([*_held(strategy, model, spec), *before.own]):
        try:
            yield
        finally:
            strategy_state.keep(model, before)


def _held(strategy: Strategy, model: Any, spec: Any) -> list[Any]:
    """The variables that steps change."""
    variables = [variable for members in training_state.variables(model).values() for variable in members]
    with _random_states_kept():
        captured = building.captured(strategy, model, spec)
    return [*variables, *_of_workers(strategy), *keras_internals.tensorflow_variables(model), *captured]


def _drawing_as(strategy: Strategy) -> contextlib.AbstractContextManager[None]:
    """The context in which one device draws without a seed from the generator that workers draw from, if they do."""
    generator = strategy.unseeded()
    return contextlib.nullcontext() if generator is None else keras_variables.drawing_from(generator)


def _of_workers(strategy: Strategy) -> list[Any]:
    """The state of the seed generator that is the strategy's own."""
    generator = strategy.unseeded()
    return [] if generator is None else [generator.state]


def require_as_one_device(strategy: Strategy) -> None:
    """Raises `UsageError` where steps differ from those of one device by design."""
    if not strategy.as_one_device:
        raise UsageError(
            f"The steps of `{strategy.name}` differ from those of one device by design, so that there is nothing to "
            "verify",
            "verify the model with `custom`, `mirrored`, `multiworker` or `horovod`",
        )


def _on_one_device(
    strategy: Strategy,
    steps: Steps,
    batches: Sequence[Any],
    compared: Sequence[Any],
    held: Sequence[Any],
    watch: Watch,
    epsilon: float,
) -> list[list[Step]]:
    """The reference and the nudged runs; `compared` are the variables to compare, `held` those to restore."""
    runs = []
    watch.noise = tf.Variable(0.0)
    for number in range(1 + _NUDGES):
        # Operations of `tf.random` keep their state in the graph, so that each run needs a new one.
        program = StepProgram(strategy.on_this_process(), steps)
        with _state_kept(held), _drawing_as(strategy):
            if number:
                _nudge(steps.model.variables, epsilon, number)
                watch.noise.assign(epsilon * (-1) ** number)
            steps.model.reset_metrics()
            with tensorflow_variables.first_copies():  # of what the step captures from the script
                runs.append(_run(program, batches, compared))
    watch.noise = None
    return runs


def _run(program: Any, batches: Sequence[Any], variables: Sequence[Any]) -> list[Step]:
    """Runs a step per batch, and returns what each step computed and the variables after it."""
    before = [_value(variable) for variable in variables]
    steps = []
    program.begin_epoch()
    for batch in batches:
        logs = program.run(BatchFeed(batch).start(0, 0), 0, 1).logs
        step: Step = {}
        for name, value in _flat(logs).items():
            kind, _, of = name.removeprefix(MARK).partition(": ") if name.startswith(MARK) else ("log", "", name)
            step[kind, of] = np.asarray(value, np.float64)
        for variable, start in zip(variables, before, strict=True):
            step["variable", variable.path] = np.asarray(_value(variable) - start)
        steps.append(step)
    program.end_epoch()
    return steps


def _in_one_call(program: Any, feed: Feed, count: int, variables: Sequence[Any]) -> list[Step]:
    """Runs the first `count` steps of `feed` in one call, and returns the variables after the last one."""
    before = [_value(variable) for variable in variables]
    program.begin_epoch()
    program.run(feed.start(0, 0), 0, count)
    program.end_epoch()
    changed = ((v, np.asarray(_value(v) - start)) for v, start in zip(variables, before, strict=True))
    return [{("variable", v.path): change for v, change in changed}]


def _value(variable: Any) -> np.ndarray:
    value = tensorflow_variables.copies(variable)[0].numpy()
    return value.astype(np.float64) if tf_variable(variable).dtype.is_floating else value.astype(np.int64)


def _flat(logs: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested logs as one dict, with names joined by `/`."""
    found: dict[str, Any] = {}
    for name, value in logs.items():
        found |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


@contextlib.contextmanager
def _state_kept(variables: Sequence[Any]) -> Iterator[None]:
    """Restores `variables`, also those that move to another device, and all random states at the end of the context."""

    def held() -> list[Any]:
        return [copy for variable in variables for copy in tensorflow_variables.copies(variable)]

    values = [copy.numpy() for copy in held()]
    with _random_states_kept():
        try:
            yield
        finally:
            for copy, value in zip(held(), values, strict=True):
                copy.assign(value)


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restores the states of the generators of Python, NumPy, Keras and TensorFlow at the end of the context."""
    random_state, eager = random_states.snapshot(), tensorflow_internals.eager_random_state()
    try:
        yield
    finally:
        random_states.restore(random_state)
        tensorflow_internals.restore_eager_random_state(eager)


def _plain(model: Any, variables: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    return keras_variables.on_plain_variables(model, list({id(v): v for v in variables}.values()))


def _nudge(variables: Sequence[Any], epsilon: float, number: int) -> None:
    """Moves each floating-point number of the model up or down by one bit of the type that layers compute in."""
    draw = np.random.default_rng(number)
    for variable in variables:
        if tf_variable(variable).dtype.is_floating:
            value = tf_variable(variable).numpy().astype(np.float64)
            moved = value * (1 + epsilon * draw.choice([-1, 1], value.shape))
            tf_variable(variable).assign(tf.cast(moved, tf_variable(variable).dtype))


def _raise_if_different(strategy: Strategy, model: Any, report: Report) -> None:
    first = report.first
    mine = None if first is None else [*explained(strategy, first), first.layer]
    told = next((one for one in consensus.all_gather_object(strategy, mine) if one is not None), None)
    if told is None:
        return
    sentence, hint, layer = told
    raise VerificationError(sentence, hint, layer, report)
