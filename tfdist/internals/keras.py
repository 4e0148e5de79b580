"""The private parts of Keras that tfdist reaches into, all of them, and why. Seen in Keras 3.15.1.

`tests/test_keras_internals.py` fails when one of them changes.

What Keras' functions do in the step of one replica among several is in `tfdist.core.keras_steps`; here is where
they are, and what it needs of Keras for that.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend, tree
from keras.src.backend import config
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import nn as tensorflow_nn
from keras.src.backend.tensorflow import numpy as tensorflow_numpy
from keras.src.backend.tensorflow import random as tensorflow_random
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.callbacks.progbar_logger import ProgbarLogger
from keras.src.initializers.random_initializers import RandomInitializer
from keras.src.losses import loss as loss_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import global_seed_generator
from keras.src.trainers import data_adapters
from keras.src.trainers import trainer as trainer_module
from keras.src.trainers.compile_utils import CompileMetrics
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.utils import python_utils

from tfdist.errors import UsageError
from tfdist.internals import tensorflow as tensorflow_internals

SEEN_IN = "3.15.1"

__all__ = ["ArrayDataAdapter", "GeneratorDataAdapter", "ProgbarLogger", "tree"]

# What the loop uses as Keras' own `fit` does.
class_weight_to_sample_weights = data_adapter_utils.class_weight_to_sample_weights
concatenate = tensorflow_trainer.potentially_ragged_concat
get_data_adapter = data_adapters.get_data_adapter
is_default = keras.src.utils.is_default
is_tf_dataset = data_adapters.is_tf_dataset
join = tensorflow_trainer.concat
squeeze_or_expand_to_same_rank = loss_module.squeeze_or_expand_to_same_rank
max_epochs = config.max_epochs
max_steps_per_epoch = config.max_steps_per_epoch
pythonify_logs = python_utils.pythonify_logs
to_numpy = tensorflow_trainer.convert_to_np_if_not_ragged
train_validation_split = array_slicing.train_validation_split
unpack_x_y_sample_weight = data_adapter_utils.unpack_x_y_sample_weight


class _Thread(threading.local):
    applies_reduced_gradients = False
    assigns = True


_thread = _Thread()


# The functions of Keras that can be replaced, see `around`.
PLACES: dict[str, tuple[Any, str]] = {
    "loss": (keras.losses.Loss, "__call__"),
    "reduce_weighted_values": (loss_module, "reduce_weighted_values"),
    "reduce_values": (loss_module, "reduce_values"),
    "apply_mask": (loss_module, "apply_mask"),
    "scale_loss": (loss_module, "scale_loss_for_distribution"),
    "unscale_loss": (loss_module, "unscale_loss_for_distribution"),
    "mean_update_state": (keras.metrics.Mean, "update_state"),
    "add_loss": (keras.Layer, "add_loss"),
    "get_own_losses": (keras.Layer, "_get_own_losses"),
    "clear_losses": (keras.Layer, "_clear_losses"),
    "compute_moments_sync": (tensorflow_nn, "_compute_moments_sync"),
    "masked_moments": (keras.layers.BatchNormalization, "_moments"),
    "apply": (BaseOptimizer, "apply"),
    "apply_scaled": (keras.optimizers.LossScaleOptimizer, "apply"),
    **{
        name: (tensorflow_random, name)
        for name in (
            "beta",
            "binomial",
            "categorical",
            "draw_seed",
            "dropout",
            "gamma",
            "normal",
            "randint",
            "truncated_normal",
            "uniform",
        )
    },
}


def around(place: str, call: Callable[..., Any]) -> None:
    """From now on Keras' function at a place of `PLACES` is `call(original, *args, **named)`."""
    owner, name = PLACES[place]
    original = getattr(owner, name)

    @functools.wraps(original)
    def replaced(*args: Any, **named: Any) -> Any:
        return call(original, *args, **named)

    setattr(owner, name, replaced)


