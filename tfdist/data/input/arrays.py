"""The arrays of a split: x and y, and what they must be like for the dataset's facts to be true."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdist.data.input import padding
from tfdist.data.spec import DataSpec
from tfdist.errors import DataError

# x, or for translation {"source": ..., "target": ...}; and y
Arrays = tuple[Any, np.ndarray]

TASKS_OF_TOKENS = ("text_classification", "translation", "characters")


def seen_types(spec: DataSpec) -> tuple[type[np.generic], type[np.generic]]:
    """The types of x and y as a model sees them."""
    pictures = spec.task not in TASKS_OF_TOKENS
    return (np.float32 if pictures else np.int32), (np.float32 if spec.task == "autoencoding" else np.int32)


def label_type(spec: DataSpec) -> np.dtype:
    """The smallest type that holds the labels of a dataset."""
    ignored = 0 if spec.ignored_class is None else spec.ignored_class
    return np.result_type(np.min_scalar_type(max(spec.classes - 1, 0)), np.min_scalar_type(ignored))


def checked(spec: DataSpec, split: str, x: Any, y: Any) -> Arrays:
    """x and y of a split as they are held: whole numbers in their own types where these are narrower than `seen_types`.

    Raises:
        DataError: they do not fit `spec`.
    """
    count, (x_type, y_type) = spec.examples[split], seen_types(spec)
    if isinstance(x, dict):
        _check_shape(spec, split, "source", np.shape(x["source"]), (count, *spec.input_shape))
        _check_shape(spec, split, "target", np.shape(x["target"]), (count, *spec.target_shape))
    else:
        _check_shape(spec, split, "x", np.shape(x), (count, *spec.input_shape))
    if spec.task == "autoencoding":
        x = _held(x, x_type)
        return x, x
    _check_shape(spec, split, "y", np.shape(y), (count, *spec.target_shape))
    check_labels(y, spec)
    if isinstance(x, dict):
        return {name: _held(array, x_type) for name, array in x.items()}, _held(y, y_type)
    return _held(x, x_type), _held(y, y_type)


def _held(array: Any, seen: type[np.generic]) -> np.ndarray:
    """`array`, C-contiguous, of whole numbers in its own type if that is narrower than `seen`, which has them all."""
    own = np.asarray(array).dtype
    narrower = own.kind in "biu" and own.itemsize < np.dtype(seen).itemsize and np.can_cast(own, seen)
    return np.ascontiguousarray(array, own.newbyteorder("=") if narrower else seen)


def cast(array: np.ndarray, seen: type[np.generic], divisor: int = 1) -> np.ndarray:
    """What a model sees of an array that is held: `array` itself where there is nothing to be done."""
    return np.asarray(array, seen) if divisor == 1 else np.divide(array, np.float32(divisor))


def _check_shape(spec: DataSpec, split: str, what: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise DataError(
            f"Dataset `{spec.name}` promises {what} of shape `{expected}` in its split `{split}`, found `{found}`",
            "make the source's spec and what it reads agree",
        )


def check_labels(y: Any, spec: DataSpec) -> None:
    """Checks that targets are class numbers.

    Args:
        y: integers `[N, ...]`, each to be 0 to `spec.classes - 1`, or `spec.ignored_class`.
        spec: the dataset's facts.

    Raises:
        DataError: not integers, or one outside the classes; names the first such example and its value.
    """
    y = np.asarray(y)
    if y.dtype.kind not in "iu":
        raise DataError(
            f"Labels of dataset `{spec.name}` are of type `{y.dtype}`",
            f"give class numbers, integers from 0 to {spec.classes - 1}",
        )
    # A comparison is a byte an example; the labels' own type is never widened.
    outside = (y < 0) | (y >= spec.classes)
    if spec.ignored_class is not None:
        outside &= y != spec.ignored_class
    if outside.any():
        first = tuple(int(index) for index in np.argwhere(outside)[0])
        raise DataError(
            f"Label {first[0]} of dataset `{spec.name}` is `{y[first]}`, outside its {spec.classes} classes "
            f"({np.count_nonzero(outside)} of {y.size} labels are)",
            f"labels go from 0 to {spec.classes - 1}: renumber them, or give the source more classes",
        )


def sentence_lengths(x: Any) -> dict[str, np.ndarray]:
    """The lengths of each kind of sentence, int `[N]`."""
    return {kind: padding.lengths(tokens) for kind, tokens in (x if isinstance(x, dict) else {"x": x}).items()}


def as_numpy(x: Any) -> Any:
    """`x` as NumPy arrays."""
    return {name: np.asarray(array) for name, array in x.items()} if isinstance(x, dict) else np.asarray(x)


def main_input(x: Any) -> np.ndarray:
    """x itself, or the sentences to translate."""
    return x["source"] if isinstance(x, dict) else x


def head(arrays: Arrays, count: int) -> Arrays:
    """The first `count` examples."""
    x, y = arrays
    return ({name: array[:count] for name, array in x.items()} if isinstance(x, dict) else x[:count]), y[:count]
