"""Compares the steps of a model on several replicas with those of one device, by running both.

    reference    one device                     whole global batches
    nudged       one device, twice              the same, with weights and gradients changed by one bit
    actual       the replicas of the strategy   their parts of the global batches

All runs begin with the same variables and random states, which are restored afterwards, so that a verification does not
change a subsequent training. Besides variables and logs, a run records the outputs of layers, the losses and the
gradients, so that the error can name the first place where runs differ.

**Tolerance.** The nudged runs measure the effect of rounding on a number. The number may differ by `TIMES_ROUNDING`
times this effect, plus its size times the square root of the machine epsilon of the coarsest dtype in which layers
compute, which is half of the digits. The size of a variable is the largest change that the steps made to it.

**Random numbers** of a partitioned step equal those of one device. Operations of `tf.random` keep their state in a
graph, so that each run needs a new graph.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import tensorflow as tf

from tfdist.checkpointing import state as training_state
from tfdist.data.input.dataset_feed import BatchFeed
from tfdist.data.input.feed import Feed
from tfdist.errors import UsageError, VerificationError
from tfdist.interface.program import Steps
from tfdist.interface.strategy import Strategy, seed_of_random
from tfdist.interface.variables import keep_strategy_state, strategy_state
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_patches, keras_variables, tensorflow_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.keras import tf_variable, tree
from tfdist.jobs import consensus
from tfdist.loop import building, metrics, partitioned_program
from tfdist.loop.inner_loop import StepProgram
from tfdist.terminal import counted
from tfdist.verification.report import Comparison, Entry, Report, Step

STEPS = 3
_NUDGES = 2
# The prefix of the recorded values among the logs of a step.
_MARK = "tfdist verification: "


def verify(
    strategy: Strategy,
    model: Any,
    batches: Sequence[Any],
    inside: bool = True,
    in_one_call_from: Feed | None = None,
) -> Report:
    """Compares steps of `model` on one device and on `strategy`, and restores the model.

    Args:
        strategy: the strategy in whose scope the model was created.
        model: a compiled model, built for training.
        batches: global batches, as `train_step` takes them, the same in all processes of the job.
        inside: whether to compare values inside of steps and logs, besides the variables after each step.
        in_one_call_from: a feed that begins with these batches; if set, the strategy runs all steps in one call of its
            inner loop, and only the variables after the last step are compared.

    Raises:
        VerificationError: the steps differ, in any of the processes.
    """
    if strategy.runs_eagerly(model):
        _create_variables(strategy, model, BatchFeed(batches[0]))
    groups = training_state.variables(model)
    variables = [variable for members in groups.values() for variable in members]
    compared = [v for group in ("model", "optimizer") for v in groups[group]]
    changed = _changed_variables(strategy, model, BatchFeed(batches[0]).spec)
    epsilon = partitioned_program.coarsest(strategy, model)
    watch = Watch(model, sees=inside)
    with _state_kept(changed), watch:
        _seed_generator_of_unseeded(strategy)
        feed: Feed = BatchFeed(batches[0])
        own_logs = building.build(strategy, model, "train", feed.spec)
        plain = list({id(v): v for v in [*variables, *_generator_state(strategy)]}.values())
        with tensorflow_internals.without_strategy(), keras_variables.on_plain_variables(model, plain):
            steps = Steps(model, "train", feed.batches, own_logs=own_logs, spec=feed.spec)
            reference, *nudged = _on_one_device(strategy, steps, batches, compared, changed, watch, epsilon)
        feed = in_one_call_from or feed
        program = strategy.program(Steps(model, "train", feed.batches, own_logs=own_logs, spec=feed.spec))
        metrics.reset(strategy, model)
        if in_one_call_from is None:
            with _own_traces(strategy, model):
                actual = _run(program, batches, compared)
        else:
            with _state_kept(changed):
                _in_one_call(program, feed, len(batches), compared)  # builds the graphs
            reference, nudged = reference[-1:], [run[-1:] for run in nudged]
            actual = _in_one_call(program, feed, len(batches), compared)
    if not inside:
        actual = [{key: value for key, value in step.items() if key[0] == "variable"} for step in actual]
    sizes = {v.path: float(np.max(np.abs(_value(v)), initial=0)) for v in variables}
    of = f"`{strategy.name}` on {counted(strategy.num_replicas, 'replica')}"
    report = Comparison(model, of, groups, sizes, watch.seen, epsilon).report(reference, nudged, actual)
    _raise_if_different(strategy, model, report)
    return report


def _create_variables(strategy: Strategy, model: Any, feed: Feed) -> None:
    """Creates the variables of an eager step in the strategy's scope, with their initial values, by taking a step."""
    created = []

    def record(next_creator: Callable[..., Any], **options: Any) -> Any:
        variable = next_creator(**options)
        created.append((variable, variable.numpy()))
        return variable

    with _state_kept(_changed_variables(strategy, model, feed.spec)):
        _seed_generator_of_unseeded(strategy)
        own_logs = building.build(strategy, model, "train", feed.spec)
        program = strategy.program(Steps(model, "train", feed.batches, own_logs=own_logs, spec=feed.spec))
        with tf.variable_creator_scope(record), _own_traces(strategy, model):
            program.run(feed.start(0, 0), 0, 1)
    for variable, value in created:
        variable.assign(value)


