"""Checks a strategy whose steps differ from those of one device by design against its error bound.

`tfdist.interface.bound` defines the bounds. With averaging after each step of SGD, a staleness of 0, or synchronous
updates, the steps equal those of one device and are compared with them. The weights, the norms of gradients and the
number of updates are measured here. The workers measure the staleness, since only they know when they read.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.input.array_feed import ArrayBatches
from tfdist.data.input.dataset_feed import BatchFeed
from tfdist.data.input.feed import Feed
from tfdist.errors import VerificationError
from tfdist.interface.bound import Averaging, Bound, Staleness
from tfdist.interface.program import Steps
from tfdist.interface.strategy import Strategy
from tfdist.internals import keras as keras_internals
from tfdist.internals.keras import tf_variable
from tfdist.loop import building, metrics, programs
from tfdist.terminal import counted
from tfdist.verification import comparison
from tfdist.verification.comparison import Watch
from tfdist.verification.report import Report, Shown

# The relative rounding error of norms in float32.
ROUNDING = 1e-5
# With fewer steps, one worker may finish all of them before another begins.
STEPS_OF_WORKERS = 40
_HINT = "this is a bug in the strategy, unless custom layers or metrics change variables in a step"


@dataclass(frozen=True)
class Measurement:
    """A measured quantity.

    Attributes:
        quantity: its description.
        measured: its value.
        at_most: the largest value that the bound allows; `None` without a limit.
    """

    quantity: str
    measured: float
    at_most: float | None

    @property
    def is_broken(self) -> bool:
        """Whether the value is NaN or larger than the bound allows."""
        return self.at_most is not None and not self.measured <= self.at_most


@dataclass(frozen=True, repr=False)
class BoundReport(Shown):
    """Measurements of a strategy, and its bound.

    Attributes:
        strategy: the name of the strategy.
        bound: the bound, as a sentence without a full stop.
        measurements: the measured quantities, in the order in which they are compared.
        steps: the number of steps that were run.
    """

    strategy: str
    bound: str
    measurements: tuple[Measurement, ...]
    steps: int

    @property
    def verdict(self) -> str:
        return f"{self._broken}." if self._broken else f"The steps of `{self.strategy}` stay within its bound."

    @property
    def _broken(self) -> str | None:
        """A sentence about the first measurement that breaks the bound; `None` if there is none."""
        broken = next((measurement for measurement in self.measurements if measurement.is_broken), None)
        if broken is None:
            return None
        return (
            f"`{self.strategy}` breaks its bound: {broken.quantity} is {broken.measured:.4g}, and at most "
            f"{broken.at_most:.4g} is allowed"
        )

    @property
    def table(self) -> str:
        width = max(len(measurement.quantity) for measurement in self.measurements)
        lines = [f"The bound: {self.bound}.", f"{'':{width}}  measured    at most     (steps: {self.steps})"]
        for m in self.measurements:
            limit = "no limit" if m.at_most is None else f"{m.at_most:<10.4g}"
            lines.append(f"{m.quantity:{width}}  {m.measured:<10.4g}  {limit}" + ("  broken" if m.is_broken else ""))
        return "\n".join(lines)

    def require(self, model: Any) -> None:
        """Raises `VerificationError` if the bound is broken; all processes of a job have the same report."""
        if self._broken:
            raise VerificationError(self._broken, _HINT, model.name, self)


def verify(strategy: Strategy, model: Any, feed: Feed, steps: int) -> Report | BoundReport:
    """Runs steps of `model` on `strategy`, checks them against the strategy's bound, and restores the model.

    Args:
        strategy: a strategy with a bound, in whose scope the model was created.
        model: a compiled model, built for training.
        feed: global batches, the same in all processes of the job.
        steps: the number of batches.

    Raises:
        VerificationError: the bound is broken in one of the processes.
    """
    bound = strategy.bound
    assert bound is not None
    if is_equality(bound, strategy, model, feed):
        try:
            return _compared(strategy, model, feed, steps)
        except VerificationError as error:
            difference, _, _ = error.sentence.partition("; the likely cause")
            sentence = f"`{strategy.name}` breaks its bound ({bound.equality}): {difference}"
            raise VerificationError(sentence, _HINT, error.layer, error.report) from error
    with comparison.restored(strategy, model, feed.spec):
        if isinstance(bound, Averaging):
            report = _measure_averaging(bound, strategy, model, feed, steps)
        else:
            assert isinstance(bound, Staleness)
            report = _measure_staleness(bound, strategy, model, feed, steps)
    report.require(model)
    return report


def is_equality(bound: Bound, strategy: Strategy, model: Any, feed: Feed) -> bool:
    """Whether the bound implies that the steps of `model` on `feed` equal those of one device."""
    if isinstance(bound, Staleness):
        return bound.most == 0
    assert isinstance(bound, Averaging)
    synchronous = bound.plain and bound.sync_every == 1 and model.optimizer.gradient_accumulation_steps is None
    # Each rank takes its examples from its own share of arrays; the batches equal global ones only if these divide.
    uneven = isinstance(feed.batches, ArrayBatches) and feed.batch_size % strategy.world.world_size
    by_rank = any(map(_depends_on_rank, keras_internals.all_layers(model)))
    return synchronous and _is_sgd(model.optimizer) and not by_rank and not uneven


def _compared(strategy: Strategy, model: Any, feed: Feed, steps: int) -> Report:
    if isinstance(strategy.bound, Staleness):
        # In one call, since steps of different calls never run at the same time.
        batches = feed.first(max(steps, STEPS_OF_WORKERS))
        return comparison.verify(strategy, model, batches, inside=False, in_one_call_from=feed)
    return comparison.verify(strategy, model, feed.first(steps), inside=False)


def _measure_averaging(bound: Averaging, strategy: Strategy, model: Any, feed: Feed, steps: int) -> BoundReport:
    """Measures the distances of ranks from each other and from the last average, over up to `steps` steps."""
    batches = feed.first(steps)
    drift = _Drift(strategy, model)
    with _Norms(model) as norms:
        own_logs = building.build(strategy, model, "train", BatchFeed(batches[0]).spec)
        program = strategy.program(Steps(model, "train", BatchFeed.batches, own_logs=own_logs))
        metrics.reset(strategy, model)
        program.begin_epoch()
        for number, batch in enumerate(batches):
            rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
            program.run(BatchFeed(batch).start(0, 0), number, 1)
            drift.step(rate, norms.of_step())
            if bound.sync_every is not None and (number + 1) % bound.sync_every == 0:
                drift.averaged()
        program.end_epoch()
        drift.averaged()
    plain = _is_sgd(model.optimizer) and not model.optimizer.momentum and _only_gradients_move_weights(model)
    every = f"every {counted(bound.sync_every, 'step')}" if bound.sync_every else "at the end of an epoch"
    stated = f"averaging {every}, after which all ranks have the same weights"
    if plain:
        stated += "; n steps later a rank is at most r * G * n away, with learning rate r and gradient norm G"
    return BoundReport(strategy.name, stated, drift.measurements(plain), len(batches))


def _measure_staleness(bound: Staleness, strategy: Strategy, model: Any, feed: Feed, steps: int) -> BoundReport:
    """Measures the number of updates and the largest staleness over `steps` steps or more."""
    wanted = max(steps, STEPS_OF_WORKERS)
    count = min(wanted, feed.num_batches or wanted)
    program = programs.program(strategy, model, "train", feed)
    program.begin_epoch()
    program.run(feed.start(0, 0), 0, count)  # workers build their graphs at different times in this call
    metrics.reset(strategy, model)
    program.begin_epoch()
    updates_before = _updates(model)
    outcome = program.run(feed.start(1, 0), 0, count)
    program.end_epoch()
    wrong = abs(_updates(model) - updates_before - outcome.steps)
    staleness = float(outcome.logs.get("staleness_max", 0.0))
    stated = "each step updates the variables once"
    if bound.most is not None:
        stated += f", and at most {counted(bound.most, 'update')} of others may come between its reads and its update"
    measurements = (
        Measurement("updates that are missing or too many", wrong, 0),
        Measurement("the largest staleness of a step", staleness, bound.most),
    )
    return BoundReport(strategy.name, stated, measurements, outcome.steps)


@dataclass
class _Drift:
    """The distances of this rank from the last common weights, and of the ranks from each other after averagings.

    Attributes:
        spread: the largest relative difference between ranks after an averaging.
        rate: the largest learning rate.
        gradient: the largest norm of a gradient of this rank.
        moved: after each step, the number of steps since the averaging, and the distance from the common weights.
        common: the common weights.
        since: the number of steps since the averaging.
    """

    strategy: Strategy
    model: Any
    spread: float = 0.0
    rate: float = 0.0
    gradient: float = 0.0
    moved: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.averaged()
        self.spread = 0.0  # before training nothing was averaged

    def averaged(self) -> None:
        """Measures the difference of the ranks after an averaging, and begins a new interval."""
        self.common, self.since = _weights(self.model), 0
        messages = self.strategy.exchange(self.common.tobytes())
        weights = [np.frombuffer(message, self.common.dtype) for message in messages]
        size = float(np.max(np.abs(self.common), initial=0))
        spread = max(float(np.max(np.abs(of_rank - weights[0]), initial=0)) for of_rank in weights)
        self.spread = max(self.spread, spread / size if size else spread)

    def step(self, rate: float, gradient: float) -> None:
        """Measures the distance after a step with this learning rate and this norm of the rank's gradient."""
        self.since += 1
        self.rate, self.gradient = max(self.rate, rate), max(self.gradient, gradient)
        self.moved.append((self.since, float(np.linalg.norm(_weights(self.model) - self.common))))

    def measurements(self, plain: bool) -> tuple[Measurement, ...]:
        """Returns the largest values over all ranks; the distance is limited for `plain` SGD only."""
        local = {"spread": self.spread, "rate": self.rate, "gradient": self.gradient, "moved": self.moved}
        ranks = [json.loads(message) for message in self.strategy.exchange(json.dumps(local).encode())]
        spread = max(rank["spread"] for rank in ranks)
        step = max(rank["rate"] for rank in ranks) * max(rank["gradient"] for rank in ranks)
        moved = ((since, distance) for rank in ranks for since, distance in rank["moved"])
        since, distance = max(moved, key=lambda pair: pair[1] / pair[0])
        rounding = ROUNDING * float(np.linalg.norm(self.common))
        limit = step * since * (1 + ROUNDING) + rounding if plain else None
        quantity = f"a rank's distance from the last common weights, {counted(since, 'step')} later"
        return (
            Measurement("the largest relative difference of ranks after an averaging", spread, ROUNDING),
            Measurement(quantity, distance, limit),
        )


