"""Whether the steps of a model on several replicas are those of one device, told by running both.

    reference    one device                     the whole of each global batch
    nudged       one device, twice              the same, weights and gradients moved by one bit: what rounding can do
    found        the replicas of the strategy   their parts

All begin with the same variables and random states, which are put back whatever happens, so that a training is the same
with and without a verification before it. Besides variables and logs, a run notes what each layer returns, the losses
and the gradients, so that the first place where runs differ can be named.

**Tolerance.** A number may differ by `TIMES_ROUNDING` times as much as a nudge changes it, and by half of the digits of
its own size: the square root of the machine epsilon of the coarsest type that layers compute in. The size of a variable
is the largest change that the steps made to it.

**Random numbers** are drawn per example, so that one device and several cannot have the same. During a verification
they are drawn once per batch instead and repeated for all examples, in all runs: dropout stays at work, and hides
nothing. That holds for Keras' functions and layers and for those of `tf.random` with a state. What differs, and is
reported, are numbers from `tf.random.stateless_*`, from `gamma`, `beta` and `binomial` with parameters per example, and
a shuffle of the examples.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpointing import state as training_state
from tfdist.cluster import consensus
from tfdist.core import building, exact_step, metrics, randomness
from tfdist.core.inner_loop import StepProgram, Steps, as_traced
from tfdist.data.pipeline.batch_feed import BatchFeed
from tfdist.errors import UsageError, VerificationError
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_patches, keras_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.keras import tf_variable, tree

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy

STEPS = 3
TIMES_ROUNDING = 10
_NUDGES = 2

# Among the logs of a step, what its layers and losses were.
_MARK = "tfdist verification: "


@dataclass(frozen=True)
class Entry:
    """How far one quantity is from one device, in the first step in which it differs too much, else in the last.

    Attributes:
        kind: "output", "added loss", "loss", "whole loss", "gradient", "weight", "state", "optimizer" or "log".
        name: of the layer, loss, variable or log.
        layer: the layer that it belongs to, or the model.
        difference: the largest between the strategy and one device.
        sensitivity: the largest that a nudge of one bit in each weight makes on one device.
        tolerance: what the difference may be.
        replicas_over_one: the size on the strategy, divided by that on one device.
        step: the first step, from 0, in which it differed by more; `None` if in none.
    """

    kind: str
    name: str
    layer: str
    difference: float
    sensitivity: float
    tolerance: float
    replicas_over_one: float
    step: int | None


@dataclass(frozen=True)
class Report(Mapping[str, Entry]):
    """The entries of a verification, by kind and name such as "weight dense/kernel"; `str` makes a table of them."""

    entries: tuple[Entry, ...]
    steps: int

    def __getitem__(self, name: str) -> Entry:
        for entry in self.entries:
            if f"{entry.kind} {entry.name}" == name:
                return entry
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (f"{entry.kind} {entry.name}" for entry in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def first(self) -> Entry | None:
        """The first entry, in the order in which a step computes them, that differs in the first step that does."""
        steps = [entry.step for entry in self.entries if entry.step is not None]
        return next((entry for entry in self.entries if steps and entry.step == min(steps)), None)

    def __str__(self) -> str:
        width = max((len(name) for name in self), default=0)
        head = f"{'':{width}}  difference  one bit     tolerance   (steps: {self.steps})"
        lines = [
            f"{name:{width}}  {e.difference:<10.3g}  {e.sensitivity:<10.3g}  {e.tolerance:<10.3g}"
            + ("" if e.step is None else "  differs")
            for name, e in zip(self, self.entries, strict=True)
        ]
        return "\n".join([head, *lines])


def verify(strategy: Strategy, model: Any, batches: Sequence[Any]) -> Report:
    """Compares steps of `model` on one device and on `strategy`, and leaves it as it is.

    Args:
        strategy: whose variables the model has.
        model: compiled, and built for training.
        batches: global batches, the same in all processes of the job, as `train_step` takes them.

    Raises:
        VerificationError: they differ, in any of the processes.
    """
    require_as_one_device(strategy)
    exact_step.install()
    groups = training_state.variables(model)
    unseeded = [randomness.unseeded_of(strategy).state]
    variables = [variable for members in groups.values() for variable in members]
    compared = [v for group in ("model", "optimizer") for v in groups[group]]
    held = [*variables, *unseeded, *keras_internals.tensorflow_variables(model)]
    epsilon = _epsilon(strategy, model)
    watch = _Watch(strategy, model)
    with _state_kept(held), watch:
        seen = building.build(strategy, model, "train", BatchFeed(batches[0]).spec)
        with tensorflow_internals.without_strategy(), _plain(model, [*variables, *unseeded]):
            steps = Steps(model, "train", BatchFeed.batches, own_logs=seen)
            reference, *nudged = _on_one_device(strategy, steps, batches, compared, held, watch, epsilon)
        program = strategy.program(Steps(model, "train", as_traced(strategy, model, BatchFeed.batches), own_logs=seen))
        metrics.reset(strategy, model)
        found = _run(program, batches, compared)
    report = _report(model, groups, watch.seen, epsilon, reference, nudged, found)
    _raise_if_different(strategy, model, report)
    return report


def require_as_one_device(strategy: Strategy) -> None:
    """Raises `UsageError` where steps differ from those of one device by design."""
    if not strategy.as_one_device:
        raise UsageError(
            f"The steps of `{strategy.name}` differ from those of one device by design, so that there is nothing to "
            "verify",
            "verify the model with `custom`, `mirrored`, `multiworker` or `horovod`",
        )


# Arrays by the kind and the name of what they are; of the variables, what all steps so far have changed.
_Step = dict[tuple[str, str], np.ndarray]


def _on_one_device(
    strategy: Strategy,
    steps: Steps,
    batches: Sequence[Any],
    compared: Sequence[Any],
    held: Sequence[Any],
    watch: _Watch,
    epsilon: float,
) -> list[list[_Step]]:
    """The reference, and the nudged runs; `compared` are the variables of interest, and `held` all."""
    runs = []
    program: Any = None
    watch.noise = tf.Variable(0.0)
    for number in range(1 + _NUDGES):
        # Operations of `tf.random` keep their state in a graph: each run begins with new ones.
        if program is None or watch.keeps_state:
            program = StepProgram(strategy.on_this_process(), steps)
        with _state_kept(held):
            if number:
                _nudge(steps.model.variables, epsilon, number)
                watch.noise.assign(epsilon * (-1) ** number)
            steps.model.reset_metrics()
            runs.append(_run(program, batches, compared))
    watch.noise = None
    return runs


def _run(program: Any, batches: Sequence[Any], variables: Sequence[Any]) -> list[_Step]:
    """What each step leaves."""
    before = [_value(variable) for variable in variables]
    steps = []
    program.begin_epoch()
    for batch in batches:
        logs = program.run(BatchFeed(batch).start(0, 0), 0, 1).logs
        step: _Step = {}
        for name, value in _flat(logs).items():
            kind, _, of = name.removeprefix(_MARK).partition(": ") if name.startswith(_MARK) else ("log", "", name)
            step[kind, of] = np.asarray(value, np.float64)
        for variable, start in zip(variables, before, strict=True):
            step["variable", variable.path] = np.asarray(_value(variable) - start)
        steps.append(step)
    program.end_epoch()
    return steps


def _value(variable: Any) -> np.ndarray:
    value = training_state.copies(variable)[0].numpy()
    return value.astype(np.float64) if tf_variable(variable).dtype.is_floating else value.astype(np.int64)


def _flat(logs: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Logs may have logs inside."""
    found: dict[str, Any] = {}
    for name, value in logs.items():
        found |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


