"""The messages between the stages of different processes, in the graph of a step.

A message is known by the call of the inner loop and its number in the step, so that none of an interrupted call is ever
taken for another. A process sends and receives one message after the other, in the order in which it writes them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import tensorflow as tf

from tfdist.groups.arrays import ArrayGroup

MOST_NUMBERS = 1 << 32


class Exchange:
    """What the stage of this process sends and receives.

    Args:
        group: of the processes; stage number `rank` is in process `rank`.
    """

    def __init__(self, group: ArrayGroup):
        self._group = group
        self._call = 0
        self._begun: list[tuple[tf.Tensor, list[tf.Tensor]]] = []

    def begin_call(self) -> None:
        """Called before each call of the inner loop, which all processes make alike."""
        self._call += 1

    @contextlib.contextmanager
    def sequence(self) -> Iterator[None]:
        """The context in which messages are written into one graph; later exchanges come after them."""
        self._begin()
        yield
        self._end()

    def _begin(self) -> None:
        """Called before the messages of a graph."""
        self._begun.append((self._group.begin_messages(), []))

    def _end(self) -> None:
        """Puts the messages of the present graph in order."""
        begin, done = self._begun.pop()
        self._group.order_messages(begin, done)

    @contextlib.contextmanager
    def around_branches(self) -> Iterator[None]:
        """The context of a condition in whose branches there are messages, in the midst of those of a graph."""
        self._end()
        with self._group.around_branches():
            yield
        self._begin()

    def note_branches(self, result: tf.Tensor) -> None:
        """Called with a result of the condition."""
        self._group.note_branches(result)

    def send(self, tensor: tf.Tensor, to: int, number: int) -> None:
        """Sends `tensor` to stage `to`; `number` says which of the step's messages it is."""
        self._begun[-1][1].append(self._group.send_in_graph(tensor, to, self._tag(number)))

    def receive(self, spec: tf.TensorSpec, from_: int, number: int) -> tf.Tensor:
        """The tensor that stage `from_` has sent with this `number`."""
        received, done = self._group.receive_in_graph(spec, from_, self._tag(number))
        self._begun[-1][1].append(done)
        return received

    def _tag(self, number: int) -> functools.partial[int]:
        return functools.partial(self._numbered, number)

    def _numbered(self, number: int) -> int:
        return self._call * MOST_NUMBERS + number
