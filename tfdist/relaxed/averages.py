"""Synchronization of processes that train independently: what they exchange, when, and what is measured.

`Averages` synchronizes all weights at once. `Streaming` synchronizes one fragment of the weights at a time, while steps
go on:

    at step s          fragment p of P is sent, where s - (p + 1) H / P is a multiple of H = `sync_every`
    at step s + tau    the outer optimizer updates the common weights with the mean of what was sent at step s, and the
                       weights become mixing * (those of this process) + (1 - mixing) * (the new common weights)

At the end of an epoch, and at a checkpoint within it, the fragments on their way are taken in, and then all fragments
are synchronized.

Sources: Stich, Local SGD converges fast and communicates little, ICLR 2019; on averaging the slots of optimizers, Wang
et al., SlowMo, arXiv 1910.00643; on fragments, Douillard et al., Streaming DiLoCo with overlapping communication, arXiv
2501.18512.
"""

from __future__ import annotations

import concurrent.futures
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import NonFiniteLossError
from tfdist.internals import keras as keras_internals
from tfdist.internals import tensorflow_variables
from tfdist.internals.keras import tf_variable
from tfdist.relaxed import compression
from tfdist.relaxed.compression import PackedVariables, pieces, squared_norm, weighted_sum
from tfdist.relaxed.outer import OuterOptimizer

# Integer variables of up to this many elements are seeds and counters. Larger ones, such as tables, are left alone.
MOST_COUNTERS = 16


