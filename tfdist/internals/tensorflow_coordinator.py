"""The private parts of TensorFlow's coordinator of parameter servers, and of functions that another process calls.

Written for TensorFlow 2.21.0, as `tfdist.internals.tensorflow`; `tests/test_tensorflow_internals.py` fails when
TensorFlow changes a part that is used.
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

from tfdist.internals import tensorflow_functions

# So many steps of a job may fail by a broken connection to a server before the job ends. TensorFlow's 3 are those of
# one reset of a few connections; a server that is gone makes 100 in no time.
BROKEN_CONNECTIONS = 100


def coordinator(strategy: tf.distribute.ParameterServerStrategy) -> tf.distribute.coordinator.ClusterCoordinator:
    """The coordinator of a strategy, kept until this process ends.

    Deleting it waits for a thread that may itself wait for a worker that never comes back.
    """
    os.environ.setdefault("TF_COORDINATOR_IGNORE_TRANSIENT_PS_FAILURES", str(BROKEN_CONNECTIONS))
    found = tf.distribute.coordinator.ClusterCoordinator(strategy)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))
    return found


def on_each_worker(coordinator: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """The results of `function` on each worker, to pass to scheduled functions; made again when a worker comes back."""
    return coordinator._create_per_worker_resources(function, args=arguments)


def answers_of_workers(per_worker: Any, seconds: float) -> list[Any] | None:
    """The results of `on_each_worker`, as NumPy arrays; `None` if a worker has none within `seconds`, or failed."""
    until = time.monotonic() + seconds
    if not all(finished(value, max(0.0, until - time.monotonic())) for value in per_worker._values):
        return None
    try:
        return [value.fetch() for value in per_worker._values]
    except tf.errors.OpError:
        return None


def serve_function(name: str, function: Callable[..., Any]) -> None:
    """Lets graphs of other processes call `function`, of NumPy arrays, in this process by `call_served`."""
    _served.append(function)  # TensorFlow's registry keeps none alive
    script_ops._py_funcs._funcs[name] = function


_served: list[Callable[..., Any]] = []


def call_served(name: str, arguments: Sequence[Any], specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """In a graph: the results, of these specs, of a function that the process of the current device serves."""
    inputs = [tf.convert_to_tensor(argument) for argument in arguments]
    results = gen_script_ops.py_func(inputs, name, [spec.dtype for spec in specs])
    return [tf.ensure_shape(result, spec.shape) for result, spec in zip(results, specs, strict=True)]


def finished(remote_value: Any, seconds: float) -> bool:
    """Whether the scheduled function of `remote_value` has ended, or ends within `seconds`."""
    return remote_value._status_available_event.wait(seconds)


def wait_for_closures(coordinator: Any, seconds: float) -> bool:
    """Waits until all scheduled functions have ended, for at most `seconds`; whether they have.

    The thread that ends the last one wakes this one. The public `join` waits without limit.
    """
    queue = coordinator._cluster.closure_queue
    with queue._queue_lock:
        return queue._stop_waiting_condition.wait_for(
            lambda: queue._queue.empty() and not queue.inflight_closure_count, seconds
        )


def variable_of_process(name: str, shape: Sequence[int], dtype: tf.DType, stands_for: Any = None) -> Any:
    """In a graph: the variable called `name` of the process that runs it, which outlasts the graph.

    It has no value before one is assigned.

    Args:
        name: of which a process has one variable for each device.
        shape: of its values.
        dtype: of its values.
        stands_for: a variable whose slots Keras' optimizers find for it.
    """
    handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name)
    found = resource_variable_ops.VariableSpec(tf.TensorShape(shape), dtype, trainable=True)._from_components([handle])
    if stands_for is not None:
        whole = getattr(stands_for, "_distributed_container", lambda: stands_for)()
        found._unique_id = whole._unique_id
    return found


def variable_of_execution(value: Any) -> Any:
    """In a graph: a variable that begins with `value` and belongs to one execution of the graph alone."""
    begun = tf.convert_to_tensor(value)
    handle = tf.raw_ops.VarHandleOp(dtype=begun.dtype, shape=begun.shape, shared_name=context.anonymous_name())
    made = resource_variable_ops.VariableSpec(begun.shape, begun.dtype, trainable=False)._from_components([handle])
    made.assign(begun)
    return made


def is_changed(variable: Any) -> bool:
    """Whether the present graph does more with a `variable_of_execution` than to begin and to read it."""
    outside, inside = tensorflow_functions.captured(tf.compat.v1.get_default_graph())
    here = [placeholder for tensor, placeholder in zip(outside, inside, strict=True) if tensor is variable.handle]
    uses = [one for tensor in here or [variable.handle] for one in tensor.consumers() if one.type != "ReadVariableOp"]
    return len(uses) > (0 if here else 1)  # where it was made, one of them has begun it


def is_computed_from(tensor: tf.Tensor, variables: Sequence[Any]) -> bool:
    """Whether a tensor of the present graph is computed from what any of `variables_of_execution` hold."""
    outside, inside = tensorflow_functions.captured(tf.compat.v1.get_default_graph())
    held = {id(variable.handle) for variable in variables}
    handles = {variable.handle.name for variable in variables if variable.handle.graph is tensor.graph}
    handles |= {placeholder.name for one, placeholder in zip(outside, inside, strict=True) if id(one) in held}
    waiting, seen = [tensor], {tensor.name}
    while waiting:
        new = [one for one in waiting.pop().op.inputs if one.name not in seen]
        if any(one.name in handles for one in new):
            return True
        seen.update(one.name for one in new)
        waiting += new
    return False
