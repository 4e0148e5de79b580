"""The outer rules of local SGD: what becomes of the weights when processes meet that have trained apart.

    start           the weights that all processes had when they met last
    mean            the mean of the weights that they have now
    memory          what the rule remembers from one meeting to the next, zeros before the first

A rule is a function of these and of the learning rate of the steps, `rule(start, mean, memory, learning_rate)`, that
returns the new weights, which all processes then have, and the new memory. It is called for each variable by itself,
and is made of operations that NumPy's arrays and TensorFlow's tensors both have.

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

# The steps from one meeting to the next, and the options, of each rule; those of a user's own rule are of `average`.
SYNC_EVERY = {"average": 16, "slowmo": 48, "diloco": 500, "easgd": 10}
# Of elastic averaging, beta of Zhang et al., which they divide by the number of processes.
MOVING_RATE_OF_ALL = 0.9
# See the head of this module.
Rule = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def average(start: Any, mean: Any, memory: Any, learning_rate: Any) -> tuple[Any, Any]:
    """The mean itself. Source: Stich, Local SGD converges fast and communicates little, ICLR 2019."""
    del start, learning_rate
    return mean, memory


@dataclass(frozen=True)
class SlowMo:
    """A momentum over the moves from one meeting to the next.

    Source: Wang, Tantia, Ballas and Rabbat, SlowMo: improving communication-efficient distributed SGD with slow
    momentum, arXiv 1910.00643, algorithm 1.

    Attributes:
        momentum: the part of the memory that is kept.
        rate: the factor of the step along the memory.
    """

    momentum: float = 0.5
    rate: float = 1.0

    def __call__(self, start: Any, mean: Any, memory: Any, learning_rate: Any) -> tuple[Any, Any]:
        memory = self.momentum * memory + (start - mean) / learning_rate
        return start - self.rate * learning_rate * memory, memory


@dataclass(frozen=True)
class Nesterov:
    """A step of SGD with Nesterov's momentum, as Keras has it, along the move of the weights: the default of DiLoCo.

    Source: Douillard et al., DiLoCo: distributed low-communication training of language models, arXiv 2311.08105.

    Attributes:
        rate: of the step.
        momentum: the part of the memory that is kept.
    """

    rate: float = 0.7
    momentum: float = 0.9

    def __call__(self, start: Any, mean: Any, memory: Any, learning_rate: Any) -> tuple[Any, Any]:
        del learning_rate
        step = self.rate * (start - mean)
        memory = self.momentum * memory - step
        return start + self.momentum * memory - step, memory


def elastic(own: Any, centre: Any, mean: Any, moving_rate: float, size: int) -> tuple[Any, Any]:
    """The new weights of one of `size` processes, and the new centre: they move towards each other.

    Source: Zhang, Choromanska and LeCun, Deep learning with elastic averaging SGD, arXiv 1412.6651, synchronous EASGD.

    Args:
        own: the weights of this process.
        centre: the weights to which all processes are drawn.
        mean: of the weights of all processes, each of which counts the same.
        moving_rate: the part of its distance that a process moves towards the centre.
        size: the number of processes, for each of which the centre moves as far towards it.
    """
    return own - moving_rate * (own - centre), centre + moving_rate * size * (mean - centre)
