"""x and y of a split: how they are stored, what makes them valid, and what a model sees of them.

Whole numbers are stored in the type of their file, such as uint8 for pixels, and cast when a batch is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tfdist.data.input import padding
from tfdist.data.spec import OF_TEXTS, DataSpec
from tfdist.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf

# x, which for translation and click_prediction is a dict of arrays by name; and y
Arrays = tuple[Any, np.ndarray]


def inputs(spec: DataSpec) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
    """The shape of an example and the type that a model sees, for each array of x; "x" if it is a single array."""
    if spec.task == "translation":
        return {"source": (spec.input_shape, np.int32), "target": (spec.target_shape, np.int32)}
    if spec.task == "click_prediction":
        return {"numbers": (spec.input_shape, np.float32), "categories": ((len(spec.category_sizes),), np.int32)}
    return {"x": (spec.input_shape, np.int32 if spec.task in (*OF_TEXTS, "recommendation") else np.float32)}


def target_type(spec: DataSpec) -> type[np.generic]:
    """The type of y that a model sees."""
    return np.float32 if spec.targets_are_inputs else np.int32


def label_type(spec: DataSpec) -> np.dtype:
    """The smallest type that can hold the labels of a dataset."""
    ignored = 0 if spec.ignored_class is None else spec.ignored_class
    return np.result_type(np.min_scalar_type(max(spec.classes - 1, 0)), np.min_scalar_type(ignored))


def checked(spec: DataSpec, split: str, x: Any, y: Any) -> Arrays:
    """Checks x and y of a split, and returns them as they are stored: C-contiguous.

    Whole numbers keep their type if it is narrower than the type that a model sees; everything else is cast.

    Raises:
        DataError: they do not match `spec`.
    """
    count, promised = spec.examples[split], inputs(spec)
    if set(_by_name(x)) != set(promised):
        raise DataError(
            f"Dataset `{spec.name}` for {spec.task} has the inputs {_listed(_by_name(x))} in its split `{split}`",
            f"return {_listed(promised)}",
        )
    for name, (shape, _) in promised.items():
        _check_shape(spec, split, name, _by_name(x)[name], (count, *shape))
    if spec.category_sizes:
        _check_categories(spec, split, x["categories"])
    stored_x = map_inputs(lambda name, array: _stored(array, promised[name][1]), x)
    if spec.targets_are_inputs:
        return stored_x, stored_x
    _check_shape(spec, split, "y", y, (count, *spec.target_shape))
    check_labels(y, spec)
    return stored_x, _stored(y, target_type(spec))


def _stored(array: Any, model_type: type[np.generic]) -> np.ndarray:
    """`array` in its own type if `model_type` is wider and can represent all its values, else in `model_type`."""
    dtype = np.asarray(array).dtype
    narrower = dtype.kind in "biu" and dtype.itemsize < np.dtype(model_type).itemsize and np.can_cast(dtype, model_type)
    return np.ascontiguousarray(array, dtype.newbyteorder("=") if narrower else model_type)


def cast(array: np.ndarray, model_type: type[np.generic], divisor: int = 1) -> np.ndarray:
    """What a model sees of a stored array: `array` itself if it needs no conversion."""
    return np.asarray(array, model_type) if divisor == 1 else np.divide(array, np.float32(divisor))


class Transform(Protocol):
    """A transformation of the gathered examples of a batch, in a graph; equal ones can share a graph."""

    def extras(self, epoch: int, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns what the transformation needs for each example, such as random numbers: arrays `[n, ...]`.

        Args:
            epoch: the number of the pass.
            indices: the numbers of the examples in the order of the pass.
        """

    def __call__(self, data: Any, *extras: tf.Tensor) -> Any:
        """Returns the transformed examples of `data`, Keras' (x, y); `extras` are those of these examples."""