class Averages:
    """Averages the weights of a model and the slots of its optimizers over the processes.

    Weights and slots become their mean over the processes, weighted by the examples that each process has seen since
    the last averaging; with outer optimizers, these compute the new weights from the mean.

    Args:
        group: the processes of the job.
        model: compiled and built, with the slots of its optimizers.
        outers: outer optimizers, one per fragment of the weights; without any, the weights are averaged.
        encoding: how values are sent, one of `tfdist.relaxed.compression.ENCODINGS`. With `outers`, the changes of the
            weights since the last averaging are sent, with error feedback. Slots are sent as bfloat16, which keeps
            their order of magnitude.

    Attributes:
        sync_every: the number of steps between averagings; `None` averages only at the end of an epoch.
        taken: the number of averagings so far.
        remembered: variables for checkpoints: those that are the same in all processes, and those with a value per
            process.
    """

    sync_every: int | None = None

    def __init__(self, group: Any, model: Any, outers: Sequence[OuterOptimizer] = (), encoding: str = "none"):
        self.group = group
        self.taken = 0
        self._model, self._outers, self._encoding = model, outers, encoding
        trained = trained_weights(model)
        moving, slots = [v for v in model.non_trainable_variables if _is_float(v)], _slots(model)
        weights = [*([] if outers else trained), *moving]
        keeps_slots = any(not outer.averages_slots for outer in outers)
        self._parts = _parts(
            [*weights, *([] if keeps_slots else slots)], sum(math.prod(weight.shape) for weight in weights)
        )
        self._feedbacks = [None if encoding == "none" else _ErrorFeedback(outer, encoding) for outer in outers]
        self._counters = _counters(model)
        self._is_finite = tf.function(lambda: all_finite(trained), autograph=False)
        self._examples = 0
        self._shares = [1.0]  # the weight of each process in the mean
        self._trains_locally = False
        lost = [variable for feedback in self._feedbacks if feedback is not None for variable in feedback.lost]
        per_process = [variable for outer in outers for variable in outer.per_process]
        self.remembered = (
            [variable for outer in outers for variable in outer.shared],
            [*(slots if keeps_slots else []), *per_process, *lost],
        )
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self._disagreements: list[float] = []
        self._seconds = 0.0

    def begin_local_steps(self) -> None:
        """Called before this process takes steps of its own; repeated calls have no effect."""
        if not self._trains_locally:
            for outer in self._outers:
                outer.begin()
        self._trains_locally = True

    def steps_until_next(self, step: int) -> int | None:
        """The number of steps from `step` of the epoch to the next exchange; `None` if there is none in the epoch."""
        return None if self.sync_every is None else self.sync_every - step % self.sync_every

    def before_steps(self) -> None:
        """Called before the steps up to the next exchange."""

    def after_steps(self, step: int) -> None:
        """Called after these steps; `step` is the number of steps of the epoch so far."""
        if self.sync_every is not None and step % self.sync_every == 0:
            self.take()

    def end_call(self) -> None:
        """Called after the last step of a call of the inner loop."""

    def note(self, examples: int) -> None:
        """Adds to the number of examples that this process has seen since the last averaging."""
        self._examples += examples

    def synchronize(self) -> None:
        """Averages, and gives the model the weights that all processes have in common until the next step."""
        self.take()
        if self._trains_locally:
            for outer in self._outers:
                outer.show_common_weights()
        self._trains_locally = False

    def take(self) -> None:
        """Averages now; measures the time and the distance of the weights from their mean.

        Raises:
            NonFiniteLossError: the weights of a process are not finite; nothing is averaged then.
        """
        began = time.perf_counter()
        if self._agree_on_shares():
            self._note_distance(self._exchange())
            self.taken += 1
            self._seconds += time.perf_counter() - began

    def mean(self, values: np.ndarray) -> np.ndarray:
        """The mean of `values` over the processes, weighted by their examples since the last averaging.

        `take` calls it for each part of the weights and slots, of which all processes have the same number. An
        algorithm that averages otherwise overrides it; it must not change `values`.
        """
        return mean_over_processes(self.group, values, self._shares[self.group.rank])

    def shares_of_processes(self) -> list[float]:
        """The weight of each process in means that are not weighted by examples."""
        return [1 / self.group.size] * self.group.size

    def end_epoch(self) -> dict[str, float]:
        """Synchronizes; returns the logs of the epoch: `disagreement` and `sync_seconds`."""
        self.synchronize()
        disagreement = float(np.mean(self._disagreements)) if self._disagreements else 0.0
        return {"disagreement": disagreement, "sync_seconds": self.sum_over_processes(self._seconds) / self.group.size}

    def _agree_on_shares(self) -> bool:
        """Computes the weights of the processes in the mean; returns whether any has seen examples."""
        examples = self._exchange_status(self._examples)
        if sum(examples) == 0:
            return False
        self._shares, self._examples = [count / sum(examples) for count in examples], 0
        return True

    def _exchange_status(self, examples: int) -> list[int]:
        """Returns the `examples` of all processes; seeds and counters become their maximum over the processes."""
        counters = [variable.numpy().tolist() for variable in self._counters]
        status = {"examples": examples, "finite": bool(self._is_finite()), "counters": counters}
        statuses = [json.loads(message) for message in self.group.exchange(json.dumps(status).encode())]
        diverged = [rank for rank, status in enumerate(statuses) if not status["finite"]]
        if diverged:
            raise self.not_finite(diverged, "averaged with those of the other processes")
        for variable, *values in zip(self._counters, *(status["counters"] for status in statuses), strict=True):
            variable.assign(np.max(np.array(values, variable.dtype.as_numpy_dtype), axis=0))
        return [status["examples"] for status in statuses]

    def not_finite(self, ranks: Sequence[int], action: str) -> NonFiniteLossError:
        """The error for processes whose weights are not finite; `action` is a participle: what was not done."""
        step = keras_internals.iterations(self._model.optimizer) if self._model.optimizer is not None else None
        when = "" if step is None else f" after step {int(step.numpy())}"
        return NonFiniteLossError(
            f"The weights of rank {', '.join(map(str, ranks))} are not finite{when}, and were not {action}",
            "lower the learning rate, or clip gradients; see docs/local_sgd.md",
        )

    def _exchange(self) -> float:
        """Averages all parts; returns the squared distance of this process's weights from the mean."""
        mean = self.mean if self._encoding == "none" else self._mean_in_bfloat16
        distance = sum(part.average(mean) for part in self._parts)
        for outer, feedback in zip(self._outers, self._feedbacks, strict=True):
            if not outer.weighted_by_examples:
                self._shares = self.shares_of_processes()
            if feedback is None:
                local = outer.packed.read()
                averaged = np.concatenate([self.mean(piece) for piece in pieces(local)])
            else:
                local, averaged = feedback.exchange(self._all_gather, self._shares, self.group.rank)
            outer.update(averaged, learning_rate(self._model))
            distance += squared_norm(local - averaged)
        return distance

    def _average_parts(self) -> None:
        """Averages what no outer optimizer updates, such as moving averages, if any process has seen examples."""
        if self._agree_on_shares():
            for part in self._parts:
                part.average(self.mean)

    def _mean_in_bfloat16(self, values: np.ndarray) -> np.ndarray:
        return weighted_sum(self._all_gather("bf16", values), self._shares)

    def _all_gather(self, encoding: str, values: np.ndarray) -> list[np.ndarray]:
        """The decoded `values` of each process, by rank; all processes get bit-identical arrays."""
        messages = self.group.exchange(compression.encode(encoding, values))
        return [compression.decode(encoding, message, values.size) for message in messages]

    def _note_distance(self, squared_distance: float) -> None:
        """Notes the root mean square over the processes of their distances from the mean."""
        self._disagreements.append(math.sqrt(self.sum_over_processes(squared_distance) / self.group.size))

    def sum_over_processes(self, value: float) -> float:
        """The sum of the `value`s of all processes, which call this at the same time."""
        total = np.array([value], np.float64)
        self.group.sum_in_place(total)
        return float(total[0])


