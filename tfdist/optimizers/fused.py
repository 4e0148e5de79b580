"""The update of a variable by an optimizer in one kernel of TensorFlow."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.groups import opaque
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_patches

# GPUs have no kernel for bfloat16, and CPUs not all.
DTYPES = (tf.float16, tf.float32, tf.float64)


@contextlib.contextmanager
def fused(
    optimizer: Any,
    enabled: bool = True,
    locking: bool = False,
    xla: bool = False,
    place: Callable[[tf.Variable], tf.Variable | None] = lambda variable: None,
) -> Iterator[None]:
    """In steps that are traced in this context, `optimizer` updates each variable with one TensorFlow kernel.

    This holds for the Keras optimizers whose formula a kernel computes (`KERNELS`, and `OF_ROWS` for sparse gradients),
    and for variables of `DTYPES`; the others keep Keras' own update. The results agree to rounding.

    Args:
        optimizer: of Keras, also inside a `LossScaleOptimizer`.
        enabled: if not, all keep Keras' own update.
        locking: a kernel locks its variables, which several processes update.
        xla: XLA compiles the steps.
        place: where a kernel updates a variable, if not where it is: it has the variable's value meanwhile.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    kernel = KERNELS.get(type(inner))
    if kernel is _rmsprop and not inner.momentum:  # that kernel has no form without momentum
        kernel = None
    if kernel is _adam and inner.amsgrad and xla:  # XLA does not know that kernel
        kernel = None
    of_rows = OF_ROWS.get(type(inner))
    if not enabled or (kernel is None and of_rows is None):
        yield
        return
    scalars: dict[Any, _Scalars] = {}  # of one update; the next one has another step number, perhaps another rate
    update_step = _update_step(inner, kernel, of_rows, locking, scalars, place)
    with keras_patches.updating_with(inner, update_step, before_each=scalars.clear):
        yield


class _Scalars:
    """An optimizer's scalars as tensors of one dtype: made once per graph, used for all variables."""

    def __init__(self, optimizer: Any, learning_rate: Any, dtype: tf.DType, locking: bool):
        self.optimizer = optimizer
        self.locking = locking
        self.dtype = dtype
        self.learning_rate = tf.cast(tf.convert_to_tensor(learning_rate), dtype)
        self._step: tf.Tensor | None = None
        self._powers: dict[float, tf.Tensor] = {}
        self._corrections: dict[float, tf.Tensor] = {}

    def constant(self, value: float) -> tf.Tensor:
        """`value` as a tensor."""
        return tf.constant(value, self.dtype)

    def cast(self, value: float) -> tf.Tensor:
        """`value` as a tensor that Keras has cast: it makes a float32 of a number of Python first."""
        return tf.cast(tf.constant(value, tf.float32), self.dtype)

    def power(self, base: float) -> tf.Tensor:
        """`base` to the power of this step's number, counted from one."""
        if base not in self._powers:
            self._powers[base] = tf.pow(self.cast(base), tf.cast(self.step, self.dtype))
        return self._powers[base]

    @property
    def step(self) -> tf.Tensor:
        """This step's number, counted from one."""
        if self._step is None:
            self._step = tf.convert_to_tensor(self.optimizer.iterations + 1)
        return self._step

    def correction(self, decay: float) -> tf.Tensor:
        """The ratio of a kernel's moving average to that of Keras, where both began at zero and decay by their weights.

        A new value counts `1 - decay` in both. A kernel computes this weight in the variable's type: for 0.999 in
        float32 it is off by 1.3e-5, for 0.9999 by 1.7e-4. Keras computes it in Python. The ratio is that of the sums of
        the weights so far.
        """
        if decay not in self._corrections:
            step = tf.cast(self.step, tf.float64)
            sums = [tf.math.expm1(step * math.log1p(-weight)) for weight in self._weights(decay)]
            self._corrections[decay] = sums[0] / sums[1]
        return self._corrections[decay]

    def correction_of_weight(self, decay: float) -> float:
        """The same ratio, where the old values decay alike."""
        kernel, of_keras = self._weights(decay)
        return kernel / of_keras

    def _weights(self, decay: float) -> tuple[float, float]:
        """What a new value counts in a moving average of a kernel, and in that of Keras."""
        kind = self.dtype.as_numpy_dtype
        return 1.0 - float(kind(decay)), float(kind(1.0 - decay))


