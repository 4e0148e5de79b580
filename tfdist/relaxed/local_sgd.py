"""Local SGD: each process trains on its own part of the data, and they synchronize from time to time.

    run(state, first, count)
        steps until the next synchronization   Keras' plain train_step, on the examples of this process alone
        synchronization                        see `tfdist.relaxed.averages`
        metrics                                are summed over the processes

SGD whose weights are averaged after each step is synchronous training: the mean of the new weights is a step along the
mean gradient. Otherwise the weights diverge between synchronizations; the distance is measured before each of them.

The new weights are computed by a rule:

    average            the mean of the weights
    slowmo             momentum over the changes from one synchronization to the next
    diloco             a Keras optimizer that takes the changes for gradients; optionally one fragment at a time
    easgd              a centre that the processes are drawn to
    module:function    a user's rule

`tfdist.relaxed.outer_rules` has the formulas and their sources.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import registry
from tfdist.data.input import batch_parts
from tfdist.data.input.array_feed import ArrayBatches
from tfdist.data.input.division import WHOLE, Division
from tfdist.data.input.feed import Batches
from tfdist.errors import UnknownNameError, UsageError
from tfdist.groups import ProcessGroup
from tfdist.interface.program import AtNan, Logs, Outcome, Program, Steps
from tfdist.interface.strategy import OnThisProcess
from tfdist.internals import keras as keras_internals
from tfdist.loop import metrics
from tfdist.loop.inner_loop import StepProgram
from tfdist.options import require_owned
from tfdist.relaxed import outer, outer_rules
from tfdist.relaxed.averages import Averages, Streaming, trained_weights
from tfdist.relaxed.compression import ENCODINGS
from tfdist.relaxed.strategy import refuse_use_ema

EPOCH = "epoch"
# The options of each rule.
OPTIONS = {
    "average": (),
    "slowmo": ("slow_momentum", "slow_rate"),
    "diloco": ("outer_optimizer", "fragments", "overlap", "mixing"),
    "easgd": ("moving_rate",),
}


class AveragingRule:
    """A rule with its options.

    Args:
        name: one of `OPTIONS`, or a user's rule as `module:function`.
        options: the options of all rules, by name; `None` is not set.
        sync_every: the number of steps between synchronizations, or "epoch"; `None` is the default of the rule.
        compression: how the changes of the weights are encoded, one of `tfdist.relaxed.ENCODINGS`.

    Attributes:
        sync_every: the argument or its default, with `None` for "epoch".

    Raises:
        UnknownNameError: the rule or the compression is unknown.
        UsageError: an option belongs to another rule, or options cannot be used together.
    """

    def __init__(self, name: str, options: Mapping[str, Any], sync_every: int | str | None, compression: str):
        self.name = name
        self.compression = compression
        self._users_rule = registry.resolve(name, "outer rule") if ":" in name else None
        if self._users_rule is None and name not in OPTIONS:
            raise UnknownNameError("outer rule", name, OPTIONS)
        self._options = {option: value for option, value in options.items() if value is not None}
        require_owned(self._options, OPTIONS, name, "outer")
        if sync_every is None:
            sync_every = outer_rules.SYNC_EVERY.get(name, outer_rules.SYNC_EVERY["average"])
        self.sync_every = None if sync_every == EPOCH else int(sync_every)
        if compression not in ENCODINGS:
            raise UnknownNameError("compression", compression, ENCODINGS)
        self._fragments = int(self._options.get("fragments", 1))
        # Whether weights are synchronized one fragment at a time, or while steps go on.
        self._streams = self._fragments > 1 or any(self._options.get(name) for name in ("overlap", "mixing"))
        if self._streams:
            self._check_streaming()

    @property
    def is_plain(self) -> bool:
        """Whether the new weights are the mean, and are sent without encoding."""
        return self.name == "average" and self.compression == "none"

    @property
    def has_common_weights(self) -> bool:
        """Whether all processes have the same weights after a synchronization within an epoch."""
        # With `easgd` the weights of the processes differ from the centre; fragments are synchronized one at a time.
        return self.name != "easgd" and not self._streams

    def _check_streaming(self) -> None:
        """Raises `UsageError` for options that cannot be used with fragments."""
        overlap = self._options.get("overlap", 0)
        if self.sync_every is None:
            raise UsageError(
                "`fragments`, `overlap` and `mixing` need a number of steps, and `sync_every` is `epoch`",
                "set `sync_every` to a number of steps",
            )
        if overlap >= self.sync_every:
            raise UsageError(
                f"`overlap` is {overlap}, and a fragment is sent again after `sync_every` = {self.sync_every} steps",
                "use a smaller `overlap`, or a larger `sync_every`",
            )
        if self.compression != "none":
            raise UsageError(
                f"`compression` is `{self.compression}`, and fragments that are sent while steps go on are not encoded",
                "leave out `compression`, or `fragments`, `overlap` and `mixing`",
            )

    def check(self, model: Any) -> None:
        """Raises `UsageError` for a model with whose optimizer the rule cannot be used."""
        if not self.is_plain and not isinstance(model.optimizer, keras.optimizers.Optimizer):
            raise UsageError(
                f"The model `{model.name}` is compiled without an optimizer, and the rule `{self.name}` needs its "
                "learning rate",
                "pass the optimizer to `compile`, or use the rule `average`",
            )
        if self.name in ("diloco", "easgd"):
            refuse_use_ema(model, f"the rule `{self.name}`", "use the rule `average` or `slowmo`")

    def averages(self, group: ProcessGroup, model: Any, device: str) -> Averages:
        """Makes what synchronizes the weights of `model`, with its additional variables on `device`."""
        fragments = [] if self.is_plain else self._divided_weights(model)
        outers = [self._outer_optimizer(weights, device, group.size) for weights in fragments]
        if self._streams:
            assert self.sync_every is not None
            return Streaming(group, model, outers, self.sync_every, self._options.get("overlap", 0))
        return Averages(group, model, outers, self.compression)

    def _divided_weights(self, model: Any) -> list[list[Any]]:
        """The trained weights in fragments of consecutive weights, whose sizes are as even as possible."""
        weights = trained_weights(model)
        if self._fragments > max(len(weights), 1):
            raise UsageError(
                f"`fragments` is {self._fragments}, and the model `{model.name}` has {len(weights)} trained variables",
                "use at most one fragment per variable",
            )
        ends = np.cumsum([math.prod(weight.shape) for weight in weights])
        cuts = [0]
        for number in range(1, self._fragments):
            cut = int(np.searchsorted(ends, ends[-1] * number / self._fragments)) + 1
            cuts.append(min(max(cut, cuts[-1] + 1), len(weights) - (self._fragments - number)))
        return [weights[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(weights)], strict=True)]

    def _outer_optimizer(self, weights: list[Any], device: str, size: int) -> outer.OuterOptimizer:
        options = self._options
        if self._users_rule is not None:
            return outer.RuleOuterOptimizer(weights, device, self._users_rule)
        if self.name == "diloco":
            optimizer = _keras_optimizer(options.get("outer_optimizer"))
            return outer.KerasOuterOptimizer(weights, device, optimizer, options.get("mixing", 0.0))
        if self.name == "easgd":
            rate = options.get("moving_rate", outer_rules.MOVING_RATE_OF_ALL / size)
            return outer.ElasticAveraging(weights, device, rate, size)
        rule = outer_rules.average
        if self.name == "slowmo":
            rule = outer_rules.SlowMo(**{name.removeprefix("slow_"): value for name, value in options.items()})
        return outer.RuleOuterOptimizer(weights, device, rule)

    def options(self) -> dict[str, Any]:
        """The options in effect; an optimizer is described in words."""
        optimizer = self._options.get("outer_optimizer")
        described = {} if optimizer is None else {"outer_optimizer": _described(optimizer)}
        always = {"outer": self.name, "sync_every": self.sync_every or EPOCH, "compression": self.compression}
        return always | self._options | described


def _keras_optimizer(optimizer: Any) -> keras.optimizers.Optimizer:
    """A new Keras optimizer from the option `outer_optimizer`."""
    if optimizer is None:
        default = outer_rules.Nesterov()
        return keras.optimizers.SGD(default.rate, momentum=default.momentum, nesterov=True)
    try:
        if isinstance(optimizer, keras.optimizers.Optimizer):  # copied, since its variables belong to one model
            return type(optimizer).from_config(optimizer.get_config())
        return keras.optimizers.get(optimizer)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"`outer_optimizer` is `{optimizer}`, which is not an optimizer that Keras knows",
            'pass a Keras optimizer, such as `keras.optimizers.SGD(0.7, momentum=0.9)`, or a name, such as "sgd"',
        ) from error


def _described(optimizer: Any) -> str:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return str(optimizer)
    settings = {name: value for name, value in optimizer.get_config().items() if name != "name"}
    return f"{type(optimizer).__name__}({settings})"


class AveragingProgram(StepProgram):
    """Runs `model.train_step` on this process's part of the data, and synchronizes the processes.

    Args:
        strategy: has the `group`.
        steps: of training, on the batches of all processes.
        sync_every: the number of steps between averagings; `None` averages only at the end of an epoch. Subclasses of
            `Averages` may determine the steps themselves.
        averages: synchronizes the processes.
        split_once: see `local_batches`.
    """

    meets_in_each_step = False

    def __init__(
        self,
        strategy: Any,
        steps: Steps,
        sync_every: int | None,
        averages: Averages,
        *,
        split_once: bool = True,
    ):
        self._job = strategy
        self._averages = averages
        self._averages.sync_every = sync_every
        self._global_state: Any = None
        self._local_state: Any = None
        group = strategy.group
        self._local_batches = local_batches(steps.batches, group.rank, group.size, split_once=split_once)
        local_steps = dataclasses.replace(steps, batches=self._local_batches, at_nan=AtNan.NOTHING)
        super().__init__(OnThisProcess(strategy), local_steps)

    def begin_epoch(self) -> None:
        self._averages.begin_epoch()

    def end_epoch(self) -> dict[str, float]:
        """Synchronizes; returns the logs about the epoch's synchronizations."""
        return self._averages.end_epoch()

    def run(self, state: Any, first: int, count: int) -> Outcome:
        """Runs `count` global steps; in some of them this process may have no example."""
        if state is not self._global_state:
            self._global_state, self._local_state = state, self._local_batches.state(state)
        self._averages.begin_local_steps()
        done, ended = 0, False
        local_logs: Logs = {}
        while done < count and not ended:
            step = first + done
            self._averages.before_steps()
            until_next = self._averages.steps_until_next(step) or count
            outcome = super().run(self._local_state, step, min(count - done, until_next))
            self._averages.note(self._local_batches.examples(self._local_state, step, outcome.steps))
            done, ended, local_logs = done + outcome.steps, outcome.data_ended, outcome.logs or local_logs
            if outcome.steps:
                self._averages.after_steps(first + done)
        self._averages.end_call()
        merged = metrics.results(self._job, self._model) if done else {}
        others = {name: value for name, value in local_logs.items() if name not in merged}
        summed = self._sums(others) if others else {}
        merged = {name: value for name, value in merged.items() if name in local_logs}
        return Outcome(done, ended, local_logs | summed | merged)

    def _sums(self, logs: Logs) -> Logs:
        """The sums over the processes of logs that a step itself returns, each of which is weighted by its share."""
        values = [np.asarray(value, np.float64) for value in tf.nest.flatten(logs)]
        flat = np.concatenate([value.reshape(-1) for value in values])
        self._job.group.sum_in_place(flat)
        ends = np.cumsum([value.size for value in values])[:-1]
        sums = [part.reshape(value.shape) for part, value in zip(np.split(flat, ends), values, strict=True)]
        structured: Logs = tf.nest.pack_sequence_as(logs, sums)
        return structured

    def _step(self, state: Any, batch: Any) -> tuple[tf.Tensor, Logs]:
        self._local_batches.note(state, batch)
        has_examples = self._local_batches.has_examples(state, batch)
        if has_examples is True:
            return super()._step(state, batch)
        step = super()._step
        return tf.cond(has_examples, lambda: step(state, batch), lambda: (tf.constant(True), self._no_logs()))


