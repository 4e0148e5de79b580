"""Keras 3 optimizers whose gradients are reduced over Horovod's processes.

The gradients are reduced before Keras' own update, so that clipping, loss scaling, gradient accumulation, weight decay
and moving averages act on the reduced gradients, as they do in one process. The optimizer keeps its class, and nothing
of Horovod is saved with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.communicators import horovod as engine
from tfdist.communicators import opaque
from tfdist.core import gradient_reduction
from tfdist.errors import UsageError
from tfdist.internals import keras_patches

# Arguments of Horovod's own function that are not supported here, and what to do instead.
LEFT_OUT = {
    "num_groups": "leave it out: all gradients of one dtype are sent as one buffer",
    "groups": "leave it out: all gradients of one dtype are sent as one buffer",
    "process_set": "reduce by hand with `hvd.allreduce(..., process_set=...)`",
    "scale_local_gradients": "leave it out: no gradient stays local",
}
_numbers = itertools.count()


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    *,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    **others: Any,
) -> keras.optimizers.Optimizer:
    """Makes `optimizer` reduce its gradients over all processes before each update, and returns it.

    The processes must make their optimizers in the same order. A model that is saved loads in stock Keras, without
    Horovod, with the plain optimizer.

    Args:
        optimizer: any optimizer of Keras 3, including `LossScaleOptimizer`.
        name: the name of the tensors that are sent; by default it is generated.
        device_dense: where dense gradients are reduced; Horovod chooses by default.
        device_sparse: where sparse gradients are gathered.
        compression: `hvd.Compression.fp16` halves the bytes; `None` sends gradients unchanged.
        sparse_as_dense: sum `tf.IndexedSlices` as dense tensors, instead of gathering their rows.
        gradient_predivide_factor: with `op=hvd.Average`, divide by it before the sum and multiply after.
        op: `hvd.Average`, also for `None`, or `hvd.Sum`.
        backward_passes_per_step: accumulate the gradients of this number of batches in each process before each
            reduction and update.
        average_aggregated_gradients: divide the accumulated gradients by the number of batches.
        others: arguments of Horovod's own function that are not supported here; see `LEFT_OUT`.

    Raises:
        UsageError: an argument cannot work, Horovod is missing, or the optimizer is already distributed.
    """
    hvd = engine.load()
    op = hvd.Average if op is None else op
    _check(optimizer, others, op, gradient_predivide_factor, backward_passes_per_step)
    name = name or f"DistributedOptimizer.{next(_numbers)}"
    compression = compression or hvd.Compression.none
    sender = _Sender(name, op, device_dense, device_sparse, compression, gradient_predivide_factor)
    pack_all = gradient_reduction.packed(sender.all_reduce, gradient_reduction.Packing(None))
    reduce = gradient_reduction.without_none(
        lambda gradients: pack_all(_dense(gradients) if sparse_as_dense else gradients)
    )
    divisor = backward_passes_per_step if average_aggregated_gradients else 1
    add_up = _SeveralPasses(backward_passes_per_step, divisor) if backward_passes_per_step > 1 else None

    def around_apply(caller: Any, gradients: list[Any], variables: list[Any], update: Callable[..., None]) -> None:
        def reduce_and_update(gradients: list[Any]) -> None:
            update(reduce(gradients))

        if add_up is None:
            reduce_and_update(gradients)
        else:
            add_up(caller, gradients, variables, reduce_and_update)

    keras_patches.set_around_apply(optimizer, around_apply)
    return optimizer


def load_model(
    filepath: Any, custom_optimizers: Sequence[type] = (), custom_objects: dict[str, Any] | None = None, **options: Any
) -> keras.Model:
    """Loads a model with `keras.saving.load_model`, and makes its optimizer distributed.

    Args:
        filepath: the file of a model that was saved with its optimizer.
        custom_optimizers: optimizer classes that are not part of Keras.
        custom_objects: other custom objects, by name.
        options: options of `DistributedOptimizer`, such as `compression`.

    Raises:
        UsageError: as for `DistributedOptimizer`, and if the model was not compiled.
    """
    known = {kind.__name__: kind for kind in custom_optimizers} | (custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is None:
        raise UsageError(f"The model in `{filepath}` has no optimizer", "compile it before it is saved")
    DistributedOptimizer(model.optimizer, **options)
    model.jit_compile = False  # XLA does not support Horovod's operations
    return model


def _check(optimizer: Any, others: dict[str, Any], op: Any, predivide_factor: float, passes: int) -> None:
    hvd = engine.load()
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"DistributedOptimizer takes an optimizer of Keras 3. Received: `{optimizer!r}`",
            'pass an object such as `keras.optimizers.get("adam")`',
        )
    if keras_patches.around_apply(optimizer) is not None:
        raise UsageError(
            f"The optimizer `{optimizer.name}` is already distributed", "call `DistributedOptimizer` once for each"
        )
    for other in others:
        if other not in LEFT_OUT:
            raise TypeError(f"DistributedOptimizer() got an unexpected keyword argument '{other}'")
        raise UsageError(f"DistributedOptimizer for Keras 3 has no `{other}`", LEFT_OUT[other])
    if op not in (hvd.Average, hvd.Sum):
        raise UsageError(
            f"DistributedOptimizer can average or sum gradients. Received: op `{op}`",
            "pass `op=hvd.Average` or `op=hvd.Sum`",
        )
    if predivide_factor != 1.0 and op != hvd.Average:
        raise UsageError(
            f"`gradient_predivide_factor` is {predivide_factor:g}, but the gradients are not averaged",
            "leave it out, or pass `op=hvd.Average`",
        )
    if passes < 1:
        raise UsageError(f"`backward_passes_per_step` is {passes}", "pass 1 or more")


@dataclass(frozen=True)
class _Sender:
    """Reduces tensors over all processes by Horovod's operations, as the arguments of `DistributedOptimizer` say."""

    name: str
    op: Any
    device_dense: str
    device_sparse: str
    compression: Any
    predivide_factor: float

    def all_reduce(self, tensors: list[Any]) -> list[Any]:
        return [self._reduced(tensor, f"{self.name}.{index}") for index, tensor in enumerate(tensors)]

    def _reduced(self, tensor: Any, name: str) -> Any:
        if isinstance(tensor, tf.IndexedSlices):
            with tf.device(self.device_sparse):
                return _gather_rows(tensor, self.op, name)
        return engine.load().allreduce(
            opaque(tensor),
            op=self.op,
            device_dense=self.device_dense,
            compression=self.compression,
            prescale_factor=1.0 / self.predivide_factor,
            postscale_factor=self.predivide_factor,
            name=name,
            ignore_name_scope=True,
        )