@functools.cache
def install() -> None:
    """Lets optimizers apply gradients that are reduced already, and variables keep their values, where asked to."""
    for kind in (BaseOptimizer, keras.optimizers.LossScaleOptimizer):
        _patch_around_apply(kind)
    _patch_supports_xla()
    all_reduce = TFOptimizer._all_reduce_sum_gradients

    @functools.wraps(all_reduce)
    def once(optimizer: Any, grads_and_vars: Any) -> Any:
        return grads_and_vars if _thread.applies_reduced_gradients else all_reduce(optimizer, grads_and_vars)

    TFOptimizer._all_reduce_sum_gradients = once
    assign = backend.Variable._direct_assign

    @functools.wraps(assign)
    def assign_unless_told(variable: Any, value: Any) -> None:
        if _thread.assigns:
            assign(variable, value)

    backend.Variable._direct_assign = assign_unless_told


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


# What these compute of a batch is no mean over its examples.
OF_WHOLE_BATCH = {
    keras.losses.Dice,
    keras.losses.Tversky,
    keras.losses.Circle,
    keras.losses.dice,
    keras.losses.tversky,
    keras.losses.circle,
}


def is_of_keras(kind: Any) -> bool:
    """Whether a class or a function is Keras' own."""
    return (getattr(kind, "__module__", None) or "").partition(".")[0] == "keras"


def is_per_example(replica: Any, values: Any) -> bool:
    """Whether the first axis of `values` is that of the replica's examples, or of their parts."""
    shape = tf.TensorShape(getattr(values, "shape", ()))  # a number has none
    if shape.rank is None or shape.rank == 0 or replica is None:
        return shape.rank != 0
    if shape[0] is None or replica.examples is None:
        return shape[0] is None
    return shape[0] % replica.examples == 0


def metrics_of(model: Any) -> list[Any]:
    """The metrics of `model`, those that it was compiled with one by one."""
    found: list[Any] = []
    for metric in model.metrics:
        found += metric.metrics if isinstance(metric, CompileMetrics) else [metric]
    return found


def compiled_metrics_are_built(model: Any) -> bool:
    """Whether the metrics that `model` was compiled with have results: a step of its own need not use them."""
    return model._compile_metrics is None or bool(model._compile_metrics.built)


def is_additive(metric: Any) -> bool:
    """Whether a metric's state is a sum over the examples: as it says by `additive`, or as Keras' own are."""
    function = metric._fn if isinstance(metric, keras.metrics.MeanMetricWrapper) else None
    declared = getattr(function, "additive", getattr(metric, "additive", None))
    if declared is not None:
        return bool(declared)
    of_keras = is_of_keras(type(metric))
    return of_keras and (function is None or (is_of_keras(function) and function not in OF_WHOLE_BATCH))


def values_per_example(replica: Any, metric: Any, *arguments: Any, **named: Any) -> bool:
    """Whether `metric` is the mean of a function that gives a value per example."""
    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        return False
    names = dict(zip(("y_true", "y_pred"), arguments, strict=False)) | named
    values = metric._fn(names["y_true"], names["y_pred"], **metric._fn_kwargs)
    return tf.is_tensor(values) and is_per_example(replica, values)


def tf_variable(variable: Any) -> Any:
    """The variable of TensorFlow's that holds the value of one of Keras'."""
    return variable._value


def set_tf_variable(variable: Any, value: Any) -> None:
    """Has a variable of Keras' stand for another one of TensorFlow's, of its type and of any shape."""
    variable._value, variable._shape = value, tuple(value.shape)


def all_layers(model: Any) -> list[Any]:
    """`model` and all layers in it."""
    return list(model._flatten_layers())


def is_connected(layer: Any) -> bool:
    """Whether a layer has been called on symbolic inputs, so that its output is known."""
    return bool(layer._inbound_nodes)


def loss_tracker(model: Any) -> Any:
    """The metric that averages the loss of `model`; `None` where it was compiled without."""
    return getattr(model, "_loss_tracker", None)


