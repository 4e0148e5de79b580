"""Keras 3 optimizers whose gradients are reduced over Horovod's processes.

The gradients are reduced before Keras' own update, so that clipping, loss scaling, gradient accumulation, weight decay
and moving averages act on the reduced gradients, as they do in one process. The optimizer keeps its class, and nothing
of Horovod is saved with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.horovod import batches, losses, operations, reduction
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
        average_over: "examples" weighs the gradient of each process by the number of examples in its batch, so that the
            average is the gradient of the joined batch. Keras' `fit` and `train_on_batch` know this number; where the
            optimizer is called by hand, outside of a `train_step`, the processes count alike. "processes" is Horovod's
            own rule: the processes always count alike.
        others: arguments of Horovod's own function that are not supported here; see `reduction.LEFT_OUT`.

    Raises:
        UsageError: an argument cannot work, Horovod is missing, or the optimizer is already distributed.
    """
    _check(optimizer, backward_passes_per_step)
    reduces = reduction.checked(
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
    batches.install()
    losses.install()
    divisor = backward_passes_per_step if average_aggregated_gradients else 1
    add_up = _SeveralPasses(backward_passes_per_step, divisor) if backward_passes_per_step > 1 else None
    around_apply = _Reducing(reduces, name or f"DistributedOptimizer.{next(_numbers)}", add_up)
    keras_patches.set_around_apply(optimizer, around_apply)
    return optimizer


class _Reducing:
    """What an optimizer does in place of an update: reduces the gradients first, perhaps those of several passes.

    Attributes:
        weighs: whether the gradients of processes count by their numbers of examples.
    """

    def __init__(self, reduces: reduction.Reduction, name: str, add_up: _SeveralPasses | None):
        self.weighs = reduces.weighs
        self._reduces = reduces
        self._name = name
        self._add_up = add_up

    def __call__(
        self, caller: Any, gradients: list[Any], variables: list[Any], update: Callable[[Sequence[Any]], None]
    ) -> None:
        def reduce_and_update(gradients: list[Any], examples: tf.Tensor | None) -> None:
            with operations.named(f"the gradients of `{caller.name}`"):
                factor = None if examples is None else _factor(caller, examples, self._name)
                reduced = self._reduces.of_all(gradients, self._name, factor)
            update(reduced)

        examples = batches.examples() if self.weighs else None
        if self._add_up is None:
            reduce_and_update(gradients, examples)
        else:
            self._add_up(caller, gradients, variables, examples, reduce_and_update)


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


def _check(optimizer: Any, passes: int) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"DistributedOptimizer takes an optimizer of Keras 3. Received: `{optimizer!r}`",
            'pass an object such as `keras.optimizers.get("adam")`',
        )
    if keras_patches.around_apply(optimizer) is not None:
        raise UsageError(
            f"The optimizer `{optimizer.name}` is already distributed", "call `DistributedOptimizer` once for each"
        )
    if passes < 1:
        raise UsageError(f"`backward_passes_per_step` is {passes}", "pass 1 or more")


def _factor(optimizer: Any, examples: tf.Tensor, name: str) -> tf.Tensor:
    # Known at the beginning of a step. The numbers of two steps in one graph have the same name, and must not be sent
    # at the same time: this one follows the update of the step before.
    with tf.control_dependencies([tf.convert_to_tensor(keras_internals.iterations(optimizer))]):
        return reduction.factor(examples, name)


class _SeveralPasses:
    """Accumulates the gradients of `passes` batches, and then applies their sum divided by `divisor`.

    Where the numbers of examples are known, it is as many times the mean over all examples of these batches. The
    optimizer counts only updates, as with Keras' own accumulation.
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
        go_on: Callable[[list[Any], tf.Tensor | None], None],
    ) -> None:
        self._build(optimizer, gradients, variables)
        assert self._done is not None and self._examples is not None
        for total, gradient in zip(self._sums, reduction.dense(gradients), strict=True):
            if total is not None:
                total.assign_add(reduction.times(gradient, examples))
        if examples is not None:
            self._examples.assign_add(examples)
        done = self._done.assign_add(1)
        tf.cond(done % self._passes == 0, lambda: self._last(go_on, examples is not None), lambda: None)

    def _build(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        if self._done is not None:
            return
        with tf.init_scope():
            if not optimizer.built:  # variables cannot be created in a branch of a condition
                optimizer.build(variables)
            self._done = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._examples = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._sums = [
                None if gradient is None else tf.Variable(tf.zeros(variable.shape, gradient.dtype), trainable=False)
                for gradient, variable in zip(gradients, variables, strict=True)
            ]

    def _last(self, go_on: Callable[[list[Any], tf.Tensor | None], None], weighed: bool) -> None:
        assert self._examples is not None
        examples = tf.convert_to_tensor(self._examples) if weighed else None
        scale = 1 / self._divisor if examples is None else self._passes / self._divisor / tf.cast(examples, tf.float64)
        go_on([None if total is None else total * tf.cast(scale, total.dtype) for total in self._sums], examples)
        self._examples.assign(0)
        for total in self._sums:
            if total is not None:
                total.assign(tf.zeros_like(total))
