"""Makes the variables of layers, losses, metrics and optimizers before the steps of a model are traced.

Keras makes them while it traces a step for the first time. tfdist's steps run inside a loop of a graph, or on several
replicas at once, where TensorFlow cannot make variables. So a step is rehearsed: traced in a scratch graph, which is
thrown away. Variables that are made meanwhile are made outside of that graph, in the strategy's scope, and nothing is
computed. So every model is built as Keras builds it, whatever its step takes and returns.

With `run_eagerly=True` nothing is traced, and the first step makes its variables as Keras does.
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
    """Makes the variables of the step of `kind`: "train", "test" or "predict".

    Args:
        strategy: makes the variables in its scope.
        model: compiled, unless it only predicts.
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
    if not _is_needed(model, kind):
        return None
    before = len(_variables(model))
    with tensorflow_internals.scratch_graph(strategy.scope) as outside:
        batch = tensorflow_internals.placeholders(keras_data.without_optionals(spec))
        logs = _rehearse(strategy, model, kind, batch, outside)
    _broadcast_new(strategy, model, before)
    if kind == "predict" or not isinstance(logs, dict) or set(logs) == metrics.names(model):
        return None
    return tf.nest.map_structure(_float_spec, logs)


def captured(strategy: Strategy, model: Any, spec: Any) -> list[captured_variables.CapturedVariable]:
    """The copies of the variables that a training step of a built `model` uses, and Keras does not know.

    None of a step that is not traced.
    """
    if strategy.runs_eagerly(model):
        return []
    with tensorflow_internals.scratch_graph(strategy.scope) as outside:
        batch = tensorflow_internals.placeholders(keras_data.without_optionals(spec))
        _rehearse(strategy, model, "train", batch, outside)
        graph = tf.compat.v1.get_default_graph()
    return captured_variables.copies(strategy, captured_variables.of_graph(strategy, model, graph))


def _float_spec(value: Any) -> tf.TensorSpec:
    """The spec of a value in the logs of a step; a number of Python is a scalar."""
    return tf.TensorSpec(getattr(value, "shape", ()), tf.float32)


def broadcast(strategy: Strategy, model: Any) -> None:
    """Gives the variables of a model and its optimizers the chief's values in every process, but what each has own."""
    state = strategy_state.of(model)
    shared = [*_variables(model), *state.shared, *_state_of_unseeded(strategy)]
    strategy.broadcast_variables([v for v in shared if not state.has_own(v)])
    captured_variables.broadcast(strategy, model)


def _state_of_unseeded(strategy: Strategy) -> list[Any]:
    """The state of Keras' generator for draws without a seed, if the chief has one; else the others forget theirs."""
    if strategy.world.world_size == 1:
        return []
    if consensus.broadcast_from_chief(strategy, keras_variables.generator_of_unseeded() is not None):
        return [keras_variables.made_generator_of_unseeded().state]
    keras_variables.forget_generator_of_unseeded()
    return []


@contextlib.contextmanager
def traced(strategy: Strategy, model: Any) -> Iterator[None]:
    """The context in which a step of `model` is traced for one device.

    All processes have the chief's state of the generator for draws without a seed, also if the step is the first that
    draws from it.
    """
    with tf.init_scope():  # the step may be traced in a graph that is thrown away
        strategy.broadcast_variables(_state_of_unseeded(strategy))
    before = keras_variables.generator_of_unseeded()
    with keras_variables.drawing_in_graphs(), strategy.tracing(model):
        yield
    made = keras_variables.generator_of_unseeded()
    if made is not before:
        with tf.init_scope():
            strategy.broadcast_variables([made.state])


def spread(strategy: Strategy, model: Any) -> None:
    """Gives all copies of the variables of a model and its optimizers the values of the chief's first one."""
    metrics_variables = {id(variable) for variable in model.metrics_variables}
    changed = [
        v for v in [*_variables(model), *keras_internals.tensorflow_variables(model)] if id(v) not in metrics_variables
    ]
    for variable in changed:
        first, *others = tensorflow_variables.copies(variable)
        for copy in others:
            copy.assign(first)
    strategy.broadcast_variables([v for v in _variables(model) if id(v) not in metrics_variables], unless_equal=True)


def _broadcast_new(strategy: Strategy, model: Any, before: int) -> None:
    variables = _variables(model)
    if len(variables) > before:
        strategy.broadcast_variables(variables, unless_equal=True)


def _variables(model: Any) -> list[Any]:
    optimizers = [v for optimizer in keras_internals.optimizers(model) for v in optimizer.variables]
    return list({id(v): v for v in [*model.variables, *optimizers]}.values())


def _is_needed(model: Any, kind: str) -> bool:
    """Whether a step must be rehearsed: the model is not built, or has a step or logs of its own."""
    own = keras_internals.has_own_step(model, kind) or (kind != "predict" and keras_internals.has_own_logs(model))
    return own or not keras_internals.is_built(model, kind)


def _rehearse(strategy: Strategy, model: Any, kind: str, batch: Any, outside: Any) -> Any:
    """Traces the step, as it will be traced, and returns its result."""
    with traced(strategy, model):
        if kind != "train" or keras_internals.has_own_step(model, kind):
            return getattr(model, f"{kind}_step")(batch)
        # Keras' own step makes no other variables than those of the optimizer.
        logs = keras_internals.forward(model, batch)
        optimizer = model.optimizer
        if optimizer is not None and not optimizer.built:
            with outside():
                strategy.build_optimizer(model, optimizer, model.trainable_variables)
        return logs
