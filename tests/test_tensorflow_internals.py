"""Fails when TensorFlow changes what `tfdist.internals.tensorflow` uses."""

import copy
import gc
import inspect
import multiprocessing.pool
import signal
import subprocess
import sys
import threading
import traceback
import types

import keras
import pytest
import tensorflow as tf
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    cross_device_ops,
    cross_device_utils,
    distribute_lib,
    one_device_strategy,
    parameter_server_strategy_v2,
    values,
)
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.eager import context
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import collective_ops

from tests.graphs import collected_graphs
from tfdist.internals import keras as keras_internals
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals import tensorflow_coordinator, tensorflow_variables


def test_the_version_of_tensorflow_is_the_one_that_was_read():
    assert tf.__version__ == tensorflow_internals.SEEN_IN, "read tfdist/internals/tensorflow*.py against it first"


def test_the_functions_that_are_replaced_or_called_exist():
    assert callable(values.apply_aggregation_replica_context)
    assert callable(distribute_lib._push_per_thread_mode) and callable(distribute_lib._pop_per_thread_mode)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert callable(strategy.extended._use_merge_call)
    # The modules that make collectives look them up there at each call.
    assert cross_device_utils.collective_ops is collective_all_reduce_strategy.collective_ops is collective_ops
    assert all(callable(getattr(collective_ops, name)) for name in tensorflow_internals.COLLECTIVES)


def test_sigterm_does_what_it_did_before():
    def noted(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, noted)
    try:
        with tensorflow_internals.sigterm_as_it_was():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is noted
    finally:
        signal.signal(signal.SIGTERM, before)


def test_there_is_no_strategy_inside_without_strategy():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        assert tf.distribute.has_strategy()
        with tensorflow_internals.without_strategy():
            assert not tf.distribute.has_strategy()
            assert not tf.distribute.in_cross_replica_context()
        assert tf.distribute.has_strategy()


def test_what_a_sharded_variable_is_made_of_and_who_makes_it_exists():
    extended = parameter_server_strategy_v2.ParameterServerStrategyV2Extended
    assert list(inspect.signature(extended._create_variable).parameters) == ["self", "next_creator", "kwargs"]
    assert list(inspect.signature(extended._update).parameters) == ["self", "var", "fn", "args", "kwargs", "group"]
    sharded = tensorflow_internals.ShardedVariable([tf.Variable([1.0]), tf.Variable([2.0])])
    assert sharded._var_offsets == [[0], [1]]
    slices = sharded._decompose_indexed_slices(tf.IndexedSlices(tf.constant([3.0]), tf.constant([1])))
    assert [part.indices.numpy().tolist() for part in slices] == [[], [0]]


def test_a_function_that_is_garbage_can_stay_registered(monkeypatch):
    removed = []
    monkeypatch.setattr(type(context.context()), "remove_function", lambda self, name: removed.append(name))
    tf.function(lambda: tf.constant(1)).get_concrete_function()
    gc.collect()
    assert removed  # so this is the method by which TensorFlow removes functions
    removed.clear()
    tensorflow_coordinator.keep_functions()
    try:
        tf.function(lambda: tf.constant(1)).get_concrete_function()
        gc.collect()
        assert not removed
    finally:
        del context.context().remove_function


def test_a_graph_can_call_a_function_that_its_process_serves_by_name():
    tensorflow_coordinator.serve_function("doubled", lambda numbers: [2 * numbers])

    @tf.function
    def doubled(numbers):
        return tensorflow_coordinator.call_served("doubled", [numbers], [tf.TensorSpec([2], tf.int64)])

    assert doubled(tf.constant([3, 4], tf.int64))[0].numpy().tolist() == [6, 8]


def test_a_variable_of_a_process_is_found_by_name_and_stands_for_another_with_keras_optimizers():
    like, optimizer = keras.Variable([1.0, 2.0]), keras.optimizers.SGD(1.0)
    optimizer.build([like])

    @tf.function
    def step():
        own = tensorflow_coordinator.variable_of_process("test.own", [2], tf.float32, stands_for=like.value)
        known = tf.raw_ops.VarIsInitializedOp(resource=own.handle)
        tf.cond(known, lambda: tf.constant(True), lambda: own.assign([3.0, 4.0]) is not None)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(own**2)
        own.assign_sub(tape.gradient(loss, own) / 4)
        return own.read_value(), keras_internals.variable_index(optimizer, own)

    assert [step()[0].numpy().tolist() for _ in range(2)] == [[1.5, 2.0], [0.75, 1.0]]
    assert int(step()[1]) == 0


