"""Workers with weights of their own, and a centre on servers: what a worker does with both, and when.

    own             the weights of the worker, with which it computes
    memory          what the rule keeps beside them, on the worker
    centre          the weights on the servers, which all workers change, each at its own pace

A worker counts its steps, t = 0, 1, 2, .... Before step t it does the exchanges that are due then, one after the other:

    begin(centre)                       own and memory of a worker that starts, or starts again
    settle(own, memory)                 before the exchanges, whether or not one is due
    exchanges[i].make(own, memory, centre)   every `exchanges[i].every` steps: new own, new memory, what is added to the
                                        centre; `None` adds nothing
    stepped(own, memory)                after each step, with the weights that the step has made

They are called for each variable by itself, and are made of operations that NumPy's arrays and TensorFlow's tensors
both have. Nothing here knows where weights lie.

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

# The steps between exchanges, and the momentum of `Eamsgd`, if they are not said; Zhang et al. use both.
EVERY, MOMENTUM = 10, 0.99
# What a worker keeps of one variable beside its weights.
Memory = tuple[Any, ...]


@dataclass(frozen=True)
class Exchange:
    """What is done with the centre, and how often.

    Attributes:
        every: the number of steps from one to the next; the first is before step 0.
        make: see the head of this module.
        reads: it uses the centre, and not `None` in its place.
        writes: it adds to the centre.
    """

    every: int
    make: Callable[[Any, Memory, Any], tuple[Any, Memory, Any]]
    reads: bool = True
    writes: bool = True


class Rule:
    """What a worker does with its weights and with those of the centre.

    Attributes:
        exchanges: in the order in which they are made.
        settles_after: the number of steps after an exchange when `settle` has something to do; `None` is never.
        follows_steps: `stepped` has something to do.
        pushes_at_end: what a worker has not yet given to the centre belongs there when training ends.
    """

    exchanges: Sequence[Exchange]
    settles_after: int | None = None
    follows_steps = False
    pushes_at_end = False

    def begin(self, centre: Any) -> tuple[Any, Memory]:
        """The weights and the memory of a worker that starts at the centre."""
        raise NotImplementedError

    def settle(self, own: Any, memory: Memory) -> tuple[Any, Memory]:
        """What an earlier exchange has left to do."""
        return own, memory

    def stepped(self, own: Any, memory: Memory) -> tuple[Any, Memory]:
        """What becomes of the weights that a step has made."""
        return own, memory

    def final_push(self, own: Any, memory: Memory) -> tuple[Memory, Any]:
        """The memory and what is added to the centre when training ends, of a rule that `pushes_at_end`."""
        raise NotImplementedError

    def exchanged(self, t: int, own: Any, memory: Memory, centre: Any) -> tuple[Any, Memory, Any]:
        """The weights, the memory and the centre after the exchanges that are due before step `t`."""
        for exchange in self.exchanges:
            if t % exchange.every == 0:
                own, memory, change = exchange.make(own, memory, centre)
                centre = centre if change is None else centre + change
        return own, memory, centre

    def until_next(self, t: Any) -> list[Any]:
        """The number of steps from step `t` to each of the next moments when there is something to do, at least 1."""
        moments = [(exchange.every, 0) for exchange in self.exchanges]
        if self.settles_after is not None:
            moments += [(exchange.every, self.settles_after % exchange.every) for exchange in self.exchanges]
        return [every - (t - offset) % every for every, offset in dict.fromkeys(moments)]


class Downpour(Rule):
    """A worker runs steps on a copy, adds to the centre what they have changed, and fetches the centre again.

    A fetch keeps what the worker has not pushed yet, so that a worker alone does the steps of one device.

    Args:
        push_every: steps from one push to the next.
        fetch_every: steps from one fetch to the next.
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
        _, kept, change = self._push(own, memory, None)
        return kept, change

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

    The gradient is taken before the worker is pulled, so that the worker gives up `d` one step after the exchange.

    Args:
        every: tau, steps from one exchange to the next.
        moving_rate: a, the part of their distance by which each moves.
    """

    settles_after: int | None = 1

    def __init__(self, every: int, moving_rate: float):
        self.exchanges = (Exchange(every, self._meet),)
        self._moving_rate = moving_rate

    def begin(self, centre: Any) -> tuple[Any, Memory]:
        return centre, (centre - centre,)

    def settle(self, own: Any, memory: Memory) -> tuple[Any, Memory]:
        (owed,) = memory
        return own - owed, (owed - owed,)

    def _meet(self, own: Any, memory: Memory, centre: Any) -> tuple[Any, Memory, Any]:
        del memory
        moved = self._moving_rate * (own - centre)
        return own, (moved,), moved


class Eamsgd(Rule):
    """As `Easgd`, with a momentum: v <- m v - rate g(x + m v); x <- x + v - d.

    The weights with which a worker computes are x + m v, where the gradient is taken; x, v and d are its memory.

    Args:
        every: tau, steps from one exchange to the next.
        moving_rate: a, the part of their distance by which each moves.
        momentum: m, of the steps.
    """

    follows_steps = True

    def __init__(self, every: int, moving_rate: float, momentum: float):
        self.exchanges = (Exchange(every, self._meet),)
        self._moving_rate, self._momentum = moving_rate, momentum

    def begin(self, centre: Any) -> tuple[Any, Memory]:
        nothing = centre - centre
        return centre, (centre, nothing, nothing)

    def stepped(self, own: Any, memory: Memory) -> tuple[Any, Memory]:
        at, velocity, owed = memory
        velocity = self._momentum * velocity + (own - (at + self._momentum * velocity))
        at = at + velocity - owed
        return at + self._momentum * velocity, (at, velocity, owed - owed)

    def _meet(self, own: Any, memory: Memory, centre: Any) -> tuple[Any, Memory, Any]:
        at, velocity, _ = memory
        moved = self._moving_rate * (at - centre)
        return own, (at, velocity, moved), moved


def run_one_worker(
    rule: Rule, step: Callable[[Any], Any], steps: int, centre: Any = 0.0
) -> tuple[list[Any], list[Any]]:
    """The weights of one worker after each step, and the centre then, where nobody else changes it.

    Args:
        rule: of the worker.
        step: makes new weights of the worker's.
        steps: their number.
        centre: at first.
    """
    (own, memory), owns, centres = rule.begin(centre), [], []
    for t in range(steps):
        own, memory, centre = rule.exchanged(t, *rule.settle(own, memory), centre)
        own, memory = rule.stepped(step(own), memory)
        owns.append(rule.settle(own, memory)[0])
        centres.append(centre)
    return owns, centres