@dataclass(frozen=True)
class ToModelTypes:
    """The transformation of stored examples into what a model sees, followed by another transformation.

    Attributes:
        spec: the spec of the dataset.
        divisor: x is divided by it, in float32.
        then: the transformation that follows, if any.
    """

    spec: DataSpec
    divisor: int = 1
    then: Transform | None = None

    def extras(self, epoch: int, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        return () if self.then is None else self.then.extras(epoch, indices)

    def __call__(self, data: Any, *extras: tf.Tensor) -> Any:
        data = self._cast(data)
        return data if self.then is None else self.then(data, *extras)

    def specs(self, stored: Any) -> Any:
        """The `tf.TensorSpec`s of what a model sees of examples with the specs `stored`."""
        import tensorflow as tf

        return self._map(stored, lambda spec, dtype: tf.TensorSpec(spec.shape, dtype))

    def _cast(self, data: Any) -> Any:
        import tensorflow as tf

        x, y = self._map(data, tf.cast)
        if self.divisor != 1:
            # TensorFlow replaces the division by a constant with a multiplication, which rounds differently.
            divisor = tf.raw_ops.PlaceholderWithDefault(input=np.float32(self.divisor), shape=[])
            x = tf.raw_ops.RealDiv(x=x, y=divisor)
        return x, (x if self.spec.targets_are_inputs else y)

    def _map(self, data: Any, function: Any) -> Any:
        """`data` with `function(part, dtype)` in place of each part whose type is narrower than the model's."""
        (x, y), types = data, {name: dtype for name, (_, dtype) in inputs(self.spec).items()}

        def mapped(part: Any, dtype: type[np.generic]) -> Any:
            # A wider type stays: the number of a stream may need int64.
            return function(part, dtype) if part.dtype.size < np.dtype(dtype).itemsize else part

        # The parts of a stream have names that are not in the spec, and are whole numbers.
        x = map_inputs(lambda name, part: mapped(part, types.get(name, np.int32)), x)
        return x, mapped(y, target_type(self.spec))


def _check_shape(spec: DataSpec, split: str, name: str, array: Any, expected: tuple[int, ...]) -> None:
    if np.shape(array) != expected:
        raise DataError(
            f"Dataset `{spec.name}` promises {name} of shape `{expected}` in its split `{split}`, "
            f"found `{np.shape(array)}`",
            "give the number of values of each category as `category_sizes`"
            if name == "categories"
            else "make the source's spec and what it reads agree",
        )


def _check_categories(spec: DataSpec, split: str, categories: Any) -> None:
    """Checks that each of the categories `[N, C]` is a row of its table: outside, a CPU fails and a GPU reads zeros."""
    if np.asarray(categories).dtype.kind not in "iu":
        raise DataError(
            f"The categories in the split `{split}` of dataset `{spec.name}` have the dtype "
            f"`{np.asarray(categories).dtype}`, and are the numbers of rows",
            "convert them with `.astype('int32')`",
        )
    outside = (np.asarray(categories) < 0) | (categories >= np.array(spec.category_sizes))
    if outside.any():
        example, column = (int(index) for index in np.argwhere(outside)[0])
        raise DataError(
            f"Category {column} of example {example} in the split `{split}` of dataset `{spec.name}` is "
            f"`{categories[example, column]}`, outside its {spec.category_sizes[column]} values",
            "values go from 0 to the size of the category less 1: renumber them, or correct `category_sizes`",
        )


def check_labels(y: Any, spec: DataSpec) -> None:
    """Checks that targets are class numbers.

    Args:
        y: integers `[N, ...]`, each to be 0 to `spec.classes - 1`, or `spec.ignored_class`.
        spec: the dataset's spec.

    Raises:
        DataError: the targets are not integers, or a label is outside the classes; names the first such example.
    """
    y = np.asarray(y)
    if y.dtype.kind not in "iu":
        raise DataError(
            f"Labels of dataset `{spec.name}` are of type `{y.dtype}`",
            f"give class numbers, integers from 0 to {spec.classes - 1}",
        )
    # A comparison takes one byte per label; the labels themselves are never cast to a wider type.
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


def map_x(function: Callable[[Any], Any], x: Any) -> Any:
    """`function(x)`, or a dict of its results if x is a dict of arrays."""
    return map_inputs(lambda name, array: function(array), x)


def map_inputs(function: Callable[[str, Any], Any], x: Any) -> Any:
    """`function("x", x)`, or a dict of the results of `function(name, array)` if x is a dict of arrays."""
    if isinstance(x, dict):
        return {name: function(name, array) for name, array in x.items()}
    return function("x", x)


def _by_name(x: Any) -> dict[str, Any]:
    return x if isinstance(x, dict) else {"x": x}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def sentence_lengths(x: Any) -> dict[str, np.ndarray]:
    """The lengths of the sentences, int `[N]`, for "x", or for "source" and "target"."""
    return {kind: padding.lengths(tokens) for kind, tokens in _by_name(x).items()}


def main_input(x: Any) -> np.ndarray:
    """x itself, or of a dict of arrays the one whose shape is the spec's `input_shape`, "source" or "numbers"."""
    return x["numbers" if "numbers" in x else "source"] if isinstance(x, dict) else x


def head(arrays: Arrays, count: int) -> Arrays:
    """The first `count` examples."""
    x, y = arrays
    return map_x(lambda array: array[:count], x), y[:count]