def test_a_variable_of_an_execution_begins_anew_and_tells_whether_a_step_changes_it():
    changed = []

    @tf.function
    def steps(value):
        own = tensorflow_coordinator.variable_of_execution(value)
        read = tensorflow_coordinator.variable_of_execution(value)
        changed.append([tensorflow_coordinator.is_changed(one) for one in (own, read)])
        assert not tensorflow_coordinator.is_computed_from(value, [own, read])

        def body(number):
            new = read + 1.0
            own.assign_add(new)
            assert tensorflow_coordinator.is_computed_from(tf.square(new), [own, read])
            assert not tensorflow_coordinator.is_computed_from(tf.square(new), [own])
            changed.append([tensorflow_coordinator.is_changed(one) for one in (own, read)])
            return number + 1

        tf.while_loop(lambda number: number < 3, body, [0])
        return own.read_value()

    assert [float(steps(tf.constant(value))) for value in (0.0, 1.0, 0.0)] == [3.0, 7.0, 3.0]
    assert changed == [[False, False], [True, False]]


def test_what_tells_that_all_closures_have_ended_exists():
    assert "TF_COORDINATOR_IGNORE_TRANSIENT_PS_FAILURES" in inspect.getsource(cluster_coordinator.Cluster)
    queue = cluster_coordinator._CoordinatedClosureQueue()
    coordinator = types.SimpleNamespace(_cluster=types.SimpleNamespace(closure_queue=queue))
    queue.put(cluster_coordinator.Closure(lambda: None, None))
    assert not tensorflow_coordinator.wait_for_closures(coordinator, 0)
    queue.get()
    assert not tensorflow_coordinator.wait_for_closures(coordinator, 0)
    threading.Timer(0.1, queue.mark_finished).start()
    assert tensorflow_coordinator.wait_for_closures(coordinator, 60)
    queue.stop()


def test_a_runtime_that_has_computed_is_known_to_have_started():
    tf.constant(1) + tf.constant(1)
    assert tensorflow_internals.runtime_started()


def test_a_serial_call_runs_a_graph_that_was_traced_for_it_and_no_other():
    def until_four(value):
        return tf.while_loop(lambda v: v < 4.0, lambda v: [v * 2.0], [value])[0]

    with tensorflow_internals.serial_calls():
        assert float(tf.function(until_four, autograph=False)(tf.constant(1.0))) == 4.0
    usual = tf.function(until_four, autograph=False).get_concrete_function(tf.constant(1.0))
    with tensorflow_internals.serial_calls(), pytest.raises(tf.errors.FailedPreconditionError):
        usual(tf.constant(1.0))


def test_a_graph_is_flat_when_nothing_in_it_but_a_loop_calls_a_function():
    inner = tf.function(lambda value: value + 1.0, autograph=False)
    steps = {
        "plain": (lambda value: value + 1.0, True),
        "function": (inner, False),
        "condition": (lambda value: tf.cond(value > 1.0, lambda: value, lambda: -value), False),
        "loop": (lambda value: tf.while_loop(lambda v: v < 9.0, lambda v: [v + 1.0], [value])[0], False),
    }
    for name, (step, expected) in steps.items():
        looped = tf.function(lambda v, step=step: tf.while_loop(lambda v: v < 5.0, lambda v: [step(v)], [v]))
        graph = looped.get_concrete_function(tf.constant(0.0)).graph
        assert tensorflow_internals.flat(graph) is expected, name


def test_a_graph_is_light_without_convolutions_pooling_and_large_products_also_in_a_loop():
    steps = {
        "product": ([None, 784], lambda x: x @ tf.ones([784, 128]), True),
        "large product": ([None, 784], lambda x: x @ tf.ones([784, 200]), False),
        "many examples": ([300, 784], lambda x: (x + 1.0) @ tf.ones([784, 2]), False),
        "large table": ([None], lambda x: tf.gather(tf.ones([1 << 20, 2]), tf.cast(x, tf.int32)), True),
        "convolution": ([None, 8, 8, 1], lambda x: tf.nn.conv2d(x, tf.ones([3, 3, 1, 4]), 1, "SAME"), False),
        "pooling": ([None, 8, 8, 1], lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"), False),
    }
    for name, (shape, step, expected) in steps.items():

        def looped(x, step=step):
            return tf.while_loop(lambda total: total < 5.0, lambda total: [total + tf.reduce_sum(step(x))], [0.0])

        for function in (step, looped):
            graph = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec(shape)).graph
            assert tensorflow_internals.light(graph) is expected, name