def _update_step(
    optimizer: Any,
    kernel: Callable[..., None] | None,
    of_rows: Callable[..., None] | None,
    locking: bool,
    memo: dict[Any, _Scalars],
    place: Callable[[tf.Variable], tf.Variable | None],
) -> Callable[..., None]:
    original = optimizer.update_step

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        chosen = of_rows if isinstance(gradient, tf.IndexedSlices) else kernel
        dtype = variable.dtype.base_dtype
        if chosen is None or dtype not in DTYPES:
            original(gradient, variable, learning_rate)
            return
        key = (tf.compat.v1.get_default_graph(), variable.device, dtype)
        if key not in memo or tf.executing_eagerly():
            memo[key] = _Scalars(optimizer, learning_rate, dtype, locking)
        index = keras_internals.variable_index(optimizer, variable)
        other = None if chosen is of_rows else place(variable)
        if other is not None:
            _assign(other, variable.read_value())
        chosen(optimizer, memo[key], (variable if other is None else other).handle, index, tf.cast(gradient, dtype))
        if other is not None:
            updated = other.read_value()
            _release(other)
            variable.assign(updated)

    return update_step


def _release(variable: tf.Variable) -> None:
    """Frees the memory of the value, once what has read it is done."""
    # The number of rows is hidden from TensorFlow, which would compare the shape with that of the variable.
    rows = opaque(tf.constant(0))
    _assign(variable, tf.zeros([rows, *variable.shape[1:]], variable.dtype))


def _assign(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assigns a value of another shape than the present one; the variable's own method would refuse it."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def _handle(optimizer: Any, slots: str, index: int) -> tf.Tensor:
    return keras_internals.slots(optimizer, slots)[index].value.handle


def _sgd(optimizer: Any, scalars: _Scalars, variable: tf.Tensor, index: int, gradient: tf.Tensor) -> None:
    if optimizer.momentum == 0:
        tf.raw_ops.ResourceApplyGradientDescent(
            var=variable, alpha=scalars.learning_rate, delta=gradient, use_locking=scalars.locking
        )
        return
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable,
        accum=_handle(optimizer, "momentums", index),
        lr=scalars.learning_rate,
        grad=gradient,
        momentum=scalars.cast(optimizer.momentum),
        use_nesterov=optimizer.nesterov,
        use_locking=scalars.locking,
    )


def _adam(optimizer: Any, scalars: _Scalars, variable: tf.Tensor, index: int, gradient: tf.Tensor) -> None:
    correction = tf.cast(tf.sqrt(scalars.correction(optimizer.beta_2)), scalars.dtype)
    arguments = {
        "var": variable,
        "m": _handle(optimizer, "momentums", index),
        "v": _handle(optimizer, "velocities", index),
        "beta1_power": scalars.power(optimizer.beta_1),
        "beta2_power": scalars.power(optimizer.beta_2),
        "lr": scalars.learning_rate * correction,
        "beta1": scalars.constant(optimizer.beta_1),
        "beta2": scalars.constant(optimizer.beta_2),
        "epsilon": scalars.constant(optimizer.epsilon) * correction,
        "grad": gradient,
        "use_locking": scalars.locking,
    }
    if optimizer.amsgrad:
        tf.raw_ops.ResourceApplyAdamWithAmsgrad(vhat=_handle(optimizer, "velocity_hats", index), **arguments)
    else:
        tf.raw_ops.ResourceApplyAdam(**arguments)


def _adamax(optimizer: Any, scalars: _Scalars, variable: tf.Tensor, index: int, gradient: tf.Tensor) -> None:
    tf.raw_ops.ResourceApplyAdaMax(
        var=variable,
        m=_handle(optimizer, "m", index),
        v=_handle(optimizer, "u", index),
        beta1_power=scalars.power(optimizer.beta_1),
        lr=scalars.learning_rate,
        beta1=scalars.constant(optimizer.beta_1),
        beta2=scalars.constant(optimizer.beta_2),
        epsilon=scalars.constant(optimizer.epsilon),
        grad=gradient,
        use_locking=scalars.locking,
    )


