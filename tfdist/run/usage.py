"""How to load the model of a run in stock Keras, and its input, for the table at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from tfdist.data.spec import DataSpec
from tfdist.internals import keras as keras_internals


def rows(model: keras.Model, spec: DataSpec, dataset: str, path: Path) -> list[tuple[str, str]]:
    """The rows `load` and `input`.

    Args:
        model: the trained model.
        spec: the facts about the dataset.
        dataset: the dataset's name as the user gave it.
        path: the file of the model.
    """
    return [("load", loading(model, path)), ("input", f"{_inputs(model, spec)}; {_content(spec, dataset)}")]


def loading(model: keras.Model, path: Path) -> str:
    """The Python code that loads the model."""
    own = {type(layer) for layer in keras_internals.all_layers(model) if not keras_internals.is_of_keras(type(layer))}
    own.discard(type(model) if type(model) is keras.Model else None)
    modules = sorted({kind.__module__ for kind in own})
    others = sorted(kind.__name__ for kind in own if keras.saving.get_registered_name(kind) == kind.__name__)
    named = ", ".join(f"{name!r}: {_module_of(own, name)}.{name}" for name in others)
    compiled = [*keras_internals.metrics_of(model), model.loss]
    plain = all(isinstance(one, str) or keras_internals.is_of_keras(type(one)) for one in compiled)
    arguments = [
        f"{str(path)!r}",
        *([f"custom_objects={{{named}}}"] if named else []),
        *([] if plain else ["compile=False"]),
    ]
    return "; ".join([*(f"import {module}" for module in modules), f"keras.saving.load_model({', '.join(arguments)})"])


def _module_of(kinds: set[Any], name: str) -> str:
    return next(kind.__module__ for kind in kinds if kind.__name__ == name)


def _inputs(model: keras.Model, spec: DataSpec) -> str:
    """Type and shape of each input, such as `float32 [N, 28, 28, 1]`."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    if not inputs:
        return _typed("int32" if spec.vocabulary_size else "float32", spec.input_shape)
    found = [_typed(one.dtype, one.shape[1:]) for one in inputs]
    if len(found) == 1:
        return found[0]
    return ", ".join(f"{one.name}: {text}" for one, text in zip(inputs, found, strict=True))


def _typed(dtype: str, shape: Any) -> str:
    return f"{dtype} [{', '.join(['N', *('any' if size is None else str(size) for size in shape)])}]"


def _content(spec: DataSpec, dataset: str) -> str:
    if ":" in dataset:
        return f"scaled as `{dataset}` gives it"
    if spec.vocabulary:
        return "words by their number in vocabulary.txt, from 0"
    if spec.vocabulary_size:
        return "tokens by number, as the dataset gives them"
    return "pixels from 0 to 1 (bytes divided by 255)" if len(spec.input_shape) == 3 else "as the dataset gives it"