def test_the_thread_pool_of_a_collective_that_failed_is_closed():
    def cut(*arguments):
        raise tf.errors.UnavailableError(None, None, "the link is cut")

    one_device = types.SimpleNamespace(_devices=["CPU:0"], _lock=threading.Lock(), _all_reduce=cut)
    value = types.SimpleNamespace(values=[tf.constant(1.0)])
    with pytest.raises(tf.errors.UnavailableError) as caught:
        cross_device_ops.CollectiveAllReduce._all_reduce_per_replica_values(one_device, "SUM", [value], None)
    (pool,) = {
        local
        for frame, _ in traceback.walk_tb(caught.value.__traceback__)
        for local in frame.f_locals.values()
        if isinstance(local, multiprocessing.pool.ThreadPool)
    }
    assert pool._state == multiprocessing.pool.RUN
    tensorflow_internals.close_pools(caught.value)
    assert pool._state == multiprocessing.pool.CLOSE


def test_a_trace_that_is_being_taken_is_known(tmp_path):
    assert not tensorflow_internals.profiling()
    tf.profiler.experimental.start(str(tmp_path))
    assert tensorflow_internals.profiling()
    tf.profiler.experimental.stop()
    assert not tensorflow_internals.profiling()


def test_a_strategy_of_one_device_can_be_taught_to_meet_others():
    overridden = [name for name in vars(tensorflow_internals.ReducingExtended) if name not in ("_reduced",)]
    inherited = one_device_strategy.OneDeviceExtended
    assert [name for name in overridden if not name.startswith("__") and not hasattr(inherited, name)] == []


def test_a_variable_made_in_a_scratch_graph_is_made_outside_of_it_by_the_strategy():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    spec = (tf.TensorSpec([None, 2]), None, {"rows": tf.RaggedTensorSpec([None, None], tf.int32)})
    with tensorflow_internals.scratch_graph(strategy.scope) as outside:
        x, nothing, rows = tensorflow_internals.placeholders(spec)
        assert x.shape.as_list() == [None, 2]
        assert nothing is None
        assert isinstance(rows["rows"], tf.RaggedTensor)
        variables = [tf.Variable([3.0]), keras.Variable("ones", shape=(1,))._value]
        with outside():
            assert tf.executing_eagerly()
            variables.append(tf.Variable([4.0]))
        variables[0].assign([5.0])  # an operation of the graph, which nobody runs
        tf.matmul(x, x, transpose_b=True)
    assert [float(variable.read_value()[0]) for variable in variables] == [3.0, 1.0, 4.0]
    assert all(len(strategy.experimental_local_results(variable)) == 2 for variable in variables)


def test_the_global_seed_is_what_was_set_last():
    before = tensorflow_internals.global_seed()
    try:
        tf.random.set_seed(17)
        assert tensorflow_internals.global_seed() == 17
    finally:
        tf.random.set_seed(before)


def test_the_seeds_of_eager_draws_go_on_where_they_stood():
    tf.random.set_seed(3)
    first = random_seed.get_seed(None)
    state = tensorflow_internals.eager_random_state()
    taken = [random_seed.get_seed(None) for _ in range(2)]
    tensorflow_internals.restore_eager_random_state(state)
    assert [random_seed.get_seed(None) for _ in range(2)] == taken
    assert first not in taken


def test_an_iterator_goes_on_where_another_one_stood():
    def shuffled():
        numbers = tf.data.Dataset.range(9).map(lambda n: tf.numpy_function(abs, [n], tf.int64))
        return numbers.shuffle(9, seed=1)

    first, second = iter(shuffled()), iter(shuffled())
    for _ in range(4):
        next(first)
    state = tensorflow_internals.iterator_state(first)
    tensorflow_internals.restore_iterator(second, state)
    assert [int(n) for n in second] == [int(n) for n in first]
    signature = tf.TensorSpec([], tf.int32)
    generated = iter(tf.data.Dataset.from_generator(lambda: iter(range(3)), output_signature=signature))
    next(generated)
    with pytest.raises(tf.errors.OpError):
        tensorflow_internals.iterator_state(generated)
    plain = iter(tf.data.Dataset.range(9))
    with pytest.raises(tf.errors.OpError):
        tensorflow_internals.restore_iterator(iter(shuffled()), tensorflow_internals.iterator_state(plain))


def test_elements_go_to_devices_in_turn():
    elements = tensorflow_internals.device_iterator(tf.data.Dataset.range(4), ["CPU:1", "CPU:2"])
    taken = [elements.get_next(), elements.get_next()]
    assert [[int(one) for one in pair] for pair in taken] == [[0, 1], [2, 3]]
    assert [one.device[-5:] for one in taken[0]] == ["CPU:1", "CPU:2"]


