"""The private parts of TensorFlow that tfdist calls, reads, extends and replaces.

Written for TensorFlow 2.21.0; `tests/test_tensorflow_internals.py` fails when TensorFlow changes a part that this uses.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import multiprocessing.pool
import signal
import tempfile
import threading
import time
import traceback
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import cross_device_ops, distribute_lib, one_device_strategy, sharded_variable, values
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.ops import collective_ops, resource_variable_ops
from tensorflow.python.profiler import profiler_v2

from tfdist.internals import tensorflow_graphs
from tfdist.internals.patching import SharedPatch, surround, surrounded
from tfdist.jobs.world import World

SEEN_IN = "2.21.0"

# The class of a variable whose parts lie on several parameter servers.
ShardedVariable = sharded_variable.ShardedVariable


@contextlib.contextmanager
def own_traces(eagerly: bool = False) -> Iterator[None]:
    """Within this context, each `tf.function` that is called in a graph is traced anew, in any thread.

    TensorFlow finds an earlier trace of a function by its arguments, and not by the variables that it reads. A strategy
    may have replaced these since, by copies on other devices, or by shards.

    Args:
        eagerly: whether functions that are called outside of graphs are traced anew too.
    """
    copies: _Copies = {}
    lists = [_in_graphs, _eager] if eagerly else [_in_graphs]
    for contexts in lists:
        contexts.append(copies)
    try:
        with _own_traces:
            yield
    finally:
        for contexts in lists:
            contexts[:] = [others for others in contexts if others is not copies]


def _call_with_own_trace(original: Callable[..., Any], function: Any, *args: Any, **named: Any) -> Any:
    contexts, key = _eager if tf.executing_eagerly() else _in_graphs, (threading.get_ident(), id(function))
    copies = next(reversed(contexts), None)  # another thread may leave its context meanwhile
    # A function of a saved model has no Python code to trace.
    if copies is None or type(function) is not polymorphic_function.Function:
        return original(function, *args, **named)
    if key not in copies:
        copies[key] = function, function._clone(None)
    return original(copies[key][1], *args, **named)


# Functions, which must live as long as their `id` is used, and their copies, by thread and the function's `id`.
_Copies: TypeAlias = dict[tuple[int, int], tuple[Any, Any]]
# Those of each context, the innermost last, for calls in graphs and outside of them.
_in_graphs: list[_Copies] = []
_eager: list[_Copies] = []
_own_traces = SharedPatch(lambda: surround(polymorphic_function.Function, "__call__", _call_with_own_trace))


def set_container(part: tf.Variable, variable: Any) -> None:
    """Marks `part` as a part of a sharded `variable`: Keras' optimizers then use the slots of `variable` for it."""
    part._distributed_container = weakref.ref(variable)


def first_rows(variable: Any) -> list[int]:
    """The index of the first row of each part of a sharded variable."""
    return [offset[0] for offset in variable._var_offsets]


def slices_by_part(variable: Any, slices: tf.IndexedSlices) -> list[tf.IndexedSlices]:
    """`slices` divided among the parts of a sharded variable; the row indices count from the start of each part."""
    return list(variable._decompose_indexed_slices(slices))


@contextlib.contextmanager
def without_strategy() -> Iterator[None]:
    """Within this context, in a cross-replica context, code runs as without a strategy, on variables with one copy."""

    def plain(next_creator: Any, **arguments: Any) -> tf.Variable:
        return resource_variable_ops.default_variable_creator_v2(None, **arguments)

    # An optimizer that is not built yet makes its variables here, and Keras makes them outside of the graph.
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
    """Within this context, graphs that are called run their operations one after the other, in the caller's thread.

    TensorFlow's default executor passes operations between threads even if only one thread computes. The serial
    executor rejects graphs that span devices or contain collectives, and hangs in a graph that is not `flat`.
    """
    return context.function_executor_type("SINGLE_THREADED_EXECUTOR")


def flat(graph: tf.Graph) -> bool:
    """Whether no operation in `graph` calls a function, except loops whose bodies call none.

    A nested call blocks its thread and runs in another one, and there may be no other free thread.
    """
    definition = graph.as_graph_def()
    in_functions = [node for function in definition.library.function for node in function.node_def]
    in_graph = [node for node in definition.node if node.op not in ("While", "StatelessWhile")]
    return not any(value.HasField("func") for node in in_functions + in_graph for value in node.attr.values())


