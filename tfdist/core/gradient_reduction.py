"""Gradients: weighed, packed into few buffers, reduced; and the optimizer's step in one kernel a variable.

When gradients are reduced, and what each replica's count, `tfdist.core.gradient_tape` says.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

AllReduce = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class Packing:
    """How tensors travel.

    Attributes:
        buffer_bytes: dense tensors smaller than this travel together, in buffers of at most this size; `None` makes one
            buffer of all. Copying a large tensor into a buffer and out again costs more than it saves. Buffers are
            filled from the last tensor to the first, the order in which back-propagation ends, so that one is on its
            way while others are computed.
        wire_dtype: float32 gradients are sent in this type; `None` leaves them as they are.
    """

    buffer_bytes: int | None = 1 << 16
    wire_dtype: tf.DType | None = None


def weigh(gradients: Sequence[Any], share: tf.Tensor) -> list[Any]:
    """`share * gradient` of each; exactly zero on a replica without examples, whatever it computed there."""

    def weigh_one(gradient: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            values = weigh_one(gradient.values)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return tf.math.multiply_no_nan(gradient, tf.cast(share, gradient.dtype))

    return [None if gradient is None else weigh_one(gradient) for gradient in gradients]


def without_none(all_reduce: AllReduce) -> AllReduce:
    """An all-reduce of a list in which some are `None`, and stay so."""

    def reduce(tensors: list[Any]) -> list[Any]:
        reduced = iter(all_reduce([tensor for tensor in tensors if tensor is not None]))
        return [None if tensor is None else next(reduced) for tensor in tensors]

    return reduce


def packed(all_reduce: AllReduce, packing: Packing) -> AllReduce:
    """An all-reduce that sends dense tensors of a type in common buffers, as `packing` says."""

    def reduce(tensors: list[Any]) -> list[Any]:
        buffers = _buffers(tensors, packing)
        sent = [_joined([tensors[index] for index in members]) for members in buffers]
        reduced = all_reduce([_to_wire(tensor, packing.wire_dtype) for tensor in sent])
        results: list[Any] = [None] * len(tensors)
        for members, buffer, original in zip(buffers, reduced, sent, strict=True):
            pieces = _split(_from_wire(buffer, original.dtype), [tensors[index] for index in members])
            for index, piece in zip(members, pieces, strict=True):
                results[index] = piece
        return results

    return reduce


def _buffers(tensors: Sequence[Any], packing: Packing) -> list[list[int]]:
    """Which tensors travel together, by their indices."""
    buffers: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    for index in reversed(range(len(tensors))):
        tensor = tensors[index]
        size = _packed_bytes(tensor, packing.buffer_bytes)
        if size is None:
            buffers.append([index])
            continue
        members, filled = filling.get(tensor.dtype, ([], 0))
        if not members or (packing.buffer_bytes is not None and filled + size > packing.buffer_bytes):
            members, filled = [], 0
            buffers.append(members)
        members.append(index)
        filling[tensor.dtype] = members, filled + size
    return buffers


def _packed_bytes(tensor: Any, buffer_bytes: int | None) -> int | None:
    """The size of a tensor that is packed; `None` for one that travels alone."""
    if isinstance(tensor, tf.IndexedSlices) or not tensor.shape.is_fully_defined():
        return None
    size = tensor.shape.num_elements() * tensor.dtype.size
    return size if buffer_bytes is None or size < buffer_bytes else None


def _joined(tensors: list[Any]) -> Any:
    return tensors[0] if len(tensors) == 1 else tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def _split(buffer: Any, like: list[Any]) -> list[Any]:
    if len(like) == 1:
        return [buffer]
    pieces = tf.split(buffer, [tensor.shape.num_elements() for tensor in like])
    return [tf.reshape(piece, tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def _to_wire(tensor: Any, dtype: tf.DType | None) -> Any:
    dense = not isinstance(tensor, tf.IndexedSlices)
    return tf.cast(tensor, dtype) if dtype is not None and dense and tensor.dtype == tf.float32 else tensor


def _from_wire(tensor: Any, dtype: tf.DType) -> Any:
    return tensor if isinstance(tensor, tf.IndexedSlices) else tf.cast(tensor, dtype)


def add(tensors: Sequence[Any]) -> Any:
    """The sum of dense tensors, or of `tf.IndexedSlices`, which stay sparse."""
    if not any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        return tf.add_n(list(tensors))
    if not all(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        return tf.add_n([tf.convert_to_tensor(tensor) for tensor in tensors])
    values = tf.concat([tensor.values for tensor in tensors], 0)
    indices = tf.concat([tensor.indices for tensor in tensors], 0)
    return tf.IndexedSlices(values, indices, tensors[0].dense_shape)


@contextlib.contextmanager
def fused(optimizer: Any, enabled: bool = True, locking: bool = False) -> Iterator[None]:
    """While a step is traced in this context, `optimizer` updates each variable with one TensorFlow kernel.

    With `locking` a kernel is alone with its variables, where several processes update them.

    Only for the Keras optimizers whose update a kernel computes with the same formula (`KERNELS`, and of sparse
    gradients `OF_ROWS`); the others keep Keras' own update. The results agree to rounding.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    kernel = KERNELS.get(type(inner))
    if kernel is _rmsprop and not inner.momentum:  # that kernel has no form without momentum
        kernel = None
    of_rows = OF_ROWS.get(type(inner))
    if not enabled or (kernel is None and of_rows is None):
        yield
        return
    # Set on the instance and past Keras' attribute tracking, so that nothing of it is saved with the model.
    object.__setattr__(inner, "update_step", _update_step(inner, kernel, of_rows, locking))
    object.__setattr__(inner, "_backend_update_step", functools.partial(_update_all, inner, inner._backend_update_step))
    try:
        yield
    finally:
        object.__delattr__(inner, "_backend_update_step")
        object.__delattr__(inner, "update_step")


