"""The variables that a step uses and Keras does not track: the `tf.Variable`s of layers, closures and scripts.

Among them are the states of TensorFlow's random generators, some of which start differently in each process. They are
known once a step is traced, since its graph captures them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.checkpointing import state as training_state
from tfdist.interface import state as strategy_state
from tfdist.interface.strategy import Strategy
from tfdist.interface.variables import broadcast_array
from tfdist.internals import tensorflow_graphs, tensorflow_variables
from tfdist.internals.patching import Attached
from tfdist.jobs import consensus

_captured: Attached[dict[int, tf.Tensor]] = Attached("captured_variables")  # the handles, by id


class CapturedVariable:
    """A variable that a graph captures by its handle."""

    def __init__(self, handle: tf.Tensor):
        self._handle = handle

    def numpy(self) -> np.ndarray:
        """Returns a copy of the value."""
        return tensorflow_graphs.value(self._handle)

    def assign(self, value: Any) -> None:
        """Sets the value."""
        tensorflow_graphs.set_value(self._handle, value)


def of_graph(strategy: Strategy, model: Any, graph: Any) -> list[tf.Tensor]:
    """Returns the handles of the variables that the graph of a step of `model` captures and Keras does not track.

    Variables that differ between processes by design, such as the earlier weights of a stage, are left out.
    """
    mesh = strategy.mesh
    tracked = [*itertools.chain(*training_state.variables(model).values()), *strategy_state.of(model).own]
    with strategy.tracing(model):  # selects the same copies as the traced step
        known = {id(tensorflow_variables.copies(variable)[0].handle) for variable in tracked}
    known |= set(strategy.variables_in_parts(model))
    unknown = [handle for handle in tensorflow_graphs.variables_of(graph) if id(handle) not in known]
    return [handle for handle in unknown if mesh is None or mesh.is_common(handle)]


def copies(strategy: Strategy, handles: Iterable[tf.Tensor]) -> list[CapturedVariable]:
    """Returns all copies of the variables in this process."""
    mesh = strategy.mesh
    copies_by_variable = [[handle] if mesh is None else mesh.captured(handle) for handle in handles]
    return [CapturedVariable(copy) for copy in itertools.chain(*copies_by_variable)]


def broadcast(strategy: Strategy, model: Any, graph: Any = None) -> None:
    """Broadcasts the chief's values of the variables that the steps of `model` capture; all processes must call it.

    Args:
        strategy: the strategy of the processes.
        model: the model whose steps were traced.
        graph: the graph of a step that was just traced; `None` for all steps that were traced before.

    Raises:
        DisagreementError: the variables of the processes have different shapes or dtypes.
    """
    if strategy.world.world_size == 1:
        return
    captured = _captured.get(model) or {}
    if graph is None:
        _broadcast(strategy, list(captured.values()))
        return
    handles = of_graph(strategy, model, graph)
    described = list(map(tensorflow_graphs.described, handles))
    consensus.require_equal_variables(strategy, described, "what a step uses besides the model")
    _broadcast(strategy, handles)
    _captured.set(model, captured | {id(handle): handle for handle in handles})


def _broadcast(strategy: Strategy, handles: list[tf.Tensor]) -> None:
    if not handles:
        return
    values = [tf.io.serialize_tensor(tensorflow_graphs.read(handle)).numpy() for handle in handles]
    lengths = consensus.broadcast_from_chief(strategy, list(map(len, values)))  # strings have different lengths
    is_chief = strategy.world.is_chief
    message = np.frombuffer(b"".join(values), np.uint8) if is_chief else np.empty(sum(lengths), np.uint8)
    broadcast_array(message, strategy.broadcast)
    if is_chief:
        return
    for handle, part in zip(handles, np.split(message, np.cumsum(lengths)[:-1]), strict=True):
        value = tf.io.parse_tensor(part.tobytes(), tensorflow_graphs.read(handle).dtype)
        for copy in copies(strategy, [handle]):
            copy.assign(value)