def _seed_generator_of_unseeded(strategy: Strategy) -> None:
    """If there is no generator for unseeded draws, lets all processes create it from the same seed."""
    random.seed(consensus.broadcast_from_chief(strategy, seed_of_random()))


def _own_traces(strategy: Strategy, model: Any) -> contextlib.AbstractContextManager[None]:
    """The context of a run, whose variables and random states must not remain in traces of the user's functions."""
    return tensorflow_internals.own_traces(eagerly=strategy.runs_eagerly(model))


def steps_with_an_update(model: Any, steps: int) -> int:
    """`steps`, or more if the optimizer accumulates gradients: as many as make one update."""
    optimizer = keras_internals.inner(getattr(model, "optimizer", None))
    return max(steps, getattr(optimizer, "gradient_accumulation_steps", None) or 0)


@contextlib.contextmanager
def restored(strategy: Strategy, model: Any, spec: Any) -> Iterator[None]:
    """The context that restores the variables of `model` and its strategy, and all random states, at its end.

    It also restores other variables that a step on a batch of `spec` uses.
    """
    state = strategy_state(model)
    with _state_kept([*_changed_variables(strategy, model, spec), *state.own]):
        try:
            yield
        finally:
            keep_strategy_state(model, state)


def _changed_variables(strategy: Strategy, model: Any, spec: Any) -> list[Any]:
    variables = [variable for members in training_state.variables(model).values() for variable in members]
    with _random_states_kept():
        captured = building.captured(strategy, model, spec)
    return [*variables, *_generator_state(strategy), *keras_internals.tensorflow_variables(model), *captured]


def _generator_state(strategy: Strategy) -> list[Any]:
    generator = strategy.unseeded()
    return [] if generator is None else [generator.state]


def require_as_one_device(strategy: Strategy) -> None:
    """Raises `UsageError` if the steps differ from those of one device by design."""
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
    changed: Sequence[Any],
    watch: Watch,
    epsilon: float,
) -> list[list[Step]]:
    """Returns the reference and the nudged runs; `compared` are variables to compare, `changed` those to restore."""
    runs = []
    watch.noise = tf.Variable(0.0)
    generator = strategy.unseeded()
    for number in range(1 + _NUDGES):
        # Operations of `tf.random` keep their state in the graph, so that each run needs a new graph.
        program = StepProgram(strategy.on_this_process(), steps)
        drawing = contextlib.nullcontext() if generator is None else keras_variables.drawing_from(generator)
        with _state_kept(changed), drawing, _own_traces(strategy, steps.model):
            if number:
                _nudge(steps.model.variables, epsilon, number)
                watch.noise.assign(epsilon * (-1) ** number)
            steps.model.reset_metrics()
            with tensorflow_variables.first_copies():  # of variables that the step captures from the script
                runs.append(_run(program, batches, compared))
    watch.noise = None
    return runs


def _run(program: Any, batches: Sequence[Any], variables: Sequence[Any]) -> list[Step]:
    """Runs one step per batch; returns the values that each step computed, and the changes of the variables."""
    start_values = [_value(variable) for variable in variables]
    steps = []
    program.begin_epoch()
    for batch in batches:
        logs = program.run(BatchFeed(batch).start(0, 0), 0, 1).logs
        step: Step = {}
        for name, value in _flat(logs).items():
            kind, _, of = name.removeprefix(_MARK).partition(": ") if name.startswith(_MARK) else ("log", "", name)
            step[kind, of] = np.asarray(value, np.float64)
        steps.append(step | _changes(variables, start_values))
    program.end_epoch()
    return steps


def _in_one_call(program: Any, feed: Feed, count: int, variables: Sequence[Any]) -> list[Step]:
    """Runs the first `count` steps of `feed` in one call; returns the changes of the variables."""
    start_values = [_value(variable) for variable in variables]
    program.begin_epoch()
    program.run(feed.start(0, 0), 0, count)
    program.end_epoch()
    return [_changes(variables, start_values)]


def _changes(variables: Sequence[Any], start_values: Sequence[np.ndarray]) -> Step:
    pairs = zip(variables, start_values, strict=True)
    return {("variable", variable.path): np.asarray(_value(variable) - start) for variable, start in pairs}