def light(graph: tf.Graph) -> bool:
    """Whether `graph` has no work for oneDNN: no convolution, no pooling, no matrix product too large for a cache.

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

    By default TensorFlow waits an hour for a peer that does not register, and its heartbeats terminate a process that
    was merely suspended, before the timeout of a collective can report it.
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

    In a process that joins a TensorFlow cluster, `PreemptionWatcher` catches SIGTERM, and the process does not exit.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def abort_collectives(reason: str) -> None:
    """Makes all current and future collectives of this process fail with a `tf.errors.DeadlineExceededError`."""
    context.context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, reason)


def silent_peers(world: World, seconds: float) -> list[int]:
    """The ranks of `world` whose process does not answer or was replaced by another one.

    TensorFlow holds the GIL while it waits for an answer, so peers are queried one after the other, and this process
    sends no heartbeats meanwhile. The time limit of `seconds` is for all peers together, so some may be missing if many
    are silent; peers that have exited take no time.
    """
    silent = []
    deadline = time.monotonic() + seconds
    for rank, task in enumerate(world.tasks):
        if rank == world.rank:
            continue
        name = f"/job:{task.role}/replica:0/task:{task.index}"
        remaining_ms = int(1000 * (deadline - time.monotonic()))
        if remaining_ms <= 0:
            break
        try:
            context.context().check_collective_ops_peer_health(name, timeout_in_ms=remaining_ms)
        except tf.errors.OpError:
            silent.append(rank)
    return silent


def runtime_started() -> bool:
    """Whether TensorFlow has initialized its devices and threads, which can then no longer be configured."""
    return context.context()._initialized


def global_seed() -> int | None:
    """The seed of `tf.random.set_seed`; `None` before it is called."""
    return context.global_seed()


def eager_random_state() -> Any:
    """The state of the generator that seeds eager operations; `None` before `tf.random.set_seed`."""
    generator = getattr(context.context(), "_rng", None)
    return None if generator is None else generator.getstate()


def restore_eager_random_state(state: Any) -> None:
    """Restores an `eager_random_state`; an operation that has already drawn with one of its seeds is not reset."""
    if state is not None:
        context.context()._rng.setstate(state)


def close_pools(error: BaseException) -> None:
    """Closes the thread pool that a TensorFlow collective left open when it raised `error` outside of graphs.

    Otherwise Python prints a traceback about the pool when the process exits.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        pool = frame.f_locals.get("pool")
        if frame.f_globals is vars(cross_device_ops) and isinstance(pool, multiprocessing.pool.ThreadPool):
            pool.close()


def profiling() -> bool:
    """Whether the TensorFlow profiler is tracing this process."""
    return profiler_v2._profiler is not None


def per_replica(tensors: Sequence[tf.Tensor]) -> Any:
    """The tensors of the replicas of this process as a `PerReplica` value of TensorFlow's strategies."""
    return values.PerReplica(list(tensors))


def local_copy(variable: Any) -> Any:
    """The current replica's copy of a mirrored variable; any other variable unchanged."""
    return variable._get() if isinstance(variable, values.MirroredVariable) else variable


class ReducingExtended(one_device_strategy.OneDeviceExtended):
    """One replica per process, which communicate by `reduce`; everything else is as on one device.

    Args:
        strategy: the strategy that this extends.
        device: the device of this process's replica.
        rank: the rank of this process.
        size: the world size.
        reduce: `reduce(tensors)` returns the sums over the processes; tensors may be `tf.IndexedSlices`.
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
        flat = tf.nest.flatten(value)
        return tf.nest.pack_sequence_as(value, self._reduced(reduce_op, flat))

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        return self._reduced(reduce_op, [value])[0]

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        return self._reduced(reduce_op, [value for value, _ in value_destination_pairs])

    def _reduced(self, reduce_op: Any, flat: Sequence[Any]) -> list[Any]:
        sums = self._reduce(list(flat))
        return [total / self._size for total in sums] if reduce_op == tf.distribute.ReduceOp.MEAN else sums

    def _experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        return value_fn(tf.distribute.experimental.ValueContext(self._rank, self._size))

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return 0


@contextlib.contextmanager
def scratch_graph(scope: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """A graph that never runs; variables are made outside of it, in the context `scope()`, with their initial values.

    Yields what `variables_made_in` yields. `tf.function` would make the initial values a part of its graph, from where
    TensorFlow's strategies cannot copy them to their devices.
    """
    with tensorflow_graphs.empty_graph("scratch").as_default(), variables_made_in(scope) as outside:
        yield outside


@contextlib.contextmanager
def variables_made_in(scope: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Within this context variables are made outside of all graphs, in the context `scope()`.

    Yields a function that returns a context for running any code outside of all graphs, in `scope()`.
    """
    inside = False

    @contextlib.contextmanager
    def outside() -> Iterator[None]:
        nonlocal inside
        previous, inside = inside, True
        try:
            with tf.init_scope(), scope():
                yield
        finally:
            inside = previous

    def make(next_creator: Callable[..., Any], **options: Any) -> Any:
        if inside:
            # In a trace of `tf.function` it would be made a variable that the function initializes, whose handle lacks
            # the reference to the strategy's variable.
            return next_creator(**options | {"experimental_enable_variable_lifting": False})
        with outside():
            return tf.Variable(**options)

    with tf.variable_creator_scope(make):
        yield outside


