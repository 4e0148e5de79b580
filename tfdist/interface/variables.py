"""The variables of a model and its strategy: where they are placed, and how all processes get the chief's values.

Values are broadcast as bytes, so that every dtype arrives bit by bit. Small variables are packed into one message and
large ones are sent in pieces, so that no process needs more memory than one message takes.

Synopsis:

    >>> import tensorflow as tf
    >>> weight = tf.Variable([1.0, 2.0])
    >>> broadcast_variables([weight], lambda values: values, is_chief=True)
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.groups import ProcessGroup, parts
from tfdist.groups.packing import summed
from tfdist.internals import tensorflow_graphs, tensorflow_variables
from tfdist.internals.keras import tf_variable
from tfdist.internals.patching import Attached
from tfdist.internals.tensorflow_variables import PIECE_BYTES, filled, memory, read, size_bytes
from tfdist.jobs import consensus

# Broadcasts the chief's bytes, uint8 `[n]`; every process passes an array of this length.
Broadcast = Callable[[np.ndarray], np.ndarray]


class Variables:
    """Ordinary variables, with one copy in each process.

    Args:
        device: the device of the variables; `None` leaves the choice to TensorFlow.
        in_parts: whether each process of a job keeps its own part of a metric's state, which is the sum of the parts.
    """

    def __init__(self, device: str | None = None, *, in_parts: bool = False):
        self._device = device
        self.in_parts = in_parts

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which a model and its optimizer are created and compiled."""
        return contextlib.nullcontext() if self._device is None else tf.device(self._device)

    def tracing(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """The context in which a step of `model` is traced for one device."""
        del model
        return contextlib.nullcontext()

    def calling(self, strategy: Any, model: Any) -> contextlib.AbstractContextManager[Any]:
        """The context of `fit`, `evaluate` and `predict` of `strategy`."""
        del strategy, model
        return contextlib.nullcontext()

    def check(self, model: Any, is_divided: Any) -> None:
        """Raises `UsageError` for a model that was not created in the scope.

        Args:
            model: a compiled model.
            is_divided: returns whether the strategy has sharded an optimizer, whose variables are then plain.
        """

    def sum_metrics(self, group: ProcessGroup, variables: Sequence[Any], name: str) -> list[tf.Tensor]:
        """Sums `variables`, the state of metrics, over all replicas; `name` identifies the collective operation."""
        values = [tf.convert_to_tensor(tf_variable(variable)) for variable in variables]
        return summed(group, values, name) if self.in_parts and group.size > 1 else values


@dataclass(frozen=True)
class StrategyState:
    """The state that a strategy keeps for a model besides the model's own variables, for checkpoints.

    These Keras variables are attached to the model but are not part of it: `model.save` leaves them out. Some variables
    in `own` belong to the model's optimizer, so that a checkpoint also has the chief's values in that place.

    Attributes:
        shared: variables with the same value in all processes, such as the momentum of an outer optimizer.
        own: variables with a different value in each process, such as optimizer state that is not averaged.
        kept: the object that the strategy works with between steps, created for these variables.
        made_for: the ids of the objects for which `kept` was created.
    """

    shared: Sequence[Any] = ()
    own: Sequence[Any] = ()
    kept: Any = None
    made_for: tuple[int, ...] = ()
    _own_ids: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_own_ids", frozenset(map(id, self.own)))

    def has_own(self, variable: Any) -> bool:
        """Whether the value of `variable` differs between processes."""
        return id(variable) in self._own_ids


_NOTHING = StrategyState()
_state: Attached[StrategyState] = Attached("strategy_state")


def keep_strategy_state(model: Any, state: StrategyState) -> None:
    """Attaches `state` to `model`, replacing any earlier state."""
    _state.set(model, state)


def strategy_state(model: Any) -> StrategyState:
    """Returns the strategy state that is attached to `model`, empty if there is none."""
    return _state.get(model) or _NOTHING


def broadcast_variables(variables: Iterable[Any], broadcast: Broadcast, is_chief: bool) -> None:
    """Assigns the chief's values to Keras or TensorFlow `variables`."""
    for pack in tensorflow_variables.packs(variables, PIECE_BYTES):
        if size_bytes(pack[0][0]) > PIECE_BYTES:
            _broadcast_large(pack[0], broadcast, is_chief)
        else:
            _broadcast_pack(pack, broadcast, is_chief)


def _broadcast_large(copies: Sequence[Any], broadcast: Broadcast, is_chief: bool) -> None:
    if is_chief:
        broadcast_array(read(copies[0]), broadcast)
    else:
        with filled(copies[0]) as content:
            broadcast_array(content, broadcast)
    for copy in copies[1:]:
        tensorflow_variables.fill(copy, read(copies[0]))


def _broadcast_pack(pack: Sequence[Sequence[Any]], broadcast: Broadcast, is_chief: bool) -> None:
    ends = np.cumsum([size_bytes(copies[0]) for copies in pack])
    if not ends[-1]:
        return
    message = np.concatenate([memory(read(copies[0])) for copies in pack]) if is_chief else np.zeros(ends[-1], np.uint8)
    for copies, piece in zip(pack, np.split(broadcast(message), ends[:-1]), strict=True):
        values = piece.view(copies[0].dtype.as_numpy_dtype).reshape(copies[0].shape)
        for variable in copies[is_chief:]:
            variable.assign(values)


def broadcast_handles(handles: Sequence[Sequence[tf.Tensor]], peers: consensus.Peers) -> None:
    """Assigns the chief's values to variables of any dtype, including strings.

    Args:
        handles: the handles of each variable's copies in this process.
        peers: the processes, which all call this function.
    """
    if not handles or peers.world.world_size == 1:
        return
    values = [tf.io.serialize_tensor(tensorflow_graphs.read(copies[0])).numpy() for copies in handles]
    lengths = consensus.broadcast_from_chief(peers, list(map(len, values)))  # strings have different lengths
    is_chief = peers.world.is_chief
    message = np.frombuffer(b"".join(values), np.uint8) if is_chief else np.empty(sum(lengths), np.uint8)
    broadcast_array(message, peers.broadcast)
    if is_chief:
        return
    for copies, part in zip(handles, np.split(message, np.cumsum(lengths)[:-1]), strict=True):
        value = tf.io.parse_tensor(part.tobytes(), tensorflow_graphs.read(copies[0]).dtype)
        for handle in copies:
            tensorflow_graphs.set_value(handle, value)


def checksum(variables: Iterable[Any]) -> int:
    """Returns the CRC-32 of the values."""
    crc = 0
    for variable in variables:
        crc = zlib.crc32(memory(read(tensorflow_variables.copies(variable)[0])).data, crc)
    return crc


def differ(variables: Iterable[Any], peers: consensus.Peers, doing: str) -> bool:
    """Whether the processes, which all call this function, have different values; `doing` is a verb for messages."""
    return len(set(consensus.all_gather_object(peers, checksum(variables), doing))) > 1


def divide(variable: Any, whole: np.ndarray | None, broadcast: Broadcast) -> None:
    """Gives each process its part (`tfdist.groups.parts`) of a variable, whose `whole` value only the chief has."""
    (local,) = tensorflow_variables.copies(variable)
    value = np.empty(parts.whole_shape(variable), local.dtype.as_numpy_dtype) if whole is None else whole
    value = np.ascontiguousarray(value)
    broadcast_array(value, broadcast)
    parts.fill(variable, value)


def described(variables: Iterable[Any]) -> list[str]:
    """Returns the dtype and shape of each variable, such as "float32 [4,3]"; for a part, the shape of the whole."""
    return [
        tensorflow_variables.in_words(tensorflow_variables.copies(variable)[0].dtype, parts.whole_shape(variable))
        for variable in variables
    ]


def broadcast_array(array: np.ndarray, broadcast: Broadcast) -> None:
    """Fills a C-contiguous `array` with the chief's values; the chief's array may be read-only."""
    flat = memory(array)
    for begin in range(0, len(flat), PIECE_BYTES):
        values = broadcast(flat[begin : begin + PIECE_BYTES])
        if flat.flags.writeable:
            flat[begin : begin + PIECE_BYTES] = values
