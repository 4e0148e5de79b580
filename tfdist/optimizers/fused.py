"""Optimizer updates in which a single TensorFlow kernel updates a variable."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.groups import opaque
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_patches

# On GPUs there are no kernels for bfloat16, and on CPUs only some.
DTYPES = (tf.float16, tf.float32, tf.float64)


@contextlib.contextmanager
def fused(
    optimizer: Any,
    enabled: bool = True,
    locking: bool = False,
    xla: bool = False,
    place: Callable[[tf.Variable], tf.Variable | None] = lambda variable: None,
) -> Iterator[None]:
    """The context in which steps are traced so that `optimizer` updates each variable with one TensorFlow kernel.

    This holds for the Keras optimizers whose formula a kernel computes (`KERNELS`, and `SPARSE_KERNELS` for sparse
    gradients), and for variables with one of the `DTYPES`; others keep Keras' own update. The results agree up to
    rounding.

    Args:
        optimizer: a Keras optimizer, or a `LossScaleOptimizer` with one.
        enabled: if false, Keras' own update is kept everywhere.
        locking: kernels lock their variables, because several processes update them.
        xla: XLA compiles the steps.
        place: returns another variable with the same value, which the kernel updates instead; or `None`.
    """
    inner = keras_internals.inner(optimizer)
    kernel = KERNELS.get(type(inner))
    if kernel is _rmsprop and not inner.momentum:  # the kernel needs a momentum
        kernel = None
    if kernel is _adam and inner.amsgrad and xla:  # XLA does not have the kernel
        kernel = None
    sparse_kernel = SPARSE_KERNELS.get(type(inner))
    if not enabled or (kernel is None and sparse_kernel is None):
        yield
        return
    scalars: dict[Any, _Scalars] = {}  # for one update; the next has another step number, and perhaps learning rate
    update_step = _update_step(inner, kernel, sparse_kernel, locking, scalars, place)
    with keras_patches.updating_with(inner, update_step, before_each=scalars.clear):
        yield


class _Scalars:
    """The scalars of an optimizer as tensors of one dtype, which are made once per graph and used for all variables."""

    def __init__(self, optimizer: Any, learning_rate: Any, dtype: tf.DType):
        self.optimizer = optimizer
        self.dtype = dtype
        self.learning_rate = tf.cast(tf.convert_to_tensor(learning_rate), dtype)
        self._powers: dict[float, tf.Tensor] = {}
        self._corrections: dict[float, tf.Tensor] = {}

    def constant(self, value: float) -> tf.Tensor:
        """`value` as a tensor."""
        return tf.constant(value, self.dtype)

    def cast(self, value: float) -> tf.Tensor:
        """`value` as a tensor with the rounding of Keras, which converts Python numbers to float32 first."""
        return tf.cast(tf.constant(value, tf.float32), self.dtype)

    def power(self, base: float) -> tf.Tensor:
        """`base` to the power of the step number, which counts from 1."""
        if base not in self._powers:
            self._powers[base] = tf.pow(self.cast(base), tf.cast(self.step, self.dtype))
        return self._powers[base]

    @functools.cached_property
    def step(self) -> tf.Tensor:
        """The step number, which counts from 1."""
        return tf.convert_to_tensor(self.optimizer.iterations + 1)

    def correction(self, decay: float) -> tf.Tensor:
        """The ratio of a kernel's moving average to Keras', where both start at zero and each uses its own weight.

        A new value has the weight `1 - decay` in both. A kernel computes this weight in the dtype of the variable, with
        a relative error of 1.3e-5 for 0.999 in float32, and 1.7e-4 for 0.9999. Keras computes it in Python. The ratio
        is that of the sums of the weights so far.
        """
        if decay not in self._corrections:
            step = tf.cast(self.step, tf.float64)
            sums = [tf.math.expm1(step * math.log1p(-weight)) for weight in self._weights(decay)]
            self._corrections[decay] = sums[0] / sums[1]
        return self._corrections[decay]

    def correction_of_weight(self, decay: float) -> float:
        """The same ratio, where both moving averages decay by the same factor."""
        kernel_weight, keras_weight = self._weights(decay)
        return kernel_weight / keras_weight

    def _weights(self, decay: float) -> tuple[float, float]:
        """The weights of a new value in the moving averages of a kernel and of Keras."""
        dtype = self.dtype.as_numpy_dtype
        return 1.0 - float(dtype(decay)), float(dtype(1.0 - decay))


def _update_step(
    optimizer: Any,
    kernel: Callable[..., None] | None,
    sparse_kernel: Callable[..., None] | None,
    locking: bool,
    scalars: dict[Any, _Scalars],
    place: Callable[[tf.Variable], tf.Variable | None],
) -> Callable[..., None]:
    keras_update_step = optimizer.update_step

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        chosen = sparse_kernel if isinstance(gradient, tf.IndexedSlices) else kernel
        dtype = variable.dtype.base_dtype
        if chosen is None or dtype not in DTYPES:
            keras_update_step(gradient, variable, learning_rate)
            return
        key = (tf.compat.v1.get_default_graph(), variable.device, dtype)
        if key not in scalars or tf.executing_eagerly():
            scalars[key] = _Scalars(optimizer, learning_rate, dtype)
        index = keras_internals.variable_index(optimizer, variable)
        temporary = None if chosen is sparse_kernel else place(variable)
        if temporary is not None:
            _assign(temporary, variable.read_value())
        chosen(
            optimizer,
            scalars[key],
            lambda name: keras_internals.slots(optimizer, name)[index].value.handle,
            var=(variable if temporary is None else temporary).handle,
            grad=tf.cast(gradient, dtype),
            use_locking=locking,
        )
        if temporary is not None:
            updated = temporary.read_value()
            _release(temporary)
            variable.assign(updated)

    return update_step


def _release(variable: tf.Variable) -> None:
    """Frees the memory of the value, after the operations that read it."""
    # The number of rows is hidden from TensorFlow, which would compare the shape with that of the variable.
    rows = opaque(tf.constant(0))
    _assign(variable, tf.zeros([rows, *variable.shape[1:]], variable.dtype))


def _assign(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assigns a value of any shape; the variable's own method would refuse another shape."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


# A kernel gets the optimizer, its scalars, a function from the name of a slot to its handle, and the arguments `var`,
# `grad` and `use_locking`, which TensorFlow's operations have in common.
_Slot = Callable[[str], tf.Tensor]


def _sgd(optimizer: Any, scalars: _Scalars, slot: _Slot, **common: Any) -> None:
    if optimizer.momentum == 0:
        gradient = common.pop("grad")
        tf.raw_ops.ResourceApplyGradientDescent(alpha=scalars.learning_rate, delta=gradient, **common)
        return
    tf.raw_ops.ResourceApplyKerasMomentum(
        accum=slot("momentums"),
        lr=scalars.learning_rate,
        momentum=scalars.cast(optimizer.momentum),
        use_nesterov=optimizer.nesterov,
        **common,
    )


def _adam(optimizer: Any, scalars: _Scalars, slot: _Slot, **common: Any) -> None:
    correction = tf.cast(tf.sqrt(scalars.correction(optimizer.beta_2)), scalars.dtype)
    arguments = {
        "m": slot("momentums"),
        "v": slot("velocities"),
        "beta1_power": scalars.power(optimizer.beta_1),
        "beta2_power": scalars.power(optimizer.beta_2),
        "lr": scalars.learning_rate * correction,
        "beta1": scalars.constant(optimizer.beta_1),
        "beta2": scalars.constant(optimizer.beta_2),
        "epsilon": scalars.constant(optimizer.epsilon) * correction,
        **common,
    }
    if optimizer.amsgrad:
        tf.raw_ops.ResourceApplyAdamWithAmsgrad(vhat=slot("velocity_hats"), **arguments)
    else:
        tf.raw_ops.ResourceApplyAdam(**arguments)


def _adamax(optimizer: Any, scalars: _Scalars, slot: _Slot, **common: Any) -> None:
    tf.raw_ops.ResourceApplyAdaMax(
        m=slot("m"),
        v=slot("u"),
        beta1_power=scalars.power(optimizer.beta_1),
        lr=scalars.learning_rate,
        beta1=scalars.constant(optimizer.beta_1),
        beta2=scalars.constant(optimizer.beta_2),
        epsilon=scalars.constant(optimizer.epsilon),
        **common,
    )


def _rmsprop(optimizer: Any, scalars: _Scalars, slot: _Slot, **common: Any) -> None:
    correction = scalars.correction_of_weight(optimizer.rho)
    arguments = {
        "ms": slot("velocities"),
        "mom": slot("momentums"),
        "lr": scalars.learning_rate * scalars.constant(math.sqrt(correction)),
        "rho": scalars.constant(optimizer.rho),
        "momentum": scalars.constant(optimizer.momentum),
        "epsilon": scalars.constant(optimizer.epsilon * correction),
        **common,
    }
    if optimizer.centered:
        tf.raw_ops.ResourceApplyCenteredRMSProp(mg=slot("average_gradients"), **arguments)
    else:
        tf.raw_ops.ResourceApplyRMSProp(**arguments)


def _adadelta(optimizer: Any, scalars: _Scalars, slot: _Slot, **common: Any) -> None:
    tf.raw_ops.ResourceApplyAdadelta(
        accum=slot("accumulated_grads"),
        accum_update=slot("accumulated_delta_vars"),
        lr=scalars.learning_rate,
        rho=scalars.constant(optimizer.rho),
        epsilon=scalars.constant(optimizer.epsilon),
        **common,
    )


def _ftrl(optimizer: Any, scalars: _Scalars, slot: _Slot, **common: Any) -> None:
    l2 = scalars.constant(optimizer.l2_regularization_strength)
    tf.raw_ops.ResourceApplyFtrlV2(
        accum=slot("accumulators"),
        linear=slot("linears"),
        lr=scalars.learning_rate,
        l1=scalars.constant(optimizer.l1_regularization_strength),
        l2=l2 + scalars.constant(optimizer.beta) / (2.0 * scalars.learning_rate),
        l2_shrinkage=scalars.constant(optimizer.l2_shrinkage_regularization_strength),
        lr_power=scalars.constant(optimizer.learning_rate_power),
        **common,
    )


def _sparse_adagrad(
    optimizer: Any, scalars: _Scalars, slot: _Slot, *, var: tf.Tensor, grad: tf.IndexedSlices, use_locking: bool
) -> None:
    """Computes Keras' formula for the rows that have a gradient; a zero gradient changes nothing."""
    del use_locking
    accumulator, rows = slot("accumulators"), grad.indices
    tf.raw_ops.ResourceScatterAdd(resource=accumulator, indices=rows, updates=tf.square(grad.values))
    squares = tf.raw_ops.ResourceGather(resource=accumulator, indices=rows, dtype=scalars.dtype)
    step = scalars.learning_rate * grad.values / tf.sqrt(squares + scalars.constant(optimizer.epsilon))
    tf.raw_ops.ResourceScatterSub(resource=var, indices=rows, updates=step)


# Keras' own update with a sparse gradient reads and writes whole variables. Other optimizers are left out: they change
# rows without a gradient, too, or (SGD without momentum) Keras' own update is sparse already.
SPARSE_KERNELS: dict[type, Callable[..., None]] = {keras.optimizers.Adagrad: _sparse_adagrad}

# Adagrad, Nadam and Lion are left out: their kernels apply epsilon or the schedule elsewhere than Keras does.
KERNELS: dict[type, Callable[..., None]] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
    keras.optimizers.Adamax: _adamax,
    keras.optimizers.RMSprop: _rmsprop,
    keras.optimizers.Adadelta: _adadelta,
    keras.optimizers.Ftrl: _ftrl,
}