def _gather_rows(slices: tf.IndexedSlices, op: Any, name: str) -> tf.IndexedSlices:
    hvd = engine.load()
    values = hvd.allgather(opaque(slices.values), name=f"{name}.values", ignore_name_scope=True)
    indices = hvd.allgather(opaque(slices.indices), name=f"{name}.indices", ignore_name_scope=True)
    if op == hvd.Average:
        values = values / tf.cast(hvd.size_op(), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _dense(gradients: Sequence[Any]) -> list[Any]:
    return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]


class _SeveralPasses:
    """Accumulates the gradients of `passes` batches, and then applies their sum divided by `divisor`.

    The optimizer counts only updates, as with Keras' own accumulation.
    """

    def __init__(self, passes: int, divisor: int):
        self._passes = passes
        self._divisor = divisor
        self._sums: list[tf.Variable | None] = []
        self._done: tf.Variable | None = None

    def __call__(
        self, optimizer: Any, gradients: list[Any], variables: list[Any], go_on: Callable[[list[Any]], None]
    ) -> None:
        self._build(optimizer, gradients, variables)
        assert self._done is not None
        for total, gradient in zip(self._sums, _dense(gradients), strict=True):
            if total is not None:
                total.assign_add(gradient)
        done = self._done.assign_add(1)
        tf.cond(done % self._passes == 0, lambda: self._last(go_on), lambda: None)

    def _build(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        if self._done is not None:
            return
        with tf.init_scope():
            if not optimizer.built:  # variables cannot be created in a branch of a condition
                optimizer.build(variables)
            self._done = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._sums = [
                None if gradient is None else tf.Variable(tf.zeros(variable.shape, gradient.dtype), trainable=False)
                for gradient, variable in zip(gradients, variables, strict=True)
            ]

    def _last(self, go_on: Callable[[list[Any]], None]) -> None:
        go_on([None if total is None else total / self._divisor for total in self._sums])
        for total in self._sums:
            if total is not None:
                total.assign(tf.zeros_like(total))