@pytest.mark.thorough
def test_the_graphs_that_functions_run_are_collected_one_per_device():
    @tf.function
    def across():
        with tf.device("CPU:1"):
            one = tf.random.uniform([])
        with tf.device("CPU:2"):
            return tf.sin(one)

    tf.summary.trace_on(graph=True)
    tf.function(across.python_function)()  # collected for TensorBoard, not for us
    with collected_graphs() as graphs:
        across()
    tf.summary.trace_off()
    sent = [node.attr["recv_device"].s for graph in graphs for node in graph.node if node.op == "_Send"]
    assert [device[-5:] for device in sent] == [b"CPU:2"]


def test_what_is_put_around_gradients_functions_assignments_and_draws_has_the_parameters_that_were_seen():
    def parameters(function):
        return list(inspect.signature(inspect.unwrap(function)).parameters)

    assert parameters(tf.GradientTape.gradient) == [
        "self",
        "target",
        "sources",
        "output_gradients",
        "unconnected_gradients",
    ]


MANY_SILENT = """
import os, socket, time
from tfdist.jobs import ports
from tfdist.jobs.tf_config import Task
from tfdist.jobs.world import World
from tfdist.internals import tensorflow as internals
import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context

listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]  # of which none ever answers
own = listeners[0].getsockname()[1]
listeners[0].close()
addresses = [f"127.0.0.1:{port}" for port in [own, *(each.getsockname()[1] for each in listeners[1:])]]
cluster = tf.train.ClusterSpec({"worker": addresses}).as_cluster_def()
server = tensorflow_server_pb2.ServerDef(cluster=cluster, job_name="worker", task_index=0, protocol="grpc")
context.context().enable_collective_ops(server)
context.context().ensure_initialized()
tasks = tuple(Task("worker", rank, address) for rank, address in enumerate(addresses))
began = time.monotonic()
silent = internals.silent_peers(World(0, 5, 0, 5, "TF_CONFIG", tasks), seconds=1.0)
print(len(silent) >= 1, time.monotonic() - began < 1.9, flush=True)
os._exit(0)
"""


@pytest.mark.thorough
def test_many_silent_processes_are_waited_for_together_and_not_each_in_turn():
    done = subprocess.run([sys.executable, "-c", MANY_SILENT], check=False, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["True", "True"], done.stderr[-2000:]


def test_variables_with_copies_that_convert_to_numbers_are_in_all_else_those_of_tensorflow():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    sum_of_copies = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
    with strategy.scope(), tensorflow_variables.converting_to_numbers():
        variable, state = tf.Variable(2.5), tf.Variable(3.0, **sum_of_copies)
        copied = copy.deepcopy(variable)
    assert type(variable).__name__ == "MirroredVariable" and isinstance(variable, values.MirroredVariable)
    assert isinstance(state, values.SyncOnReadVariable)
    strategy.run(tf.function(lambda: (variable.assign(4.0), state.assign_add(1.0))))
    assert (float(variable), int(variable), complex(variable), float(copied)) == (4.0, 4, 4.0, 2.5)
    assert float(state) == 2 * (3.0 + 1.0)
    assert [float(one) for one in strategy.experimental_local_results(variable)] == [4.0, 4.0]
    assert float(variable + 1) == 5.0
    with pytest.raises(TypeError, match="only"), strategy.scope(), tensorflow_variables.converting_to_numbers():
        float(tf.Variable([1.0, 2.0]))


def test_functions_that_graphs_call_have_traces_of_their_own_in_a_context():
    traced = []

    @tf.function
    def inner(x):
        traced.append(x)
        return x + 1

    def in_a_graph():
        return tf.function(lambda x: 2 * inner(x)).get_concrete_function(tf.TensorSpec(()))

    in_a_graph()
    with tensorflow_internals.own_traces():
        assert in_a_graph()(tf.constant(1.0)) == 4 and len(traced) == 2
        in_a_graph()
        assert len(traced) == 2
        with tensorflow_internals.own_traces():
            in_a_graph()
        assert len(traced) == 3
    in_a_graph()
    inner(tf.constant(1.0))
    assert len(traced) == 3


def test_variables_that_a_function_makes_in_a_scratch_graph_are_known_by_the_handles_of_their_copies():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    made = []

    @tf.function
    def step(x):
        if not made:
            made.append(tf.Variable([1.0, 2.0], trainable=False))
        return made[0] * x

    with tensorflow_internals.scratch_graph(strategy.scope):
        step(tf.compat.v1.placeholder(tf.float32, ()))
    for part in tensorflow_variables.copies(made[0]):
        assert tensorflow_variables.container(part.handle) is made[0]
