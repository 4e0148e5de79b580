"""The private parts of Keras that tfdist reaches into, all of them, and why. Seen in Keras 3.15.1.

`tests/test_keras_internals.py` fails when one of them changes.

Keras computes a replica's loss as a mean over the replica's own examples. tfdist makes N replicas equal to one by a
single rule: a replica's step counts with its *share*, its part of the examples of the global batch. Shares add up
to one, so the rule leaves alone what is whole on each replica (regularizers) and is right for every mean over the
batch (losses, activity regularizers, what `add_loss` or an own `compute_loss` averages). Where Keras divides by
something else than the number of examples (a sum, a mask, the sum of the sample weights), the patches below put the
global divisor in its place. See docs/contract.md for the derivation.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend, tree
from keras.src.backend import config
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import nn as tensorflow_nn
from keras.src.backend.tensorflow import numpy as tensorflow_numpy
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.callbacks.progbar_logger import ProgbarLogger
from keras.src.initializers.random_initializers import RandomInitializer
from keras.src.losses import loss as loss_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers import data_adapters
from keras.src.trainers import trainer as trainer_module
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.utils import python_utils

from tfdist import tensorflow_internals
from tfdist.errors import UsageError

SEEN_IN = "3.15.1"

__all__ = ["ArrayDataAdapter", "ProgbarLogger", "tree"]

# What the loop uses as Keras' own `fit` does.
concatenate = tensorflow_trainer.potentially_ragged_concat
get_data_adapter = data_adapters.get_data_adapter
is_default = keras.src.utils.is_default
is_tf_dataset = data_adapters.is_tf_dataset
join = tensorflow_trainer.concat
max_epochs = config.max_epochs
max_steps_per_epoch = config.max_steps_per_epoch
pythonify_logs = python_utils.pythonify_logs
to_numpy = tensorflow_trainer.convert_to_np_if_not_ragged
train_validation_split = array_slicing.train_validation_split
unpack_x_y_sample_weight = data_adapter_utils.unpack_x_y_sample_weight


class Replica(Protocol):
    """What Keras' code must know while it traces the step of one replica among several."""

    share: tf.Tensor  # float64 scalar: examples of this replica / examples of the global batch
    weighed: set[Any]  # the optimizers whose loss was multiplied by the share, until they are applied

    def gradient_share(self, weighed: bool) -> tf.Tensor:
        """What is left to multiply gradients by: the share, or 1 where their loss was weighed; 0 of no examples."""
        ...

    def all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """The sums of `tensors` over the replicas."""
        ...

    def apply(self, optimizer: Any, apply: Callable[..., Any], gradients: Sequence[Any]) -> None:
        """Reduces this replica's `gradients`, then lets `apply(gradients)` of `optimizer` update the variables."""
        ...


class _Current(threading.local):
    replica: Replica | None = None
    applies_reduced_gradients = False


_current = _Current()


@contextlib.contextmanager
def on_replica(replica: Replica | None) -> Iterator[None]:
    """Code in this context, in this thread, runs on `replica`; with `None`, Keras is as it always was."""
    install()
    before = _current.replica
    _current.replica = replica
    try:
        yield
    finally:
        _current.replica = before


@functools.cache
def install() -> None:
    """Puts the patches in place, once; outside of `on_replica` each of them calls the original."""
    for kind in (BaseOptimizer, keras.optimizers.LossScaleOptimizer):
        _patch_around_apply(kind)
    _patch_supports_xla()
    _patch(loss_module, "reduce_values", _reduce_values)
    _patch(loss_module, "apply_mask", _apply_mask)
    _patch(loss_module, "scale_loss_for_distribution", _as_it_is)
    _patch(loss_module, "unscale_loss_for_distribution", _as_it_is)
    _patch(keras.metrics.Mean, "update_state", _mean_update_state)
    _patch(tensorflow_nn, "_compute_moments_sync", _compute_moments_sync)
    _patch(BaseOptimizer, "apply", _optimizer_apply)
    _patch(keras.optimizers.LossScaleOptimizer, "apply", _optimizer_apply)
    _patch(keras.optimizers.LossScaleOptimizer, "scale_loss", _scale_loss)
    all_reduce = TFOptimizer._all_reduce_sum_gradients

    @functools.wraps(all_reduce)
    def once(optimizer: Any, grads_and_vars: Any) -> Any:
        return grads_and_vars if _current.applies_reduced_gradients else all_reduce(optimizer, grads_and_vars)

    TFOptimizer._all_reduce_sum_gradients = once