def iterations(optimizer: Any) -> Any:
    """The variable that counts the steps of `optimizer`; its public property counts updates."""
    return optimizer._iterations


def learning_rate(optimizer: Any) -> Any:
    """The learning rate of `optimizer`: a variable, or a schedule."""
    return optimizer._learning_rate


def variable_index(optimizer: Any, variable: Any) -> int:
    """The number of `variable` among those that `optimizer` was built for."""
    return int(optimizer._get_variable_index(variable))


def slots(optimizer: Any, name: str) -> list[Any]:
    """What `optimizer` keeps for each trainable variable, such as "velocities"; `None` for one that has none."""
    found: list[Any] = getattr(optimizer, name if hasattr(optimizer, name) else f"_{name}")
    return found


@contextlib.contextmanager
def updating_with(
    optimizer: Any, update_step: Callable[[Any, Any, Any], None], before_each: Callable[[], None]
) -> Iterator[None]:
    """Meanwhile `optimizer` updates a variable by `update_step(gradient, variable, learning_rate)`.

    `before_each` is called before each update of all variables.
    """
    update_all = optimizer._backend_update_step

    def update(*arguments: Any) -> None:
        before_each()
        update_all(*arguments)

    # Set on the instance and past Keras' attribute tracking, so that nothing of it is saved with the model.
    object.__setattr__(optimizer, "update_step", update_step)
    object.__setattr__(optimizer, "_backend_update_step", update)
    try:
        yield
    finally:
        object.__delattr__(optimizer, "_backend_update_step")
        object.__delattr__(optimizer, "update_step")


def strategy_of(optimizer: Any) -> Any:
    """The `tf.distribute.Strategy` in whose scope `optimizer` was made."""
    return optimizer._distribution_strategy


def in_order_of_metrics(model: Any, logs: Any) -> Any:
    """`logs` as a list, as `evaluate` returns them."""
    return model._flatten_metrics_in_order(logs)


def validates(model: Any, epoch: int, frequency: Any) -> bool:
    """Whether epoch number `epoch` ends with a validation, for the `validation_freq` of `fit`."""
    return bool(model._should_eval(epoch, frequency))


def initial_epoch(model: Any) -> int | None:
    """The epoch that a callback has set `fit` to begin with, see `set_initial_epoch`."""
    epoch: int | None = model._initial_epoch
    return epoch


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Has `fit` begin with `epoch`, as `keras.callbacks.BackupAndRestore` does; `None` leaves it to its argument."""
    model._initial_epoch = epoch


def trainable_variables(optimizer: Any) -> list[Any]:
    """The variables that `optimizer` was built for."""
    return list(optimizer._trainable_variables)


def reduction_axes(normalization: keras.layers.BatchNormalization) -> list[int]:
    """The axes along which a batch normalization averages."""
    return list(normalization._reduction_axes)


def mask_of(tensor: Any) -> Any:
    """The mask that goes with `tensor`, `None` where there is none."""
    return backend.get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Has `mask` go with `tensor`."""
    backend.set_keras_mask(tensor, mask)


def uniform(shape: Any, minimum: float, maximum: float, seed: Any) -> tf.Tensor:
    """As `keras.random.uniform`, of a shape that may be made of tensors."""
    return tensorflow_random.uniform(shape, minimum, maximum, seed=seed)


def seed_generator(seed: int | None) -> Any:
    """A seed generator that begins with `seed`; Keras' own for functions that are given no seed, where it is `None`."""
    return global_seed_generator() if seed is None else keras.random.SeedGenerator(seed)


