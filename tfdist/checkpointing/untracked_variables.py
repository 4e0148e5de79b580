"""What a model and its layers hold besides Keras variables: `tf.Variable`s, and the states of `tf.random.Generator`s.

Keras does not save them, but a run that is resumed must go on with them. They are told apart by their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.checkpointing.format import Entry
from tfdist.interface.variables import described
from tfdist.internals import keras as keras_internals
from tfdist.internals.tensorflow_variables import copies

_GROUP = "held"


def snapshot(model: Any) -> list[Entry]:
    """The values of this process."""
    held = _held(model)
    return [Entry(_GROUP, name, _array(copies(one)[0])) for name, one in zip(described(held), held, strict=True)]


def difference(model: Any, entries: Iterable[Entry]) -> tuple[str, str] | None:
    """What a checkpoint has, and what `model` has, where they differ; older checkpoints have nothing of the kind."""
    theirs = [entry.name for entry in entries if entry.group == _GROUP]
    ours = described(_held(model))
    if not theirs or theirs == ours:
        return None
    return tuple("variables of TensorFlow " + (", ".join(these) or "(none)") for these in (theirs, ours))  # type: ignore[return-value]


def restore(model: Any, entries: Iterable[Entry]) -> None:
    """Assigns the values of a `snapshot`, if there is one among `entries`."""
    stored = [entry for entry in entries if entry.group == _GROUP]
    for variable, entry in zip(_held(model) if stored else [], stored, strict=True):
        value = entry.value
        for copy in copies(variable):
            copy.assign(tf.io.parse_tensor(value.tobytes(), tf.string) if copy.dtype == tf.string else value)


def _held(model: Any) -> list[Any]:
    generators = keras_internals.held(model, tf.random.Generator)
    found = [*keras_internals.held(model, tf.Variable), *(generator.state for generator in generators)]
    return list({id(one): one for one in found}.values())


def _array(variable: Any) -> np.ndarray:
    """The value; strings as bytes that TensorFlow reads again."""
    if variable.dtype == tf.string:
        return np.frombuffer(tf.io.serialize_tensor(variable.read_value()).numpy(), np.uint8)
    return np.array(variable.numpy())
