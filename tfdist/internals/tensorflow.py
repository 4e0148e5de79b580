"""The private parts of TensorFlow that tfdist calls, reads and extends.

`tfdist.internals.tensorflow_patches` replaces functions of TensorFlow. Both modules were written for TensorFlow 2.21.0,
and `tests/test_tensorflow_internals.py` fails when TensorFlow changes a part that they use.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing.pool
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.distribute import cross_device_ops, distribute_lib, one_device_strategy, sharded_variable, values
from tensorflow.python.eager import context
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.profiler import profiler_v2

from tfdist.jobs.world import World

SEEN_IN = "2.21.0"

# The class of a variable whose parts lie on several parameter servers.
ShardedVariable = sharded_variable.ShardedVariable


def set_container(part: tf.Variable, whole: Any) -> None:
    """Marks `part` as a part of `whole`: Keras' optimizers then use the slots of `whole` for it."""
    part._distributed_container = weakref.ref(whole)


def first_rows(whole: Any) -> list[int]:
    """The index of the first row of each part of a sharded variable."""
    return [offset[0] for offset in whole._var_offsets]


def slices_by_part(whole: Any, slices: tf.IndexedSlices) -> list[tf.IndexedSlices]:
    """`slices` divided among the parts of a sharded variable; the row indices count from the start of each part."""
    return list(whole._decompose_indexed_slices(slices))


@contextlib.contextmanager
def without_strategy() -> Iterator[None]:
    """Within a cross-replica context, code runs here as without a strategy, for variables that have one copy."""

    def plain(next_creator: Any, **arguments: Any) -> tf.Variable:
        del next_creator  # the strategy's
        return resource_variable_ops.default_variable_creator_v2(None, **arguments)

    # An optimizer that is not built makes its variables now; Keras makes them outside of the graph.
    creators = tf.variable_creator_scope(plain)
    distribute_lib._push_per_thread_mode(distribute_lib._DefaultReplicaThreadMode())
    try:
        with tf.init_scope():
            creators.__enter__()
        try:
            yield
        finally:
            with tf.init_scope():
                creators.__exit__(None, None, None)
    finally:
        distribute_lib._pop_per_thread_mode()


def serial_calls() -> contextlib.AbstractContextManager[None]:
    """Graphs that are called in this context run their operations one after the other, in the caller's thread.

    TensorFlow's usual executor passes operations between threads even if only one thread computes. The serial executor
    refuses graphs that span devices or hold collectives, and hangs in a graph that is not `flat`.
    """
    return context.function_executor_type("SINGLE_THREADED_EXECUTOR")


def flat(graph: tf.Graph) -> bool:
    """Whether no operation in `graph` calls a function, except loops whose bodies call none.

    A nested call blocks its thread and runs on another one, and no other thread may be left.
    """
    definition = graph.as_graph_def()
    inside = [node for function in definition.library.function for node in function.node_def]
    outside = [node for node in definition.node if node.op not in ("While", "StatelessWhile")]
    return not any(value.HasField("func") for node in inside + outside for value in node.attr.values())


def light(graph: tf.Graph) -> bool:
    """Whether `graph` has no work for oneDNN: no convolution, no pooling, no product of matrices too large for a cache.

    The serial executor uses TensorFlow's plain kernels, which take up to three times as long for these.
    """
    definition = graph.as_graph_def(add_shapes=True)
    for nodes in (definition.node, *(function.node_def for function in definition.library.function)):
        elements = {node.name: _elements(node) for node in nodes}
        for node in nodes:
            operands = [elements.get(name.partition(":")[0], 0) for name in node.input]
            if node.op.startswith(_CONVOLVING) or (node.op in _PRODUCTS and max(operands) > _CACHED_ELEMENTS):
                return False
    return True


_CONVOLVING = ("Conv", "Depthwise", "MaxPool", "AvgPool")
_PRODUCTS = ("MatMul", "BatchMatMulV2")
_CACHED_ELEMENTS = 1 << 17


def _elements(node: Any) -> int:
    """The number of elements of a node's first output; an unknown dimension counts as one."""
    shapes = node.attr["_output_shapes"].list.shape
    return math.prod(max(1, dimension.size) for dimension in shapes[0].dim) if shapes else 0


def configure_coordination(cluster: Mapping[str, Sequence[str]], timeout_seconds: float) -> None:
    """Limits how long processes wait for each other: `timeout_seconds` at the start, five seconds at the end.

    By default TensorFlow waits an hour for a peer that does not register, and its heartbeats end a process that was
    only suspended for a while before the timeout of a collective can report it.
    """
    jobs = [
        coordination_config_pb2.CoordinatedJob(name=role, num_tasks=len(addresses))
        for role, addresses in cluster.items()
    ]
    leader = "chief" if "chief" in cluster else "worker"
    milliseconds = int(1000 * timeout_seconds)
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{leader}/replica:0/task:0",
        cluster_register_timeout_in_ms=milliseconds,
        heartbeat_timeout_in_ms=2 * milliseconds,
        shutdown_barrier_timeout_in_ms=5_000,
        coordinated_jobs=jobs,
    )


