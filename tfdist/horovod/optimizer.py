"""Keras 3 optimizers whose gradients are reduced over Horovod's processes.

The gradients are reduced before Keras' own update, so that clipping, loss scaling, gradient accumulation, weight decay
and moving averages act on the reduced gradients, as in one process. The optimizer keeps its class, and it is saved
without any trace of Horovod.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.horovod import operations, reduction
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_patches

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
    average_over: str = reduction.EXAMPLES,
    **others: Any,
) -> keras.optimizers.Optimizer:
    """Makes `optimizer` reduce its gradients over all processes before each update, and returns it.

    All processes must make their optimizers in the same order. A saved model loads in stock Keras, without Horovod,
    with the plain optimizer.

    Args:
        optimizer: any optimizer of Keras 3, including `LossScaleOptimizer`.
        name: the name of the tensors that are sent; by default it is generated.
        device_dense: the device on which dense gradients are reduced; Horovod chooses by default.
        device_sparse: the device on which sparse gradients are gathered.
        compression: `hvd.Compression.fp16` halves the bytes; `None` sends gradients unchanged.
        sparse_as_dense: sum `tf.IndexedSlices` as dense tensors, instead of gathering their rows.
        gradient_predivide_factor: with `op=hvd.Average`, divide by it before the sum and multiply after.
        op: `hvd.Average` or `hvd.Sum`; `None` means `hvd.Average`.
        backward_passes_per_step: the number of batches whose gradients each process accumulates before a reduction and
            update.
        average_aggregated_gradients: divide the accumulated gradients by the number of batches.
        average_over: "examples" weights the gradient of each process by the number of examples in its batch, so that
            the average is the gradient of the global batch. Keras' `fit` and `train_on_batch` know this number; if the
            optimizer is called outside of a `train_step`, all processes have equal weights. "processes" is Horovod's
            rule: all processes always have equal weights.
        others: arguments of Horovod's function that are not supported here; see `reduction.LEFT_OUT`.

    Raises:
        UsageError: an argument is not supported, Horovod is missing, or the optimizer is already distributed.
    """
    _check(optimizer, backward_passes_per_step)
    checked = reduction.checked(
        "DistributedOptimizer",
        op,
        gradient_predivide_factor,
        average_over,
        others,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
    )
    reduction.install_batches()
    reduction.install_loss_factors()
    divisor = backward_passes_per_step if average_aggregated_gradients else 1
    accumulation = _Accumulation(backward_passes_per_step, divisor) if backward_passes_per_step > 1 else None
    around_apply = _ReducedUpdate(checked, name or f"DistributedOptimizer.{next(_numbers)}", accumulation)
    keras_patches.set_around_apply(optimizer, around_apply)
    return optimizer


class _ReducedUpdate:
    """Replaces the update of an optimizer: accumulates gradients, reduces them, and then updates.

    Attributes:
        weights_by_examples: whether the gradients of processes are weighted by their numbers of examples.
    """

    def __init__(self, reduction: reduction.Reduction, name: str, accumulation: _Accumulation | None):
        self.weights_by_examples = reduction.weights_by_examples
        self._reduction = reduction
        self._name = name
        self._accumulation = accumulation

    def __call__(
        self, caller: Any, gradients: list[Any], variables: list[Any], update: Callable[[Sequence[Any]], None]
    ) -> None:
        def reduce_and_update(gradients: list[Any], examples: tf.Tensor | None) -> None:
            with operations.named(f"the gradients of `{caller.name}`"):
                weight = None if examples is None else _weight(caller, examples, self._name)
                reduced = self._reduction.reduce(gradients, self._name, weight)
            update(reduced)

        examples = reduction.current_batch().examples if self.weights_by_examples else None
        if self._accumulation is None:
            reduce_and_update(gradients, examples)
        else:
            self._accumulation(caller, gradients, variables, examples, reduce_and_update)


def load_model(
    filepath: Any, custom_optimizers: Sequence[type] = (), custom_objects: dict[str, Any] | None = None, **options: Any
) -> keras.Model:
    """Loads a model with `keras.saving.load_model`, and distributes its optimizer.

    Args:
        filepath: the file of a model that was saved with its optimizer.
        custom_optimizers: optimizer classes that are not part of Keras.
        custom_objects: other custom objects by name.
        options: options of `DistributedOptimizer`, such as `compression`.

    Raises:
        UsageError: the model was not compiled, or for the reasons of `DistributedOptimizer`.
    """
    known = {kind.__name__: kind for kind in custom_optimizers} | (custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known, safe_mode=True)  # refuses code in a `Lambda` layer
    if getattr(model, "optimizer", None) is None:
        raise UsageError(f"The model in `{filepath}` has no optimizer", "compile it before saving it")
    DistributedOptimizer(model.optimizer, **options)
    model.jit_compile = False  # XLA does not support Horovod's operations
    return model


def _check(optimizer: Any, passes: int) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"DistributedOptimizer takes an optimizer of Keras 3. Received: `{optimizer!r}`",
            'pass an object such as `keras.optimizers.get("adam")`',
        )
    if keras_patches.around_apply(optimizer) is not None:
        raise UsageError(
            f"The optimizer `{optimizer.name}` is already distributed",
            "call `DistributedOptimizer` once per optimizer",
        )
    if passes < 1:
        raise UsageError(f"`backward_passes_per_step` is {passes}", "pass 1 or more")


def _weight(optimizer: Any, examples: tf.Tensor, name: str) -> tf.Tensor:
    # The numbers of examples of two steps in one graph are sent under the same name, which must not happen at the same
    # time. So this one, which is known from the beginning of the step, waits for the update of the previous step.
    with tf.control_dependencies([tf.convert_to_tensor(keras_internals.iterations(optimizer))]):
        return reduction.weight_of_process(examples, name)


class _Accumulation:
    """Accumulates the gradients of `passes` batches, and then applies their sum divided by `divisor`.

    If the numbers of examples are known, it applies the mean over all examples of these batches, times `passes /
    divisor`. The optimizer counts only updates, as with Keras' own accumulation.
    """

    def __init__(self, passes: int, divisor: int):
        self._passes = passes
        self._divisor = divisor
        self._sums: list[tf.Variable | None] = []
        self._done: tf.Variable | None = None
        self._examples: tf.Variable | None = None

    def __call__(
        self,
        optimizer: Any,
        gradients: list[Any],
        variables: list[Any],
        examples: tf.Tensor | None,
        apply: Callable[[list[Any], tf.Tensor | None], None],
    ) -> None:
        self._build(optimizer, gradients, variables)
        assert self._done is not None and self._examples is not None
        for total, gradient in zip(self._sums, reduction.dense(gradients), strict=True):
            if total is not None:
                total.assign_add(reduction.scaled(gradient, examples))
        if examples is not None:
            self._examples.assign_add(examples)
        done = self._done.assign_add(1)
        tf.cond(done % self._passes == 0, lambda: self._apply(apply, examples is not None), lambda: None)

    def _build(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        if self._done is not None:
            return
        with tf.init_scope():
            if not optimizer.built:  # variables cannot be created in a branch of a conditional
                optimizer.build(variables)
            self._done = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._examples = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._sums = [
                None if gradient is None else tf.Variable(tf.zeros(variable.shape, gradient.dtype), trainable=False)
                for gradient, variable in zip(gradients, variables, strict=True)
            ]

    def _apply(self, apply: Callable[[list[Any], tf.Tensor | None], None], weighted: bool) -> None:
        assert self._examples is not None
        examples = tf.convert_to_tensor(self._examples) if weighted else None
        scale = 1 / self._divisor if examples is None else self._passes / self._divisor / tf.cast(examples, tf.float64)
        apply([None if total is None else total * tf.cast(scale, total.dtype) for total in self._sums], examples)
        self._examples.assign(0)
        for total in self._sums:
            if total is not None:
                total.assign(tf.zeros_like(total))
