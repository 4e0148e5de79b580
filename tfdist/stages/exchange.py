"""The messages between the stages of different processes, in the graph of a step.

A message is known by the call of the inner loop, the micro-batch and what is sent, so that none of an interrupted call
is ever taken for another. A process sends and receives in the order in which its stage computes (`schedule`), one
message after the other: all stages follow the same schedule, so that no two of them wait for each other.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import tensorflow as tf

from tfdist.communicators.arrays import ArrayCommunicator
from tfdist.stages import placement, schedule
from tfdist.stages.schedule import Task

MOST_MICRO_BATCHES = 1 << 12
MOST_NUMBERS = 1 << 20


class Exchange:
    """What the stage of this process sends and receives.

    Args:
        communicator: of the processes; stage number `rank` is in process `rank`.
        schedule_name: see `tfdist.stages.schedule`.
        micro_batches: in a step.
    """

    def __init__(self, communicator: ArrayCommunicator, schedule_name: str, micro_batches: int):
        self._communicator = communicator
        self._schedule, self._micro_batches = schedule_name, micro_batches
        self._call = 0
        self._begun: weakref.WeakKeyDictionary[Any, tf.Tensor] = weakref.WeakKeyDictionary()  # by graph
        self._waiting: weakref.WeakKeyDictionary[Any, list[tuple[Task, tf.Tensor]]] = weakref.WeakKeyDictionary()

    def begin_call(self) -> None:
        """Called before each call of the inner loop, which all processes make alike."""
        self._call += 1

    def begin_steps(self) -> None:
        """Called before a step is traced, or several whose messages are one sequence."""
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            self._begun[graph], self._waiting[graph] = self._communicator.begin_messages(), []

    def send(self, tensor: tf.Tensor, to: int, number: int, task: Task) -> None:
        """Sends `tensor`, which this stage has computed in `task`, to stage `to`; `number` says which it is."""
        with tf.name_scope(placement.scope_of(self._communicator.rank, task)):
            sent = self._communicator.send_in_graph(tensor, to, self._tag(number, task))
        self._note(task, sent)

    def receive(self, spec: tf.TensorSpec, from_: int, number: int, task: Task) -> tf.Tensor:
        """The tensor that stage `from_` has sent with this `number`, for use in `task`."""
        with tf.name_scope(placement.scope_of(self._communicator.rank, task)):
            received, done = self._communicator.receive_in_graph(spec, from_, self._tag(number, task))
        self._note(task, done)
        return received

    def _tag(self, number: int, task: Task) -> Any:
        fixed = (number * 2 + (task.direction == "backward")) * MOST_MICRO_BATCHES + task.micro_batch
        return functools.partial(self._numbered, fixed)

    def _numbered(self, fixed: int) -> int:
        return self._call * MOST_NUMBERS * 2 * MOST_MICRO_BATCHES + fixed

    def _note(self, task: Task, tensor: tf.Tensor) -> None:
        if not tf.executing_eagerly():
            self._waiting[tf.compat.v1.get_default_graph()].append((task, tensor))

    def put_in_order(self, steps: int = 1) -> None:
        """Orders the messages of the present graph so far; later exchanges of the communicator come after them.

        Args:
            steps: that were traced; the micro-batches of all of them are numbered one after the other.
        """
        if tf.executing_eagerly():
            return
        graph = tf.compat.v1.get_default_graph()
        noted = self._waiting.pop(graph, [])
        rank, stages = self._communicator.rank, self._communicator.size
        tasks = schedule.tasks(self._schedule, rank, stages, steps * self._micro_batches)
        place = {task: index for index, task in enumerate(tasks)}
        noted.sort(key=lambda one: place[one[0]])
        if noted:
            self._communicator.order_messages(self._begun[graph], [done for _, done in noted])
