"""Models by name: `build` makes an uncompiled Keras model that fits a dataset's spec.

Each file beside this one is one model: the file is the registration. Importing this package and asking for
the names imports neither Keras nor TensorFlow.

Synopsis:

    >>> names()[:3], len(names())
    (['bilstm', 'cnn', 'conv_autoencoder'], 17)
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

if TYPE_CHECKING:
    import keras

    from tfdist.data.spec import DataSpec

__all__ = ["build", "knows", "names", "tasks", "training"]

# A model for each task, to name where one was chosen that does another.
FOR_TASK = {
    "classification": "mlp",
    "segmentation": "unet",
    "text_classification": "nbow",
    "translation": "seq2seq",
    "characters": "stateful_rnn",
    "autoencoding": "conv_autoencoder",
}


def names() -> list[str]:
    """The names of the models that come with tfdist, sorted."""
    return registry.names(__name__)


def build(name: str, spec: DataSpec, **options: Any) -> keras.Model:
    """The model `name` for the examples and classes of `spec`, built and not compiled.

    Args:
        name: one of `names()`, or the user's own `module:function`, where `function(spec, **options)` returns
            a `keras.Model`.
        spec: the facts about the dataset.
        **options: what that model knows, such as `units` for `mlp`; all models of tfdist know `width`.

    Returns:
        A model from examples x of `spec.task` to logits `[B, *spec.target_shape, spec.classes]`, for autoencoding to
        pixels like x; float32 under any dtype policy, for the models of tfdist.

    Raises:
        UnknownNameError: no such model.
        UsageError: an option that the model does not know, a task or an input shape that it cannot take, or a
            `module:function` that gives no model.
    """
    function = _builder(name)
    if spec.task not in (tasks(name) or [spec.task]):
        does = " and ".join(task.replace("_", " ") for task in tasks(name))
        raise UsageError(
            f"The model `{name}` does {does}, dataset `{spec.name}` is for {spec.task.replace('_', ' ')}",
            f"use `--model {FOR_TASK[spec.task]}`, or another that docs/models.md lists for this task",
        )
    model = registry.call(function, spec, kind="model", name=name, options=options)
    import keras

    if not isinstance(model, keras.Model):
        raise UsageError(
            f"The model `{name}` returned a `{type(model).__name__}`, not a `keras.Model`",
            "return a Keras 3 model; docs/models.md has an example",
        )
    return model


def knows(name: str, option: str) -> bool:
    """Whether the model `name` has such an option."""
    return option in inspect.signature(_builder(name)).parameters


def tasks(name: str) -> tuple[str, ...]:
    """What the model `name` can do, of `tfdist.data.spec.TASKS`; empty for one that does not say, such as one's own."""
    return tuple(_said(name, "TASKS", ()))


def training(name: str) -> dict[str, Any]:
    """How the model `name` is trained where nothing else is said.

    Returns:
        "optimizer", "learning_rate", and where it has them "momentum" and "weight_decay"; empty for a model that says
        nothing, such as the user's own: Keras' Adam will do.
    """
    return dict(_said(name, "TRAINING", {}))


def _said(name: str, what: str, default: Any) -> Any:
    return getattr(sys.modules[_builder(name).__module__], what, default)


def _builder(name: str) -> Callable[..., Any]:
    return registry.find(name, "model", __name__, "build")