class PostLocalProgram(Program):
    """Trains synchronously up to a step of the run, and with local SGD from then on.

    Source: Lin, Stich, Patel and Jaggi, Don't use large mini-batches, use local SGD, arXiv 1808.07217.

    Args:
        model: its optimizer counts the steps of the run.
        local_from: the number of synchronous steps.
        synchronous: runs the synchronous steps.
        local: runs the other steps.
    """

    def __init__(self, model: Any, local_from: int, synchronous: Program, local: Program):
        self._model, self._local_from = model, local_from
        self._synchronous, self._local = synchronous, local

    def begin_epoch(self) -> None:
        self._synchronous.begin_epoch()
        self._local.begin_epoch()

    def run(self, state: Any, first: int, count: int) -> Outcome:
        """Runs `count` global steps."""
        left = self._local_from - int(keras_internals.iterations(self._model.optimizer).numpy())
        if left <= 0:
            return self._local.run(state, first, count)
        begun = self._synchronous.run(state, first, min(left, count))
        if begun.steps == count or begun.data_ended:
            return begun
        rest = self._local.run(state, first + begun.steps, count - begun.steps)
        return Outcome(begun.steps + rest.steps, rest.data_ended, rest.logs or begun.logs)

    def end_epoch(self) -> Logs:
        return self._synchronous.end_epoch() | self._local.end_epoch()