class Streaming(Averages):
    """Synchronizes fragments of the weights.

    Args:
        group: the processes of the job.
        model: compiled and built, with the slots of its optimizers.
        fragments: the outer optimizer of each fragment.
        sync_every: the number of steps between two synchronizations of a fragment.
        overlap: the number of steps while a fragment is on its way, fewer than `sync_every`.
    """

    def __init__(self, group: Any, model: Any, fragments: Sequence[OuterOptimizer], sync_every: int, overlap: int):
        super().__init__(group, model, fragments)
        self._fragments, self._every, self._overlap = fragments, sync_every, overlap
        self._offsets = [(number + 1) * sync_every // len(fragments) for number in range(len(fragments))]
        self._examples_of = [0] * len(fragments)  # since each fragment was last sent
        self._transfers: dict[int, _Transfer] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "fragments")

    def note(self, examples: int) -> None:
        super().note(examples)
        self._examples_of = [seen + examples for seen in self._examples_of]

    def steps_until_next(self, step: int) -> int:
        sends = [self._every - (step - offset) % self._every for offset in self._offsets]
        return min([*sends, *(transfer.due - step for transfer in self._transfers.values())])

    def after_steps(self, step: int) -> None:
        """Takes in, and sends, the fragments that are due after `step` steps of the epoch."""
        for number in [number for number, transfer in self._transfers.items() if transfer.due == step]:
            self._take_in(number)
        for number, offset in enumerate(self._offsets):
            if (step - offset) % self._every == 0:
                self._send(number, step + self._overlap)
                if not self._overlap:
                    self._take_in(number)

    def end_call(self) -> None:
        """Waits until no fragment is on its way, so that the group can be used; they are taken in when due."""
        concurrent.futures.wait([transfer.mean for transfer in self._transfers.values()])

    def take(self) -> None:
        for number in list(self._transfers):
            self._take_in(number)
        for number in range(len(self._fragments)):
            self._send(number, 0)
            self._take_in(number)
        self._average_parts()

    def _send(self, number: int, due: int) -> None:
        began = time.perf_counter()
        self.end_call()  # only one thread at a time may use the process group
        examples = self._exchange_status(self._examples_of[number])
        self._examples_of[number] = 0
        if sum(examples):
            share = examples[self.group.rank] / sum(examples)
            local = self._fragments[number].packed.read()
            self._transfers[number] = _Transfer(due, local, self._thread.submit(self._mean_of, local, share))
        self._seconds += time.perf_counter() - began

    def _mean_of(self, local: np.ndarray, share: float) -> np.ndarray:
        return np.concatenate([mean_over_processes(self.group, piece, share) for piece in pieces(local)])

    def _take_in(self, number: int) -> None:
        if number not in self._transfers:  # no process has seen an example since the fragment was last sent
            return
        began = time.perf_counter()
        self.end_call()
        transfer = self._transfers.pop(number)
        mean = transfer.mean.result()
        self._note_distance(squared_norm(transfer.local - mean))
        self._fragments[number].update(mean, learning_rate(self._model))
        self.taken += 1
        self._seconds += time.perf_counter() - began


@dataclass
class _Transfer:
    """A fragment on its way."""

    due: int  # the step of the epoch at which it is taken in
    local: np.ndarray  # the weights that this process has sent, float32 `[n]`
    mean: concurrent.futures.Future[np.ndarray]  # over all processes


def mean_over_processes(group: Any, values: np.ndarray, share: float) -> np.ndarray:
    """The mean of the `values` of all processes, float32 `[n]`, in which this process has the weight `share`."""
    mean = values * np.float32(share)
    group.sum_in_place(mean)
    return mean


