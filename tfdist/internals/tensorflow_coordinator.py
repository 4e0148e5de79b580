"""The private parts of TensorFlow's parameter-server coordinator, and of functions that other processes call.

Written for TensorFlow 2.21.0; `tests/test_tensorflow_internals.py` fails when TensorFlow changes a part that is used.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_script_ops, resource_variable_ops, script_ops

from tfdist.internals import tensorflow_graphs

# The number of steps of a job that may fail by a broken connection to a server before the job ends. A single reset of a
# few connections exceeds TensorFlow's default of 3; a server that has exited causes 100 failures at once.
BROKEN_CONNECTIONS = 100


def coordinator(strategy: tf.distribute.ParameterServerStrategy) -> tf.distribute.coordinator.ClusterCoordinator:
    """The coordinator of a strategy, which is never deleted.

    Deleting it would wait for a thread that may itself wait for a worker that never returns.
    """
    os.environ.setdefault("TF_COORDINATOR_IGNORE_TRANSIENT_PS_FAILURES", str(BROKEN_CONNECTIONS))
    result = tf.distribute.coordinator.ClusterCoordinator(strategy)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(result))
    return result


def keep_functions() -> None:
    """From now on, functions stay registered in all processes of the job until this process ends.

    When a function is garbage, TensorFlow removes it from all processes, and waits for their answers without a limit
    while it holds Python's global interpreter lock: if a process is stopped, no thread of this one runs any more.
    """
    context.context().remove_function = lambda name: None


def on_each_worker(coordinator: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """The results of `function` on each worker, to pass to scheduled functions; computed again if a worker restarts."""
    return coordinator._create_per_worker_resources(function, args=arguments)


def answers_of_workers(per_worker: Any, seconds: float) -> list[Any] | None:
    """The results of `on_each_worker` as NumPy arrays; `None` if a worker fails or takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    if not all(finished(value, max(0.0, deadline - time.monotonic())) for value in per_worker._values):
        return None
    try:
        return [value.fetch() for value in per_worker._values]
    except tf.errors.OpError:
        return None


def serve_function(name: str, function: Callable[..., Any]) -> None:
    """Lets graphs of other processes call `function` in this process, on NumPy arrays, by `call_served`."""
    _served.append(function)  # TensorFlow's registry has weak references only
    script_ops._py_funcs._funcs[name] = function


_served: list[Callable[..., Any]] = []


def call_served(name: str, arguments: Sequence[Any], specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """Calls, in a graph, a function that the process of the current device serves; `specs` are those of its results."""
    inputs = [tf.convert_to_tensor(argument) for argument in arguments]
    results = gen_script_ops.py_func(inputs, name, [spec.dtype for spec in specs])
    return [tf.ensure_shape(result, spec.shape) for result, spec in zip(results, specs, strict=True)]


def finished(remote_value: Any, seconds: float) -> bool:
    """Waits up to `seconds` for the scheduled function of `remote_value`; returns whether it has finished."""
    return remote_value._status_available_event.wait(seconds)


def wait_for_closures(coordinator: Any, seconds: float) -> bool:
    """Waits up to `seconds` for all scheduled functions; returns whether they have finished.

    The public `join` has no time limit.
    """
    queue = coordinator._cluster.closure_queue
    with queue._queue_lock:
        return queue._stop_waiting_condition.wait_for(
            lambda: queue._queue.empty() and not queue.inflight_closure_count, seconds
        )


def variable_of_process(name: str, shape: Sequence[int], dtype: tf.DType, stands_for: Any = None) -> Any:
    """The variable called `name` of the process that runs the current graph; it outlives the graph.

    It has no value until one is assigned.

    Args:
        name: the name; a process has one variable of this name per device.
        shape: of the variable.
        dtype: of the variable.
        stands_for: a variable whose slots Keras' optimizers use for it.
    """
    handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name)
    variable = resource_variable_ops.VariableSpec(tf.TensorShape(shape), dtype, trainable=True)._from_components(
        [handle]
    )
    if stands_for is not None:
        variable_with_slots = getattr(stands_for, "_distributed_container", lambda: stands_for)()
        variable._unique_id = variable_with_slots._unique_id
    return variable


def variable_of_execution(value: Any) -> Any:
    """A variable with the initial `value` that lives for one execution of the current graph."""
    initial = tf.convert_to_tensor(value)
    handle = tf.raw_ops.VarHandleOp(dtype=initial.dtype, shape=initial.shape, shared_name=context.anonymous_name())
    spec = resource_variable_ops.VariableSpec(initial.shape, initial.dtype, trainable=False)
    variable = spec._from_components([handle])
    variable.assign(initial)
    return variable


def is_changed(variable: Any) -> bool:
    """Whether the current graph does more with a `variable_of_execution` than to initialize and read it."""
    outside, inside = tensorflow_graphs.captured(tf.compat.v1.get_default_graph())
    captured = [placeholder for tensor, placeholder in zip(outside, inside, strict=True) if tensor is variable.handle]
    consumers = [user for handle in captured or [variable.handle] for user in handle.consumers()]
    uses = [user for user in consumers if user.type != "ReadVariableOp"]
    return len(uses) > (0 if captured else 1)  # the graph that made it has initialized it


def is_computed_from(tensor: tf.Tensor, variables: Sequence[Any]) -> bool:
    """Whether a tensor of the current graph depends on any of these `variable_of_execution`s."""
    outside, inside = tensorflow_graphs.captured(tf.compat.v1.get_default_graph())
    ids = {id(variable.handle) for variable in variables}
    handles = {variable.handle.name for variable in variables if variable.handle.graph is tensor.graph}
    handles |= {placeholder.name for outer, placeholder in zip(outside, inside, strict=True) if id(outer) in ids}
    reached = tensorflow_graphs.ancestors([tensor.op], lambda operation: [source.op for source in operation.inputs])
    return any(source.name in handles for operation in reached.values() for source in operation.inputs)
