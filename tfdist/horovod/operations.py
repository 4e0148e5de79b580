"""Which of Horovod's operations this process waits in.

Horovod waits for a tensor of the same name in all processes, without limit and without a word. Here all its operations
are counted as they begin and end, under names that say to a user what they are for.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.groups import horovod as engine
from tfdist.jobs.heartbeat.messages import SOME

COLLECTIVES = {
    f"horovod_{name}"
    for name in (
        "allgather",
        "allreduce",
        "alltoall",
        "broadcast",
        "broadcast_inplace",
        "broadcast_inplace_resource",
        "grouped_allgather",
        "grouped_allreduce",
        "grouped_reducescatter",
        "join",
        "reducescatter",
    )
}
# Names beyond that number are counted together.
MOST_NAMES = 64


class _Thread(threading.local):
    purpose: str | None = None


_thread = _Thread()


@contextlib.contextmanager
def named(purpose: str) -> Iterator[None]:
    """In this context operations are run, or added to a graph, for `purpose`, such as "the gradients of `adam`".

    An outer context of this kind has the say.
    """
    before, _thread.purpose = _thread.purpose, _thread.purpose or purpose
    try:
        yield
    finally:
        _thread.purpose = before


class Operations:
    """Counts the operations of this process by their names, inside graphs and outside.

    Args:
        guard: the context of an operation outside of graphs.
        before: called before each operation in which all processes take part is run, or added to a graph.

    Attributes:
        before: the same.
    """

    def __init__(self, guard: Callable[[], contextlib.AbstractContextManager[Any]], before: Callable[[], None]):
        self._guard = guard
        self.before = before
        self._lock = threading.Lock()
        self._outside: dict[str, list[int]] = {}  # begun and ended
        # Two variables for a name, so that no operation has to wait for the end of another one: TensorFlow orders what
        # is done to a variable, and the order may differ between the processes.
        self._inside: dict[str, tuple[tf.Variable, tf.Variable]] = {}

    def counts(self) -> tuple[int, int]:
        """How many operations have begun, and how many have ended; read from any thread."""
        counts = self._by_name()
        return sum(begun for _, begun, _ in counts), sum(ended for _, _, ended in counts)

    def pending(self) -> list[str]:
        """The names of those that have begun and not ended; read from any thread."""
        return [name for name, begun, ended in self._by_name() if ended < begun]

    def forget(self) -> None:
        """An operation in a graph has failed: none is under way any more."""
        for begun, ended in list(self._inside.values()):
            ended.assign(begun)

    def around(self, name: str, make: Callable[[], Any], inputs: list[Any]) -> Any:
        """Counts the operation that `make` runs, or adds to the graph, and returns its result."""
        if tf.executing_eagerly():
            return self._run(name, make)
        begun, ended = self._counters(name)
        with tf.control_dependencies(inputs):
            has_begun = _add_one(begun)
        with tf.control_dependencies([has_begun]):
            result = make()
        with tf.control_dependencies([one for one in tf.nest.flatten(result) if one is not None]):
            _add_one(ended)
        return result

    def _run(self, name: str, make: Callable[[], Any]) -> Any:
        with self._lock:
            counts = self._outside.setdefault(self._kept(name, self._outside), [0, 0])
            counts[0] += 1
        try:
            with self._guard():
                return make()
        finally:
            with self._lock:
                counts[1] += 1

    def _counters(self, name: str) -> tuple[tf.Variable, tf.Variable]:
        name = self._kept(name, self._inside)
        if name not in self._inside:
            with tf.init_scope(), tf.device("CPU:0"):
                zero = tf.zeros([], tf.int64)
                self._inside[name] = (tf.Variable(zero, trainable=False), tf.Variable(zero, trainable=False))
        return self._inside[name]

    @staticmethod
    def _kept(name: str, known: dict[str, Any]) -> str:
        return name if name in known or len(known) < MOST_NAMES else "another operation"

    def _by_name(self) -> list[tuple[str, int, int]]:
        with self._lock:
            found = [(name, begun, ended) for name, (begun, ended) in self._outside.items()]
        # What has ended is read first, so that nothing seems to have ended that has not begun.
        for name, (begun, ended) in list(self._inside.items()):
            has_ended = int(ended.numpy())
            found.append((name, int(begun.numpy()), has_ended))
        return found


def install(operations: Operations) -> None:
    """From now on `operations` counts the operations of `horovod.tensorflow`."""
    mpi_ops = engine.load().mpi_ops
    library = mpi_ops.MPI_LIB
    mpi_ops.MPI_LIB = _Counted(getattr(library, "library", library), operations)


class _Counted:
    """Stands for Horovod's library of operations."""

    def __init__(self, library: Any, operations: Operations):
        self.library = library
        self._operations = operations

    def __getattr__(self, name: str) -> Any:
        make = getattr(self.library, name)
        if name not in COLLECTIVES:
            return make

        @tf.autograph.experimental.do_not_convert
        @functools.wraps(make)
        def counted(*arguments: Any, **named: Any) -> Any:
            if not named.get("process_set_id"):
                self._operations.before()
            purpose = _purpose(name, named)
            inputs = [one for one in tf.nest.flatten(list(arguments)) if isinstance(one, tf.Tensor)]
            return self._operations.around(purpose, lambda: make(*arguments, **named), inputs)

        return counted


def _purpose(operation: str, named: dict[str, Any]) -> str:
    if named.get("process_set_id") or operation == "horovod_join":
        return SOME
    if _thread.purpose is not None:
        return _thread.purpose
    called = f"`hvd.{operation.removeprefix('horovod_')}`"
    return f"{called} of `{named['name']}`" if named.get("name") else called


def _add_one(counter: tf.Variable) -> Any:
    with tf.device(counter.device):
        return tf.raw_ops.AssignAddVariableOp(resource=counter.handle, value=tf.constant(1, tf.int64))
