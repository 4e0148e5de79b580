"""Workers with their own copies of the weights, and a centre on servers: what a worker does with both, and when.

    own             the worker's weights, with which it computes
    memory          what the rule keeps for each weight on the worker
    centre          the weights on the servers, which every worker changes at its own pace

A worker counts its steps, t = 0, 1, 2, .... A rule is called for one variable at a time:

    begin(centre)                           when a worker starts or restarts: its weights and memory
    settle(own, memory)                     before the exchanges of step t, whether or not one is due
    exchanges[i].make(own, memory, centre)  every `exchanges[i].every` steps: the new weights, the new memory, and what
                                            is added to the centre, or `None`
    stepped(own, memory)                    after each step, with the weights after the step

A rule is made of operations that NumPy arrays and TensorFlow tensors have in common. It does not know where the weights
are stored.

    Downpour       Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, algorithm 7.1
    Easgd          Zhang, Choromanska and LeCun, Deep learning with Elastic Averaging SGD, arXiv 1412.6651, algorithm 1
    Eamsgd         the same, algorithm 2

Synopsis:

    >>> run_one_worker(Easgd(every=2, moving_rate=1.0), lambda own: own + 1.0, steps=5)
    ([1.0, 2.0, 1.0, 2.0, 3.0], [0.0, 0.0, 2.0, 2.0, 2.0])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.relaxed.outer_rules import elastic_force

# The default number of steps between exchanges, and the default momentum of `Eamsgd`; both are those of Zhang et al.
EVERY, MOMENTUM = 10, 0.99
# What a worker keeps for one variable beside its weights.
Memory = tuple[Any, ...]


@dataclass(frozen=True)
class Exchange:
    """An exchange with the centre.

    Attributes:
        every: the number of steps between exchanges; the first is before step 0.
        make: see the docstring of this module.
        reads: whether `make` uses the centre; otherwise it may get `None` in its place.
        writes: whether something is added to the centre.
    """

    every: int
    make: Callable[[Any, Memory, Any], tuple[Any, Memory, Any]]
    reads: bool = True
    writes: bool = True


class Rule:
    """What a worker does with its weights and those of the centre.

    Attributes:
        exchanges: in the order in which they are made.
        settles_after: the number of steps after an exchange when `settle` has an effect; `None` is never.
        follows_steps: whether `stepped` has an effect.
        pushes_at_end: whether the worker's changes since the last exchange are added to the centre at the end of
            training, see `final_push`.
    """

    exchanges: Sequence[Exchange]
    settles_after: int | None = None
    follows_steps = False
    pushes_at_end = False

    def begin(self, centre: Any) -> tuple[Any, Memory]:
        """Returns the weights and the memory of a worker that starts at the centre."""
        raise NotImplementedError

    def settle(self, own: Any, memory: Memory) -> tuple[Any, Memory]:
        """Completes an earlier exchange."""
        return own, memory

    def stepped(self, own: Any, memory: Memory) -> tuple[Any, Memory]:
        """Returns what becomes of the weights after a step."""
        return own, memory

    def final_push(self, own: Any, memory: Memory) -> tuple[Memory, Any]:
        """Returns the memory and what is added to the centre at the end of training, for rules that do so."""
        raise NotImplementedError

    def exchanged(self, t: int, own: Any, memory: Memory, centre: Any) -> tuple[Any, Memory, Any]:
        """Returns the weights, the memory and the centre after the exchanges that are due before step `t`."""
        for exchange in self.exchanges:
            if t % exchange.every == 0:
                own, memory, change = exchange.make(own, memory, centre)
                centre = centre if change is None else centre + change
        return own, memory, centre

    def until_next(self, t: Any) -> list[Any]:
        """Returns the number of steps from step `t` to each of the next exchanges and `settle`s; each is at least 1."""
        due = [(exchange.every, 0) for exchange in self.exchanges]
        if self.settles_after is not None:
            due += [(exchange.every, self.settles_after % exchange.every) for exchange in self.exchanges]
        return [every - (t - offset) % every for every, offset in dict.fromkeys(due)]


class Downpour(Rule):
    """A worker adds the changes of its steps to the centre, and from time to time fetches the centre again.

    A fetch keeps the changes that have not been pushed yet, so that a single worker computes the steps of one device.

    Args:
        push_every: the number of steps between pushes.
        fetch_every: the number of steps between fetches.
    """

    pushes_at_end = True

    def __init__(self, push_every: int, fetch_every: int):
        self.exchanges = (
            Exchange(push_every, self._push, reads=False),
            Exchange(fetch_every, self._fetch, writes=False),
        )

    def begin(self, centre: Any) -> tuple[Any, Memory]:
        return centre, (centre,)

    def final_push(self, own: Any, memory: Memory) -> tuple[Memory, Any]:
        _, memory, change = self._push(own, memory, None)
        return memory, change

    @staticmethod
    def _push(own: Any, memory: Memory, centre: Any) -> tuple[Any, Memory, Any]:
        del centre
        (pushed,) = memory
        return own, (own,), own - pushed

    @staticmethod
    def _fetch(own: Any, memory: Memory, centre: Any) -> tuple[Any, Memory, Any]:
        (pushed,) = memory
        return centre + (own - pushed), (centre,), None


class Easgd(Rule):
    """A worker and the centre move towards each other: d = a (x - c); c += d; x <- x - rate g(x) - d.

    The gradient is taken before d is subtracted, so `d` is subtracted one step after the exchange.

    Args:
        every: tau, the number of steps between exchanges.
        moving_rate: a, the fraction of their distance by which both move.
    """

    settles_after: int | None = 1

    def __init__(self, every: int, moving_rate: float):
        self.exchanges = (Exchange(every, self._exchange),)
        self._moving_rate = moving_rate

    def begin(self, centre: Any) -> tuple[Any, Memory]:
        return centre, (centre - centre,)

    def settle(self, own: Any, memory: Memory) -> tuple[Any, Memory]:
        (force,) = memory
        return own - force, (force - force,)

    def _exchange(self, own: Any, memory: Memory, centre: Any) -> tuple[Any, Memory, Any]:
        del memory
        force = elastic_force(own, centre, self._moving_rate)
        return own, (force,), force


class Eamsgd(Rule):
    """As `Easgd`, with momentum: v <- m v - rate g(x + m v); x <- x + v - d.

    A worker computes with the weights x + m v, where the gradient is taken; its memory is x, v and d.

    Args:
        every: tau, the number of steps between exchanges.
        moving_rate: a, the fraction of their distance by which both move.
        momentum: m.
    """

    follows_steps = True

    def __init__(self, every: int, moving_rate: float, momentum: float):
        self.exchanges = (Exchange(every, self._exchange),)
        self._moving_rate, self._momentum = moving_rate, momentum

    def begin(self, centre: Any) -> tuple[Any, Memory]:
        zeros = centre - centre
        return centre, (centre, zeros, zeros)

    def stepped(self, own: Any, memory: Memory) -> tuple[Any, Memory]:
        x, velocity, force = memory
        velocity = self._momentum * velocity + (own - (x + self._momentum * velocity))
        x = x + velocity - force
        return x + self._momentum * velocity, (x, velocity, force - force)

    def _exchange(self, own: Any, memory: Memory, centre: Any) -> tuple[Any, Memory, Any]:
        x, velocity, _ = memory
        force = elastic_force(x, centre, self._moving_rate)
        return own, (x, velocity, force), force


def run_one_worker(
    rule: Rule, step: Callable[[Any], Any], steps: int, centre: Any = 0.0
) -> tuple[list[Any], list[Any]]:
    """Runs a single worker, whose new weights `step` computes; returns its weights and the centre after each step."""
    (own, memory), owns, centres = rule.begin(centre), [], []
    for t in range(steps):
        own, memory, centre = rule.exchanged(t, *rule.settle(own, memory), centre)
        own, memory = rule.stepped(step(own), memory)
        owns.append(rule.settle(own, memory)[0])
        centres.append(centre)
    return owns, centres