@contextlib.contextmanager
def applying_reduced_gradients() -> Iterator[None]:
    """Optimizers take the gradients that they are given meanwhile for those of all replicas."""
    _thread.applies_reduced_gradients = True
    try:
        yield
    finally:
        _thread.applies_reduced_gradients = False


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
        around = None if _thread.applies_reduced_gradients else around_apply(optimizer)
        if around is None:
            return original(optimizer, grads, trainable_variables)
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables

        def update(gradients: Sequence[Any]) -> None:
            with applying_reduced_gradients():
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
def outside_of_stateless_scope() -> Iterator[None]:
    """What is assigned meanwhile is written at once."""
    scope = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


@contextlib.contextmanager
def counting(optimizer: Any, count: Callable[[Any], None]) -> Iterator[None]:
    """Meanwhile `count(variable)` adds one to the `iterations` of `optimizer`, which Keras reads and then writes."""
    iterations = optimizer._iterations
    object.__setattr__(iterations, "assign_add", lambda value: count(iterations._value))
    try:
        yield
    finally:
        object.__delattr__(iterations, "assign_add")


def has_own_step(model: Any, kind: str) -> bool:
    """Whether the step of `kind`, "train", "test" or "predict", is not Keras' own."""
    name = f"{kind}_step"
    return getattr(getattr(model, name), "__func__", None) is not getattr(keras.Model, name)


def is_built(model: Any, kind: str) -> bool:
    """Whether all has its variables that Keras' own step of `kind` needs."""
    parts = [] if kind == "predict" else [model._compile_metrics, model._compile_loss]
    if kind == "train":
        parts += optimizers(model)
    return all(part.built for part in [*layers_to_build(model), *parts] if part is not None)


def layers_to_build(model: Any) -> list[Any]:
    """`model` and the layers in it. One without `call`, whose step calls parts of it, is never built itself."""
    has_call = type(model).call is not keras.Model.call
    return [layer for layer in model._flatten_layers() if has_call or layer is not model]


def step_function(model: Any, kind: str) -> Any:
    """What Keras' own loop calls for the steps of `kind`, made if there is none: as new as the graphs must be.

    It is another one after `compile`, `quantize` and `make_train_function(force=True)`; a change of `trainable` alone
    leaves it, and the graphs, as they were.
    """
    getattr(model, f"make_{kind}_function")()
    function = getattr(model, f"{kind}_function")
    if getattr(function, "python_function", function).__module__ != tensorflow_trainer.__name__:
        raise UsageError(
            f"The model `{model.name}` has a `{kind}_function` of its own, and a strategy calls none",
            f"override `{kind}_step`, and neither `make_{kind}_function` nor `{kind}_function`",
        )
    return function


def forward(model: Any, data: Any) -> None:
    """What Keras' own `train_step` computes before the gradients."""
    x, y, sample_weight = unpack_x_y_sample_weight(data)
    predictions = model(x, training=True) if model._call_has_training_arg else model(x)
    model._compute_loss(x=x, y=y, y_pred=predictions, sample_weight=sample_weight, training=True)
    model.compute_metrics(x, y, predictions, sample_weight=sample_weight)


def optimizers(model: Any) -> list[Any]:
    """All optimizers that `model` and its layers hold: the compiled one first, then those of attributes, lists, dicts.

    One that is inside of another, such as `LossScaleOptimizer`, is a part of it.
    """
    found = _held(model, BaseOptimizer, first=getattr(model, "optimizer", None))
    inner = {id(getattr(optimizer, "inner_optimizer", None)) for optimizer in found}
    return [optimizer for optimizer in found if id(optimizer) not in inner]


def tensorflow_variables(model: Any) -> list[Any]:
    """The `tf.Variable`s that `model` and its layers hold besides Keras' own variables."""
    return _held(model, tf.Variable)


def _held(model: Any, kind: type, first: Any = None) -> list[Any]:
    """What `model` and its layers have of a kind in attributes, lists and dicts, after `first`, which is one."""
    found = {} if first is None else {id(first): first}
    return list((found | {id(container[key]): container[key] for container, key in _places(model, kind)}).values())


