"""The meetings of processes that train apart: what they exchange, and what is measured of it.

    take          the weights, and mostly the optimizer's slots, become their mean over the processes, weighed by the
                  examples of each since they met last; or an outer rule makes the new weights of the mean
    settle        the model shows what all processes have in common, until one of them trains on

Sources: Stich, Local SGD converges fast and communicates little, ICLR 2019; on averaging the optimizer's slots, Wang et
al., SlowMo, arXiv 1910.00643.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import NonFiniteLossError
from tfdist.internals import keras as keras_internals
from tfdist.internals import tensorflow_variables
from tfdist.internals.keras import tf_variable
from tfdist.internals.tensorflow_variables import PIECE_BYTES, size_bytes
from tfdist.relaxed import compression
from tfdist.relaxed.flat_weights import packed, unpacked
from tfdist.relaxed.outer import Outer

# Variables of whole numbers up to this size are seeds and counters. Larger ones, such as tables, are left alone.
MOST_COUNTERS = 16


class Averages:
    """Averages a model's weights and its optimizer's slots over the processes, one part after the other.

    Args:
        group: the processes of the job.
        model: compiled and built, with the slots of its optimizers.
        outers: make the new weights of the mean, each of some of them; without any, the mean is taken.
        compressed: "none", or how what is sent is encoded, see `tfdist.relaxed.compression`. With `outers` the
            moves of the weights are, with error feedback; the slots travel as bfloat16, which keeps their order of
            magnitude.

    Attributes:
        taken: the number of averagings so far.
        remembered: variables for checkpoints: those that are the same in all processes, and those of each.
    """

    def __init__(self, group: Any, model: Any, outers: Sequence[Outer] = (), compressed: str = "none"):
        self.group = group
        self.taken = 0
        self._model, self._outers = model, outers
        trained = trained_weights(model)
        moving, slots = [v for v in model.non_trainable_variables if _is_float(v)], _slots(model)
        averaged = [*([] if outers else trained), *moving]
        own_slots = any(not outer.averages_slots for outer in outers)
        together = [*averaged, *([] if own_slots else slots)]
        self._parts = _parts(together, sum(math.prod(v.shape) for v in averaged))
        self._encoding = compressed
        self._feedbacks = [None if compressed == "none" else _Feedback(outer, compressed) for outer in outers]
        self._counters = _counters(model)
        self._finite = tf.function(lambda: all_finite(trained), autograph=False)
        self._examples = 0
        self._shares = [1.0]
        self._apart = False
        lost = [variable for feedback in self._feedbacks if feedback is not None for variable in feedback.lost]
        shared = [variable for outer in outers for variable in outer.shared]
        own = [*(slots if own_slots else []), *(variable for outer in outers for variable in outer.own), *lost]
        self.remembered = shared, own
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self._disagreements: list[float] = []
        self._seconds = 0.0

    def part(self) -> None:
        """The processes train apart from now on, if they do not already."""
        if not self._apart:
            for outer in self._outers:
                outer.begin()
        self._apart = True

    def note(self, examples: int) -> None:
        """Counts `examples` more that this process has trained on."""
        self._examples += examples

    def settle(self) -> None:
        """The processes meet, and the model has what they have in common until the next step."""
        self.take()
        if self._apart:
            for outer in self._outers:
                outer.settle()
        self._apart = False

    def take(self) -> None:
        """Gives every process the new weights, and measures the time and the distance from their mean.

        Raises:
            NonFiniteLossError: the weights of a process are not finite; nothing is averaged then.
        """
        began = time.perf_counter()
        examples = self._meet(self._examples)
        if sum(examples) == 0:
            return
        self._shares, self._examples = [one / sum(examples) for one in examples], 0
        self._note_distance(self._exchange())
        self.taken += 1
        self._seconds += time.perf_counter() - began

    def mean(self, values: np.ndarray) -> np.ndarray:
        """The mean of the processes' `values`, weighted by their examples since the last averaging.

        It is called for each part of the weights and slots, whose number is the same in all processes. An algorithm
        that averages otherwise overrides this; `values` must stay as they are.
        """
        mean = values * np.float32(self._shares[self.group.rank])
        self.group.sum_in_place(mean)
        return mean

    def shares_of_processes(self) -> list[float]:
        """What each process counts in the mean of weights that are not weighed by examples."""
        return [1 / self.group.size] * self.group.size

    def end_epoch(self) -> dict[str, float]:
        """Meets, and returns the logs about the epoch's meetings."""
        self.settle()
        seconds = np.array([self._seconds], np.float64)
        self.group.sum_in_place(seconds)
        disagreement = float(np.mean(self._disagreements)) if self._disagreements else 0.0
        return {"disagreement": disagreement, "sync_seconds": float(seconds[0]) / self.group.size}

    def _note_distance(self, squared_distance: float) -> None:
        """Notes the mean over the processes of the squared distance of each from what they have met for."""
        of_all = np.array([squared_distance], np.float64)
        self.group.sum_in_place(of_all)
        self._disagreements.append(math.sqrt(of_all[0] / self.group.size))

    def _average_rest(self) -> None:
        """Averages what no rule is for, such as moving averages, if any process has seen examples."""
        examples = self._meet(self._examples)
        if sum(examples):
            self._shares, self._examples = [one / sum(examples) for one in examples], 0
            for part in self._parts:
                part.average(self.mean)

    def _meet(self, examples: int) -> list[int]:
        """The `examples` of each process; counters become the largest of all processes."""
        counters = [variable.numpy().tolist() for variable in self._counters]
        mine = {"examples": examples, "finite": bool(self._finite()), "counters": counters}
        of_all = [json.loads(one) for one in self.group.exchange(json.dumps(mine).encode())]
        diverged = [rank for rank, one in enumerate(of_all) if not one["finite"]]
        if diverged:
            raise self.not_finite(diverged, "averaged with those of the other processes")
        for variable, *values in zip(self._counters, *(one["counters"] for one in of_all), strict=True):
            variable.assign(np.max(np.array(values, variable.dtype.as_numpy_dtype), axis=0))
        return [one["examples"] for one in of_all]

    def not_finite(self, ranks: Sequence[int], what: str) -> NonFiniteLossError:
        """The error for processes whose weights are not finite, so that they were not `what`."""
        step = keras_internals.iterations(self._model.optimizer) if self._model.optimizer is not None else None
        when = "" if step is None else f" after step {int(step.numpy())}"
        return NonFiniteLossError(
            f"The weights of rank {', '.join(map(str, ranks))} are not finite{when}, and were not {what}",
            "lower the learning rate, or clip gradients; see docs/local_sgd.md",
        )

    def _exchange(self) -> float:
        """Averages all parts; returns the squared distance of this process' weights from their mean."""
        mean = self.mean if self._encoding == "none" else self._mean_of_sent
        distance = sum(part.average(mean) for part in self._parts)
        for outer, feedback in zip(self._outers, self._feedbacks, strict=True):
            if not outer.by_examples:
                self._shares = self.shares_of_processes()
            if feedback is None:
                local = outer.packed_weights()
                found = np.concatenate([self.mean(piece) for piece in pieces(local)])
            else:
                local, found = feedback.exchange(self._sent_by_all, self._shares, self.group.rank)
            outer.update(found, learning_rate(self._model))
            distance += squared(local - found)
        return distance

    def _mean_of_sent(self, values: np.ndarray) -> np.ndarray:
        return _weighed(self._sent_by_all("bf16", values), self._shares)

    def _sent_by_all(self, encoding: str, values: np.ndarray) -> list[np.ndarray]:
        """The `values` of each process as they come, by rank; bit by bit the same in all processes."""
        sent = self.group.exchange(compression.encode(encoding, values))
        return [compression.decode(encoding, one, values.size) for one in sent]


