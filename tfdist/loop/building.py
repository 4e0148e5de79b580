"""Creates the variables of layers, losses, metrics and optimizers before the steps of a model are traced.

Keras creates them while it traces a step for the first time. tfdist's steps run inside a graph's loop, or on several
replicas at once, where TensorFlow cannot create variables. Therefore a step is first traced in a scratch graph, which
is thrown away and never computed. The variables are created outside of that graph, in the strategy's scope, so that
every model is built as Keras builds it, whatever its step takes and returns.

With `run_eagerly=True`, nothing is traced, and the first step creates its variables as in Keras.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.interface import state as strategy_state
from tfdist.interface.strategy import Strategy
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_data, keras_variables, tensorflow_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.jobs import consensus
from tfdist.loop import captured_variables, metrics


def build(strategy: Strategy, model: Any, kind: str, spec: Any) -> Any:
    """Creates the variables of a step.

    Args:
        strategy: the strategy in whose scope the variables are created.
        model: a compiled model; for "predict" it need not be compiled.
        kind: "train", "test" or "predict".
        spec: the `tf.TypeSpec`s of a global batch.

    Returns:
        The `tf.TensorSpec`s of the logs that the step returns; `None` if they are the results of the metrics, or if the
        step is not traced.
    """
    logs = None if strategy.runs_eagerly(model) else _built(strategy, model, kind, spec)
    if kind == "train":
        strategy.divide_optimizers(model)
    return logs


def _built(strategy: Strategy, model: Any, kind: str, spec: Any) -> Any:
    if not _must_rehearse(model, kind):
        return None
    count = len(_variables(model))
    with tensorflow_internals.scratch_graph(strategy.scope) as outside:
        batch = tensorflow_internals.placeholders(keras_data.without_optionals(spec))
        logs = _rehearse(strategy, model, kind, batch, outside)
    variables = _variables(model)
    if len(variables) > count:
        strategy.broadcast_variables(variables, unless_equal=True)
    if kind == "predict" or not isinstance(logs, dict) or set(logs) == metrics.names(model):
        return None
    # A Python number among the logs is a scalar.
    return tf.nest.map_structure(lambda value: tf.TensorSpec(getattr(value, "shape", ()), tf.float32), logs)


def captured(strategy: Strategy, model: Any, spec: Any) -> list[captured_variables.CapturedVariable]:
    """Returns the copies of the variables that a training step of a built `model` uses and Keras does not track.

    The list is empty if the step is not traced.
    """
    if strategy.runs_eagerly(model):
        return []
    with tensorflow_internals.scratch_graph(strategy.scope) as outside:
        batch = tensorflow_internals.placeholders(keras_data.without_optionals(spec))
        _rehearse(strategy, model, "train", batch, outside)
        graph = tf.compat.v1.get_default_graph()
    return captured_variables.copies(strategy, captured_variables.of_graph(strategy, model, graph))


def broadcast(strategy: Strategy, model: Any) -> None:
    """Broadcasts the chief's variables of a model and its optimizers, except those that differ by design."""
    state = strategy_state.of(model)
    shared = [*_variables(model), *state.shared, *_state_of_unseeded(strategy)]
    strategy.broadcast_variables([v for v in shared if not state.has_own(v)])
    captured_variables.broadcast(strategy, model)


def _state_of_unseeded(strategy: Strategy) -> list[Any]:
    """Returns the state of Keras' generator for unseeded draws; if the chief has none, the others delete theirs."""
    if strategy.world.world_size == 1:
        return []
    if consensus.broadcast_from_chief(strategy, keras_variables.generator_of_unseeded() is not None):
        return [keras_variables.made_generator_of_unseeded().state]
    keras_variables.forget_generator_of_unseeded()
    return []


@contextlib.contextmanager
def traced(strategy: Strategy, model: Any) -> Iterator[None]:
    """The context in which a step of `model` is traced for one device.

    All processes get the chief's state of the generator for unseeded draws, even if this step is the first to use it.
    """
    with tf.init_scope():  # the step may be traced in a scratch graph
        strategy.broadcast_variables(_state_of_unseeded(strategy))
    generator_before = keras_variables.generator_of_unseeded()
    with keras_variables.drawing_in_graphs(), strategy.tracing(model):
        yield
    generator = keras_variables.generator_of_unseeded()
    if generator is not generator_before:
        with tf.init_scope():
            strategy.broadcast_variables([generator.state])


def spread(strategy: Strategy, model: Any) -> None:
    """Copies the chief's first copy of each variable of a model and its optimizers to all other copies."""
    metrics_variables = {id(variable) for variable in model.metrics_variables}
    variables = [v for v in _variables(model) if id(v) not in metrics_variables]
    untracked = [v for v in keras_internals.tensorflow_variables(model) if id(v) not in metrics_variables]
    for variable in [*variables, *untracked]:
        first, *others = tensorflow_variables.copies(variable)
        for copy in others:
            copy.assign(first)
    strategy.broadcast_variables(variables, unless_equal=True)


def _variables(model: Any) -> list[Any]:
    optimizers = [v for optimizer in keras_internals.optimizers(model) for v in optimizer.variables]
    return list({id(v): v for v in [*model.variables, *optimizers]}.values())


def _must_rehearse(model: Any, kind: str) -> bool:
    """Whether a step must be traced in a scratch graph: the model is not built, or has a custom step or logs."""
    custom = keras_internals.has_own_step(model, kind) or (kind != "predict" and keras_internals.has_own_logs(model))
    return custom or not keras_internals.is_built(model, kind)


def _rehearse(strategy: Strategy, model: Any, kind: str, batch: Any, outside: Any) -> Any:
    """Traces the step, and returns its result."""
    with traced(strategy, model):
        if kind != "train" or keras_internals.has_own_step(model, kind):
            return getattr(model, f"{kind}_step")(batch)
        # Beyond the forward pass, Keras' own step creates only the optimizer's variables.
        logs = keras_internals.forward(model, batch)
        optimizer = model.optimizer
        if optimizer is not None and not optimizer.built:
            with outside():
                strategy.build_optimizer(model, optimizer, model.trainable_variables)
        return logs