def _rmsprop(optimizer: Any, scalars: _Scalars, variable: tf.Tensor, index: int, gradient: tf.Tensor) -> None:
    correction = scalars.correction_of_weight(optimizer.rho)
    arguments = {
        "var": variable,
        "ms": _handle(optimizer, "velocities", index),
        "mom": _handle(optimizer, "momentums", index),
        "lr": scalars.learning_rate * scalars.constant(math.sqrt(correction)),
        "rho": scalars.constant(optimizer.rho),
        "momentum": scalars.constant(optimizer.momentum),
        "epsilon": scalars.constant(optimizer.epsilon * correction),
        "grad": gradient,
        "use_locking": scalars.locking,
    }
    if optimizer.centered:
        tf.raw_ops.ResourceApplyCenteredRMSProp(mg=_handle(optimizer, "average_gradients", index), **arguments)
    else:
        tf.raw_ops.ResourceApplyRMSProp(**arguments)


def _adadelta(optimizer: Any, scalars: _Scalars, variable: tf.Tensor, index: int, gradient: tf.Tensor) -> None:
    tf.raw_ops.ResourceApplyAdadelta(
        var=variable,
        accum=_handle(optimizer, "accumulated_grads", index),
        accum_update=_handle(optimizer, "accumulated_delta_vars", index),
        lr=scalars.learning_rate,
        rho=scalars.constant(optimizer.rho),
        epsilon=scalars.constant(optimizer.epsilon),
        grad=gradient,
        use_locking=scalars.locking,
    )


def _ftrl(optimizer: Any, scalars: _Scalars, variable: tf.Tensor, index: int, gradient: tf.Tensor) -> None:
    l2 = scalars.constant(optimizer.l2_regularization_strength)
    tf.raw_ops.ResourceApplyFtrlV2(
        var=variable,
        accum=_handle(optimizer, "accumulators", index),
        linear=_handle(optimizer, "linears", index),
        grad=gradient,
        lr=scalars.learning_rate,
        l1=scalars.constant(optimizer.l1_regularization_strength),
        l2=l2 + scalars.constant(optimizer.beta) / (2.0 * scalars.learning_rate),
        l2_shrinkage=scalars.constant(optimizer.l2_shrinkage_regularization_strength),
        lr_power=scalars.constant(optimizer.learning_rate_power),
        use_locking=scalars.locking,
    )


def _adagrad_of_rows(
    optimizer: Any, scalars: _Scalars, variable: tf.Tensor, index: int, gradient: tf.IndexedSlices
) -> None:
    """Keras' formula on the rows that have a gradient; a zero gradient changes nothing."""
    accumulator, rows = _handle(optimizer, "accumulators", index), gradient.indices
    tf.raw_ops.ResourceScatterAdd(resource=accumulator, indices=rows, updates=tf.square(gradient.values))
    squares = tf.raw_ops.ResourceGather(resource=accumulator, indices=rows, dtype=scalars.dtype)
    step = scalars.learning_rate * gradient.values / tf.sqrt(squares + scalars.constant(optimizer.epsilon))
    tf.raw_ops.ResourceScatterSub(resource=variable, indices=rows, updates=step)


# For a sparse gradient Keras' own update of these reads and writes whole variables. Other optimizers are left out: they
# change rows without a gradient too, or (SGD without momentum) Keras' own update is sparse already.
OF_ROWS: dict[type, Callable[..., None]] = {keras.optimizers.Adagrad: _adagrad_of_rows}

# Adagrad, Nadam and Lion are left out: their kernels place epsilon or the schedule elsewhere than Keras does.
KERNELS: dict[type, Callable[..., None]] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
    keras.optimizers.Adamax: _adamax,
    keras.optimizers.RMSprop: _rmsprop,
    keras.optimizers.Adadelta: _adadelta,
    keras.optimizers.Ftrl: _ftrl,
}