class _ErrorFeedback:
    """Sends encoded changes of the weights since the last averaging; what encoding loses is added to the next changes.

    Attributes:
        lost: what the encoding has lost so far; one Keras variable per weight.
    """

    def __init__(self, outer: OuterOptimizer, encoding: str):
        self._encoding = encoding
        self.lost = outer.new_variables("lost")
        self._weights = outer.packed
        self._common, self._lost = PackedVariables(outer.common), PackedVariables(self.lost)

    def exchange(
        self, all_gather: Callable[[str, np.ndarray], list[np.ndarray]], shares: Sequence[float], rank: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the weights of this process and their mean over all processes, both float32 `[n]`."""
        common, local = self._common.read(), self._weights.read()
        changes = local - common + self._lost.read()
        means = []
        for piece in pieces(changes):
            received = all_gather(self._encoding, piece)
            means.append(weighted_sum(received, shares))
            np.subtract(piece, received[rank], out=piece)  # which leaves in `changes` what was lost
        self._lost.assign(changes)
        return local, common + np.concatenate(means)


class _Part:
    """Some of the weights and slots, which are averaged as one array.

    Args:
        variables: several small variables, or one large variable.
        weights: the number of their elements that are weights, which come before the slots.
    """

    def __init__(self, variables: Sequence[tf.Variable], weights: int):
        self.weights = weights
        self.size = sum(map(_size, variables))
        self._variables = variables
        self._packed = PackedVariables(variables)

    def average(self, mean: Callable[[np.ndarray], np.ndarray]) -> float:
        """Assigns the `mean` of the values; returns the squared distance of the weights from it."""
        if (
            len(self._variables) == 1
            and tensorflow_variables.size_bytes(self._variables[0]) > tensorflow_variables.PIECE_BYTES
        ):
            return self._average_in_pieces(mean)
        local = self._packed.read()
        averaged = mean(local)
        self._packed.assign(averaged)
        return squared_norm(local[: self.weights] - averaged[: self.weights])

    def _average_in_pieces(self, mean: Callable[[np.ndarray], np.ndarray]) -> float:
        """Does the same as `average` for one large variable, with less memory."""
        (variable,) = self._variables
        values = tensorflow_variables.read(variable).reshape(-1).copy()
        distance = 0.0
        for piece in pieces(values):
            local = piece.astype(np.float32)
            averaged = mean(local)
            distance += squared_norm(local - averaged) if self.weights else 0.0
            piece[:] = averaged
        tensorflow_variables.fill(variable, values)
        return distance


def _parts(variables: Sequence[Any], weights: int) -> list[_Part]:
    """Divides `variables` into parts; the first `weights` of their elements are weights."""
    parts: list[_Part] = []
    for pack in tensorflow_variables.packs(variables, tensorflow_variables.PIECE_BYTES):
        parts.append(_Part([copies[0] for copies in pack], max(weights, 0)))
        weights -= parts[-1].size
    return parts


def _size(variable: tf.Variable) -> int:
    return math.prod(variable.shape)


def trained_weights(model: Any) -> list[Any]:
    """The trainable variables of `model` that are averaged: those with a floating-point dtype."""
    return [variable for variable in model.trainable_variables if _is_float(variable)]


def _slots(model: Any) -> list[Any]:
    """The slots of the model's optimizers: their variables that have the shape of a weight."""
    shapes = {tuple(variable.shape) for variable in model.trainable_variables} - {()}
    return [v for v in keras_internals.optimizer_variables(model) if _is_float(v) and tuple(v.shape) in shapes]


def _counters(model: Any) -> list[Any]:
    """The seeds and counters of a model and its optimizers, which are integers."""
    variables = {id(v): v for v in [*model.variables, *keras_internals.optimizer_variables(model)]}.values()
    return [v for v in map(tf_variable, variables) if v.dtype.is_integer and _size(v) <= MOST_COUNTERS]


def learning_rate(model: Any) -> float:
    """The learning rate of the last step; NaN for a model without an optimizer."""
    return math.nan if model.optimizer is None else keras_internals.last_learning_rate(model.optimizer)


def _is_float(variable: Any) -> bool:
    return tf_variable(variable).dtype.is_floating


def all_finite(variables: Sequence[Any]) -> tf.Tensor:
    """Whether all elements of `variables` are finite: bool scalar."""
    return tf.reduce_all([tf.math.is_finite(tf.reduce_sum(tf.cast(v, tf.float32))) for v in variables])
