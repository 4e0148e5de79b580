"""The private parts of Keras' models, layers, metrics and optimizers that tfdist calls, reads and sets.

`keras_patches` replaces functions of Keras, `keras_routes` routes those of a prepared model to its strategy,
`keras_variables` reads and protects variables, and `keras_data` reads the data of `fit`. All of these modules were
written for Keras 3.15.1, and `tests/test_keras_internals.py` fails when Keras changes a part that they use.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from types import NoneType
from typing import Any

import keras
import tensorflow as tf
from keras.src import tree
from keras.src.backend import config
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.callbacks.progbar_logger import ProgbarLogger
from keras.src.losses import loss as loss_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.compile_utils import CompileMetrics
from keras.src.utils import python_utils

from tfdist.errors import UsageError
from tfdist.internals import keras_routes
from tfdist.internals.keras_data import unpack_x_y_sample_weight
from tfdist.internals.patching import with_attributes

SEEN_IN = "3.15.1"

__all__ = ["ProgbarLogger", "global_state", "tree"]

# Functions of Keras' own `fit` that tfdist's loop uses too.
concatenate = tensorflow_trainer.potentially_ragged_concat
is_default = keras.src.utils.is_default
join = tensorflow_trainer.concat
apply_mask = loss_module.apply_mask
max_epochs = config.max_epochs
max_steps_per_epoch = config.max_steps_per_epoch
pythonify_logs = python_utils.pythonify_logs
to_numpy = tensorflow_trainer.convert_to_np_if_not_ragged

_ADDRESS = re.compile(" at 0x[0-9a-f]+")

# Losses and metrics whose value for a batch is not a mean over its examples.
_OF_WHOLE_BATCH = {
    keras.losses.Dice,
    keras.losses.Tversky,
    keras.losses.Circle,
    keras.losses.dice,
    keras.losses.tversky,
    keras.losses.circle,
}


def with_attributes_of(tensor: Any, copy: Any) -> Any:
    """Returns `copy` with what Keras notes on `tensor`: its mask, and the logits that a loss computes with."""
    for name in ("_keras_mask", "_keras_logits"):
        if hasattr(tensor, name):
            setattr(copy, name, getattr(tensor, name))
    return copy


def is_of_keras(kind: Any) -> bool:
    """Whether Keras defines a class or a function."""
    return (getattr(kind, "__module__", None) or "").partition(".")[0] == "keras"


def metrics_of(model: Any) -> list[Any]:
    """The metrics of `model`, with the compiled metrics in place of their container."""
    metrics: list[Any] = []
    for metric in model.metrics:
        metrics += metric.metrics if isinstance(metric, CompileMetrics) else [metric]
    return metrics


def compiled_metrics_are_built(model: Any) -> bool:
    """Whether the compiled metrics of `model` are built or it has none; a custom step may leave them unused."""
    return model._compile_metrics is None or bool(model._compile_metrics.built)


def is_additive(metric: Any) -> bool:
    """Whether a metric's state is a sum over the examples: what its `additive` says, else whether Keras defines it."""
    function = metric._fn if isinstance(metric, keras.metrics.MeanMetricWrapper) else None
    declared = getattr(function, "additive", getattr(metric, "additive", None))
    if declared is not None:
        return bool(declared)
    of_keras = is_of_keras(type(metric))
    return of_keras and (function is None or (is_of_keras(function) and function not in _OF_WHOLE_BATCH))


def gives_values_per_example(metric: Any, *arguments: Any, **named: Any) -> bool:
    """Whether `metric`, updated with these arguments, is the mean of a function that returns a value per example."""
    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        return False
    names = dict(zip(("y_true", "y_pred"), arguments, strict=False)) | named
    values = metric._fn(names["y_true"], names["y_pred"], **metric._fn_kwargs)
    return bool(tf.is_tensor(values) and values.shape.rank != 0)