def _value(variable: Any) -> np.ndarray:
    value = tensorflow_variables.copies(variable)[0].numpy()
    return value.astype(np.float64) if tf_variable(variable).dtype.is_floating else value.astype(np.int64)


def _flat(logs: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested logs to one dict, with names joined by `/`."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


@contextlib.contextmanager
def _state_kept(variables: Sequence[Any]) -> Iterator[None]:
    """Restores `variables`, even if they move to another device, and all random states at the end of the context."""

    def copies() -> list[Any]:
        return [copy for variable in variables for copy in tensorflow_variables.copies(variable)]

    values = [copy.numpy() for copy in copies()]
    with _random_states_kept():
        try:
            yield
        finally:
            for copy, value in zip(copies(), values, strict=True):
                copy.assign(value)


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restores the states of the generators of Python, NumPy, Keras and TensorFlow at the end of the context."""
    states, eager_state = training_state.random_states(), tensorflow_internals.eager_random_state()
    try:
        yield
    finally:
        training_state.restore_random_states(states)
        tensorflow_internals.restore_eager_random_state(eager_state)


def _nudge(variables: Sequence[Any], epsilon: float, number: int) -> None:
    """Changes each floating-point number of the model by one bit of the dtype in which layers compute."""
    draw = np.random.default_rng(number)
    for variable in variables:
        if tf_variable(variable).dtype.is_floating:
            value = tf_variable(variable).numpy().astype(np.float64)
            moved = value * (1 + epsilon * draw.choice([-1, 1], value.shape))
            tf_variable(variable).assign(tf.cast(moved, tf_variable(variable).dtype))


def _raise_if_different(strategy: Strategy, model: Any, report: Report) -> None:
    """Raises the error of the first process with a difference in all processes."""
    first = report.first
    error = None if first is None else [*_explained(strategy, first), first.layer]
    error = next((error for error in consensus.all_gather_object(strategy, error) if error is not None), None)
    if error is not None:
        sentence, hint, layer = error
        raise VerificationError(sentence, hint, layer, report)


def _explained(strategy: Strategy, entry: Entry) -> tuple[str, str]:
    """Returns the error's sentence and hint for the first entry that differs.

    The partitioned step should equal that of one device for every model, so that a difference is a bug in the
    partitioner or in the user's own mesh.
    """
    causes = {
        "sum": f"the strategy `{strategy.name}` sums over its replicas incorrectly",
        "batch": f"the strategy `{strategy.name}` divides batches incorrectly",
    }
    hint = "this is a bug in the strategy: check the methods of its `mesh`"
    if entry.kind in causes:
        cause = causes[entry.kind]
    elif type(strategy.mesh).__module__.partition(".")[0] == "tfdist":
        cause = "tfdist divides an operation of the step among the replicas by a wrong rule"
        hint = "this is a bug in tfdist: train with the strategy `single`, and report the layer"
    else:
        cause = f"the strategy `{strategy.name}` sums or gathers some values over its replicas incorrectly"
    sentence = (
        f"{_SUBJECTS[entry.kind].format(entry=entry)} differs from one device by {entry.difference:.2g} in step "
        f"{entry.step}, where rounding explains {entry.sensitivity:.2g}; the likely cause: {cause}"
    )
    return sentence, hint


_SUBJECTS = {
    "sum": "The sum of a 1 for each number in the part `{entry.name}` of the batch, over all replicas,",
    "batch": "The part `{entry.name}` of the batch that a step receives",
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


class Watch(contextlib.AbstractContextManager[Any]):
    """In this context, the model's `train_step` also returns its input, layer outputs, losses and gradients.

    Args:
        model: the model.
        sees: whether anything is recorded.

    Attributes:
        seen: the layer, loss or variable of each recorded value, by the value's kind and name; `None` for the input.
        noise: the relative noise that steps on one device add to their gradients.
    """

    def __init__(self, model: Any, sees: bool = True):
        self.seen: dict[tuple[str, str], Any] = {}
        self.noise: tf.Variable | None = None
        self._model = model
        self._sees = sees
        self._traced_step = _TracedStep()

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(keras_patches.watching(self._model, self._see))
        step = functools.partial(self._train_step, self._model.train_step)
        if not self._sees:  # then the wrapper counts as Keras' own step, which is recognized by `__func__`
            vars(step)["__func__"] = getattr(self._model.train_step, "__func__", None)
        # Past Keras' attribute tracking, so that nothing of it is saved with the model.
        object.__setattr__(self._model, "train_step", step)
        self._stack.callback(object.__delattr__, self._model, "train_step")
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.close()

    def _train_step(self, step: Callable[[Any], Any], data: Any) -> Any:
        values: dict[str, tf.Tensor] = {}
        self._traced_step.values = values
        self._traced_step.graph = _graph()
        try:
            if self._sees:
                self._record_batch(data)
            logs = step(data)
        finally:
            self._traced_step.values = None
        return {**logs, **values} if isinstance(logs, dict) else logs

    @property
    def is_in_step(self) -> bool:
        """Whether this thread is tracing a step, and is not in a nested graph."""
        return self._traced_step.values is not None and _graph() is self._traced_step.graph

    def _record_batch(self, data: Any) -> None:
        """Records the input and a sum over the replicas, so that their bugs are not attributed to the first layer."""
        parts = data if isinstance(data, tuple) and len(data) <= 3 else (data,)
        numbers = [
            (name, tensor)
            for name, part in zip(("x", "y", "sample_weight"), parts, strict=False)
            for tensor in tree.flatten(part)
            if isinstance(tensor, tf.Tensor) and (tensor.dtype.is_floating or tensor.dtype.is_integer)
        ]
        for name, tensor in numbers[:1]:
            self._record("sum", name, None, tf.reduce_sum(tf.cast(tf.equal(tensor, tensor), tf.float32)))
        for name, tensor in numbers:
            self._record("batch", name, None, tensor)

    def _see(self, kind: str, of: Any, value: Any) -> Any:
        """Records what a step computes; on one device, gradients may get noise."""
        if not self._sees or not self.is_in_step:
            return value
        if kind == "gradients":
            for variable, gradient in zip(of, value, strict=True):
                if gradient is not None:
                    self._record("gradient", variable.path, variable, tf.convert_to_tensor(gradient)[tf.newaxis])
            return value if self.noise is None else [self._with_noise(gradient) for gradient in value]
        name = getattr(of, "path", None) or of.name
        for tensor in tree.flatten(value):
            if isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating:
                self._record(kind, name, of, tensor)
        return value if kind != "output" or self.noise is None else tree.map_structure(self._noisy_backward, value)

    def _noisy_backward(self, output: Any) -> Any:
        """Adds noise to the gradient of a layer's output, like rounding errors of its sum over the batch.

        The sum of B examples is rounded to bits of its partial sums, which are up to B times an example, even if it is
        itself close to 0. Random errors of sqrt(B) bits of each example add up to as much.
        """
        if not isinstance(output, tf.Tensor) or not output.dtype.is_floating or not output.shape.rank:
            return output
        noise, seed = tf.cast(self.noise, output.dtype), [1, len(self.seen)]

        @tf.custom_gradient
        def same(values: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def backward(gradient: tf.Tensor) -> tf.Tensor:
                bits = tf.sqrt(tf.cast(tf.shape(gradient)[0], gradient.dtype))
                signs = tf.sign(tf.random.stateless_uniform(tf.shape(gradient), seed, -1.0, 1.0))
                return gradient + noise * bits * gradient * tf.cast(signs, gradient.dtype)

            return tf.identity(values), backward

        return keras_internals.with_attributes_of(output, same(output))

    def _with_noise(self, gradient: Any) -> Any:
        """Adds noise of about one bit of the largest element to a gradient, like rounding errors of sums."""
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(self._with_noise(gradient.values), gradient.indices, gradient.dense_shape)
        draws = tf.random.stateless_uniform(tf.shape(gradient), [0, len(self.seen)], -1.0, 1.0, gradient.dtype)
        largest = tf.reduce_max(tf.abs(gradient), keepdims=True) if gradient.shape.rank else tf.abs(gradient)
        return gradient + tf.cast(self.noise, gradient.dtype) * largest * draws

    def _record(self, kind: str, name: str, of: Any, rows: tf.Tensor) -> None:
        """Records a scalar, or for a tensor its sum and its sum of absolute values, divided by its rows, float32 `[2]`.

        Args:
            kind: the kind of the value, such as "output".
            name: the name of the value.
            of: the layer, loss or variable of the value.
            rows: the value.
        """
        values = self._traced_step.values
        assert values is not None
        candidates = (name if number == 1 else f"{name} ({number})" for number in range(1, len(values) + 2))
        name = next(candidate for candidate in candidates if f"{_MARK}{kind}: {candidate}" not in values)
        self.seen[kind, name] = of
        rows = tf.cast(rows, tf.float32)
        if rows.shape.rank:
            count = tf.cast(tf.maximum(tf.shape(rows)[0], 1), tf.float32)
            rows = tf.stack([tf.reduce_sum(rows), tf.reduce_sum(tf.abs(rows))]) / count
        values[f"{_MARK}{kind}: {name}"] = rows


class _TracedStep(threading.local):
    """The step that this thread is tracing: its recorded values by name, and its graph."""

    values: dict[str, tf.Tensor] | None = None
    graph: Any = None


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