def _places(model: Any, kind: type) -> list[tuple[Any, Any]]:
    """Where `model` and its layers hold something of a kind: a dict, such as that of attributes, or a list; the key."""
    found: list[tuple[Any, Any]] = []
    seen: set[int] = set()

    def look_into(container: Any) -> None:
        container = vars(container) if isinstance(container, keras.Layer) else container
        if id(container) in seen:
            return
        seen.add(id(container))
        for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if isinstance(value, kind):
                found.append((container, key))
            elif isinstance(value, list | tuple | dict | keras.Layer):
                look_into(value)

    look_into(model)
    return found


@contextlib.contextmanager
def on_plain_variables(model: Any, variables: Sequence[Any]) -> Iterator[None]:
    """Meanwhile Keras `variables` are plain ones with the same values, and the optimizers know no strategy.

    What is trained in this context leaves the model's own variables as they are, however many copies they have. That
    also holds for a `tf.Variable` with copies that is an attribute of a layer, or in a list or a dict of one.

    Args:
        model: whose optimizers.
        variables: all that the model and its optimizers have.
    """
    own = [variable._value for variable in variables]
    places = [place for place in _places(model, tf.distribute.DistributedValues) if isinstance(place[0], dict | list)]
    raw = [container[key] for container, key in places]
    inside = [part for o in optimizers(model) for part in (o, getattr(o, "inner_optimizer", None)) if part is not None]
    strategies = [optimizer._distribution_strategy for optimizer in inside]
    indices = [optimizer._trainable_variables_indices for optimizer in inside]
    plain = {id(one): tf.Variable(one.numpy(), dtype=one.dtype, trainable=one.trainable) for one in raw}
    try:
        for variable in variables:
            value = variable._value.numpy()
            variable._value = tf.Variable(value, dtype=variable._value.dtype, trainable=variable.trainable)
        for place, one in zip(places, raw, strict=True):
            _put(*place, plain[id(one)])
        for optimizer in inside:
            optimizer._distribution_strategy = tf.distribute.get_strategy()
            known = enumerate(optimizer._trainable_variables)
            optimizer._trainable_variables_indices = {optimizer._var_key(one): index for index, one in known}
        yield
    finally:
        for variable, value in zip(variables, own, strict=True):
            variable._value = value
        for place, one in zip(places, raw, strict=True):
            _put(*place, one)
        for optimizer, strategy, of_variables in zip(inside, strategies, indices, strict=True):
            optimizer._distribution_strategy = strategy
            optimizer._trainable_variables_indices = of_variables


def _put(container: Any, key: Any, value: Any) -> None:
    """Sets an item past what Keras' containers make of it."""
    (dict if isinstance(container, dict) else list).__setitem__(container, key, value)


# `see(kind, of, value)` is told of what a step computes; of gradients it returns those to go on with.
See = Callable[[str, Any, Any], Any]