def tf_variable(variable: Any) -> Any:
    """The `tf.Variable` that holds the value of a Keras variable."""
    return variable._value


def set_tf_variable(variable: Any, value: Any) -> None:
    """Replaces the `tf.Variable` behind a Keras variable by one of the same dtype and any shape."""
    variable._value, variable._shape = value, tuple(value.shape)


def all_layers(model: Any) -> list[Any]:
    """`model` and all of its layers, also nested ones."""
    return list(model._flatten_layers())


def is_connected(layer: Any) -> bool:
    """Whether a layer has been called on symbolic inputs, so that its output is known."""
    return bool(layer._inbound_nodes)


def last_operation(model: Any) -> Any:
    """The layer or operation that computes the only output of a model; `None` for several or unknown outputs."""
    outputs = tree.flatten(getattr(model, "outputs", None) or [])
    if len(outputs) != 1:
        return None
    operation = outputs[0]._keras_history.operation
    return last_operation(operation) if isinstance(operation, keras.Model) else operation


def loss_tracker(model: Any) -> Any:
    """The metric that averages the loss of `model`; `None` if it has none."""
    return getattr(model, "_loss_tracker", None)


def iterations(optimizer: Any) -> Any:
    """The variable that counts the steps of `optimizer`; its public property counts updates."""
    return optimizer._iterations


def learning_rate(optimizer: Any) -> Any:
    """The learning rate of `optimizer`: a variable, or a schedule."""
    return optimizer._learning_rate


def last_learning_rate(optimizer: Any) -> float:
    """The learning rate of the last step of `optimizer`; its public property is that of the next step."""
    optimizer = inner(optimizer)
    rate = learning_rate(optimizer)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        rate = rate(keras.ops.maximum(iterations(optimizer) - 1, 0))
    else:
        rate = optimizer.learning_rate
    return float(keras.ops.convert_to_numpy(rate))


def variable_index(optimizer: Any, variable: Any) -> int:
    """The index of `variable` among those that `optimizer` was built for."""
    return int(optimizer._get_variable_index(variable))


def slots(optimizer: Any, name: str) -> list[Any]:
    """The slots called `name`, such as "velocities", one per trainable variable; `None` for a variable without one."""
    values: list[Any] = getattr(optimizer, name if hasattr(optimizer, name) else f"_{name}")
    return values


def strategy_of(optimizer: Any) -> Any:
    """The `tf.distribute.Strategy` in whose scope `optimizer` was made."""
    return optimizer._distribution_strategy


class _OnOneDevice:
    """A stand-in for an optimizer's strategy, with which each copy of a variable is updated where it is."""

    def __init__(self) -> None:
        self.extended = self

    def colocate_vars_with(self, variable: Any) -> contextlib.AbstractContextManager[Any]:
        """Does nothing: a scope makes the slots of a variable on the devices of all of its copies anyway."""
        return contextlib.nullcontext(variable)

    def update(self, *arguments: Any, **named: Any) -> Any:
        return tf.distribute.get_strategy().extended.update(*arguments, **named)


@contextlib.contextmanager
def updating_on_one_device(model: Any) -> Iterator[None]:
    """Within this context the optimizers of `model` update variables as without a strategy of TensorFlow."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers(model):
            if hasattr(inner(optimizer), "_distribution_strategy"):
                stack.enter_context(with_attributes(inner(optimizer), {"_distribution_strategy": _OnOneDevice()}))
        yield


def in_order_of_metrics(model: Any, logs: Any) -> Any:
    """`logs` as a list, in the order in which `evaluate` returns them."""
    return model._flatten_metrics_in_order(logs)


def validates(model: Any, epoch: int, frequency: Any) -> bool:
    """Whether epoch number `epoch` ends with a validation; `frequency` is the `validation_freq` of `fit`."""
    return bool(model._should_eval(epoch, frequency))


def initial_epoch(model: Any) -> int | None:
    """The epoch at which a callback has made `fit` start, see `set_initial_epoch`; `None` if none has."""
    epoch: int | None = model._initial_epoch
    return epoch


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Makes `fit` start at `epoch`, as `keras.callbacks.BackupAndRestore` does; `None` leaves it to the argument."""
    model._initial_epoch = epoch


