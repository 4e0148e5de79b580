"""Models by name: `build` creates an uncompiled Keras model for a dataset's spec.

Each file in this folder registers one model under its own name. Importing this package and listing the names
imports neither Keras nor TensorFlow.

Synopsis:

    >>> {"cnn", "gpt", "mlp"} <= set(names())
    True
    >>> import tfdist.data
    >>> model = build("mlp", tfdist.data.load("digits").spec, units=32)
    >>> model.output_shape
    (None, 10)
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfdist import registry
from tfdist.errors import UsageError
from tfdist.models._training import Training

if TYPE_CHECKING:
    import keras
    import numpy as np

    from tfdist.data.spec import DataSpec
    from tfdist.models import _decoding

__all__ = ["Training", "build", "can_translate", "knows", "names", "tasks", "training", "translate"]

# The model that error messages suggest for each task.
FOR_TASK = {
    "classification": "mlp",
    "segmentation": "unet",
    "text_classification": "nbow",
    "translation": "seq2seq",
    "characters": "stateful_rnn",
    "masked_lm": "bert",
    "autoencoding": "conv_autoencoder",
    "generation": "vae",
    "recommendation": "two_tower",
    "click_prediction": "dlrm",
}


def names() -> list[str]:
    """The names of the models that come with tfdist, sorted."""
    return registry.names(__name__)


def build(name: str, spec: DataSpec, **options: Any) -> keras.Model:
    """Builds the model `name` for the examples and classes of `spec`, without compiling it.

    Args:
        name: one of `names()`, or the name of a custom function as `module:function`, where
            `function(spec, **options)` returns a `keras.Model`.
        spec: the spec of the dataset.
        **options: options of the model, such as `units` for `mlp`; all models of tfdist have `width`.

    Returns:
        A model from examples x of `spec.task` to logits `[B, *spec.target_shape, spec.classes]`; for autoencoding and
        generation to pixels like x, and for click_prediction to one logit `[B, 1]`. Outputs of tfdist's models are
        float32 under any dtype policy.

    Raises:
        UnknownNameError: there is no such model.
        UsageError: the model does not have an option, cannot do the task or take the input shape; or
            `module:function` does not return a model.
    """
    function = _builder(name)
    if not hasattr(spec, "task"):
        raise UsageError(
            f"The spec for the model `{name}` is a `{type(spec).__name__}`, not a `tfdist.data.DataSpec`",
            "pass the spec of a dataset: `tfdist.data.load(...).spec`",
        )
    if spec.task not in (tasks(name) or [spec.task]):
        does = " and ".join(task.replace("_", " ") for task in tasks(name))
        raise UsageError(
            f"The model `{name}` does {does}, but the dataset `{spec.name}` is for {spec.task.replace('_', ' ')}",
            f"use `--model {FOR_TASK[spec.task]}`, or another model that docs/models.md lists for this task",
        )
    import keras

    if isinstance(function, keras.Model):
        raise UsageError(
            f"The model `{name}` is a `keras.Model`, not a function that builds a model",
            "build the model in a function, such as `def build(spec):`, and return it",
        )
    model = registry.call(function, spec, kind="model", name=name, options=options)
    if not isinstance(model, keras.Model):
        raise UsageError(
            f"The model `{name}` returned a `{type(model).__name__}`, not a `keras.Model`",
            "return a Keras 3 model; docs/models.md has an example",
        )
    return model


def can_translate(model: keras.Model) -> bool:
    """Whether `translate` can use a model, that is, whether tfdist has built it for translation."""
    return _decoder(model) is not None


def translate(model: keras.Model, source: np.ndarray, *, length: int = 50, width: int = 1) -> np.ndarray:
    """Translates sentences with beam search.

    Args:
        model: a trained model of tfdist for translation, such as `seq2seq`.
        source: tokens, int `[B, S]`, padded with 0.
        length: the largest number of tokens in a translation, including the end token.
        width: the number of beams; 1 is greedy decoding.

    Returns:
        Tokens int32 `[B, L]`, L at most `length`, padded with the end token.

    Raises:
        UsageError: another model.
    """
    from tfdist.models import _decoding

    decoder = _decoder(model)
    if decoder is None:
        raise UsageError(
            f"`translate` cannot use the model `{model.name}`",
            "use a model that `tfdist.models.build` has made for translation",
        )
    return _decoding.translate(decoder, model, source, length=length, width=width)


def knows(name: str, option: str) -> bool:
    """Whether the model `name` has the option `option`."""
    return option in inspect.signature(_builder(name)).parameters


def shuffles(name: str, split: str = "train") -> bool | None:
    """Whether the model `name` takes the examples of a split in random order; `None` if the task of the data decides.

    Pieces of a text are read as streams for models that keep a state. Models without one learn more from them in random
    order, and are evaluated on all of them. Of a custom model it is not known whether it keeps a state.
    """
    return split == "train" if tasks(name) and not knows(name, "streams") else None


def tasks(name: str) -> tuple[str, ...]:
    """The tasks of the model `name`, a subset of `tfdist.data.spec.TASKS`; empty if unknown, as for a custom model."""
    return tuple(_module_constant(name, "TASKS", ()))


def training(name: str) -> Training | None:
    """How the model `name` is usually trained; `None` if unknown, as for a custom model, which is trained with Adam."""
    settings: Training | None = _module_constant(name, "TRAINING", None)
    return settings


def _decoder(model: keras.Model) -> _decoding.Decoder | None:
    """The decoder of a model of tfdist for translation, trained or loaded; `None` for another model."""
    from tfdist.models import seq2seq, transformer_translation

    names = {layer.name for layer in model.layers}
    return next((module.decoder for module in (seq2seq, transformer_translation) if names >= module.PARTS), None)


def _module_constant(name: str, constant: str, default: Any) -> Any:
    return getattr(sys.modules[_builder(name).__module__], constant, default)


def _builder(name: str) -> Callable[..., Any]:
    return registry.find(name, "model", __name__, "build")