def placeholders(spec: Any) -> Any:
    """Placeholders for the inputs of a graph, in the structure of `spec`; `None` stays `None`."""
    flat = [
        None if leaf is None else tf.compat.v1.placeholder(leaf.dtype, leaf.shape)
        for leaf in tf.nest.flatten(spec, expand_composites=True)
    ]
    return tf.nest.pack_sequence_as(spec, flat, expand_composites=True)


# The collectives that `tf.distribute.MultiWorkerMirroredStrategy` uses in its steps and when it makes a variable.
COLLECTIVES = ("all_reduce_v2", "all_gather_v2", "broadcast_send", "broadcast_recv")


@contextlib.contextmanager
def computing_gradients_in(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Within this context and thread each `tf.GradientTape.gradient` computes in the context `context()`."""
    thread = threading.get_ident()

    def call(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with context() if threading.get_ident() == thread else contextlib.nullcontext():
            return original(*arguments, **named)

    with surrounded(tf.GradientTape, "gradient", call):
        yield


def around_collectives(around: Callable[[Callable[[], tf.Tensor], Sequence[tf.Tensor]], tf.Tensor]) -> None:
    """From now on `around(make, inputs)` makes each collective operation of TensorFlow's strategies."""

    def call(original: Callable[..., tf.Tensor], first: Any, *arguments: Any, **named: Any) -> tf.Tensor:
        # The receiver of a broadcast passes a shape in place of a tensor.
        inputs = [first] if tf.is_tensor(first) else []
        return around(lambda: original(first, *arguments, **named), inputs)

    for name in COLLECTIVES:
        surround(collective_ops, name, call)


def around_new_variables(strategy: tf.distribute.Strategy, create: Callable[..., Any]) -> None:
    """From now on `create(make, **arguments)` makes each variable of `strategy`, instead of an earlier `create`.

    `make(**arguments)` makes a variable as the strategy does.
    """
    extended = strategy.extended
    make = functools.partial(type(extended)._create_variable, extended)

    def make_around(next_creator: Any, **arguments: Any) -> Any:
        if arguments.get("initial_value") is None:  # a variable that is being loaded
            return make(next_creator, **arguments)
        return create(functools.partial(make, next_creator), **arguments)

    extended._create_variable = make_around


def around_updates(strategy: tf.distribute.ParameterServerStrategy, update: Callable[..., Any]) -> None:
    """From now on `update(apply, variable, function, arguments)` updates each variable of `strategy`.

    `apply(variable, function, arguments)` calls `function(variable, *arguments)` as the strategy does, on the
    variable's device.
    """
    extended = strategy.extended
    apply = extended._update

    def update_around(variable: Any, function: Any, args: Any, kwargs: Any, group: bool) -> Any:
        return update(
            lambda part, inner, arguments: apply(part, inner, tuple(arguments), kwargs, group), variable, function, args
        )

    extended._update = update_around


_IGNORE_FUNCTIONS = 1  # the value in `ExternalStatePolicy` of TensorFlow's dataset options


def iterator_state(iterator: Any) -> bytes:
    """The state of an iterator over a `tf.data.Dataset`: its position and buffers, such as the shuffle buffer.

    State inside functions of the input pipeline, such as a random generator, is left out. The public
    `tf.train.Checkpoint` rejects pipelines with stateful functions, such as a decoder in Python.

    Raises:
        tf.errors.OpError: a part of the pipeline cannot save its state, such as a Python generator.
    """
    handle = iterator._iterator_resource
    state = tf.raw_ops.SerializeIterator(resource_handle=handle, external_state_policy=_IGNORE_FUNCTIONS)
    with tempfile.TemporaryDirectory() as folder, io.BytesIO() as packed:
        # Only a file can hold tensors of this type.
        tf.raw_ops.SaveV2(prefix=f"{folder}/it", tensor_names=["it"], shape_and_slices=[""], tensors=[state])
        with zipfile.ZipFile(packed, "w") as archive:
            for path in sorted(Path(folder).iterdir()):
                archive.write(path, path.name)
        return packed.getvalue()


def restore_iterator(iterator: Any, state: bytes) -> None:
    """Restores the `iterator_state` of another iterator over the same input pipeline.

    Raises:
        tf.errors.OpError: `state` lacks a part of the pipeline, because it is from another pipeline.
    """
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(io.BytesIO(state)) as archive:
            archive.extractall(folder)
        (restored,) = tf.raw_ops.RestoreV2(
            prefix=f"{folder}/it", tensor_names=["it"], shape_and_slices=[""], dtypes=[tf.variant]
        )
        tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=restored)


def device_iterator(dataset: tf.data.Dataset, devices: Sequence[str]) -> Any:
    """An iterator that distributes elements to `devices` in turn, each prefetched to its device.

    `get_next()` returns a list of one element per device. `tf.distribute.MirroredStrategy` reads this iterator; the
    public `tf.data.experimental.prefetch_to_device` supports only one device.
    """
    return multi_device_iterator_ops.OwnedMultiDeviceIterator(dataset, list(devices))