def local_batches(batches: Batches, rank: int, size: int, *, split_once: bool) -> LocalBatches:
    """The batches of process `rank` of `size`, from the global `batches`.

    With `split_once` arrays are divided before the first epoch, so that a process has the same examples in every epoch;
    otherwise each batch is divided.
    """
    if not isinstance(batches, ArrayBatches):
        with tf.init_scope(), tf.device("CPU:0"):
            seen = tf.Variable(0, dtype=tf.int64, trainable=False)
        return StreamParts(batches, rank, Division(size), seen)
    return SplitArrays(batches, rank, size) if split_once else ArrayParts(batches, rank, Division(size))


class LocalBatches(Batches):
    """The batches of one process, which counts its examples."""

    def state(self, state: Any) -> Any:
        """The state of a pass for this process, from its state for all processes."""
        return state

    def examples(self, state: Any, first: int, steps: int) -> int:
        """The number of examples of this process in `steps` steps, the first of which is number `first`."""
        raise NotImplementedError

    def has_examples(self, state: Any, batch: Any) -> bool | tf.Tensor:
        """Whether this process has an example of the step's global batch."""
        raise NotImplementedError

    def note(self, state: Any, batch: Any) -> None:
        """Counts the examples of this process in a step, unless they follow from the number of the step."""