def trainable_variables(optimizer: Any) -> list[Any]:
    """The variables for which `optimizer` was built."""
    return list(optimizer._trainable_variables)


def reduction_axes(normalization: keras.layers.BatchNormalization) -> list[int]:
    """The axes along which a batch normalization averages."""
    return list(normalization._reduction_axes)


def has_own_step(model: Any, kind: str) -> bool:
    """Whether `model` overrides the step of `kind`: "train", "test" or "predict"."""
    return _overrides(model, f"{kind}_step")


def has_own_logs(model: Any) -> bool:
    """Whether `model` overrides `compute_metrics`, which returns the logs of Keras' own steps."""
    return _overrides(model, "compute_metrics")


def _overrides(model: Any, name: str) -> bool:
    return getattr(getattr(model, name), "__func__", None) is not getattr(keras.Model, name)


def is_built(model: Any, kind: str) -> bool:
    """Whether the layers, metrics, loss and optimizers that Keras' own step of `kind` needs have their variables."""
    parts = [] if kind == "predict" else [model._compile_metrics, model._compile_loss]
    if kind == "train":
        parts += optimizers(model)
    return all(part.built for part in [*layers_to_build(model), *parts] if part is not None)


def layers_to_build(model: Any) -> list[Any]:
    """`model` and its layers; without `model` itself if it has no `call`, because then it is never built."""
    has_call = type(model).call is not keras.Model.call
    return [layer for layer in model._flatten_layers() if has_call or layer is not model]


def step_function(model: Any, kind: str) -> Any:
    """The function that Keras' own loop calls for the steps of `kind`; it is made if it does not exist.

    When Keras replaces it, graphs must be traced again: after `compile`, `quantize` and
    `make_train_function(force=True)`, but not after a change of `trainable` alone.
    """
    getattr(model, f"make_{kind}_function")()
    function = keras_routes.unguarded(getattr(model, f"{kind}_function"))
    if getattr(function, "python_function", function).__module__ != tensorflow_trainer.__name__:
        raise UsageError(
            f"The model `{model.name}` has a `{kind}_function` of its own, which a strategy does not call",
            f"override `{kind}_step`, and neither `make_{kind}_function` nor `{kind}_function`",
        )
    return function


def forward(model: Any, data: Any) -> Any:
    """Computes the predictions, loss and metrics of Keras' own `train_step`, without gradients; returns the logs."""
    x, y, sample_weight = unpack_x_y_sample_weight(data)
    predictions = model(x, training=True) if model._call_has_training_arg else model(x)
    model._compute_loss(x=x, y=y, y_pred=predictions, sample_weight=sample_weight, training=True)
    return model.compute_metrics(x, y, predictions, sample_weight=sample_weight)


def optimizers(model: Any) -> list[Any]:
    """All optimizers of `model` and its layers: the compiled one first, then those in attributes, lists and dicts.

    The inner optimizer of another one, such as of `LossScaleOptimizer`, is left out.
    """
    instances = instances_of(BaseOptimizer, model, first=getattr(model, "optimizer", None))
    inside = {id(getattr(optimizer, "inner_optimizer", None)) for optimizer in instances}
    return [optimizer for optimizer in instances if id(optimizer) not in inside]


def optimizer_variables(model: Any) -> list[Any]:
    """The variables of all optimizers of `model`: slots, counts and learning rates."""
    return [variable for optimizer in optimizers(model) for variable in optimizer.variables]