@contextlib.contextmanager
def _state_kept(variables: Sequence[Any]) -> Iterator[None]:
    """Whatever happens in this context, `variables` and all random states are afterwards what they were."""
    held = [copy for variable in variables for copy in training_state.copies(variable)]
    values = [copy.numpy() for copy in held]
    random_state, eager = training_state.random_state(), tensorflow_internals.eager_random_state()

    try:
        yield
    finally:
        for copy, value in zip(held, values, strict=True):
            copy.assign(value)
        training_state.restore_random_state(random_state)
        tensorflow_internals.restore_eager_random_state(eager)


def _plain(model: Any, variables: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    return keras_variables.on_plain_variables(model, list({id(v): v for v in variables}.values()))


def _nudge(variables: Sequence[Any], epsilon: float, number: int) -> None:
    """Moves each floating-point number of the model up or down by one bit of what layers compute in."""
    draw = np.random.default_rng(number)
    for variable in variables:
        if tf_variable(variable).dtype.is_floating:
            value = tf_variable(variable).numpy().astype(np.float64)
            moved = value * (1 + epsilon * draw.choice([-1, 1], value.shape))
            tf_variable(variable).assign(tf.cast(moved, tf_variable(variable).dtype))


def _epsilon(strategy: Strategy, model: Any) -> float:
    """The machine epsilon of the coarsest type that layers compute in."""
    types = {str(layer.compute_dtype) for layer in keras_internals.all_layers(model)} | {"float32"}
    found = [_epsilon_of(tf.as_dtype(name).as_numpy_dtype) for name in types if "float" in name]
    on_gpu = any("GPU" in device for device in strategy.devices)
    if on_gpu and tf.config.experimental.tensor_float_32_execution_enabled():
        found.append(2.0**-10)  # of TensorFloat-32
    return max(found)


def _epsilon_of(kind: type) -> float:
    """The distance from 1 to the next number; NumPy's `finfo` does not know bfloat16."""
    one, two = kind(1), kind(2)
    return float(np.nextafter(one, two) - one)


class _Seen(threading.local):
    step: dict[str, tf.Tensor] | None = None
    graph: Any = None


class _Watch(contextlib.AbstractContextManager[None]):
    """In this context, the model's `train_step` also returns what its layers, losses and gradients are.

    Attributes:
        seen: for each of them, by kind and name, the layer, loss or variable.
        noise: how much noise the steps on one device add to their gradients, as a part of their size.
        keeps_state: a step draws by operations of TensorFlow that keep a state in their graph.
    """

    def __init__(self, strategy: Strategy, model: Any):
        self.seen: dict[tuple[str, str], Any] = {}
        self.keeps_state = False
        self.noise: tf.Variable | None = None
        self._unseeded = randomness.unseeded_of(strategy)
        self._model = model
        self._of_thread = _Seen()

    def __enter__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(keras_patches.watching(self._model, self._see))
        step = functools.partial(self._train_step, self._model.train_step)
        # Past Keras' attribute tracking, so that nothing of it is saved with the model.
        object.__setattr__(self._model, "train_step", step)
        self._stack.callback(object.__delattr__, self._model, "train_step")

    def __exit__(self, *raised: Any) -> None:
        self._stack.close()

    def _train_step(self, step: Callable[[Any], Any], data: Any) -> Any:
        seen: dict[str, tf.Tensor] = {}
        self._of_thread.step = seen
        self._of_thread.graph = _graph()
        sized = [one for one in tf.nest.flatten(data, expand_composites=True) if one is not None and one.shape.rank]
        try:
            examples = sized[0].shape[0] if sized else None
            with randomness.alike_for_all_examples(examples, self._unseeded) as alike:
                logs = step(data)
            self.keeps_state = self.keeps_state or alike.draws > 0
        finally:
            self._of_thread.step = None
        return {**logs, **seen} if isinstance(logs, dict) else logs

    def _see(self, kind: str, of: Any, value: Any) -> Any:
        if self._of_thread.step is None or _graph() is not self._of_thread.graph:
            return value
        if kind == "gradients":
            for variable, gradient in zip(of, value, strict=True):
                if gradient is not None:
                    self._note("gradient", variable.path, variable, tf.convert_to_tensor(gradient)[tf.newaxis])
            return value if self.noise is None else [self._with_noise(gradient) for gradient in value]
        name = getattr(of, "path", None) or of.name
        for tensor in tree.flatten(value):
            if isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating:
                self._note(kind, name, of, tensor)

    def _with_noise(self, gradient: Any) -> Any:
        """`gradient` as if its sums had been rounded otherwise, by a bit of its largest number."""
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(self._with_noise(gradient.values), gradient.indices, gradient.dense_shape)
        draws = tf.random.stateless_uniform(tf.shape(gradient), [0, len(self.seen)], -1.0, 1.0, gradient.dtype)
        largest = tf.reduce_max(tf.abs(gradient), keepdims=True) if gradient.shape.rank else tf.abs(gradient)
        return gradient + tf.cast(self.noise, gradient.dtype) * largest * draws

    def _note(self, kind: str, name: str, of: Any, rows: tf.Tensor) -> None:
        """Notes a scalar; of other tensors the sums of the numbers and of their sizes per row, float32 `[2]`."""
        seen = self._of_thread.step
        assert seen is not None
        numbers = (name if number == 1 else f"{name} ({number})" for number in range(1, len(seen) + 2))
        name = next(one for one in numbers if f"{_MARK}{kind}: {one}" not in seen)
        self.seen[kind, name] = of
        rows = tf.cast(rows, tf.float32)
        if rows.shape.rank:
            count = tf.cast(tf.maximum(tf.shape(rows)[0], 1), tf.float32)
            rows = tf.stack([tf.reduce_sum(rows), tf.reduce_sum(tf.abs(rows))]) / count
        seen[f"{_MARK}{kind}: {name}"] = rows


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _report(
    model: Any,
    groups: Mapping[str, Sequence[Any]],
    seen: Mapping[tuple[str, str], Any],
    epsilon: float,
    reference: list[_Step],
    nudged: list[list[_Step]],
    found: list[_Step],
) -> Report:
    optimizer = {variable.path for variable in groups["optimizer"]}
    trainable = {variable.path for variable in model.trainable_variables}
    owners = _owners(model)
    metric_names = {metric.name for metric in keras_internals.metrics_of(model)}
    values = {v.path: float(np.max(np.abs(_value(v)), initial=0)) for group in groups.values() for v in group}

    def place(kind: str, name: str) -> tuple[str, str]:
        if kind == "variable":
            kind = "optimizer" if name in optimizer else "weight" if name in trainable else "state"
        of = seen.get((kind, name))
        if kind == "gradient" or kind in ("weight", "state"):
            return kind, owners.get(name if of is None else of.path, model.name)
        if kind == "log" and name in metric_names:
            return kind, name
        return kind, model.name if of is None else of.name

    def compared(kind: str, name: str) -> Entry:
        differences, sensitivities, tolerances, ratios, first = [], [], [], [], None
        for number, one in enumerate(reference):
            key = kind, name
            expected, got = one[key], found[number][key]
            sensitivity = max(_distance(run[number][key], expected) for run in nudged)
            size = float(np.max(np.abs(expected), initial=0))
            exact = kind == "variable" and expected.dtype.kind == "i"
            rounding = 0.0 if exact else math.sqrt(epsilon) * size
            if kind == "variable" and not exact:
                rounding += 4 * epsilon * (values[name] + size)  # its own digits end there
            tolerance = TIMES_ROUNDING * sensitivity + rounding
            difference = _distance(got, expected)
            if first is None and not difference <= tolerance:
                first = number
                ratios.append(float(np.max(np.abs(got), initial=0)) / size if size else math.inf)
            differences.append(difference)
            sensitivities.append(sensitivity)
            tolerances.append(tolerance)
        kind, layer = place(kind, name)
        worst = len(reference) - 1 if first is None else first
        return Entry(
            kind, name, layer, differences[worst], sensitivities[worst], tolerances[worst], (ratios or [1.0])[0], first
        )

    common = [key for key in reference[0] if all(key in step for step in (*reference, *found))]
    inside = [compared(*key) for key in seen if key in common]  # in the order in which a step computes them
    after = [compared(*key) for key in common if key not in seen]
    return Report((*inside, *sorted(after, key=lambda entry: _AFTER.index(entry.kind))), len(reference))


_AFTER = ("state", "weight", "optimizer", "log")


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference; what is NaN, or infinite, in both is the same."""
    same = (one == other) | (np.isnan(one.astype(np.float64)) & np.isnan(other.astype(np.float64)))
    return float(np.max(np.where(same, 0.0, np.abs(np.where(same, 0, one) - np.where(same, 0, other))), initial=0))


def _owners(model: Any) -> dict[str, str]:
    """The layer of each variable, by the variable's path: the innermost one that has it."""
    layers = sorted(keras_internals.all_layers(model), key=lambda layer: -len(layer.variables))
    return {variable.path: layer.name for layer in layers for variable in layer.variables}


def _raise_if_different(strategy: Strategy, model: Any, report: Report) -> None:
    first = report.first
    mine = None if first is None else [*_explained(model, first), first.layer]
    told = next((one for one in consensus.all_gather_object(strategy, mine) if one is not None), None)
    if told is None:
        return
    sentence, hint, layer = told
    raise VerificationError(sentence, hint, layer, report)


def _explained(model: Any, entry: Entry) -> tuple[str, str]:
    """The sentence and the hint for the first entry that differs."""
    cause, hint = _cause(model, entry)
    sentence = (
        f"{_WHAT[entry.kind].format(entry=entry)} differs from one device by {entry.difference:.2g} in step "
        f"{entry.step}, where rounding makes {entry.sensitivity:.2g}; the likely cause: {cause}"
    )
    return sentence, hint


_WHAT = {
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


def _cause(model: Any, entry: Entry) -> tuple[str, str]:
    """What most often makes an entry of this kind differ, and the way that is equal."""
    layer = next((one for one in keras_internals.all_layers(model) if one.name == entry.layer), None)
    if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized:
        return (
            f"`{entry.layer}` normalizes each replica's part of the batch by itself",
            "use `BatchNormalization(synchronized=True)`",
        )
    if entry.kind == "log":
        return _cause_of_log(model, entry)
    is_sum = entry.replicas_over_one < _A_SUM
    part = "is a sum over a replica's part of the batch" if is_sum else "depends on the whole batch"
    step = "`train_step`" if keras_internals.has_own_step(model, "train") else "the model"
    cause, hint = _CAUSES[entry.kind]
    return cause.format(part=part, step=step), hint


# A sum over a part of a batch is at most about so much of the sum over the batch.
_A_SUM = 0.75
_GATHER = "compute it of `tfdist.gather(...)` or of sums by `tfdist.all_reduce(...)`"
_OF_LOSS = "the loss {part}, and is not a mean of what each example gives", f"average it; or {_GATHER}"
_OF_STATE = (
    "it is set from a sum over a replica's part of the batch, or from something else that is not a mean",
    "set it from `tfdist.all_reduce(...)` of the sum",
)
_CAUSES = {
    "output": (
        "the layer computes an example's output from other examples of its part of the batch, or draws random numbers "
        "that cannot be compared",
        _GATHER,
    ),
    "added loss": ("what is given to `add_loss` {part}, and not a mean over its examples", f"average it; or {_GATHER}"),
    "loss": _OF_LOSS,
    "whole loss": _OF_LOSS,
    "gradient": (
        "the loss that {step} differentiates {part}, and is not a mean over its examples",
        f"average it (`tf.reduce_mean`); or {_GATHER}",
    ),
    "state": _OF_STATE,
    "weight": _OF_STATE,
    "optimizer": ("the optimizer is given something that only a replica's part of the batch says", _GATHER),
}


def _cause_of_log(model: Any, entry: Entry) -> tuple[str, str]:
    metric = next((one for one in keras_internals.metrics_of(model) if one.name == entry.name.split("/")[0]), None)
    if metric is None:
        return f"`{entry.name}` is a number that `train_step` computes of a replica's part of the batch", (
            "return what is a mean over the examples, or the result of a metric"
        )
    if getattr(metric, "additive", False) or getattr(getattr(metric, "_fn", None), "additive", False):
        return (
            f"the metric `{entry.name}` says `additive = True`, and its state is no sum over the examples",
            "leave `additive` out: the metric is then computed on the global batch",
        )
    return (
        f"the metric `{entry.name}` is given a number that was computed of a replica's part of the batch",
        "give it the values of the examples, or use `keras.metrics.Mean` for a mean over the batch",
    )
