"""The reduction of gradients over Horovod's processes, for optimizers and for tapes.

The gradient of a process is that of the mean over its batch. With n of N examples in a process, the gradient of the
global batch is the sum over the processes of n / N times their gradients. If all batches have the same size, this is
the plain mean over the processes, which is Horovod's rule.

Some losses of Keras are no means over the examples of the batch. Their gradients are multiplied by a factor first; the
value of the loss remains that of the process.

    loss of a process                                   factor
    a mean over d valid entries, of D in all processes  (d / D) / (n / N)
    a weighted mean with the sum of weights d           the same
    a sum, to be averaged over the processes            (1 / processes) / (n / N)

Keras passes each batch to the model's `train_step`. The number of its examples is the length of the first axis of its
first tensor, as everywhere in Keras. In a custom training loop it is unknown which tensors are the batch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnknownNameError, UsageError
from tfdist.groups import horovod as engine
from tfdist.groups import opaque
from tfdist.groups import packing as gradient_reduction
from tfdist.horovod import operations
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_patches

EXAMPLES, PROCESSES = "examples", "processes"
# Arguments of Horovod's own functions that are not supported here, and what to do instead.
LEFT_OUT = {
    "num_groups": "remove it: all gradients of one dtype are sent as one buffer",
    "groups": "remove it: all gradients of one dtype are sent as one buffer",
    "process_set": "reduce by hand with `hvd.allreduce(..., process_set=...)`",
    "scale_local_gradients": "remove it: no gradient stays local",
}


@dataclass(frozen=True)
class Reduction:
    """Reduces gradients over all processes, with the options of `DistributedOptimizer`."""

    op: Any
    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = None
    sparse_as_dense: bool = False
    predivide_factor: float = 1.0
    average_over: str = EXAMPLES

    @property
    def weights_by_examples(self) -> bool:
        """Whether the gradients of processes are weighted by their numbers of examples, if these are known."""
        return self.average_over == EXAMPLES and self.op == engine.load().Average

    def reduce(self, gradients: Sequence[Any], name: str, weight: tf.Tensor | None = None) -> list[Any]:
        """Returns the reduced gradients, some of which may be `None`.

        Args:
            gradients: the gradients of this process.
            name: the name for the tensors that are sent, the same in all processes.
            weight: the factor by which the gradients of this process are multiplied first, see `weight_of_process`.
        """

        def send(tensors: list[Any]) -> list[Any]:
            return [self._reduced(scaled(tensor, weight), f"{name}.{index}") for index, tensor in enumerate(tensors)]

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
    """Checks the arguments of a function of Horovod's API, and returns the reduction that they describe.

    Args:
        made_by: the name of the function for messages.
        op: `hvd.Average` or `hvd.Sum`; `None` means `hvd.Average`.
        gradient_predivide_factor: the gradients are divided by it before the sum, and multiplied by it afterwards.
        average_over: "examples" or "processes".
        others: arguments that are only supported with their default values.
        options: other fields of `Reduction`.

    Raises:
        UsageError: an argument is not supported.
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
            "remove it, or pass `op=hvd.Average`",
        )
    if average_over not in (EXAMPLES, PROCESSES):
        raise UnknownNameError("average_over", average_over, (EXAMPLES, PROCESSES))
    return Reduction(op, predivide_factor=gradient_predivide_factor, average_over=average_over, **options)


def weight_of_process(examples: Any, name: str) -> tf.Tensor:
    """Returns the weight of this process's gradient in a mean over the processes: 1 if all batches have the same size.

    Args:
        examples: the number of examples in the batch of this process.
        name: the name for the tensors that are sent, the same in all processes.
    """
    hvd = engine.load()
    with tf.device("CPU:0"):
        local = tf.cast(examples, tf.int64)
        total = hvd.allreduce(opaque(local), op=hvd.Sum, name=f"{name}.examples", ignore_name_scope=True)
        return tf.cast(local * hvd.size(), tf.float64) / tf.cast(total, tf.float64)


def scaled(tensor: Any, factor: tf.Tensor | None) -> Any:
    """Returns `tensor`, dense or sparse, times `factor`, where 0 times NaN is 0; `None` means unchanged."""
    if factor is None or tensor is None:
        return tensor
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(scaled(tensor.values, factor), tensor.indices, tensor.dense_shape)
    return tf.math.multiply_no_nan(tensor, tf.cast(factor, tensor.dtype))