class _Norms(Watch):
    """In this context, the model's `train_step` also sums the squares of this rank's gradients."""

    def __init__(self, model: Any):
        super().__init__(model)
        # Not among the step's logs, which are averaged over the ranks.
        self._squares = tf.Variable(0.0, trainable=False)

    def of_step(self) -> float:
        """Returns the norm of all gradients of the steps since the last call."""
        squares = float(self._squares.numpy())
        self._squares.assign(0.0)
        return math.sqrt(squares)

    def _see(self, kind: str, of: Any, value: Any) -> Any:
        if kind == "gradients" and self.is_in_step:
            for gradient in value:
                if gradient is not None:
                    dense = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
                    self._squares.assign_add(tf.reduce_sum(tf.square(dense)))
        return value


def _weights(model: Any) -> np.ndarray:
    """Returns the trainable weights, flat, float32 `[n]`."""
    return np.concatenate([np.ravel(tf_variable(v).numpy()).astype(np.float32) for v in model.trainable_variables])


def _updates(model: Any) -> int:
    return int(keras_internals.iterations(model.optimizer).numpy())


def _is_sgd(optimizer: Any) -> bool:
    """Whether an update is linear in the gradient: SGD, with or without momentum, and without clipping."""
    clips = (optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm)
    return type(optimizer) is keras.optimizers.SGD and all(clip is None for clip in clips)


def _depends_on_rank(layer: Any) -> bool:
    """Whether a layer's output for an example depends on the rank that computes it."""
    normalizes = isinstance(layer, keras.layers.BatchNormalization)
    return normalizes or getattr(layer, "seed_generator", None) is not None


def _only_gradients_move_weights(model: Any) -> bool:
    """Whether there are no constraints, no weight decay and no moving average of the weights."""
    optimizer = model.optimizer
    constrained = any(variable.constraint is not None for variable in model.trainable_variables)
    return not constrained and not optimizer.weight_decay and not optimizer.use_ema