@functools.cache
def look_up_rows() -> None:
    """Lets Keras read of an embedding the rows that it takes, from here on, and not the whole table.

    The result is the same. But TensorFlow copies a variable at each reading of the whole, once it has updated some of
    its rows alone.
    """
    original = tensorflow_numpy.take

    @functools.wraps(original)
    def take(x: Any, indices: Any, axis: int | None = None) -> Any:
        value = _readable_by_row(x) if axis == 0 and tf.is_tensor(indices) else None
        if value is None or isinstance(indices, tf.SparseTensor | tf.RaggedTensor):
            return original(x, indices, axis=axis)
        rows = tf.gather(value, tf.where(indices < 0, indices + value.shape[0], indices))
        return x._maybe_autocast(rows)

    tensorflow_numpy.take = take


# From this size on, what is saved is worth tracing a graph.
_LARGE_BYTES = 1 << 26


@functools.cache
def fill_large_variables_in_place() -> None:
    """Lets Keras make the first value of a large variable without further tensors of its size, from here on.

    The value is the same. But done one by one each operation of an initializer has a result of its own, so that random
    numbers take three times the variable, and TensorFlow keeps what it once took. In a graph an operation writes over
    what it read, unless constant folding holds on to that.
    """
    original = backend.Variable._initialize_with_initializer

    @functools.wraps(original)
    def initialize(self: Any, initializer: Any) -> None:
        size_bytes = np.prod(self._shape) * tf.as_dtype(self._dtype).size
        if size_bytes < _LARGE_BYTES or not tf.executing_eagerly():
            original(self, initializer)
            return
        with _without_constant_folding():
            original(self, _in_place(initializer))
        _take_apart(self._value)

    backend.Variable._initialize_with_initializer = initialize


def _in_place(initializer: Any) -> Any:
    if isinstance(initializer, RandomInitializer):
        return tf.function(initializer, autograph=False)
    if isinstance(initializer, keras.initializers.Constant) and np.ndim(initializer.value) == 0:
        return lambda shape, dtype: tf.fill(shape, tf.cast(initializer.value, dtype))
    return initializer


def _take_apart(variable: Any) -> None:
    """Gives each copy of a variable on the CPU a tensor of its own.

    They begin with one for all. Replicas that change its first rows at the same moment would each find it shared and
    copy it, the last one too.
    """
    for copy in tf.distribute.get_strategy().experimental_local_results(variable)[1:]:
        if "CPU" in copy.device:
            copy.assign(tf.raw_ops.DeepCopy(x=copy.value()))


@contextlib.contextmanager
def _without_constant_folding() -> Iterator[None]:
    before = tf.config.optimizer.get_experimental_options().get("constant_folding", True)
    tf.config.optimizer.set_experimental_options({"constant_folding": False})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"constant_folding": before})


def _readable_by_row(x: Any) -> Any:
    """The variable behind a Keras variable, where that is what it stands for here."""
    if not isinstance(x, backend.Variable):
        return None
    scope = global_state.get_global_attribute("stateless_scope")
    value = None if scope is None else scope.get_current_value(x)
    value = tensorflow_internals.local_copy(x._value if value is None else value)
    return value if hasattr(value, "sparse_read") else None


def _patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        replica = _current.replica
        if replica is None:
            return original(*args, **kwargs)
        return replacement(replica, original, *args, **kwargs)

    setattr(owner, name, patched)


def _as_it_is(replica: Replica, original: Any, value: Any) -> Any:
    """Keras scales the loss by 1/replicas here; the share does that, exactly, when gradients are reduced."""
    del replica, original
    return value


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
    if reduction in (None, "none"):  # a vector, whose gradient is that of its sum
        return tf.math.divide_no_nan(values, tf.cast(replica.share, values.dtype))
    if reduction == "sum":
        return tf.math.divide_no_nan(tf.reduce_sum(values), tf.cast(replica.share, values.dtype))
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        weight = tf.cast(tf.reduce_sum(sample_weight), values.dtype)
        return _over_global(replica, tf.reduce_sum(values), weight)
    return original(values, sample_weight, reduction)


