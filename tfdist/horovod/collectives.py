"""Collectives for values and variables over Horovod's processes.

Horovod matches the tensors of the processes by name. If the graphs of the processes differ, for example because of a
smaller last batch, so do the names from the graphs, and the processes wait for each other forever. Therefore, the
functions for variables set the names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.groups import horovod as engine
from tfdist.groups.packing import Packing, packed
from tfdist.horovod import operations


@tf.autograph.experimental.do_not_convert
def allreduce(value: Any, *arguments: Any, **options: Any) -> Any:
    """Calls `horovod.tensorflow.allreduce` with a tensor, an array, a number or a list of numbers.

    It returns the mean, or the reduction `op`. All processes must pass the same shape.
    """
    return engine.load().allreduce(_tensor(value), *arguments, **options)


@tf.autograph.experimental.do_not_convert
def allgather(value: Any, *arguments: Any, **options: Any) -> Any:
    """Calls `horovod.tensorflow.allgather`, which concatenates the values of all processes along the first axis."""
    return engine.load().allgather(_tensor(value), *arguments, **options)


@tf.autograph.experimental.do_not_convert
def broadcast(value: Any, root_rank: int, *arguments: Any, **options: Any) -> Any:
    """Calls `horovod.tensorflow.broadcast`, which returns the value of the process `root_rank`."""
    return engine.load().broadcast(_tensor(value), root_rank, *arguments, **options)


@tf.autograph.experimental.do_not_convert
def reducescatter(value: Any, *arguments: Any, **options: Any) -> Any:
    """Calls `horovod.tensorflow.reducescatter`, which returns this process's part, by rows, of the reduced value."""
    return engine.load().reducescatter(_tensor(value), *arguments, **options)


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = None, inplace: bool = False
) -> None:
    """Sets variables of Keras or TensorFlow to their values in the process `root_rank`.

    Args:
        variables: the variables, in the same order in all processes.
        root_rank: the process whose values the others receive.
        process_set: the processes that take part; `None` means all.
        inplace: has no effect.
    """
    del inplace
    broadcast_(variables, root_rank, process_set=process_set)


@tf.autograph.experimental.do_not_convert
def broadcast_(variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: Any = None) -> list[Any]:
    """Does the same as `broadcast_variables`, and returns the values. `name` has no effect."""
    del name
    hvd = engine.load()
    plain = [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]
    prefix = operations.next_name("tfdist.broadcast")
    options = {"process_set": process_set or hvd.global_process_set, "ignore_name_scope": True}

    def send(tensors: list[Any]) -> list[Any]:
        named = ((f"{prefix}.{index}", tensor) for index, tensor in enumerate(tensors))
        return [hvd.broadcast(tensor, root_rank, name=name, **options) for name, tensor in named]

    with operations.named("a broadcast of variables"):
        sent = packed(send, Packing(None))([tf.convert_to_tensor(variable) for variable in plain])
    for variable, value in zip(plain, sent, strict=True):
        variable.assign(value)
    return sent


@tf.autograph.experimental.do_not_convert
def broadcast_global_variables(root_rank: int) -> None:
    """Raises an error, because TensorFlow 2 has no global variables.

    Raises:
        UsageError: always; the message says what to call instead.
    """
    raise UsageError(
        f"`broadcast_global_variables({root_rank})` needs TensorFlow 1: TensorFlow 2 has no global variables",
        "call `hvd.broadcast_variables(model.variables, root_rank)`, and the same for `optimizer.variables`",
    )


def _tensor(value: Any) -> Any:
    return value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)