@contextlib.contextmanager
def watching(model: Any, see: See) -> Iterator[None]:
    """Meanwhile `see` is told of what the steps of `model` compute.

    | kind | of | value |
    |---|---|---|
    | "output" | a layer | what its call returned |
    | "added loss" | a layer | what it gave to `add_loss` |
    | "loss" | a `keras.losses.Loss` | what it returned |
    | "whole loss" | the model | what its `compute_loss` returned |
    | "gradients" | the variables | what an optimizer applies to them |
    """

    def returned(kind: str) -> Callable[..., Any]:
        def call(original: Callable[..., Any], of: Any, *args: Any, **named: Any) -> Any:
            value = original(of, *args, **named)
            see(kind, of, value)
            return value

        return call

    def add_loss(original: Callable[..., Any], layer: Any, loss: Any) -> Any:
        see("added loss", layer, loss)
        return original(layer, loss)

    def apply(original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        of = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        return original(optimizer, see("gradients", list(of), list(grads)), trainable_variables)

    around: list[tuple[Any, str, Callable[..., Any]]] = [
        (keras.Layer, "__call__", returned("output")),
        (keras.Layer, "add_loss", add_loss),
        (keras.losses.Loss, "__call__", returned("loss")),
        (type(model), "compute_loss", returned("whole loss")),
        (BaseOptimizer, "apply", apply),
        (keras.optimizers.LossScaleOptimizer, "apply", apply),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, call in around:
            stack.enter_context(_surrounded(owner, name, call))
        yield


@contextlib.contextmanager
def _surrounded(owner: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile a method is `call(original, ...)`."""
    original, is_own = getattr(owner, name), name in vars(owner)

    @functools.wraps(original)
    def method(*args: Any, **named: Any) -> Any:
        return call(original, *args, **named)

    setattr(owner, name, method)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


# The methods of a model that lead to its strategy.
ROUTED = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_STRATEGY = "_tfdist_strategy"


def set_strategy(model: Any, strategy: Any) -> None:
    """From now on Keras' own `fit` and the like call `strategy.fit(model, ...)`, also where a class' own call them."""
    _route_methods()
    # Past Keras' attribute tracking, so that nothing of it is saved with the model.
    object.__setattr__(model, _STRATEGY, strategy)


_TO_VERIFY = "_tfdist_to_verify"


def set_to_verify(model: Any, wish: bool) -> None:
    """Whether the next training of `model` is to be verified first."""
    object.__setattr__(model, _TO_VERIFY, wish)


def take_to_verify(model: Any) -> bool:
    """Whether it was to be; it is asked once."""
    wish = vars(model).get(_TO_VERIFY, False)
    object.__setattr__(model, _TO_VERIFY, False)
    return bool(wish)


@functools.cache
def _route_methods() -> None:
    for name in ROUTED:
        setattr(tensorflow_trainer.TensorFlowTrainer, name, _routed(name))


def _routed(name: str) -> Callable[..., Any]:
    original = getattr(tensorflow_trainer.TensorFlowTrainer, name)

    @functools.wraps(original)
    def method(model: Any, *arguments: Any, **named: Any) -> Any:
        strategy = vars(model).get(_STRATEGY)
        if strategy is None:
            return original(model, *arguments, **named)
        return getattr(strategy, name)(model, *arguments, **named)

    return method


@contextlib.contextmanager
def assigning_nothing() -> Iterator[None]:
    """Keras variables keep their values meanwhile, whatever is assigned to them."""
    install()
    _thread.assigns = False
    try:
        yield
    finally:
        _thread.assigns = True


def without_optionals(spec: Any) -> Any:
    """`spec` with `None` for what Keras' generators carry as an empty optional."""
    return tree.map_structure(lambda one: None if isinstance(one, tf.OptionalSpec) else one, spec)


def standardized(adapter: Any, batch: Any) -> Any:
    """A batch of a `PyDataset` as its adapter gives it: `(x, y, sample_weight)` with the class weights applied."""
    return adapter._standardize_batch(batch)


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
        if isinstance(array, tf.RaggedTensor):
            shape = [None, *array.shape[1:]]
            return tf.RaggedTensorSpec(shape, array.dtype, array.ragged_rank, array.row_splits.dtype)
        return tf.TensorSpec([None, *array.shape[1:]], array.dtype)

    return tree.traverse(spec_one, arrays)


def number_of_examples(arrays: Any) -> int:
    """The length of the first array of a structure that `sliceable` made."""
    first = next(array for array in tree.flatten(arrays) if array is not None)
    return int(first.shape[0])


def is_of_keras_alone(model: Any) -> bool:
    """Whether all classes in `model` are Keras' own, whose losses are known."""
    return all(is_of_keras(type(part)) for part in [model, *model._flatten_layers()])


def fixed_batch_size(model: Any) -> int | None:
    """The number of examples that a model of Keras' own insists on, `None` where any number will do."""
    inputs = tree.flatten(getattr(model, "inputs", None) or [])
    sizes = [one.shape[0] for one in inputs if len(one.shape) > 0]
    return next((size for size in sizes if size is not None), None)


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
