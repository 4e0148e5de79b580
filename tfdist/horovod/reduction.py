"""The reduction of gradients over Horovod's processes, for optimizers and for tapes.

A process' gradient is that of the mean over its own batch. With n examples of N in all processes, the gradient of the
joined batch is the sum over the processes of n / N times theirs. Where all batches have the same size that is the plain
mean over the processes, which is Horovod's own rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.errors import UnknownNameError, UsageError
from tfdist.groups import horovod as engine
from tfdist.groups import opaque
from tfdist.groups import packing as gradient_reduction

EXAMPLES, PROCESSES = "examples", "processes"
# Arguments of Horovod's own functions that are not supported here, and what to do instead.
LEFT_OUT = {
    "num_groups": "leave it out: all gradients of one dtype are sent as one buffer",
    "groups": "leave it out: all gradients of one dtype are sent as one buffer",
    "process_set": "reduce by hand with `hvd.allreduce(..., process_set=...)`",
    "scale_local_gradients": "leave it out: no gradient stays local",
}


@dataclass(frozen=True)
class Reduction:
    """Reduces gradients over all processes, as the arguments of `DistributedOptimizer` say."""

    op: Any
    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = None
    sparse_as_dense: bool = False
    predivide_factor: float = 1.0
    average_over: str = EXAMPLES

    @property
    def weighs(self) -> bool:
        """Whether the gradients of processes count by their numbers of examples, where these are known."""
        return self.average_over == EXAMPLES and self.op == engine.load().Average

    def of_all(self, gradients: Sequence[Any], name: str, factor: tf.Tensor | None = None) -> list[Any]:
        """The reduced gradients, of which some may be `None`.

        Args:
            gradients: those of this process.
            name: of what is sent, the same in all processes.
            factor: what the gradients of this process are multiplied by first, see `factor`.
        """

        def send(tensors: list[Any]) -> list[Any]:
            return [self._reduced(times(one, factor), f"{name}.{index}") for index, one in enumerate(tensors)]

        reduce = gradient_reduction.without_none(gradient_reduction.packed(send, gradient_reduction.Packing(None)))
        return reduce(dense(gradients) if self.sparse_as_dense else list(gradients))

    def _reduced(self, tensor: Any, name: str) -> Any:
        if isinstance(tensor, tf.IndexedSlices):
            with tf.device(self.device_sparse):
                return _gather_rows(tensor, self.op, name)
        hvd = engine.load()
        return hvd.allreduce(
            opaque(tensor),
            op=self.op,
            device_dense=self.device_dense,
            compression=self.compression or hvd.Compression.none,
            prescale_factor=1.0 / self.predivide_factor,
            postscale_factor=self.predivide_factor,
            name=name,
            ignore_name_scope=True,
        )


def checked(
    made_by: str,
    op: Any,
    gradient_predivide_factor: float,
    average_over: str,
    others: Mapping[str, Any],
    **options: Any,
) -> Reduction:
    """The reduction that arguments of Horovod's own functions describe.

    Args:
        made_by: the function, in messages.
        op: `hvd.Average`, also for `None`, or `hvd.Sum`.
        gradient_predivide_factor: divide by it before the sum, and multiply after.
        average_over: see `Reduction`.
        others: arguments that are not supported, unless they have their default values.
        options: see `Reduction`.

    Raises:
        UsageError: an argument cannot work.
    """
    hvd = engine.load()
    op = hvd.Average if op is None else op
    defaults = {"num_groups": 0, "groups": None, "process_set": hvd.global_process_set, "scale_local_gradients": True}
    for other, value in others.items():
        if other not in LEFT_OUT:
            raise TypeError(f"{made_by}() got an unexpected keyword argument '{other}'")
        if value is not defaults[other]:
            raise UsageError(f"{made_by} for Keras 3 has no `{other}`", LEFT_OUT[other])
    if op not in (hvd.Average, hvd.Sum):
        raise UsageError(
            f"{made_by} can average or sum gradients. Received: op `{op}`", "pass `op=hvd.Average` or `op=hvd.Sum`"
        )
    if gradient_predivide_factor != 1.0 and op != hvd.Average:
        raise UsageError(
            f"`gradient_predivide_factor` is {gradient_predivide_factor:g}, but the gradients are not averaged",
            "leave it out, or pass `op=hvd.Average`",
        )
    if average_over not in (EXAMPLES, PROCESSES):
        raise UnknownNameError("average_over", average_over, (EXAMPLES, PROCESSES))
    return Reduction(op, predivide_factor=gradient_predivide_factor, average_over=average_over, **options)


def factor(examples: Any, name: str) -> tf.Tensor:
    """By how much the gradient of this process counts in a mean over the processes: exactly 1 if all batches are alike.

    Args:
        examples: how many examples the batch of this process has.
        name: of what is sent, the same in all processes.
    """
    hvd = engine.load()
    with tf.device("CPU:0"):
        mine = tf.cast(examples, tf.int64)
        of_all = hvd.allreduce(opaque(mine), op=hvd.Sum, name=f"{name}.examples", ignore_name_scope=True)
        return tf.cast(mine * hvd.size(), tf.float64) / tf.cast(of_all, tf.float64)


def times(tensor: Any, by: tf.Tensor | None) -> Any:
    """A dense or sparse `tensor` times `by`, of which 0 leaves nothing, not even NaN; `None` leaves it as it is."""
    if by is None or tensor is None:
        return tensor
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(times(tensor.values, by), tensor.indices, tensor.dense_shape)
    return tf.math.multiply_no_nan(tensor, tf.cast(by, tensor.dtype))


def dense(gradients: Sequence[Any]) -> list[Any]:
    """The gradients, of which the sparse ones are made dense, and `None` stays `None`."""
    return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]


def _gather_rows(slices: tf.IndexedSlices, op: Any, name: str) -> tf.IndexedSlices:
    hvd = engine.load()
    values = hvd.allgather(opaque(slices.values), name=f"{name}.values", ignore_name_scope=True)
    indices = hvd.allgather(opaque(slices.indices), name=f"{name}.indices", ignore_name_scope=True)
    if op == hvd.Average:
        values = values / tf.cast(hvd.size_op(), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)
