"""Holds a strategy whose steps differ from those of one device, by design, to the bound that it states.

The bounds are in `tfdist.interface.bound`. Averaging after each step of SGD, a staleness of 0, and steps taken together
give those of one device: they are compared with these then.
The weights, the norms of gradients and the updates are measured here; the staleness by the workers, who alone know when
they read.
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
from tfdist.verification.report import Report, Shown
from tfdist.verification.watch import Watch

# Relative, of norms in float32.
ROUNDING = 1e-5
# Of fewer steps one worker may have done all before another begins.
STEPS_OF_WORKERS = 40
_FAULT = "this is a fault of the strategy, unless layers or metrics of your own change variables in a step"


@dataclass(frozen=True)
class Held:
    """A quantity that was measured, and the largest that the bound allows; `None` where nothing is stated."""

    what: str
    measured: float
    at_most: float | None

    @property
    def is_broken(self) -> bool:
        """Whether it is larger than the bound allows; a number that is not finite is."""
        return self.at_most is not None and not self.measured <= self.at_most


@dataclass(frozen=True, repr=False)
class BoundReport(Shown):
    """What was measured of a strategy, beside its bound.

    Attributes:
        strategy: its name.
        bound: what the strategy states, as a sentence without its full stop.
        held: the quantities, in the order in which they are compared.
        steps: the number of steps that were run.
    """

    strategy: str
    bound: str
    held: tuple[Held, ...]
    steps: int

    @property
    def verdict(self) -> str:
        return f"{self._broken}." if self._broken else f"The steps of `{self.strategy}` stay within its bound."

    @property
    def _broken(self) -> str | None:
        """How the bound is broken, if it is."""
        broken = next((one for one in self.held if one.is_broken), None)
        if broken is None:
            return None
        return (
            f"`{self.strategy}` breaks its bound: {broken.what} is {broken.measured:.4g}, and at most "
            f"{broken.at_most:.4g} is allowed"
        )

    @property
    def table(self) -> str:
        width = max(len(one.what) for one in self.held)
        lines = [f"{'':{width}}  measured    at most     (steps: {self.steps})"]
        for one in self.held:
            most = "not stated" if one.at_most is None else f"{one.at_most:<10.4g}"
            lines.append(f"{one.what:{width}}  {one.measured:<10.4g}  {most}" + ("  broken" if one.is_broken else ""))
        return "\n".join([f"The bound: {self.bound}.", *lines])

    def require(self, model: Any) -> None:
        """Raises `VerificationError` if the bound is broken; all processes of a job have the same report."""
        if self._broken:
            raise VerificationError(self._broken, _FAULT, model.name, self)


def verify(strategy: Strategy, model: Any, feed: Feed, steps: int) -> Report | BoundReport:
    """Runs steps of `model` on `strategy`, holds them to the bound that the strategy states, and restores the model.

    Args:
        strategy: which states a bound, in whose scope the model was made.
        model: compiled, and built for training.
        feed: of global batches, the same in all processes of the job.
        steps: the number of batches.

    Raises:
        VerificationError: the bound is broken, in any of the processes.
    """
    bound = strategy.bound
    assert bound is not None
    if is_equality(bound, strategy, model, feed):
        try:
            return _compared(strategy, model, feed, steps)
        except VerificationError as error:
            what, _, _ = error.sentence.partition("; the likely cause")
            sentence = f"`{strategy.name}` breaks its bound ({bound.equality}): {what}"
            raise VerificationError(sentence, _FAULT, error.layer, error.report) from error
    with comparison.restored(strategy, model, feed.spec):
        if isinstance(bound, Averaging):
            report = _averaging_measured(bound, strategy, model, feed, steps)
        else:
            assert isinstance(bound, Staleness)
            report = _staleness_measured(bound, strategy, model, feed, steps)
    report.require(model)
    return report


def is_equality(bound: Bound, strategy: Strategy, model: Any, feed: Feed) -> bool:
    """Whether the steps of `model` on the batches of `feed` equal those of one device, for a strategy of this bound."""
    if isinstance(bound, Staleness):
        return bound.most == 0
    assert isinstance(bound, Averaging)
    at_once = bound.plain and bound.sync_every == 1 and model.optimizer.gradient_accumulation_steps is None
    # Each rank has its own share of arrays, of which it takes a share of each batch: equal ones where that divides.
    other = isinstance(feed.batches, ArrayBatches) and feed.batch_size % strategy.world.world_size
    of_rank = any(map(_is_of_rank, keras_internals.all_layers(model)))
    return at_once and _is_sgd(model.optimizer) and not of_rank and not other


def _compared(strategy: Strategy, model: Any, feed: Feed, steps: int) -> Report:
    """Compares steps with those of one device, which they equal."""
    if isinstance(strategy.bound, Staleness):
        # In one call, since the steps of several calls are never computed at the same time.
        batches = feed.first(max(steps, STEPS_OF_WORKERS))
        return comparison.verify(strategy, model, batches, inside=False, in_one_call_from=feed)
    return comparison.verify(strategy, model, feed.first(steps), inside=False)


def _averaging_measured(bound: Averaging, strategy: Strategy, model: Any, feed: Feed, steps: int) -> BoundReport:
    """How far ranks are from each other, and from the last average, over up to `steps` steps."""
    batches = feed.first(steps)
    drift = _Drift(strategy, model)
    with _Norms(model) as norms:
        seen = building.build(strategy, model, "train", BatchFeed(batches[0]).spec)
        program = strategy.program(Steps(model, "train", BatchFeed.batches, own_logs=seen))
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
    plain = _is_sgd(model.optimizer) and not model.optimizer.momentum and _is_free(model)
    every = f"every {counted(bound.sync_every, 'step')}" if bound.sync_every else "at the end of an epoch"
    stated = f"averaging {every}, after which all ranks have the same weights"
    if plain:
        stated += "; n steps later a rank is at most r * G * n away from them, of rate r and gradient norm G"
    return BoundReport(strategy.name, stated, drift.held(plain), len(batches))


def _staleness_measured(bound: Staleness, strategy: Strategy, model: Any, feed: Feed, steps: int) -> BoundReport:
    """The number of updates, and the largest staleness that the workers measured, over `steps` steps or more."""
    wanted = max(steps, STEPS_OF_WORKERS)
    count = min(wanted, feed.num_batches or wanted)
    program = programs.program(strategy, model, "train", feed)
    program.begin_epoch()
    program.run(feed.start(0, 0), 0, count)  # in which each worker builds its graphs, at a time of its own
    metrics.reset(strategy, model)
    program.begin_epoch()
    before = _updates(model)
    outcome = program.run(feed.start(1, 0), 0, count)
    program.end_epoch()
    lost = abs(_updates(model) - before - outcome.steps)
    stale = Held("the largest staleness of a step", float(outcome.logs.get("staleness_max", 0.0)), bound.most)
    stated = "each step updates the variables once"
    if bound.most is not None:
        stated += f", and at most {counted(bound.most, 'update')} of others may come between its reads and its own"
    held = Held("updates that are missing or too many", lost, 0), stale
    return BoundReport(strategy.name, stated, held, outcome.steps)


@dataclass
class _Drift:
    """How far this rank has moved from the last common weights, and how far the ranks are apart after averagings."""

    strategy: Strategy
    model: Any
    apart: float = 0.0
    rate: float = 0.0
    gradient: float = 0.0
    moved: list[tuple[int, float]] = field(default_factory=list)  # steps since the averaging, distance

    def __post_init__(self) -> None:
        self.averaged()
        self.apart = 0.0  # before training nothing was averaged

    def averaged(self) -> None:
        """All ranks should have the same weights now."""
        self.common, self.since = _weights(self.model), 0
        of_all = [np.frombuffer(one, self.common.dtype) for one in self.strategy.exchange(self.common.tobytes())]
        size = float(np.max(np.abs(self.common), initial=0))
        apart = max(float(np.max(np.abs(one - of_all[0]), initial=0)) for one in of_all)
        self.apart = max(self.apart, apart / size if size else apart)

    def step(self, rate: float, gradient: float) -> None:
        """A step of this rate, with a gradient of this norm on this rank, is over."""
        self.since += 1
        self.rate, self.gradient = max(self.rate, rate), max(self.gradient, gradient)
        self.moved.append((self.since, float(np.linalg.norm(_weights(self.model) - self.common))))

    def held(self, plain: bool) -> tuple[Held, ...]:
        """What was measured, of all ranks; the distance is held to the bound of `plain` SGD alone."""
        mine = {"apart": self.apart, "rate": self.rate, "gradient": self.gradient, "moved": self.moved}
        ranks = [json.loads(one) for one in self.strategy.exchange(json.dumps(mine).encode())]
        apart = max(one["apart"] for one in ranks)
        step = max(one["rate"] for one in ranks) * max(one["gradient"] for one in ranks)
        since, moved = max(
            (tuple(one) for of_rank in ranks for one in of_rank["moved"]), key=lambda one: one[1] / one[0]
        )
        distance = f"a rank's distance from the last common weights, {counted(since, 'step')} later"
        rounding = ROUNDING * float(np.linalg.norm(self.common))
        return (
            Held("the largest relative difference of ranks after an averaging", apart, ROUNDING),
            Held(distance, moved, step * since * (1 + ROUNDING) + rounding if plain else None),
        )


class _Norms(Watch):
    """In this context, the model's `train_step` also adds up the squares of this rank's own gradients."""

    def __init__(self, model: Any):
        super().__init__(model)
        # Not among the step's logs, of which all ranks together have one mean.
        self._squares = tf.Variable(0.0, trainable=False)

    def __enter__(self) -> _Norms:  # type: ignore[override]
        super().__enter__()
        return self

    def of_step(self) -> float:
        """The norm of all gradients together, of the steps since this was last called."""
        squares = float(self._squares.numpy())
        self._squares.assign(0.0)
        return math.sqrt(squares)

    def _see(self, kind: str, of: Any, value: Any) -> Any:
        if kind == "gradients" and self.is_in_step:
            for gradient in value:
                if gradient is not None:
                    whole = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
                    self._squares.assign_add(tf.reduce_sum(tf.square(whole)))
        return value


def _weights(model: Any) -> np.ndarray:
    """The trainable weights, flat, float32 `[n]`."""
    return np.concatenate([np.ravel(tf_variable(one).numpy()).astype(np.float32) for one in model.trainable_variables])


def _updates(model: Any) -> int:
    return int(keras_internals.iterations(model.optimizer).numpy())


def _is_sgd(optimizer: Any) -> bool:
    """Whether an update is linear in the gradient: SGD, with or without momentum, that clips nothing."""
    clips = (optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm)
    return type(optimizer) is keras.optimizers.SGD and all(one is None for one in clips)


def _is_of_rank(layer: Any) -> bool:
    """Whether what a layer makes of an example depends on the rank that has it."""
    normalizes = isinstance(layer, keras.layers.BatchNormalization)
    return normalizes or getattr(layer, "seed_generator", None) is not None


def _is_free(model: Any) -> bool:
    """Whether nothing but the gradient moves the weights."""
    optimizer = model.optimizer
    constrained = any(variable.constraint is not None for variable in model.trainable_variables)
    return not constrained and not optimizer.weight_decay and not optimizer.use_ema
