"""The outer rules of local SGD: how the weights change when processes that trained independently synchronize.

    start           the weights that all processes had after the last synchronization
    mean            the mean of the weights that they have now
    memory          what the rule keeps from one synchronization to the next; zeros before the first one

A rule is a function `rule(start, mean, memory, learning_rate)` that returns the new weights of all processes and the
new memory; `learning_rate` is that of the last step. It is called for one variable at a time, and is made of operations
that NumPy arrays and TensorFlow tensors have in common.

Synopsis:

    >>> rule = SlowMo(momentum=0.5)
    >>> weights, memory = rule(start=1.0, mean=0.8, memory=0.0, learning_rate=0.1)
    >>> round(weights, 6), round(memory, 6)
    (0.8, 2.0)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

# The default number of steps between synchronizations; that of a user's rule is the default of `average`.
SYNC_EVERY = {"average": 16, "slowmo": 48, "diloco": 500, "easgd": 10}
# For elastic averaging: beta in Zhang et al., who divide it by the number of processes.
MOVING_RATE_OF_ALL = 0.9
Rule = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def average(start: Any, mean: Any, memory: Any, learning_rate: Any) -> tuple[Any, Any]:
    """The mean itself. Source: Stich, Local SGD converges fast and communicates little, ICLR 2019."""
    del start, learning_rate
    return mean, memory


@dataclass(frozen=True)
class SlowMo:
    """Momentum over the changes from one synchronization to the next.

    Source: Wang, Tantia, Ballas and Rabbat, SlowMo: improving communication-efficient distributed SGD with slow
    momentum, arXiv 1910.00643, algorithm 1.

    Attributes:
        momentum: the fraction of the memory that is kept.
        rate: the factor of the step along the memory.
    """

    momentum: float = 0.5
    rate: float = 1.0

    def __call__(self, start: Any, mean: Any, memory: Any, learning_rate: Any) -> tuple[Any, Any]:
        memory = self.momentum * memory + _divided(start - mean, learning_rate)
        return start - self.rate * learning_rate * memory, memory


@dataclass(frozen=True)
class Nesterov:
    """A step of Keras' SGD with Nesterov momentum along the change of the weights: the default of DiLoCo.

    Source: Douillard et al., DiLoCo: distributed low-communication training of language models, arXiv 2311.08105.

    Attributes:
        rate: the learning rate of the step.
        momentum: the fraction of the memory that is kept.
    """

    rate: float = 0.7
    momentum: float = 0.9

    def __call__(self, start: Any, mean: Any, memory: Any, learning_rate: Any) -> tuple[Any, Any]:
        del learning_rate
        step = self.rate * (start - mean)
        memory = self.momentum * memory - step
        return start + self.momentum * memory - step, memory


def elastic_force(weights: Any, centre: Any, moving_rate: float) -> Any:
    """The step that elastic averaging subtracts from the weights of a process and adds to the centre.

    Source: Zhang, Choromanska and LeCun, Deep learning with elastic averaging SGD, arXiv 1412.6651.
    """
    return moving_rate * (weights - centre)


def elastic(weights: Any, centre: Any, mean: Any, moving_rate: float, size: int) -> tuple[Any, Any]:
    """The new weights of a process and the new centre in synchronous elastic averaging.

    Args:
        weights: the weights of this process.
        centre: the weights that the processes move towards.
        mean: the mean of the weights of all processes, with equal weights.
        moving_rate: the fraction of the distance by which a process moves towards the centre.
        size: the number of processes; the centre moves towards each of them by the same fraction.
    """
    force = elastic_force(weights, centre, moving_rate)
    return weights - force, centre + elastic_force(mean, centre, moving_rate * size)


def _divided(change: Any, learning_rate: Any) -> Any:
    """`change / learning_rate`; 0 at a learning rate of 0, at which the steps change nothing."""
    if isinstance(learning_rate, float):
        return change / learning_rate if learning_rate else 0.0 * change
    return keras.ops.divide_no_nan(change, learning_rate)
