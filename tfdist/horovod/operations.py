"""Names and counts Horovod's operations, to know which ones this process waits for.

Horovod waits for a tensor of the same name in all processes, without a timeout or a message. Here all its operations
are counted as they begin and end, under names that tell a user their purpose.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.groups import horovod as engine
from tfdist.jobs.heartbeat_tree import SOME

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
# Operations with further names are counted together.
MOST_NAMES = 64
# The number of exchanges of each kind in a graph, including the graphs inside it.
_exchanges: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


class _ThreadState(threading.local):
    purpose: str | None = None


_thread = _ThreadState()


def next_name(kind: str) -> str:
    """Returns a name for an exchange, by which Horovod matches the tensors of the processes.

    In a graph, including the graphs inside it, each exchange of a kind gets a different name, because two of them may
    run at the same time. Outside of graphs, exchanges take turns, and the name is `kind`.
    """
    if tf.executing_eagerly():
        return kind
    graph = tf.compat.v1.get_default_graph()
    outer = getattr(graph, "outer_graph", None)
    while outer is not None and hasattr(outer, "outer_graph"):
        graph, outer = outer, outer.outer_graph
    counts = _exchanges.setdefault(graph, Counter())
    counts[kind] += 1
    return f"{kind}.{counts[kind]}"


@contextlib.contextmanager
def named(purpose: str) -> Iterator[None]:
    """Within this context, operations run or are added to a graph for `purpose`, such as "the gradients of `adam`".

    The outermost context of this kind determines the purpose.
    """
    previous, _thread.purpose = _thread.purpose, _thread.purpose or purpose
    try:
        yield
    finally:
        _thread.purpose = previous


class Operations:
    """Counts the operations of this process by name, inside and outside of graphs.

    Args:
        guard: the context in which an operation runs outside of graphs.
        before: called before an operation of all processes runs, or is added to a graph.
    """

    def __init__(self, guard: Callable[[], contextlib.AbstractContextManager[Any]], before: Callable[[], None]):
        self._guard = guard
        self.before = before
        self._lock = threading.Lock()
        self._outside: dict[str, list[int]] = {}  # the numbers of operations that have begun and ended
        # Two variables per name, so that no operation has to wait for the end of another one: TensorFlow orders the
        # accesses to a variable, and the order may differ between processes.
        self._inside: dict[str, tuple[tf.Variable, tf.Variable]] = {}

    def counts(self) -> tuple[int, int]:
        """Returns how many operations have begun and how many have ended; callable from any thread."""
        counts = self._by_name()
        return sum(begun for _, begun, _ in counts), sum(ended for _, _, ended in counts)

    def pending(self) -> list[str]:
        """Returns the names of operations that have begun and not ended; callable from any thread."""
        return [name for name, begun, ended in self._by_name() if ended < begun]

    def forget(self) -> None:
        """Marks all operations in graphs as ended, after one of them has failed."""
        for begun, ended in list(self._inside.values()):
            ended.assign(begun)

    def around(self, name: str, make: Callable[[], Any], inputs: list[Any]) -> Any:
        """Counts the operation that `make` runs or adds to the graph, and returns its result."""
        if tf.executing_eagerly():
            return self._run(name, make)
        begun, ended = self._counters(name)
        with tf.control_dependencies(inputs):
            increment = _add_one(begun)
        with tf.control_dependencies([increment]):
            result = make()
        with tf.control_dependencies([tensor for tensor in tf.nest.flatten(result) if tensor is not None]):
            _add_one(ended)
        return result

    def _run(self, name: str, make: Callable[[], Any]) -> Any:
        with self._lock:
            counts = self._outside.setdefault(self._counted_name(name, self._outside), [0, 0])
            counts[0] += 1
        try:
            with self._guard():
                return make()
        finally:
            with self._lock:
                counts[1] += 1

    def _counters(self, name: str) -> tuple[tf.Variable, tf.Variable]:
        name = self._counted_name(name, self._inside)
        if name not in self._inside:
            with tf.init_scope(), tf.device("CPU:0"):
                zero = tf.zeros([], tf.int64)
                self._inside[name] = (tf.Variable(zero, trainable=False), tf.Variable(zero, trainable=False))
        return self._inside[name]

    @staticmethod
    def _counted_name(name: str, known: dict[str, Any]) -> str:
        return name if name in known or len(known) < MOST_NAMES else "another operation"

    def _by_name(self) -> list[tuple[str, int, int]]:
        with self._lock:
            counts = [(name, begun, ended) for name, (begun, ended) in self._outside.items()]
        for name, (begun_variable, ended_variable) in list(self._inside.items()):
            # Read in this order, so that no operation seems to have ended before it has begun.
            ended = int(ended_variable.numpy())
            counts.append((name, int(begun_variable.numpy()), ended))
        return counts


def install(operations: Operations) -> None:
    """Lets `operations` count the operations of `horovod.tensorflow` from now on."""
    mpi_ops = engine.load().mpi_ops
    library = mpi_ops.MPI_LIB
    mpi_ops.MPI_LIB = _CountedLibrary(getattr(library, "library", library), operations)


class _CountedLibrary:
    """Wraps Horovod's library of operations, and counts them."""

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
            inputs = [tensor for tensor in tf.nest.flatten(list(arguments)) if isinstance(tensor, tf.Tensor)]
            return self._operations.around(purpose, lambda: make(*arguments, **named), inputs)

        return counted


def _purpose(operation: str, named: dict[str, Any]) -> str:
    if named.get("process_set_id") or operation == "horovod_join":
        return SOME
    if _thread.purpose is not None:
        return _thread.purpose
    function = f"`hvd.{operation.removeprefix('horovod_')}`"
    return f"{function} of `{named['name']}`" if named.get("name") else function


def _add_one(counter: tf.Variable) -> Any:
    with tf.device(counter.device):
        return tf.raw_ops.AssignAddVariableOp(resource=counter.handle, value=tf.constant(1, tf.int64))
