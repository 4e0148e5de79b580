"""Warnings about probable mistakes in a user's model or dataset, one sentence each.

Synopsis:

    >>> import keras
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    >>> model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> about_loss(model)
    'The model ends in probabilities (softmax), and its loss expects logits (`from_logits=True`): leave the softmax out'
"""

from __future__ import annotations

import inspect
from typing import Any

import keras

from tfdist.data import Source
from tfdist.internals import keras as keras_internals

# Layers that scale or normalize their input.
_SCALING = (
    keras.layers.Rescaling,
    keras.layers.Normalization,
    keras.layers.BatchNormalization,
    keras.layers.LayerNormalization,
    keras.layers.GroupNormalization,
)
_PROBABILITIES = ("softmax", "sigmoid")


def about(model: keras.Model, source: Source) -> list[str]:
    """Returns warnings about a compiled model and its dataset, whose training examples must have been read."""
    return [sentence for sentence in (about_loss(model), about_pixels(model, source)) if sentence is not None]


def about_loss(model: keras.Model) -> str | None:
    """Returns a warning if a model outputs probabilities and its loss expects logits, or vice versa; else `None`."""
    expects_logits = _expects_logits(model.loss)
    ending = _ending(model)
    if expects_logits is None or ending is None:
        return None
    if expects_logits and ending in _PROBABILITIES:
        return (
            f"The model ends in probabilities ({ending}), and its loss expects logits (`from_logits=True`): "
            f"leave the {ending} out"
        )
    if not expects_logits and ending == "linear":
        return (
            "The model ends without an activation, and its loss expects probabilities: compile it with a loss that has "
            "`from_logits=True`"
        )
    return None


def about_pixels(model: keras.Model, source: Source) -> str | None:
    """Returns a warning if the model certainly gets pixels from 0 to 255 and does not scale them; else `None`."""
    layers = keras_internals.all_layers(model)
    scales = any(isinstance(layer, _SCALING) for layer in layers)
    # A layer of the user's may scale in its own code.
    if not source.has_bytes or scales or not all(keras_internals.is_of_keras(type(layer)) for layer in layers):
        return None
    return (
        f"The examples of `{source.spec.name}` are whole numbers up to 255 (uint8), and nothing scales them: "
        "divide them by 255, or begin the model with `keras.layers.Rescaling(1 / 255)`"
    )


def _expects_logits(loss: Any) -> bool | None:
    """Whether a loss expects logits; `None` if it takes neither logits nor probabilities, or is not part of Keras."""
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    if inspect.isfunction(loss) and loss.__module__.startswith("keras."):
        return False if "from_logits" in inspect.signature(loss).parameters else None
    if not (isinstance(loss, keras.losses.Loss) and keras_internals.is_of_keras(type(loss))):
        return None
    expects: bool | None = loss.get_config().get("from_logits")
    return expects


def _ending(model: keras.Model) -> str | None:
    """The activation of the model's output: "softmax", "sigmoid" or "linear"; `None` for anything else."""
    last = keras_internals.last_operation(model)
    kind = type(last).__name__.lower()  # `keras.layers.Softmax`, or the operation of `keras.ops.softmax`
    if kind in _PROBABILITIES:
        return kind
    name = getattr(getattr(last, "activation", None), "__name__", None)
    has_kernel = isinstance(last, keras.layers.Dense | keras.layers.Conv2D)
    return name if name in _PROBABILITIES or (name == "linear" and has_kernel) else None