def _update_all(optimizer: Any, update_all: Callable[..., None], *arguments: Any) -> None:
    """One update of all variables; the next one has a count, and may have a learning rate, of its own."""
    optimizer.update_step.scalars.clear()
    update_all(*arguments)


class _Scalars:
    """An optimizer's scalars as tensors of one dtype: made once a graph, used for all variables."""

    def __init__(self, optimizer: Any, learning_rate: Any, dtype: tf.DType, locking: bool):
        self.optimizer = optimizer
        self.locking = locking
        self.dtype = dtype
        self.learning_rate = tf.cast(tf.convert_to_tensor(learning_rate), dtype)
        self._step: tf.Tensor | None = None
        self._powers: dict[float, tf.Tensor] = {}

    def constant(self, value: float) -> tf.Tensor:
        """`value` as a tensor."""
        return tf.constant(value, self.dtype)

    def power(self, base: float) -> tf.Tensor:
        """`base` to the number of this step, counted from one."""
        if self._step is None:
            self._step = tf.cast(self.optimizer.iterations + 1, self.dtype)
        if base not in self._powers:
            self._powers[base] = tf.pow(self.constant(base), self._step)
        return self._powers[base]


def _update_step(
    optimizer: Any, kernel: Callable[..., None] | None, of_rows: Callable[..., None] | None, locking: bool
) -> Callable[..., None]:
    original = optimizer.update_step
    memo: dict[Any, _Scalars] = {}

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        chosen = of_rows if isinstance(gradient, tf.IndexedSlices) else kernel
        if chosen is None:
            original(gradient, variable, learning_rate)
            return
        dtype = variable.dtype.base_dtype
        key = (tf.compat.v1.get_default_graph(), variable.device, dtype)
        if key not in memo or tf.executing_eagerly():
            memo[key] = _Scalars(optimizer, learning_rate, dtype, locking)
        index = optimizer._get_variable_index(variable)
        chosen(optimizer, memo[key], variable.handle, index, tf.cast(gradient, dtype))

    update_step.scalars = memo  # type: ignore[attr-defined]
    return update_step


def _handle(slots: Sequence[Any], index: int) -> tf.Tensor:
    return slots[index].value.handle


