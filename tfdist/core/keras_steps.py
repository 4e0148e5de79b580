"""What functions of Keras do in the step of one of several replicas.

Keras computes a replica's loss as a mean over the replica's own examples. tfdist makes N replicas equal to one device
by a single rule: the loss of a replica counts with its *share*, its fraction of the examples of the global batch. The
shares add up to one, so the rule is right for terms that are the same on each replica (regularizers) and for every mean
over the batch (losses, activity regularizers, the means of `add_loss` and of an own `compute_loss`). Where Keras
divides by something else than the number of examples (a sum, a mask, the sum of the sample weights), the functions here
put the global divisor in its place. See docs/contract.md for the derivation.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdist.core import contributions, randomness, replica_context, share
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_patches

if TYPE_CHECKING:
    from tfdist.core.replica import Replica


@functools.cache
def install() -> None:
    """Puts the functions of this module around Keras' own, once; outside of a replica's step they call Keras' own."""
    keras_patches.install()
    for name, function in _IN_STEP.items():
        keras_patches.around(name, functools.partial(_in_step, function, _ON_PART.get(name)))
    for name, function in _DRAWS.items():
        keras_patches.around(name, functools.partial(_drawing, function))
    for name in ("scale_loss", "unscale_loss"):
        keras_patches.around(name, _as_it_is)


def _in_step(
    function: Callable[..., Any],
    on_part: Callable[..., Any] | None,
    original: Callable[..., Any],
    *args: Any,
    **named: Any,
) -> Any:
    replica = replica_context.current()
    if replica is not None:
        return function(replica, original, *args, **named)
    if on_part is not None and _thread.on_part is not None:
        return on_part(_thread.on_part, original, *args, **named)
    return original(*args, **named)


@contextlib.contextmanager
def on_part(replica: Replica) -> Iterator[None]:
    """The context of the step of a `replica` that exchanges nothing, and perhaps has a part of the global batch.

    Its mean is that of its part, and counts with the share in metrics. A sum is made that of the global batch which the
    part stands for, since weights are averaged afterwards.
    """
    if share.is_whole(replica):
        yield
        return
    install()
    before, _thread.on_part = _thread.on_part, replica
    try:
        yield
    finally:
        _thread.on_part = before


