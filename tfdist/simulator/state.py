"""The state of simulated workers as arrays: the values of many variables in one array for each dtype.

Synopsis:

    >>> packing = Packing([tf.Variable([1.0, 2.0]), tf.Variable(7, dtype=tf.int64), tf.Variable(0.5)])
    >>> packing.read()
    {'float32': array([1. , 2. , 0.5], dtype=float32), 'int64': array([7])}
    >>> packing.slots["float32"]  # numbers of variables with at least one axis
    array([ True,  True, False])
    >>> mean([np.array([0.0, 4.0]), np.array([2.0, 4.0])], shares=[0.75, 0.25])
    array([0.5, 4. ])
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

Values = dict[str, np.ndarray]  # by dtype, `[n]`


@dataclass(frozen=True)
class State:
    """What a worker has besides its weights.

    Attributes:
        averages: the values of the model's non-trainable variables, such as moving averages.
        optimizer: the values of the optimizer's variables.
    """

    averages: Values
    optimizer: Values


class Packing:
    """Where the values of variables are in arrays.

    Args:
        variables: the variables.

    Attributes:
        variables: the variables.
        slots: for each floating-point dtype, which of its numbers are of variables with at least one axis, bool `[n]`.
    """

    def __init__(self, variables: Sequence[tf.Variable]):
        self.variables = list(variables)
        self._indices: dict[str, list[int]] = {}
        for index, variable in enumerate(self.variables):
            self._indices.setdefault(variable.dtype.name, []).append(index)
        sizes = [math.prod(variable.shape) for variable in self.variables]
        self.slots = {
            name: np.concatenate([np.full(sizes[index], self.variables[index].shape.rank > 0) for index in indices])
            for name, indices in self._indices.items()
            if tf.as_dtype(name).is_floating
        }

    def packed(self, values: Sequence[Any]) -> dict[str, tf.Tensor]:
        """Returns the arrays with the value of each variable."""
        return {
            name: tf.concat([tf.reshape(values[index], [-1]) for index in indices], 0)
            for name, indices in self._indices.items()
        }

    def unpacked(self, arrays: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
        """Returns the value of each variable in `arrays`, which may have padding at their ends."""
        values: dict[int, tf.Tensor] = {}
        for name, indices in self._indices.items():
            shapes = [self.variables[index].shape for index in indices]
            sizes = [math.prod(shape) for shape in shapes]
            parts = tf.split(arrays[name], [*sizes, arrays[name].shape[0] - sum(sizes)])[:-1]
            values |= {
                index: tf.reshape(part, shape) for index, part, shape in zip(indices, parts, shapes, strict=True)
            }
        return [values[index] for index in range(len(self.variables))]

    def read(self) -> Values:
        """Returns the values that the variables have now."""
        return {name: array.numpy() for name, array in self.packed(self.variables).items()}

    def assign(self, arrays: Mapping[str, Any]) -> None:
        """Assigns the values in `arrays` to the variables."""
        for variable, value in zip(self.variables, self.unpacked(arrays), strict=True):
            variable.assign(value)


def mean(arrays: Sequence[np.ndarray], shares: Sequence[float] | None = None) -> np.ndarray:
    """Returns the mean of arrays, weighted by `shares`, which add up to 1; it is computed in float64."""
    weights = [1 / len(arrays)] * len(arrays) if shares is None else shares
    total, term = np.zeros(arrays[0].shape, np.float64), np.empty(arrays[0].shape, np.float64)
    for array, weight in zip(arrays, weights, strict=True):
        total += np.multiply(array, weight, out=term)
    return total.astype(arrays[0].dtype)


def with_mean_averages(state: State, others: Sequence[State]) -> State:
    """Returns `state`, with its moving averages replaced by the mean of those in `others`."""
    averages = {
        name: mean([other.averages[name] for other in others]) if tf.as_dtype(name).is_floating else values
        for name, values in others[0].averages.items()
    }
    return State(averages, state.optimizer)


def with_mean_slots(values: Sequence[Values], slots: Mapping[str, np.ndarray], shares: Sequence[float]) -> list[Values]:
    """Returns `values`, in which the numbers that belong to `slots` are the mean over all, weighted by `shares`."""
    means = {name: mean([each[name] for each in values], shares) for name in slots}
    return [each | {name: np.where(slots[name], means[name], each[name]) for name in slots} for each in values]
