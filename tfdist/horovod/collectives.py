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

from tfdist.communicators import horovod as engine
from tfdist.core.gradient_reduction import Packing, packed
from tfdist.errors import UsageError


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
def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Gives `variables`, of Keras or TensorFlow, the values that they have in the process `root_rank`."""
    hvd = engine.load()
    plain = [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]

    def send(tensors: list[Any]) -> list[Any]:
        return [
            hvd.broadcast(tensor, root_rank, name=f"tfdist.broadcast.{index}", ignore_name_scope=True)
            for index, tensor in enumerate(tensors)
        ]

    sent = packed(send, Packing(None))([tf.convert_to_tensor(variable) for variable in plain])
    for variable, value in zip(plain, sent, strict=True):
        variable.assign(value)


@tf.autograph.experimental.do_not_convert
def broadcast_(variables: Iterable[Any], root_rank: int, *arguments: Any, **options: Any) -> Any:
    """`horovod.tensorflow.broadcast_`: broadcasts `variables`, of Keras or TensorFlow, in place."""
    plain = [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]
    return engine.load().broadcast_(plain, root_rank, *arguments, **options)


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