@dataclasses.dataclass(frozen=True)
class SplitArrays(LocalBatches):
    """The examples of one process, which are the same in every epoch: its part of `np.array_split`.

    The number of examples per step is such that all processes end an epoch with the same step.
    """

    whole: ArrayBatches
    rank: int
    processes: int
    length_known: bool = True

    def state(self, state: Any) -> Any:
        """Returns this process's part of a pass, in the order of the pass, and the number of examples in the pass."""
        arrays, positions = state
        order = positions[0].numpy()
        lengths = [len(part) for part in np.array_split(order, self.processes)]
        begin, end = sum(lengths[: self.rank]), sum(lengths[: self.rank + 1])
        selected = (begin <= order) & (order < end)
        return (arrays, tuple(tf.constant(values.numpy()[selected]) for values in positions)), len(order)

    def examples(self, state: Any, first: int, steps: int) -> int:
        return int(self._end(state, first + steps) - self._end(state, first))

    def fetch(self, state: Any, step: tf.Tensor) -> tuple[tf.Tensor, ...]:
        (_, positions), _ = state
        if self._even:  # a static shape makes a faster graph
            count = self.whole.batch_size // self.processes
            sizes = [[count, *values.shape[1:]] for values in positions]
            starts = [[step * count, *[0] * (values.shape.rank - 1)] for values in positions]
            return tuple(map(tf.slice, positions, starts, sizes))
        begin, end = self._end(state, step), self._end(state, step + 1)
        return tuple(values[begin:end] for values in positions)

    def part(self, state: Any, batch: tuple[tf.Tensor, ...], index: int, division: Division) -> tuple[Any, Any]:
        """Returns the examples, and the process's share of all examples, which approximates its share of a batch."""
        del index, division
        local_state, examples = state
        data, _ = self.whole.part(local_state, batch, 0, WHOLE)
        return data, 1 / self.processes if self._even else tf.size(local_state[1][0]) / examples

    def has_examples(self, state: Any, batch: tuple[tf.Tensor, ...]) -> bool | tf.Tensor:
        del state
        return True if self._even else tf.shape(batch[0])[0] > 0

    @property
    def _even(self) -> bool:
        return self.whole.even and self.whole.batch_size % self.processes == 0

    def _end(self, state: Any, step: Any) -> Any:
        """The position of step `step` in this process's examples: the same fraction as in all examples, rounded."""
        (_, positions), examples = state
        seen = tf.minimum(tf.cast(step, tf.int64) * self.whole.batch_size, examples)
        count, examples = tf.cast(tf.shape(positions[0])[0], tf.int64), tf.cast(examples, tf.int64)
        return tf.cast((2 * count * seen + examples) // (2 * examples), tf.int32)


@dataclasses.dataclass(frozen=True)
class _Parts(LocalBatches):
    """The part of each global batch that belongs to one process."""

    whole: Any
    rank: int
    division: Division

    @property
    def length_known(self) -> bool:  # type: ignore[override]
        return bool(self.whole.length_known)

    def fetch(self, state: Any, step: tf.Tensor) -> Any:
        return self.whole.fetch(state, step)

    def has_examples(self, state: Any, batch: Any) -> bool | tf.Tensor:
        return self._local_part(state, batch)[1] > 0

    def part(self, state: Any, batch: Any, index: int, division: Division) -> tuple[Any, Any]:
        del index, division
        return self._local_part(state, batch)

    def _local_part(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Returns the examples of this process, and their share of the batch."""
        part: tuple[Any, Any] = self.whole.part(state, batch, self.rank, self.division)
        return part


@dataclasses.dataclass(frozen=True)
class ArrayParts(_Parts):
    """The part of each batch of arrays, in which the number of examples follows from the number of the step."""

    whole: ArrayBatches

    def examples(self, state: Any, first: int, steps: int) -> int:
        size, left = self.whole.batch_size, int(state[1][0].shape[0]) - first * self.whole.batch_size
        lengths = [min(size, left - step * size) for step in range(steps)]
        return sum(end - begin for begin, end in (self.division.part(length, self.rank) for length in lengths))


@dataclasses.dataclass(frozen=True)
class StreamParts(_Parts):
    """The part of each batch of a stream, whose examples are counted as they come."""

    seen: tf.Variable  # int64 scalar: the examples of this process since the last call of `examples`

    def examples(self, state: Any, first: int, steps: int) -> int:
        """The number of examples of this process since the last call."""
        del state, first, steps
        seen = int(self.seen.numpy())
        self.seen.assign(0)
        return seen

    def note(self, state: Any, batch: Any) -> None:
        data, share = self._local_part(state, batch)
        with_examples = [leaf for leaf in keras_internals.tree.flatten(data) if batch_parts.has_examples(leaf)]
        self.seen.assign_add(tf.where(share > 0, tf.cast(batch_parts.length(with_examples[0]), tf.int64), 0))
