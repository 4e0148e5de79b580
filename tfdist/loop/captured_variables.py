"""The variables that a step uses, and Keras does not know: the `tf.Variable`s of layers, closures and scripts.

Among them are the states of TensorFlow's random generators, some of which begin with another number in each process.
They are known once a step is traced, from what its graph captures.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.checkpointing import state as training_state
from tfdist.interface import state as strategy_state
from tfdist.interface.shared_variables import broadcast_array
from tfdist.interface.strategy import Strategy
from tfdist.internals import tensorflow_functions, tensorflow_variables
from tfdist.internals.attached import Attached
from tfdist.jobs import consensus

_captured: Attached[dict[int, tf.Tensor]] = Attached("captured_variables")  # the handles, by id


class CapturedVariable:
    """A variable that a graph captures, by its handle."""

    def __init__(self, handle: tf.Tensor):
        self._handle = handle

    def numpy(self) -> np.ndarray:
        """A copy of its value."""
        return tensorflow_functions.value(self._handle)

    def assign(self, value: Any) -> None:
        """Sets its value."""
        tensorflow_functions.set_value(self._handle, value)


def of_graph(strategy: Strategy, model: Any, graph: Any) -> list[tf.Tensor]:
    """The handles of the variables that the graph of a step of `model` captures, and Keras does not know.

    Those of which each process has its own, such as the earlier weights of a stage, are not among them.
    """
    mesh = strategy.mesh
    kept = [*itertools.chain(*training_state.variables(model).values()), *strategy_state.of(model).own]
    with strategy.tracing(model):  # which knows variables as the traced step does
        known = {id(tensorflow_variables.copies(one)[0].handle) for one in kept}
    known |= set(strategy.variables_in_parts(model))
    unknown = [one for one in tensorflow_functions.variables_of(graph) if id(one) not in known]
    return [one for one in unknown if mesh is None or mesh.is_common(one)]


def copies(strategy: Strategy, handles: Iterable[tf.Tensor]) -> list[CapturedVariable]:
    """The copies that this process has of variables."""
    mesh = strategy.mesh
    found = [[handle] if mesh is None else mesh.captured(handle) for handle in handles]
    return [CapturedVariable(copy) for copy in itertools.chain(*found)]


def broadcast(strategy: Strategy, model: Any, graph: Any = None) -> None:
    """Gives what the steps of `model` capture the chief's values in every process.

    Args:
        strategy: of the processes, which all call it.
        model: whose steps they are.
        graph: of a step that was just traced; `None` for all that were traced before.

    Raises:
        DisagreementError: the processes use variables of different shapes or dtypes.
    """
    if strategy.world.world_size == 1:
        return
    before = _captured.get(model) or {}
    if graph is None:
        _broadcast(strategy, list(before.values()))
        return
    handles = of_graph(strategy, model, graph)
    described = list(map(tensorflow_functions.described, handles))
    consensus.require_equal_variables(strategy, described, "what a step uses besides the model")
    _broadcast(strategy, handles)
    _captured.set(model, before | {id(handle): handle for handle in handles})


def _broadcast(strategy: Strategy, handles: list[tf.Tensor]) -> None:
    if not handles:
        return
    mine = [tf.io.serialize_tensor(tensorflow_functions.read(handle)).numpy() for handle in handles]
    lengths = consensus.broadcast_from_chief(strategy, list(map(len, mine)))  # those of strings differ
    is_chief = strategy.world.is_chief
    message = np.frombuffer(b"".join(mine), np.uint8) if is_chief else np.empty(sum(lengths), np.uint8)
    broadcast_array(message, strategy.broadcast)
    if is_chief:
        return
    for handle, part in zip(handles, np.split(message, np.cumsum(lengths)[:-1]), strict=True):
        value = tf.io.parse_tensor(part.tobytes(), tensorflow_functions.read(handle).dtype)
        for copy in copies(strategy, [handle]):
            copy.assign(value)