def _drawing(function: Callable[..., Any], original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    if replica_context.current() is None and not randomness.is_of_global_batch():
        return original(*args, **named)
    return function(original, *args, **named)


def _as_it_is(original: Callable[..., Any], value: Any) -> Any:
    """Leaves out Keras' scaling of losses by the number of replicas; the share does that, see `tfdist.core.share`."""
    return value if replica_context.in_step() else original(value)


def _reduce_values(
    replica: Replica,
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    reduction: str | None = "sum_over_batch_size",
) -> Any:
    """The local value L with share * L = local sum / global divisor."""
    if tuple(values.shape) in ((), (0,)):
        return original(values, sample_weight, reduction)
    if reduction == "sum":
        return share.undone(replica, tf.reduce_sum(values))
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        weight = tf.cast(tf.reduce_sum(sample_weight), values.dtype)
        return share.over_global(replica, tf.reduce_sum(values), weight)
    return original(values, sample_weight, reduction)


class _Thread(threading.local):
    per_example = False  # a loss that is not one value per example is refused
    on_part: Replica | None = None  # see `on_part`


_thread = _Thread()


class _OfWholeBatch(Exception):  # noqa: N818 - not an error
    """Raised in a loss of the user's own that is not one value of each example alone."""


def _loss_call(
    replica: Replica, original: Callable[..., Any], loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """A loss whose value counts with the replica's share, whatever its reduction is."""
    contributions.tell(replica, y_pred)
    value = _loss_value(replica, original, loss, y_true, y_pred, sample_weight)
    replica.means.append(value)
    return value


def _loss_on_part(replica: Replica, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """A loss as Keras computes it, which counts as a mean."""
    value = original(*args, **named)
    replica.means.append(value)
    return value


def _reduce_values_on_part(
    replica: Replica,
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    reduction: str | None = "sum_over_batch_size",
) -> Any:
    """As Keras', but for a sum: other divisors of the global batch are not known here."""
    if reduction == "sum":
        return _reduce_values(replica, original, values, sample_weight, reduction)
    return original(values, sample_weight, reduction)


def _loss_value(
    replica: Replica, original: Callable[..., Any], loss: Any, y_true: Any, y_pred: Any, sample_weight: Any
) -> Any:
    """The value of a loss; a loss that is not one value per example is computed on the gathered global batch."""
    kind = getattr(loss, "fn", type(loss))
    if kind not in keras_internals.OF_WHOLE_BATCH:
        if keras_internals.is_of_keras(kind):
            return original(loss, y_true, y_pred, sample_weight)
        before, _thread.per_example = _thread.per_example, True
        try:
            with replica_context.asks() as asked:
                return original(loss, y_true, y_pred, sample_weight)
        except _OfWholeBatch:
            if asked.any:  # the loss calls `gather` or `all_reduce`, and so is of the global batch already
                _thread.per_example = False
                return original(loss, y_true, y_pred, sample_weight)
        finally:
            _thread.per_example = before
    y_true, y_pred, sample_weight = gathered((y_true, y_pred, sample_weight))
    with replica_context.on_replica(None):
        return original(loss, y_true, y_pred, sample_weight)


def _reduce_weighted_values(
    replica: Replica, original: Callable[..., Any], values: Any, *args: Any, **named: Any
) -> Any:
    if _thread.per_example and not _is_of_each_example(replica, values):
        raise _OfWholeBatch
    return original(values, *args, **named)


def _is_of_each_example(replica: Replica, values: Any) -> bool:
    return keras_internals.is_per_example(replica, values) and not contributions.is_joint(replica, values)


def gathered(structure: Any) -> Any:
    """The tensors of `structure` with the examples of all replicas, and their masks; other values are unchanged."""

    def gather_one(value: Any) -> Any:
        if value is None or not tf.is_tensor(value) or value.shape.rank == 0:
            return value
        found = replica_context.gather(value)
        mask = keras_internals.mask_of(value)
        if mask is not None:
            keras_internals.set_mask(found, replica_context.gather(mask))
        return found

    return keras.tree.map_structure(gather_one, structure)


def _draw(original: Callable[..., Any], shape: Any, *args: Any, **named: Any) -> Any:
    def draw(shape: Any) -> Any:
        return original(shape, *args, **named)

    per_example = any(tf.is_tensor(one) and one.shape.rank != 0 for one in (*args, *named.values()))
    # Parameters per example are those of this part alone.
    return randomness.drawn_for(lambda: draw(shape), shape) if per_example else randomness.drawn(draw, shape)


def _draw_dropout(
    original: Callable[..., Any], inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None
) -> Any:
    shape = randomness.mask_shape(inputs, noise_shape)
    if randomness.is_of_global_batch():
        return inputs * randomness.drawn(lambda shape: original(tf.ones(shape, inputs.dtype), rate, None, seed), shape)
    return randomness.drawn_for(lambda: original(inputs, rate, noise_shape, seed), shape)


def _draw_categorical(
    original: Callable[..., Any], logits: Any, num_samples: int, dtype: Any = "int64", seed: Any = None
) -> Any:
    if randomness.is_of_global_batch():
        # The largest of the logits that this noise is added to is drawn with their probabilities (Gumbel).
        noise = keras_internals.uniform([*tf.unstack(tf.shape(logits)), num_samples], 1e-7, 1.0, seed)
        noisy = tf.cast(logits[:, :, tf.newaxis], noise.dtype) - tf.math.log(-tf.math.log(noise))
        return tf.cast(tf.argmax(noisy, axis=1), dtype)
    shape = tf.shape(logits)
    return randomness.drawn_for(lambda: original(logits, num_samples, dtype, seed), shape)


def _draw_seed(original: Callable[..., Any], seed: Any) -> Any:
    replica = replica_context.current()
    generator = randomness.unseeded(replica) if seed is None else None
    drawn = original(seed) if generator is None else generator.next(ordered=False)
    return drawn if replica is None else randomness.of_keras(replica, drawn)


def _apply_mask(
    replica: Replica, original: Callable[..., Any], sample_weight: Any, mask: Any, dtype: Any, reduction: Any
) -> Any:
    """As Keras', with the number of valid entries of the whole global batch."""
    if mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return original(sample_weight, mask, dtype=dtype, reduction=reduction)
    mask = tf.cast(mask, dtype)
    weight = mask * share.over_global(replica, tf.cast(tf.size(mask), dtype), tf.reduce_sum(mask))
    if sample_weight is None:
        return weight
    weight, sample_weight = keras_internals.squeeze_or_expand_to_same_rank(weight, tf.cast(sample_weight, dtype))
    return sample_weight * weight


# The losses that layers add are kept per replica. Keras keeps them per layer and clears them when the model is called
# again, which another replica does while this one waits for it in the middle of its step.
def _add_loss(replica: Replica, original: Callable[..., Any], layer: Any, loss: Any) -> None:
    original(layer, loss)
    replica.losses.setdefault(id(layer), []).extend(keras.tree.flatten(loss))


def _get_own_losses(replica: Replica, original: Callable[..., Any], layer: Any) -> list[Any]:
    del original
    return list(replica.losses.get(id(layer), ()))


def _clear_losses(replica: Replica, original: Callable[..., Any], layer: Any) -> None:
    replica.losses.pop(id(layer), None)
    original(layer)  # which calls this for the layers inside


def _mean_update_state(
    replica: Replica, original: Callable[..., Any], metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """A scalar given to a `Mean` is a mean over the local batch, or a sum, and counts once in the global one."""
    values = keras.ops.convert_to_tensor(values)
    if len(values.shape) == 0:
        if values.dtype.is_floating:  # the part of a sum must not be multiplied by the share
            values = share.undone(replica, contributions.to_value(replica, values))
        sample_weight = replica.share if sample_weight is None else sample_weight
    return original(metric, values, sample_weight)


def _compute_moments_sync(
    replica: Replica, original: Callable[..., Any], x: tf.Tensor, axes: Any, keepdims: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance over the global batch, in one reduction."""
    del original
    total, squares, count = _global_sums(replica, [x, tf.square(x), tf.ones_like(x)], axes)
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
    return (mean, variance) if keepdims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))


def _masked_moments(
    replica: Replica, original: Callable[..., Any], layer: Any, inputs: tf.Tensor, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of a masked batch, over the global batch; Keras' own are over the replica's part."""
    if not layer.synchronized:
        mean, variance = original(layer, inputs, mask)
        replica.own_statistics += [one for one in (mean, variance) if tf.is_symbolic_tensor(one)]
        return mean, variance
    if mask is None:
        return original(layer, inputs, mask)
    valid = tf.broadcast_to(tf.cast(mask, "bool")[..., tf.newaxis], tf.shape(inputs))
    x, axes = tf.where(valid, inputs, 0), keras_internals.reduction_axes(layer)
    total, squares, count = _global_sums(replica, [x, tf.square(x), tf.cast(valid, x.dtype)], axes)
    divisor = count + keras.config.epsilon()
    mean = total / divisor
    variance = tf.maximum((squares - 2 * mean * total + count * tf.square(mean)) / divisor, 0.0)
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)


def _global_sums(replica: Replica, tensors: list[tf.Tensor], axes: Any) -> list[tf.Tensor]:
    """The sums of `tensors` along `axes`, which are kept with length 1, and over the replicas."""
    local = [replica.only_real(tf.reduce_sum(tensor, axes, keepdims=True)) for tensor in tensors]
    return replica_context.differentiable_sums(replica, local)


def _optimizer_apply(
    replica: Replica,
    original: Callable[..., Any],
    optimizer: Any,
    grads: Any,
    trainable_variables: Any = None,
) -> Any:
    def apply(gradients: Sequence[Any], variables: Sequence[Any] | None = trainable_variables) -> None:
        with (
            replica_context.on_replica(None),
            keras_internals.outside_of_stateless_scope(),
            keras_patches.applying_reduced_gradients(),
        ):
            original(optimizer, gradients, variables)

    keras_patches.require_reduced_once(optimizer)
    if not optimizer.built:
        replica.build(
            optimizer,
            keras_internals.trainable_variables(optimizer) if trainable_variables is None else trainable_variables,
        )
    replica_context.require_meeting(replica, f"An update of the optimizer `{optimizer.name}`")
    replica.settle()
    replica.apply(apply, list(grads), optimizer, trainable_variables)


def _sum_update_state(
    replica: Replica, original: Callable[..., Any], metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """A scalar given to a `Sum` counts as what it is of the global batch; without a graph it counts as a sum."""
    values = keras.ops.cast(keras.ops.convert_to_tensor(values), metric.dtype)
    if len(values.shape) == 0 and contributions.is_read(replica, values):
        values = contributions.to_value(replica, values)
    return original(metric, values, sample_weight)


_IN_STEP: dict[str, Callable[..., Any]] = {
    "loss": _loss_call,
    "reduce_weighted_values": _reduce_weighted_values,
    "reduce_values": _reduce_values,
    "apply_mask": _apply_mask,
    "mean_update_state": _mean_update_state,
    "sum_update_state": _sum_update_state,
    "add_loss": _add_loss,
    "get_own_losses": _get_own_losses,
    "clear_losses": _clear_losses,
    "compute_moments_sync": _compute_moments_sync,
    "masked_moments": _masked_moments,
    "apply": _optimizer_apply,
    "apply_scaled": _optimizer_apply,
}
_ON_PART: dict[str, Callable[..., Any]] = {
    "loss": _loss_on_part,
    "reduce_values": _reduce_values_on_part,
    "mean_update_state": _mean_update_state,
    "sum_update_state": _sum_update_state,
}
_DRAWS: dict[str, Callable[..., Any]] = {
    "beta": _draw,
    "binomial": _draw,
    "categorical": _draw_categorical,
    "draw_seed": _draw_seed,
    "dropout": _draw_dropout,
    "gamma": _draw,
    "normal": _draw,
    "randint": _draw,
    "truncated_normal": _draw,
    "uniform": _draw,
}
