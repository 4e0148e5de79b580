"""The variables of a model that Keras does not save: `tf.Variable`s, and the states of `tf.random.Generator`s.

A resumed run must restore them, too. They are identified by their order.
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
    """Copies the values in this process."""
    variables = _variables(model)
    names = described(variables)
    return [Entry(_GROUP, name, _array(copies(variable)[0])) for name, variable in zip(names, variables, strict=True)]


def difference(model: Any, entries: Iterable[Entry]) -> tuple[str, str] | None:
    """Describes these variables in a checkpoint and in `model` if they differ; otherwise returns `None`.

    Older checkpoints do not contain such variables, and are accepted.
    """
    in_checkpoint = [entry.name for entry in entries if entry.group == _GROUP]
    in_model = described(_variables(model))
    if not in_checkpoint or in_checkpoint == in_model:
        return None
    kind = "variables of TensorFlow"
    return f"{kind} {', '.join(in_checkpoint)}", f"{kind} {', '.join(in_model) or '(none)'}"


def restore(model: Any, entries: Iterable[Entry]) -> None:
    """Assigns the values of a `snapshot`, if there is one among `entries`."""
    stored = [entry for entry in entries if entry.group == _GROUP]
    for variable, entry in zip(_variables(model) if stored else [], stored, strict=True):
        value = entry.value
        for copy in copies(variable):
            copy.assign(tf.io.parse_tensor(value.tobytes(), tf.string) if copy.dtype == tf.string else value)


def _variables(model: Any) -> list[Any]:
    generators = keras_internals.instances_of(tf.random.Generator, model)
    variables = [*keras_internals.instances_of(tf.Variable, model), *(generator.state for generator in generators)]
    return list({id(variable): variable for variable in variables}.values())


def _array(variable: Any) -> np.ndarray:
    """Returns the value; strings are serialized to bytes."""
    if variable.dtype == tf.string:
        return np.frombuffer(tf.io.serialize_tensor(variable.read_value()).numpy(), np.uint8)
    return np.array(variable.numpy())