def _over_global(replica: Replica, total: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
    (divisor,) = replica.all_reduce([tf.stop_gradient(divisor)])
    return tf.math.divide_no_nan(total, divisor * tf.cast(replica.share, total.dtype))


def _apply_mask(
    replica: Replica, original: Callable[..., Any], sample_weight: Any, mask: Any, dtype: Any, reduction: Any
) -> Any:
    """As Keras', with the number of valid entries of the whole global batch."""
    if mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return original(sample_weight, mask, dtype=dtype, reduction=reduction)
    mask = tf.cast(mask, dtype)
    weight = mask * _over_global(replica, tf.cast(tf.size(mask), dtype), tf.reduce_sum(mask))
    if sample_weight is None:
        return weight
    weight, sample_weight = loss_module.squeeze_or_expand_to_same_rank(weight, tf.cast(sample_weight, dtype))
    return sample_weight * weight


def _mean_update_state(
    replica: Replica, original: Callable[..., Any], metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """A scalar given to a `Mean` is a mean over the local batch: it counts with the replica's share."""
    values = backend.convert_to_tensor(values)
    if len(values.shape) == 0:
        values = tf.where(replica.share > 0, values, tf.zeros_like(values))  # a mean over no examples may be NaN
        sample_weight = replica.share if sample_weight is None else sample_weight
    return original(metric, values, sample_weight)


def _compute_moments_sync(
    replica: Replica, original: Callable[..., Any], x: tf.Tensor, axes: Any, keepdims: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance over the global batch, in one reduction."""
    del original
    count = tf.reduce_sum(tf.ones_like(x), axes, keepdims=True)
    total, squares, count = _global_sums(
        replica, [tf.reduce_sum(x, axes, keepdims=True), tf.reduce_sum(tf.square(x), axes, keepdims=True), count]
    )
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
    return (mean, variance) if keepdims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))


def _global_sums(replica: Replica, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums over the replicas, in the middle of a step.

    What flows back must be the gradient of the sum of share * loss over all replicas. Where a replica's gradients are
    multiplied by its own share later, that share is taken out here.
    """

    @tf.custom_gradient
    def sums(*local: tf.Tensor) -> Any:
        def backward(*upstream: tf.Tensor) -> list[tf.Tensor]:
            share = replica.gradient_share(bool(replica.weighed))
            weighed = [tf.math.multiply_no_nan(u, tf.cast(share, u.dtype)) for u in upstream]
            reduced = replica.all_reduce(weighed)
            return [tf.math.divide_no_nan(r, tf.cast(share, r.dtype)) for r in reduced]

        return replica.all_reduce(list(local)), backward

    return sums(*tensors)


class Unbuilt(Exception):  # noqa: N818 - not an error
    """Raised while tracing a step of several replicas: its optimizer has no variables yet, and gets them outside."""

    def __init__(self, optimizer: Any, variables: Sequence[Any]):
        super().__init__()
        self.optimizer, self.variables = optimizer, list(variables)


def _scale_loss(replica: Replica, original: Callable[..., Any], optimizer: Any, loss: Any) -> Any:
    """As Keras', of the share's part of the loss.

    Gradients of the whole local loss would be as many times larger than one device's as there are replicas, and so be
    out of float16's range, and the step left out, where one device takes it.
    """
    replica.weighed.add(optimizer)
    return original(optimizer, tf.math.multiply_no_nan(loss, tf.cast(replica.share, loss.dtype)))


def _optimizer_apply(
    replica: Replica,
    original: Callable[..., Any],
    optimizer: Any,
    grads: Any,
    trainable_variables: Any = None,
) -> Any:
    def apply(gradients: Sequence[Any]) -> None:
        with on_replica(None), _outside_of_stateless_scope(), _applying_reduced_gradients():
            original(optimizer, gradients, trainable_variables)

    if around_apply(optimizer) is not None:
        raise UsageError(
            f"The gradients of `{optimizer.name}` are reduced by the strategy, and by `DistributedOptimizer`",
            "leave out the one or the other",
        )
    if not optimizer.built and tf.inside_function():
        raise Unbuilt(optimizer, optimizer._trainable_variables if trainable_variables is None else trainable_variables)
    replica.apply(optimizer, apply, list(grads))
    replica.weighed.discard(optimizer)


@contextlib.contextmanager
def _applying_reduced_gradients() -> Iterator[None]:
    _current.applies_reduced_gradients = True
    try:
        yield
    finally:
        _current.applies_reduced_gradients = False


# `around(optimizer, gradients, variables, update)` reduces the gradients and calls `update(reduced)`.
AroundApply = Callable[[Any, list[Any], list[Any], Callable[[Sequence[Any]], None]], None]
_AROUND_APPLY = "_tfdist_around_apply"


def set_around_apply(optimizer: Any, around: AroundApply) -> None:
    """From now on `around` is called where `optimizer`, or one that scales its losses, is to apply gradients."""
    install()
    # Past Keras' attribute tracking, so that nothing of it is saved with the model.
    object.__setattr__(optimizer, _AROUND_APPLY, around)


def around_apply(optimizer: Any) -> AroundApply | None:
    """What was set for `optimizer` itself, or for the one inside it."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return vars(inner).get(_AROUND_APPLY) or vars(optimizer).get(_AROUND_APPLY)


def _patch_around_apply(kind: Any) -> None:
    original = kind.apply

    @functools.wraps(original)
    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        around = None if _current.applies_reduced_gradients else around_apply(optimizer)
        if around is None:
            return original(optimizer, grads, trainable_variables)
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables

        def update(gradients: Sequence[Any]) -> None:
            with _applying_reduced_gradients():
                original(optimizer, gradients, trainable_variables)

        return around(optimizer, list(grads), list(variables), update)

    kind.apply = apply


def _patch_supports_xla() -> None:
    """What goes around an update, Horovod's operations, is not known to XLA."""
    original = trainer_module.model_supports_jit

    @functools.wraps(original)
    def model_supports_jit(model: Any) -> bool:
        optimizer = getattr(model, "optimizer", None)
        return (optimizer is None or around_apply(optimizer) is None) and original(model)

    trainer_module.model_supports_jit = model_supports_jit


@contextlib.contextmanager
def _outside_of_stateless_scope() -> Iterator[None]:
    scope = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


class VariableUpdates(keras.StatelessScope):
    """Catches what a replica's step assigns to Keras variables other than metrics and trainable weights.

    Moving averages, seeds and states would otherwise drift apart between the replicas, or be written once a replica
    where there is one copy. `merge` writes each of them once, the same value everywhere: floating-point values as the
    mean of the replicas weighed by their shares, so that a replica without examples has no say; where the variable's
    aggregation is "sum", as it was with the changes of all replicas added; others, which count alike on all replicas,
    as the first replica has them.
    """

    def __init__(self, metrics_variables: Sequence[Any]):
        super().__init__(collect_losses=True)
        self._metrics = {id(variable) for variable in metrics_variables}
        self.metrics_updated: set[int] = set()
        self._updated: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if id(variable) in self._metrics:
            self.metrics_updated.add(id(variable))
            variable._value.assign(tf.cast(value, variable._value.dtype))
            return
        self._updated[id(variable)] = variable
        super().add_update((variable, value))

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        return variable._value if value is None else value

    def merge(self, replica: Replica, write: Callable[[list[tuple[Any, tf.Tensor]]], None]) -> None:
        """Agrees with the other replicas on the new values, and lets `write` assign them."""
        updates = [(variable, self.state_mapping[key]) for key, variable in self._updated.items()]
        floats = [(v, value) for v, value in updates if v._value.dtype.is_floating]
        others = [(v, value) for v, value in updates if not v._value.dtype.is_floating]
        if floats:
            sums = replica.all_reduce([_part(replica, v, tf.cast(value, v._value.dtype)) for v, value in floats])
            floats = [
                (v, v._value + total if v.aggregation == "sum" else total)
                for (v, _), total in zip(floats, sums, strict=True)
            ]
        if updates:
            write(floats + others)


def _part(replica: Replica, variable: Any, value: tf.Tensor) -> tf.Tensor:
    """What a replica adds to the value of `variable` that all agree on."""
    if variable.aggregation == "sum":
        return value - variable._value
    return tf.math.multiply_no_nan(value, tf.cast(replica.share, value.dtype))


class Carried(VariableUpdates):
    """The same, where some variables are not written either: `values` has what the step made of theirs.

    Args:
        variables: those, metrics among them.
        values: what the step finds in them.
    """

    def __init__(self, variables: Sequence[Any], values: Sequence[tf.Tensor]):
        super().__init__(())
        self._carried = {id(variable): variable for variable in variables}
        self.state_mapping.update({id(v): value for v, value in zip(variables, values, strict=True)})

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if id(variable) in self._carried:
            self.metrics_updated.add(id(variable))
            self.state_mapping[id(variable)] = tf.cast(value, variable._value.dtype)
        else:
            super().add_update(update)

    @property
    def values(self) -> list[tf.Tensor]:
        """The carried variables after the step."""
        return [self.state_mapping[key] for key in self._carried]


@contextlib.contextmanager
def counting(optimizer: Any, count: Callable[[Any], None]) -> Iterator[None]:
    """Meanwhile `count(variable)` adds one to the `iterations` of `optimizer`, which Keras reads and then writes."""
    iterations = optimizer._iterations
    object.__setattr__(iterations, "assign_add", lambda value: count(iterations._value))
    try:
        yield
    finally:
        object.__delattr__(iterations, "assign_add")


def build(model: Any, spec: Any, *, for_prediction: bool = False) -> None:
    """Makes every variable of `model`, its loss, its metrics and its optimizer, from the `spec` of a global batch.

    Variables that are made inside a traced loop cannot be lifted out of it, so all must exist before the first trace.
    A prediction needs the model's alone, and has no targets to build loss and metrics from.
    """
    look_up_rows()
    spec = tree.map_structure(_none_if_optional, spec)
    if for_prediction:
        if not all(layer.built for layer in model._flatten_layers()):
            x, _, _ = unpack_x_y_sample_weight(spec)
            inputs = tree.map_structure(lambda s: keras.KerasTensor(s.shape, backend.standardize_dtype(s.dtype)), x)
            backend.compute_output_spec(model, inputs, training=False)
        return
    if type(model).call is keras.Model.call:  # its step calls only parts of it, and they must be built
        return
    model._symbolic_build(data_batch=spec)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)


def _none_if_optional(spec: Any) -> Any:
    return None if isinstance(spec, tf.OptionalSpec) else spec


def sliceable(adapter: ArrayDataAdapter) -> Any:
    """The arrays of an adapter as TensorFlow tensors of Keras' types, in the structure `(x, y, sample_weight)`."""
    arrays = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")

    def to_tensor(array: Any) -> Any:
        return tf.convert_to_tensor(array) if isinstance(array, np.ndarray) else array

    return tree.map_structure(to_tensor, tree.lists_to_tuples(arrays))


def gather(arrays: Any, indices: tf.Tensor) -> Any:
    """The examples `indices` (int `[n]`) of every array of a structure that `sliceable` made."""

    def gather_one(array: Any) -> Any:
        if isinstance(array, array_slicing.TensorflowSparseWrapper):
            return array_slicing.slice_tensorflow_sparse_wrapper(array, tf.cast(indices, tf.int64))
        if isinstance(array, list | tuple | dict):
            return None  # Keras' `traverse` then goes into the structure
        return tf.gather(array, indices, axis=0) if tf.is_tensor(array) else array

    return tree.traverse(gather_one, arrays)


def batch_spec(arrays: Any) -> Any:
    """The specs of a batch of any size of a structure that `sliceable` made."""

    def spec_one(array: Any) -> Any:
        if isinstance(array, array_slicing.TensorflowSparseWrapper):
            return tf.SparseTensorSpec([None, *array.sparse.shape[1:]], array.sparse.dtype)
        if isinstance(array, list | tuple | dict):
            return None
        return tf.TensorSpec([None, *array.shape[1:]], array.dtype)

    return tree.traverse(spec_one, arrays)


def number_of_examples(arrays: Any) -> int:
    """The length of the first array of a structure that `sliceable` made."""
    first = next(array for array in tree.flatten(arrays) if array is not None)
    return int(first.shape[0])


def traces_batches(tensorboard: keras.callbacks.TensorBoard) -> bool:
    """Whether a `TensorBoard` callback profiles some of the batches."""
    return bool(tensorboard._should_trace)


def wants_xla(model: Any) -> bool:
    """Whether Keras would compile the steps with XLA: as `compile` was told, or as its "auto" chose, never on a CPU."""
    return model._compile_config.config.get("jit_compile") is True


def layers(model: Any) -> list[tuple[str, dict[str, Any]]]:
    """The class of each layer in `model` and those of its settings that are plain values, but for its name."""
    return [(type(layer).__name__, _plain_settings(layer)) for layer in model._flatten_layers()]


def _plain_settings(layer: Any) -> dict[str, Any]:
    try:
        config = layer.get_config()
    except NotImplementedError:  # a class of the user's that was not made to be saved
        return {}
    plain = (bool, int, float, str, NoneType)
    return {name: value for name, value in config.items() if name != "name" and isinstance(value, plain)}
