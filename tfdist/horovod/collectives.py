"""Collectives for values and variables over Horovod's processes.

Horovod matches the tensors of the processes by name. Names from a graph differ if the graphs of the processes differ,
for which a last batch of another size is enough, and the processes then wait for each other forever. The functions here
therefore set the names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.groups import horovod as engine
from tfdist.groups.packing import Packing, packed
from tfdist.horovod import names, operations


@tf.autograph.experimental.do_not_convert
def allreduce(value: Any, *arguments: Any, **options: Any) -> Any:
    """`horovod.tensorflow.allreduce` of a tensor, an array, a number or a list of numbers: the mean, or as `op` says.

    All processes must pass the same shape.
    """
    return engine.load().allreduce(_tensor(value), *arguments, **options)


@tf.autograph.experimental.do_not_convert
def allgather(value: Any, *arguments: Any, **options: Any) -> Any:
    """`horovod.tensorflow.allgather`: the values of all processes, joined along the first dimension."""
    return engine.load().allgather(_tensor(value), *arguments, **options)


@tf.autograph.experimental.do_not_convert
def broadcast(value: Any, root_rank: int, *arguments: Any, **options: Any) -> Any:
    """`horovod.tensorflow.broadcast`: the value of the process `root_rank`."""
    return engine.load().broadcast(_tensor(value), root_rank, *arguments, **options)


@tf.autograph.experimental.do_not_convert
def reducescatter(value: Any, *arguments: Any, **options: Any) -> Any:
    """`horovod.tensorflow.reducescatter`: the part of this process, along the first dimension, of the reduced value."""
    return engine.load().reducescatter(_tensor(value), *arguments, **options)


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = None, inplace: bool = False
) -> None:
    """Gives `variables`, of Keras or TensorFlow, the values that they have in the process `root_rank`.

    Args:
        variables: in the same order in all processes.
        root_rank: the process whose values the others receive.
        process_set: the processes that take part; `None` is all.
        inplace: has no effect.
    """
    del inplace
    _broadcast(variables, root_rank, process_set)


@tf.autograph.experimental.do_not_convert
def broadcast_(variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: Any = None) -> list[Any]:
    """As `broadcast_variables`; returns the values. `name` has no effect."""
    del name
    return _broadcast(variables, root_rank, process_set)


def _broadcast(variables: Iterable[Any], root_rank: int, process_set: Any) -> list[Any]:
    hvd = engine.load()
    plain = [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]
    name = names.next_name("tfdist.broadcast")
    options = {"process_set": process_set or hvd.global_process_set, "ignore_name_scope": True}

    def send(tensors: list[Any]) -> list[Any]:
        return [
            hvd.broadcast(tensor, root_rank, name=f"{name}.{index}", **options) for index, tensor in enumerate(tensors)
        ]

    with operations.named("a broadcast of variables"):
        sent = packed(send, Packing(None))([tf.convert_to_tensor(variable) for variable in plain])
    for variable, value in zip(plain, sent, strict=True):
        variable.assign(value)
    return sent


@tf.autograph.experimental.do_not_convert
def broadcast_global_variables(root_rank: int) -> None:
    """Refused: TensorFlow 2 has no global variables.

    Raises:
        UsageError: always; the message says what to call instead.
    """
    raise UsageError(
        f"`broadcast_global_variables({root_rank})` is of TensorFlow 1: TensorFlow 2 has no global variables",
        "call `hvd.broadcast_variables(model.variables, root_rank)`, and the same for `optimizer.variables`",
    )


def _tensor(value: Any) -> Any:
    return value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)