class _Feedback:
    """The moves of the weights since the processes met, encoded; what was lost by that is added to the next ones.

    Attributes:
        lost: Keras variables, one for each weight.
    """

    def __init__(self, outer: Outer, encoding: str):
        self._outer, self._encoding = outer, encoding
        self.lost = outer.alike("lost")
        self._packed = tf.function(self._pack, autograph=False)
        self._note = tf.function(self._assign_lost, autograph=False)

    def exchange(
        self, of_all: Callable[[str, np.ndarray], list[np.ndarray]], shares: Sequence[float], rank: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The weights of this process, and the mean of all; both float32 `[n]`."""
        starts, local, lost = (one.numpy() for one in self._packed())
        moves = local - starts + lost
        means = []
        for piece in pieces(moves):
            arrived = of_all(self._encoding, piece)
            means.append(_weighed(arrived, shares))
            np.subtract(piece, arrived[rank], out=piece)  # which leaves in `moves` what was lost
        self._note(tf.constant(moves))
        return local, starts + np.concatenate(means)

    def _pack(self) -> list[tf.Tensor]:
        return [packed(variables) for variables in (self._outer.starts, self._outer.weights, self.lost)]

    def _assign_lost(self, flat: tf.Tensor) -> None:
        for variable, value in zip(self.lost, unpacked(flat, self.lost), strict=True):
            variable.assign(value)


class _Part:
    """Some of the weights and slots, which travel in one array.

    Args:
        variables: small ones, or a large one.
        weights: the number of their elements that are weights, which come before the slots.
    """

    def __init__(self, variables: Sequence[tf.Variable], weights: int):
        self.weights = weights
        self.size = sum(map(_size, variables))
        self._variables = variables
        # One copy to NumPy and one back, instead of one per variable.
        self._pack_in_graph = tf.function(lambda: packed(variables), autograph=False)
        self._unpack_in_graph = tf.function(self._unpack, autograph=False)

    def average(self, mean: Callable[[np.ndarray], np.ndarray]) -> float:
        """Assigns the `mean` of the values, and returns the squared distance of the weights from it."""
        if len(self._variables) == 1 and size_bytes(self._variables[0]) > PIECE_BYTES:
            return self._average_large(mean)
        local = self._pack_in_graph().numpy()
        averaged = mean(local)
        self._unpack_in_graph(tf.constant(averaged))
        return squared(local[: self.weights] - averaged[: self.weights])

    def _average_large(self, mean: Callable[[np.ndarray], np.ndarray]) -> float:
        """As `average`, of one variable, in pieces."""
        (variable,) = self._variables
        whole = tensorflow_variables.read(variable).reshape(-1).copy()
        distance = 0.0
        for piece in pieces(whole):
            local = piece.astype(np.float32)
            averaged = mean(local)
            distance += squared(local - averaged) if self.weights else 0.0
            piece[:] = averaged
        tensorflow_variables.fill(variable, whole)
        return distance

    def _unpack(self, flat: tf.Tensor) -> None:
        for variable, value in zip(self._variables, unpacked(flat, self._variables), strict=True):
            variable.assign(tf.cast(value, variable.dtype))


def _parts(variables: Sequence[Any], weights: int) -> list[_Part]:
    """The parts of `variables`, of whose elements the first `weights` are weights."""
    parts: list[_Part] = []
    for pack in tensorflow_variables.packs(variables, PIECE_BYTES):
        parts.append(_Part([held[0] for held in pack], max(weights, 0)))
        weights -= parts[-1].size
    return parts


def pieces(whole: np.ndarray) -> Iterator[np.ndarray]:
    """Views of an array `[n]`, none of more than `PIECE_BYTES`."""
    length = max(PIECE_BYTES // whole.itemsize, 1)
    return (whole[begin : begin + length] for begin in range(0, whole.size, length))


def _weighed(values: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray:
    total = np.zeros_like(values[0])
    for one, share in zip(values, shares, strict=True):
        total += one * np.float32(share)
    return total


def _size(variable: tf.Variable) -> int:
    return math.prod(variable.shape)


def squared(difference: np.ndarray) -> float:
    """The squared norm of an array `[n]`."""
    return float(np.dot(difference, difference))


def trained_weights(model: Any) -> list[Any]:
    """The trainable variables of `model` that are averaged: those of floating-point numbers."""
    return [variable for variable in model.trainable_variables if _is_float(variable)]


def _slots(model: Any) -> list[Any]:
    """The slots of the model's optimizers: those of their variables that have the shape of a weight."""
    shapes = {tuple(variable.shape) for variable in model.trainable_variables} - {()}
    return [v for v in _of_optimizers(model) if _is_float(v) and tuple(v.shape) in shapes]


def _counters(model: Any) -> list[Any]:
    """The seeds and counters of a model and its optimizers, which are whole numbers."""
    variables = {id(v): v for v in [*model.variables, *_of_optimizers(model)]}.values()
    whole = [v for v in map(tf_variable, variables) if v.dtype.is_integer]
    return [v for v in whole if _size(v) <= MOST_COUNTERS]


def _of_optimizers(model: Any) -> list[Any]:
    return [variable for optimizer in keras_internals.optimizers(model) for variable in optimizer.variables]


def learning_rate(model: Any) -> float:
    """That of the model's optimizer; NaN for a model without one."""
    optimizer = model.optimizer
    return math.nan if optimizer is None else float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _is_float(variable: Any) -> bool:
    return tf_variable(variable).dtype.is_floating


def all_finite(variables: Sequence[Any]) -> tf.Tensor:
    """Whether all numbers of `variables` are finite: bool scalar."""
    return tf.reduce_all([tf.math.is_finite(tf.reduce_sum(tf.cast(one, tf.float32))) for one in variables])
