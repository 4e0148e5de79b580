"""Examples that are read by their numbers, from any library that numbers them.

    dataset = datasets.load_dataset("parquet", data_files="train.parquet", split="train")
    model.fit(tfdist.data.examples(dataset, x="image", y="label"), batch_size=32)

A source returns rows: of any kind, or dicts, whose values the user names. `Examples` turns rows into arrays:

    source ──> rows, or the columns of a Hugging Face `Dataset` ──> transform ──> x, y, sample_weight ──> arrays

Synopsis:

    >>> data = examples([{"a": [1.0, 2.0], "b": 0}, {"a": [3.0, 4.0], "b": 1}], y="b")
    >>> data
    <tfdist.data.examples: 2 of a `list`>
    >>> x, y = data.read([1, 0])
    >>> x.tolist(), x.dtype, y.tolist()
    ([[3.0, 4.0], [1.0, 2.0]], dtype('float32'), [1, 0])
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.data.input import libraries
from tfdist.errors import DataError, UsageError

# What Keras takes as data, in its order.
PARTS = ("x", "y", "sample_weight")

# Columns that are targets by their names; a `Dataset` that has one is not passed as inputs alone.
_TARGETS = ("label", "labels", "label_ids")

# How many examples are read to compare the data of the processes.
_COMPARED = 8

Names = str | Sequence[str] | None


@dataclass(frozen=True, eq=False, repr=False)
class Examples:
    """Examples with numbers, as `examples` and `of_columns` make them.

    Attributes:
        kind: the type of the source, for messages.
        length: the number of examples.
        rows: reads rows, or columns, which are `(x,)`, `(x, y)` or `(x, y, sample_weight)` after `select`.
        select: see `rows`.
        stored: reads rows that are the same at each call.
    """

    kind: str
    length: int
    rows: libraries.Reader
    select: Callable[[Any], tuple[Any, ...]]
    stored: libraries.Reader

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"<tfdist.data.examples: {self.length:,} of a `{self.kind}`>"

    def read(self, numbers: Iterable[int]) -> tuple[Any, ...]:
        """The examples with these numbers: structures of arrays `[n, ...]`.

        Raises:
            DataError: an example cannot be read, or the examples have different shapes or types.
        """
        numbers = [int(number) for number in numbers]
        if not numbers:
            return tuple(_map(lambda array: array[:0], part) for part in self.read([0]))
        try:
            return self._read(numbers)
        except (DataError, UsageError):
            raise
        except Exception as error:
            raise self._unreadable(numbers, error) from error

    def sample(self) -> str:
        """A hash of the number of the examples and of a few of them."""
        numbers = sorted({int(number) for number in np.linspace(0, self.length - 1, _COMPARED)})
        digest = hashlib.sha256(str(self.length).encode())
        try:
            _update(digest, self.stored(numbers) if self.length else [])
        except Exception as error:
            raise self._unreadable(numbers, error) from error
        return digest.hexdigest()[:12]

    def _unreadable(self, numbers: list[int], error: Exception) -> DataError:
        """The error for the first example among `numbers` that cannot be read by itself."""
        reasons = ((number, reason) for number in numbers if (reason := self._reason(number)) is not None)
        number, reason = next(reasons, (numbers[0], error))
        text = str(reason).strip().partition("\n")[0]
        return DataError(
            f"Example {number} of the `{self.kind}` cannot be read: {type(reason).__name__}: {text}",
            "repair this example, or leave it out of the source",
        )

    def _reason(self, number: int) -> Exception | None:
        try:
            self._read([number])
        except Exception as error:
            return error
        return None

    def _read(self, numbers: list[int]) -> tuple[Any, ...]:
        rows = self.rows(numbers)
        selected = self.select(rows) if isinstance(rows, dict) else _transposed([self.select(row) for row in rows])
        return tuple(
            _map(functools.partial(_joined, numbers, name), part) for part, name in zip(selected, PARTS, strict=False)
        )


def examples(
    source: Any,
    transform: Callable[[Any], Any] | None = None,
    *,
    x: Names = None,
    y: Names = None,
    sample_weight: str | None = None,
) -> Examples:
    """Examples that are read by their numbers, as data for `fit`, `evaluate`, `predict` and `validation_data`.

    `batch_size`, `shuffle`, `class_weight` and `steps_per_epoch` mean what they mean for arrays, and the weights are
    those of a `fit` on arrays of the same examples. In a job, each process passes the same source, and reads only its
    part of each batch. A run that is resumed within an epoch reads no example again.

    Args:
        source: a Hugging Face `Dataset`, a data source of ArrayRecord, a Grain `MapDataset` whose elements are examples
            and not batches, or any object with `__len__` and `__getitem__`, and `__getitems__` if it reads several
            examples faster. It is read from several threads.
        transform: a function of what the source returns for one example. It returns what Keras takes: x, `(x, y)` or
            `(x, y, sample_weight)`, or a dict for the names below. Within these, dicts and tuples are structures of
            inputs, and lists are arrays.
        x: for examples that are dicts, such as the rows of a `Dataset`: the name of the input, or a list of names,
            whose values the model gets as a dict. Without it, all values but those in `y` and `sample_weight`.
        y: the name of the target, or a list of names.
        sample_weight: the name of the weights; it needs `y`.

    Raises:
        UsageError: the examples have no numbers, or do not have these names.
    """
    libraries.require_numbered(source)
    _require_arguments(transform, x=x, y=y, sample_weight=sample_weight)
    kind, names = type(source).__name__, [*_listed(x), *_listed(y), *_listed(sample_weight)]
    if sample_weight is not None and y is None:
        raise UsageError(f"`sample_weight` is `{sample_weight}`, and `y` names no target", "name it with `y=`")
    if libraries.is_array_record(source) and transform is None:
        raise UsageError(
            f"An example of the `{kind}` is bytes, which only you can decode",
            "pass `tfdist.data.examples(source, decode)`, where `decode(record)` returns `(x, y)`",
        )
    select = functools.partial(_selected, kind, x, y, sample_weight)
    if libraries.is_dataset(source) and transform is None:
        if (columns := libraries.column_names(source)) is not None:
            _require_names(kind, columns, names)
            _require_target(columns, names)
        read = libraries.columns(source, names if x is not None else ())
    else:
        rows = libraries.rows(source)
        read = rows if transform is None else lambda numbers: [transform(row) for row in rows(numbers)]
    return Examples(kind, len(source), read, select, libraries.stored(source))


def of_columns(x: Any, y: Any, sample_weight: Any) -> Examples:
    """Examples of columns of Hugging Face datasets, as in `fit(dataset["image"], dataset["label"])`.

    Raises:
        UsageError: only some of the data are columns, or the columns have different lengths.
    """
    parts = tuple(part for part in (x, y, sample_weight) if part is not None)
    columns: dict[str, Any] = {}

    def key_of(column: Any) -> str:
        if not libraries.is_column(column):
            raise UsageError(
                f"A `{type(column).__name__}` was passed beside a column of a Hugging Face `Dataset`",
                'pass columns only, as in `fit(dataset["image"], dataset["label"])`, or arrays only',
            )
        columns[key := str(len(columns))] = column
        return key

    keys = _map(key_of, parts)
    lengths = [len(column) for column in columns.values()]
    if len(set(lengths)) > 1:
        raise UsageError(
            f"The columns have different numbers of rows: {', '.join(map(str, lengths))}",
            "pass columns of the same dataset",
        )
    readers = {key: libraries.column(column) for key, column in columns.items()}

    def read(numbers: list[int]) -> dict[str, Any]:
        return {key: reader(numbers) for key, reader in readers.items()}

    def select(read_columns: dict[str, Any]) -> tuple[Any, ...]:
        selected: tuple[Any, ...] = _map(read_columns.__getitem__, keys)
        return selected

    return Examples("Dataset", lengths[0], read, select, read)


def _selected(kind: str, x: Names, y: Names, sample_weight: str | None, row: Any) -> tuple[Any, ...]:
    """`(x,)`, `(x, y)` or `(x, y, sample_weight)` of a row, or of the columns of several rows."""
    names = [*_listed(x), *_listed(y), *_listed(sample_weight)]
    if row is None:
        raise LookupError("there is no example with this number, as after `filter` of a Grain `MapDataset`")
    if isinstance(row, dict):
        _require_names(kind, row, names)
        others = [name for name in row if name not in names]
        x = x if x is not None else others[0] if names and len(others) == 1 else others
        return tuple(_named(row, part) for part in (x, y, sample_weight) if part is not None)
    if names:
        raise UsageError(
            f"`{names[0]}` is the name of a value, but an example of the `{kind}` is a `{type(row).__name__}`",
            "leave `x`, `y` and `sample_weight` out, or return a dict from `transform`",
        )
    parts = row if isinstance(row, tuple) else (row,)
    if not 1 <= len(parts) <= len(PARTS):
        raise UsageError(
            f"An example of the `{kind}` is a tuple of {len(parts)} parts",
            "let `transform` return what Keras takes: x, `(x, y)` or `(x, y, sample_weight)`",
        )
    return parts


def _named(row: dict[str, Any], names: str | Sequence[str]) -> Any:
    return row[names] if isinstance(names, str) else {name: row[name] for name in names}


def _listed(names: Names) -> Sequence[str]:
    return () if names is None else [names] if isinstance(names, str) else names


def _require_arguments(transform: Any, **names: Any) -> None:
    if transform is not None and not callable(transform):
        raise UsageError(
            f"`transform` of `tfdist.data.examples` is {transform!r}, which is no function",
            'write `tfdist.data.examples(source, x="...", y="...")` for names, or pass a function of an example',
        )
    for option, value in names.items():
        listed = [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
        if value is not None and not all(isinstance(name, str) for name in listed):
            raise UsageError(
                f"`{option}` of `tfdist.data.examples` is {value!r}, which is no name",
                f'give the name of a value of an example, as in `{option}="..."`',
            )


def _require_names(kind: str, available: Iterable[str], names: Sequence[str]) -> None:
    missing = next((name for name in names if name not in available), None)
    if missing is not None:
        raise UsageError(
            f"The examples of the `{kind}` have no `{missing}`: they have {libraries.listed(available)}",
            "give `x`, `y` and `sample_weight` names of these",
        )


def _require_target(columns: Sequence[str], names: Sequence[str]) -> None:
    target = next((name for name in columns if name in _TARGETS), None)
    if target is not None and not names:
        raise UsageError(
            f"The `Dataset` has the columns {libraries.listed(columns)}, and nothing says which of them is the target",
            f'pass `tfdist.data.examples(dataset, x="...", y="{target}")`',
        )


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function(leaf)` in place of each leaf: dicts and tuples are structures, everything else a leaf."""
    if isinstance(value, dict):
        return {name: _map(function, part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_map(function, part) for part in value)
    return function(value)


def _transposed(rows: Sequence[Any]) -> Any:
    """A structure of lists, one value per row, from a list of structures."""
    first = rows[0]
    if isinstance(first, dict):
        if any(row.keys() != first.keys() for row in rows):
            raise ValueError("examples have different names")
        return {name: _transposed([row[name] for row in rows]) for name in first}
    if isinstance(first, tuple):
        return tuple(_transposed(values) for values in zip(*rows, strict=True))
    return list(rows)


def _joined(numbers: Sequence[int], name: str, values: Any) -> np.ndarray:
    """The values of the examples with these numbers in one array, in the types that Keras makes of arrays."""
    if isinstance(values, np.ndarray) and values.dtype.kind not in "OSU":
        return _in_keras_type(values)
    arrays = [_array(value) for value in values]
    for number, array in zip(numbers, arrays, strict=True):
        if (array.shape, array.dtype) != (arrays[0].shape, arrays[0].dtype):
            raise different(name, number, array, numbers[0], arrays[0].shape, arrays[0].dtype)
    return np.stack(arrays)


def different(
    name: str, number: int, array: np.ndarray, other: int, shape: Sequence[int | None], dtype: Any
) -> DataError:
    """The error for an example whose shape or type is not that of another example."""
    return DataError(
        f"`{name}` of example {number} has the shape `{array.shape}` and the type `{array.dtype}`, but that of example "
        f"{other} has `{tuple(shape)}` and `{np.dtype(dtype)}`",
        "let `transform`, or the dataset, give all examples one shape and type, for example by padding",
    )


def _array(value: Any) -> np.ndarray:
    if isinstance(value, bytes | str):  # NumPy's own types for these would cut zeros off
        return np.array(value, object)
    array = np.asarray(value)
    if array.dtype.kind in "SU":
        return np.array(value, object)
    if array.dtype.kind == "O" and not all(isinstance(item, bytes | str) for item in array.flat):
        wrong = next(item for item in array.flat if not isinstance(item, bytes | str))
        raise TypeError(f"`{type(wrong).__name__}` cannot become a tensor")
    return _in_keras_type(array)


def _in_keras_type(array: np.ndarray) -> np.ndarray:
    import keras

    return array.astype(keras.config.floatx(), copy=False) if array.dtype.kind == "f" else array


def _update(digest: Any, value: Any) -> None:
    """Adds a structure of values to a hash."""
    if isinstance(value, dict):
        value = itertools.chain.from_iterable(value.items())
    if isinstance(value, bytes | str | int | float | bool | None):
        digest.update(repr(value).encode())
    elif isinstance(value, list | tuple | itertools.chain):
        digest.update(b"[")
        for part in value:
            _update(digest, part)
    else:
        array = np.asarray(value)
        digest.update(f"{array.dtype}{array.shape}".encode())
        _update(digest, array.tolist()) if array.dtype.kind == "O" else digest.update(np.ascontiguousarray(array).data)
