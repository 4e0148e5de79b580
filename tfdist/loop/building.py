"""Creates the variables of a model before its steps are traced, and gives all processes the chief's values.

Keras creates the variables of layers, losses, metrics and optimizers while it traces a step for the first time.
tfdist's steps run inside a graph's loop, or on several replicas at once, where TensorFlow cannot create variables.
Therefore a step is first traced in a scratch graph, which is thrown away and never computed. The variables are created
outside of that graph, in the strategy's scope, so that every model is built as Keras builds it, whatever its step takes
and returns.

A step also uses variables that Keras does not track: the `tf.Variable`s of layers, closures and scripts. Among them are
the states of TensorFlow's random generators, some of which start differently in each process. They are known once a
step is traced, since its graph captures them.

With `run_eagerly=True`, nothing is traced, and the first step creates its variables as in Keras.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.checkpointing import state as training_state
from tfdist.interface.strategy import Strategy
from tfdist.interface.variables import broadcast_handles, strategy_state
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_data, keras_variables, tensorflow_graphs, tensorflow_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.patching import Attached
from tfdist.jobs import consensus
from tfdist.loop import metrics


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
    for variable in [*_variables(model), *keras_internals.tensorflow_variables(model)]:
        tensorflow_variables.set_container_of_copies(variable)
    if kind == "train":
        strategy.divide_optimizers(model)
    return logs


def _built(strategy: Strategy, model: Any, kind: str, spec: Any) -> Any:
    count = len(_variables(model))
    custom = keras_internals.has_own_step(model, kind) or (kind != "predict" and keras_internals.has_own_logs(model))
    if not custom and keras_internals.is_built(model, kind):
        return None
    logs, _ = _rehearse(strategy, model, kind, spec)
    variables = _variables(model)
    if len(variables) > count:
        strategy.broadcast_variables(variables, unless_equal=True)
    if kind == "predict" or not isinstance(logs, dict) or set(logs) == metrics.names(model):
        return None
    # A Python number among the logs is a scalar.
    return tf.nest.map_structure(lambda value: tf.TensorSpec(getattr(value, "shape", ()), tf.float32), logs)


def _rehearse(strategy: Strategy, model: Any, kind: str, spec: Any) -> tuple[Any, Any]:
    """Traces the step in a scratch graph; returns the step's result, and the graph."""
    with tensorflow_internals.scratch_graph(strategy.scope) as outside:
        batch = tensorflow_internals.placeholders(keras_data.without_optionals(spec))
        graph = tf.compat.v1.get_default_graph()
        with traced(strategy, model):
            if kind != "train" or keras_internals.has_own_step(model, kind):
                return getattr(model, f"{kind}_step")(batch), graph
            # Beyond the forward pass, Keras' own step creates only the optimizer's variables.
            logs = keras_internals.forward(model, batch)
            optimizer = model.optimizer
            if optimizer is not None and not optimizer.built:
                with outside():
                    strategy.build_optimizer(model, optimizer, model.trainable_variables)
            return logs, graph


@contextlib.contextmanager
def traced(strategy: Strategy, model: Any) -> Iterator[None]:
    """The context in which a step of `model` is traced for one device.

    All processes get the chief's state of the generator for unseeded draws, even if this step is the first to use it.
    """
    with tf.init_scope():  # the step may be traced in a scratch graph
        strategy.broadcast_variables(_state_of_unseeded(strategy))
    generator_before = keras_variables.generator_of_unseeded()
    with keras_variables.drawing_in_graphs(), strategy.tracing(model), tensorflow_internals.own_traces():
        yield
    generator = keras_variables.generator_of_unseeded()
    if generator is not generator_before:
        with tf.init_scope():
            strategy.broadcast_variables([generator.state])


def broadcast(strategy: Strategy, model: Any) -> None:
    """Broadcasts the chief's variables of a model and its optimizers, except those that differ by design."""
    state = strategy_state(model)
    shared = [*_variables(model), *state.shared, *_state_of_unseeded(strategy)]
    copies = [_copies(strategy, handle) for handle in (_captured.get(model) or {}).values()]
    strategy.broadcast_variables([v for v in shared if not state.has_own(v)])
    broadcast_handles(copies, strategy)


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


def _state_of_unseeded(strategy: Strategy) -> list[Any]:
    """Returns the state of Keras' generator for unseeded draws; if the chief has none, the others delete theirs."""
    if strategy.world.world_size == 1:
        return []
    if consensus.broadcast_from_chief(strategy, keras_variables.generator_of_unseeded() is not None):
        return [keras_variables.made_generator_of_unseeded().state]
    keras_variables.forget_generator_of_unseeded()
    return []


_captured: Attached[dict[int, tf.Tensor]] = Attached("captured_variables")  # the handles, by id


class CapturedVariable:
    """A variable that a graph captures by its handle."""

    def __init__(self, handle: tf.Tensor):
        self._handle = handle

    def numpy(self) -> np.ndarray:
        return tensorflow_graphs.value(self._handle)

    def assign(self, value: Any) -> None:
        tensorflow_graphs.set_value(self._handle, value)


def captured(strategy: Strategy, model: Any, spec: Any) -> list[CapturedVariable]:
    """Returns the copies of the variables that a training step of a built `model` uses and Keras does not track.

    The list is empty if the step is not traced.
    """
    if strategy.runs_eagerly(model):
        return []
    _, graph = _rehearse(strategy, model, "train", spec)
    handles = _captured_by(graph, strategy, model)
    return [CapturedVariable(copy) for handle in handles for copy in _copies(strategy, handle)]


def broadcast_captured(strategy: Strategy, model: Any, graph: Any) -> None:
    """Broadcasts the chief's values of the variables that the graph of a traced step captures and Keras does not track.

    All processes must call it. `broadcast` then includes these variables.

    Raises:
        DisagreementError: the variables of the processes have different shapes or dtypes.
    """
    if strategy.world.world_size == 1:
        return
    handles = _captured_by(graph, strategy, model)
    described = list(map(tensorflow_graphs.described, handles))
    consensus.require_equal_variables(strategy, described, "what a step uses besides the model")
    broadcast_handles([_copies(strategy, handle) for handle in handles], strategy)
    _captured.set(model, (_captured.get(model) or {}) | {id(handle): handle for handle in handles})


def _captured_by(graph: Any, strategy: Strategy, model: Any) -> list[tf.Tensor]:
    """Returns the handles of the variables that the graph of a step of `model` captures and Keras does not track.

    Variables that differ between processes by design, such as the earlier weights of a stage, are left out.
    """
    mesh = strategy.mesh
    tracked = [*itertools.chain(*training_state.variables(model).values()), *strategy_state(model).own]
    with strategy.tracing(model):  # selects the same copies as the traced step
        known = {id(tensorflow_variables.copies(variable)[0].handle) for variable in tracked}
    known |= set(strategy.variables_in_parts(model))
    unknown = [handle for handle in tensorflow_graphs.variables_of(graph) if id(handle) not in known]
    return [handle for handle in unknown if mesh is None or mesh.is_common(handle)]


def _copies(strategy: Strategy, handle: tf.Tensor) -> Sequence[tf.Tensor]:
    """Returns the handles of all copies of a variable in this process."""
    return [handle] if strategy.mesh is None else strategy.mesh.captured(handle)