def _sgd(optimizer: Any, scalars: _Scalars, variable: tf.Tensor, index: int, gradient: tf.Tensor) -> None:
    if optimizer.momentum == 0:
        tf.raw_ops.ResourceApplyGradientDescent(
            var=variable, alpha=scalars.learning_rate, delta=gradient, use_locking=scalars.locking
        )
        return
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable,
        accum=_handle(optimizer.momentums, index),
        lr=scalars.learning_rate,
        grad=gradient,
        momentum=scalars.constant(optimizer.momentum),
        use_nesterov=optimizer.nesterov,
        use_locking=scalars.locking,
    )


def _adam(optimizer: Any, scalars: _Scalars, variable: tf.Tensor, index: int, gradient: tf.Tensor) -> None:
    arguments = {
        "var": variable,
        "m": _handle(optimizer._momentums, index),
        "v": _handle(optimizer._velocities, index),
        "beta1_power": scalars.power(optimizer.beta_1),
        "beta2_power": scalars.power(optimizer.beta_2),
        "lr": scalars.learning_rate,
        "beta1": scalars.constant(optimizer.beta_1),
        "beta2": scalars.constant(optimizer.beta_2),
        "epsilon": scalars.constant(optimizer.epsilon),
        "grad": gradient,
        "use_locking": scalars.locking,
    }
    if optimizer.amsgrad:
        tf.raw_ops.ResourceApplyAdamWithAmsgrad(vhat=_handle(optimizer._velocity_hats, index), **arguments)
    else:
        tf.raw_ops.ResourceApplyAdam(**arguments)


def _adamax(optimizer: Any, scalars: _Scalars, variable: tf.Tensor, index: int, gradient: tf.Tensor) -> None:
    tf.raw_ops.ResourceApplyAdaMax(
        var=variable,
        m=_handle(optimizer._m, index),
        v=_handle(optimizer._u, index),
        beta1_power=scalars.power(optimizer.beta_1),
        lr=scalars.learning_rate,
        beta1=scalars.constant(optimizer.beta_1),
        beta2=scalars.constant(optimizer.beta_2),
        epsilon=scalars.constant(optimizer.epsilon),
        grad=gradient,
        use_locking=scalars.locking,
    )


def _rmsprop(optimizer: Any, scalars: _Scalars, variable: tf.Tensor, index: int, gradient: tf.Tensor) -> None:
    arguments = {
        "var": variable,
        "ms": _handle(optimizer._velocities, index),
        "mom": _handle(optimizer._momentums, index),
        "lr": scalars.learning_rate,
        "rho": scalars.constant(optimizer.rho),
        "momentum": scalars.constant(optimizer.momentum),
        "epsilon": scalars.constant(optimizer.epsilon),
        "grad": gradient,
        "use_locking": scalars.locking,
    }
    if optimizer.centered:
        tf.raw_ops.ResourceApplyCenteredRMSProp(mg=_handle(optimizer._average_gradients, index), **arguments)
    else:
        tf.raw_ops.ResourceApplyRMSProp(**arguments)


def _adadelta(optimizer: Any, scalars: _Scalars, variable: tf.Tensor, index: int, gradient: tf.Tensor) -> None:
    tf.raw_ops.ResourceApplyAdadelta(
        var=variable,
        accum=_handle(optimizer._accumulated_grads, index),
        accum_update=_handle(optimizer._accumulated_delta_vars, index),
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
        accum=_handle(optimizer._accumulators, index),
        linear=_handle(optimizer._linears, index),
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
    """Keras' formula on the rows that have a gradient; where it is zero, nothing changes."""
    accumulator, rows = _handle(optimizer._accumulators, index), gradient.indices
    tf.raw_ops.ResourceScatterAdd(resource=accumulator, indices=rows, updates=tf.square(gradient.values))
    squares = tf.raw_ops.ResourceGather(resource=accumulator, indices=rows, dtype=scalars.dtype)
    step = scalars.learning_rate * gradient.values / tf.sqrt(squares + scalars.constant(optimizer.epsilon))
    tf.raw_ops.ResourceScatterSub(resource=variable, indices=rows, updates=step)


# Keras' own update of these reads and writes whole variables for a sparse gradient too. The others are left out: they
# change rows without a gradient as well, or (SGD without momentum) Keras' own is sparse already.
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