def inner(optimizer: Any) -> Any:
    """The optimizer that updates variables: the inner one of a `LossScaleOptimizer`, else `optimizer` itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def with_inner(optimizer: Any) -> list[Any]:
    """`optimizer`, and its inner one if it has one."""
    return [optimizer] if inner(optimizer) is optimizer else [optimizer, inner(optimizer)]


def tensorflow_variables(model: Any) -> list[Any]:
    """The `tf.Variable`s of `model` and its layers that are not Keras variables."""
    return instances_of(tf.Variable, model)


def instances_of(kind: type, model: Any, first: Any = None) -> list[Any]:
    """The instances of `kind` in attributes, lists and dicts of `model` and its layers, after `first`."""
    instances = {} if first is None else {id(first): first}
    instances |= {id(container[key]): container[key] for container, key in containers_of(model, kind)}
    return list(instances.values())


def containers_of(model: Any, kind: type) -> list[tuple[Any, Any]]:
    """Where `model` and its layers have instances of `kind`: a list or dict, or `vars` of a layer, and the key."""
    places: list[tuple[Any, Any]] = []
    seen: set[int] = set()

    def visit(container: Any) -> None:
        container = vars(container) if isinstance(container, keras.Layer) else container
        if id(container) in seen:
            return
        seen.add(id(container))
        for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if isinstance(value, kind):
                places.append((container, key))
            elif isinstance(value, list | tuple | dict | keras.Layer):
                visit(value)

    visit(model)
    return places


def fixed_batch_size(model: Any) -> int | None:
    """The batch size that the inputs of a model prescribe; `None` if any size is allowed."""
    inputs = tree.flatten(getattr(model, "inputs", None) or [])
    sizes = [tensor.shape[0] for tensor in inputs if len(tensor.shape) > 0]
    return next((size for size in sizes if size is not None), None)


def traces_batches(tensorboard: keras.callbacks.TensorBoard) -> bool:
    """Whether a `TensorBoard` callback profiles some of the batches."""
    return bool(tensorboard._should_trace)


def wants_xla(model: Any) -> bool:
    """Whether Keras would compile the steps with XLA; "auto" does with a GPU if the layers allow it."""
    return bool(model.jit_compile)


def layers(model: Any) -> list[tuple[str, dict[str, Any]]]:
    """The class name and the `settings` of each layer in `model`."""
    return [(type(layer).__name__, settings(layer)) for layer in model._flatten_layers()]


def parts(model: Any) -> list[Any]:
    """The layers, metrics and optimizers of `model`, and the functions of its metrics; `model` is the first layer."""
    metrics = metrics_of(model)
    functions = [function for metric in metrics if (function := getattr(metric, "_fn", None)) is not None]
    return [*model._flatten_layers(), *metrics, *functions, *optimizers(model)]


def settings(configured: Any) -> dict[str, Any]:
    """The settings of a layer or a loss: plain values, the dtype policy, regularizers and constraints, not its name."""
    try:
        config = configured.get_config()
    except Exception:  # a function, or a user's class that cannot be saved
        return {}
    # A layer inside another one is left out: its names of tensors count the layers of the process.
    kept = ("dtype", "regularizer", "constraint")
    return {
        name: without_addresses(value)
        for name, value in config.items()
        if name != "name" and (isinstance(value, bool | int | float | str | NoneType) or name.endswith(kept))
    }


def without_addresses(value: Any) -> Any:
    """A setting without what differs between processes: the file of a lambda, and the address of another object."""
    if isinstance(value, dict):
        is_lambda = value.get("class_name") == "__lambda__"
        return "lambda" if is_lambda else {name: without_addresses(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(without_addresses, value))
    return value if isinstance(value, bool | int | float | str | NoneType) else _ADDRESS.sub("", str(value))


def loss_weights(model: Any) -> Any:
    """The `loss_weights` with which `model` was compiled, or `None`."""
    compiled = getattr(model, "_compile_config", None)
    return None if compiled is None else compiled.config.get("loss_weights")