def dense(gradients: Sequence[Any]) -> list[Any]:
    """Returns the gradients with the sparse ones converted to dense tensors; `None` stays `None`."""
    return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]


def _gather_rows(slices: tf.IndexedSlices, op: Any, name: str) -> tf.IndexedSlices:
    hvd = engine.load()
    values = hvd.allgather(opaque(slices.values), name=f"{name}.values", ignore_name_scope=True)
    indices = hvd.allgather(opaque(slices.indices), name=f"{name}.indices", ignore_name_scope=True)
    if op == hvd.Average:
        values = values / tf.cast(hvd.size_op(), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


@dataclass(frozen=True)
class Batch:
    """A batch of a Keras training step.

    Attributes:
        examples: the number of examples, int64; `None` if it is unknown.
        optimizer: the model's optimizer, or `None`.
    """

    examples: tf.Tensor | None = None
    optimizer: Any = None


class _ThreadState(threading.local):
    batch = Batch()


_thread = _ThreadState()


@functools.cache
def install_batches() -> None:
    """Makes `current_batch` available in the training steps of Keras' own loop from now on."""
    keras_patches.around_steps(_with_batch)


def current_batch() -> Batch:
    """Returns the batch of the training step that runs or is traced; outside of training steps, nothing is known."""
    return _thread.batch


def _with_batch(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if step != model.train_step:
        return step

    @functools.wraps(step)
    def with_batch(data: Any) -> Any:
        previous, _thread.batch = _thread.batch, Batch(_length(data), getattr(model, "optimizer", None))
        try:
            return step(data)
        finally:
            _thread.batch = previous

    return with_batch


def _length(data: Any) -> tf.Tensor | None:
    for tensor in keras.tree.flatten(data):
        if isinstance(tensor, tf.RaggedTensor):
            return tensor.nrows(tf.int64)
        if isinstance(tensor, tf.SparseTensor):
            return tensor.dense_shape[0]
        if hasattr(tensor, "shape") and tf.TensorShape(tensor.shape).rank != 0:
            return tf.shape(tensor, tf.int64)[0]
    return None


def averages_by_examples(optimizer: Any, default: bool = False) -> bool:
    """Whether a distributed `optimizer` weights gradients by examples; `default` if there is none."""
    around = None if optimizer is None else keras_patches.around_apply(optimizer)
    return bool(getattr(around, "weights_by_examples", default))


@functools.cache
def install_loss_factors() -> None:
    """Multiplies the gradients of Keras' losses by their factors in steps whose optimizer averages over examples."""
    keras_patches.around("reduce_weighted_values", _reduced_loss)


def _reduced_loss(
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    loss = original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    batch = current_batch()
    if batch.examples is None or loss.shape.rank != 0 or not averages_by_examples(batch.optimizer):
        return loss
    divisor = _divisor(loss, sample_weight, mask, reduction)
    return loss if divisor is None else _with_gradient_factor(loss, _loss_factor(batch, divisor))


def _divisor(loss: Any, sample_weight: Any, mask: Any, reduction: str | None) -> Any:
    """Returns the number by which a loss is divided, 1 for a sum; `None` if it is the number of its values."""
    if reduction == "sum":
        return tf.ones([], tf.float64)
    if reduction == "mean_with_sample_weight":
        weight = keras_internals.apply_mask(sample_weight, mask, dtype=loss.dtype, reduction=reduction)
        return None if weight is None else tf.reduce_sum(tf.cast(weight, tf.float64))
    if mask is not None and reduction in ("mean", "sum_over_batch_size"):
        return tf.reduce_sum(tf.cast(mask, tf.float64))
    return None


def _loss_factor(batch: Batch, divisor: Any) -> tf.Tensor:
    hvd = engine.load()
    examples = tf.cast(batch.examples, tf.float64)
    previous_update = tf.convert_to_tensor(keras_internals.iterations(batch.optimizer))
    dependencies = tf.control_dependencies([previous_update])
    with operations.named("the divisor of a loss"), tf.device("CPU:0"), dependencies:
        local = opaque(tf.stop_gradient(tf.stack([divisor, examples])))
        name = operations.next_name("tfdist.divisor")
        total = hvd.allreduce(local, op=hvd.Sum, name=name, ignore_name_scope=True)
        return tf.math.divide_no_nan(divisor * total[1], total[0] * examples)


@tf.custom_gradient
def _with_gradient_factor(value: Any, factor: Any) -> Any:
    return tf.identity(value), lambda gradient: (gradient * tf.cast(factor, gradient.dtype), None)
