"""The private parts of Keras that tfdist calls, reads and sets: those of models, layers, metrics and optimizers.

`keras_patches` beside it has the functions of Keras that tfdist replaces, `keras_variables` how variables get and give
their values, `keras_data` how Keras reads data. All four were written for Keras 3.15.1, and
`tests/test_keras_internals.py` fails when Keras changes one of the parts that they use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import NoneType
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend, tree
from keras.src.backend import config
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import random as tensorflow_random
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.callbacks.progbar_logger import ProgbarLogger
from keras.src.losses import loss as loss_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import global_seed_generator
from keras.src.trainers.compile_utils import CompileMetrics
from keras.src.utils import python_utils

from tfdist.errors import UsageError
from tfdist.internals.keras_data import unpack_x_y_sample_weight

SEEN_IN = "3.15.1"

__all__ = ["ProgbarLogger", "global_state", "tree"]

# What the loop uses as Keras' own `fit` does.
concatenate = tensorflow_trainer.potentially_ragged_concat
is_default = keras.src.utils.is_default
join = tensorflow_trainer.concat
squeeze_or_expand_to_same_rank = loss_module.squeeze_or_expand_to_same_rank
max_epochs = config.max_epochs
max_steps_per_epoch = config.max_steps_per_epoch
pythonify_logs = python_utils.pythonify_logs
to_numpy = tensorflow_trainer.convert_to_np_if_not_ragged

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


def last_operation(model: Any) -> Any:
    """The layer or operation that the only output of a model comes from; `None` where that is not known."""
    outputs = tree.flatten(getattr(model, "outputs", None) or [])
    if len(outputs) != 1:
        return None
    operation = outputs[0]._keras_history.operation
    return last_operation(operation) if isinstance(operation, keras.Model) else operation


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
def outside_of_stateless_scope() -> Iterator[None]:
    """What is assigned meanwhile is written at once."""
    scope = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


def has_own_step(model: Any, kind: str) -> bool:
    """Whether the step of `kind`, "train", "test" or "predict", is not Keras' own."""
    return _is_own(model, f"{kind}_step")


def has_own_logs(model: Any) -> bool:
    """Whether the logs of Keras' own steps are the model's own."""
    return _is_own(model, "compute_metrics")


def _is_own(model: Any, name: str) -> bool:
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


def forward(model: Any, data: Any) -> Any:
    """What Keras' own `train_step` computes but for the gradients; returns the logs."""
    x, y, sample_weight = unpack_x_y_sample_weight(data)
    predictions = model(x, training=True) if model._call_has_training_arg else model(x)
    model._compute_loss(x=x, y=y, y_pred=predictions, sample_weight=sample_weight, training=True)
    return model.compute_metrics(x, y, predictions, sample_weight=sample_weight)


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
    return list(
        (found | {id(container[key]): container[key] for container, key in containers_of(model, kind)}).values()
    )


def containers_of(model: Any, kind: type) -> list[tuple[Any, Any]]:
    """The dicts, such as those of attributes, and lists in which `model` and its layers hold a kind, with the keys."""
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


_TO_VERIFY = "_tfdist_to_verify"


def set_to_verify(model: Any, wish: bool) -> None:
    """Whether the next training of `model` is to be verified first."""
    object.__setattr__(model, _TO_VERIFY, wish)


def take_to_verify(model: Any) -> bool:
    """Whether it was to be; it is asked once."""
    wish = vars(model).get(_TO_VERIFY, False)
    object.__setattr__(model, _TO_VERIFY, False)
    return bool(wish)


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