@contextlib.contextmanager
def sigterm_as_it_was() -> Iterator[None]:
    """Restores the handler of SIGTERM at the end of this context.

    In a process that joins a TensorFlow cluster, `PreemptionWatcher` takes SIGTERM, and the process does not end.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def abort_collectives(reason: str) -> None:
    """Ends all present and future collective operations of this process with a `tf.errors.DeadlineExceededError`."""
    context.context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, reason)


def silent_peers(world: World, seconds: float) -> list[int]:
    """Ranks of `world` that do not answer, or where another process runs now; some of them if there are many.

    TensorFlow holds the interpreter's lock while it waits for an answer, so that neither can several be asked at once,
    nor the heartbeat of this process go on. All together are waited for `seconds`; those that have ended cost no time.
    """
    silent = []
    until = time.monotonic() + seconds
    for rank, task in enumerate(world.tasks):
        if rank == world.rank:
            continue
        name = f"/job:{task.role}/replica:0/task:{task.index}"
        left_ms = int(1000 * (until - time.monotonic()))
        if left_ms <= 0:
            break
        try:
            context.context().check_collective_ops_peer_health(name, timeout_in_ms=left_ms)
        except tf.errors.OpError:
            silent.append(rank)
    return silent


def runtime_started() -> bool:
    """Whether TensorFlow has fixed its devices and threads for the life of this process."""
    return context.context()._initialized


def global_seed() -> int | None:
    """The last argument of `tf.random.set_seed`; `None` before it is called."""
    return context.global_seed()


def eager_random_state() -> Any:
    """The state of the generator that seeds operations outside of graphs; `None` before `tf.random.set_seed`."""
    generator = getattr(context.context(), "_rng", None)
    return None if generator is None else generator.getstate()


def restore_eager_random_state(state: Any) -> None:
    """Restores an `eager_random_state`; an operation that has drawn with one of its seeds does not start over."""
    if state is not None:
        context.context()._rng.setstate(state)


def close_pools(error: BaseException) -> None:
    """Closes the thread pool that a collective of TensorFlow left open when it raised `error` between two graphs.

    Otherwise Python prints a traceback about the pool when the process ends.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        pool = frame.f_locals.get("pool")
        if frame.f_globals is vars(cross_device_ops) and isinstance(pool, multiprocessing.pool.ThreadPool):
            pool.close()


def profiling() -> bool:
    """Whether a trace is being taken in this process."""
    return profiler_v2._profiler is not None


def per_replica(tensors: Sequence[tf.Tensor]) -> Any:
    """The tensors of the replicas of this process as one value of TensorFlow's strategies."""
    return values.PerReplica(list(tensors))


def local_copy(variable: Any) -> Any:
    """The current replica's copy of a mirrored variable; any other variable itself."""
    return variable._get() if isinstance(variable, values.MirroredVariable) else variable


class ReducingExtended(one_device_strategy.OneDeviceExtended):
    """One replica in each of several processes, which communicate by `reduce`; the rest is as on one device.

    Args:
        strategy: the strategy that this extends.
        device: the device of this process' replica.
        rank: the rank of this process.
        size: the number of processes.
        reduce: `reduce(tensors)` returns their sums over the processes; they may include `tf.IndexedSlices`.
    """

    def __init__(self, strategy: Any, device: str, rank: int, size: int, reduce: Callable[[list[Any]], list[Any]]):
        super().__init__(strategy, device)
        self._rank, self._size, self._reduce = rank, size, reduce

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._size

    def _use_merge_call(self) -> bool:
        return False

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        context = distribute_lib.ReplicaContext(self._container_strategy(), replica_id_in_sync_group=self._rank)
        with tf.device(self._device), context:
            return fn(*args, **kwargs)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        del options
        flat = tf.nest.flatten(value)
        return tf.nest.pack_sequence_as(value, self._reduced(reduce_op, flat))

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        del destinations, options
        return self._reduced(reduce_op, [value])[0]

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        del options
        return self._reduced(reduce_op, [value for value, _ in value_destination_pairs])

    def _reduced(self, reduce_op: Any, flat: Sequence[Any]) -> list[Any]:
        sums = self._reduce(list(flat))
        return [total / self._size for total in sums] if reduce_op == tf.distribute.ReduceOp.MEAN else sums

    def _experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        return value_fn(tf.distribute.experimental.ValueContext(self._rank, self._size))

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return 0


@contextlib.contextmanager
def collected_graphs() -> Iterator[list[Any]]:
    """Collects the graphs, as `GraphDef`s of one device each, that TensorFlow makes in this context to run functions.

    The list is filled at the end. Functions that have run before are not in it.
    """
    graphs: list[Any] = []
    context.context().enable_run_metadata()
    context.context().export_run_metadata()  # what others, such as a trace of TensorBoard's, have collected before
    try:
        yield graphs
        graphs += context.context().export_run_metadata().partition_graphs
    finally:
        context.context().disable_run_metadata()


@contextlib.contextmanager
def scratch_graph(scope: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """A graph that is never run; variables that are made here are made outside of it, with their initial values.

    Yields what `variables_made_in` yields. `tf.function` would keep the initial values as a part of its graph, and
    TensorFlow's strategies cannot copy those to their devices.
    """
    with tf.__internal__.FuncGraph("scratch").as_default(), variables_made_in(scope) as outside:
        yield outside


@contextlib.contextmanager
def variables_made_in(scope: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """In this context variables are made outside of all graphs, in the context `scope()`.

    Yields a function that returns a context, in which all code runs there.
    """
    inside = False

    @contextlib.contextmanager
    def outside() -> Iterator[None]:
        nonlocal inside
        before, inside = inside, True
        try:
            with tf.init_scope(), scope():
                yield
        finally:
            inside = before

    def make(next_creator: Callable[..., Any], **options: Any) -> Any:
        if inside:
            return next_creator(**options)
        with outside():
            return tf.Variable(**options)

    with tf.variable_creator_scope(make):
        yield outside


def placeholders(spec: Any) -> Any:
    """The inputs of a graph, in the structure of `spec`; `None` stays `None`."""

    def placeholder(one: Any) -> Any:
        return None if one is None else tf.compat.v1.placeholder(one.dtype, one.shape)

    flat = [placeholder(one) for one in tf.nest.flatten(spec, expand_composites=True)]
    return tf.nest.pack_sequence_as(spec, flat, expand_composites=True)
