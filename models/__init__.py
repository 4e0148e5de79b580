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

from tfdist import plugins
from tfdist.errors import UsageError

if TYPE_CHECKING:
    import keras

    from tfdist.data.spec import DataSpec

__all__ = ["build", "knows", "names", "training"]


def names() -> list[str]:
    """The names of the models that come with tfdist, sorted."""
    return plugins.names(__name__)


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
    model = plugins.call(function, spec, kind="model", name=name, options=options)
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


def training(name: str) -> dict[str, Any]:
    """How the model `name` is trained where nothing else is said.

    Returns:
        "optimizer", "learning_rate", and where it has them "momentum" and "weight_decay"; empty for a model that says
        nothing, such as the user's own: Keras' Adam will do.
    """
    return dict(getattr(sys.modules[_builder(name).__module__], "TRAINING", {}))


def _builder(name: str) -> Callable[..., Any]:
    return plugins.find(name, "model", __name__, "build")
