"""Recognises the data of Hugging Face `datasets` 5.2, Grain 0.2.18 and ArrayRecord 0.8.6, none of which it imports.

examples that are read by their numbers     `datasets.Dataset` and its columns, ArrayRecord's data source, any
                                            object with `__len__` and `__getitem__`; see `examples`
batches as the library makes them           Grain's `DataLoader`, `MapDataset` and `IterDataset`; see `grain_feed`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdist.errors import DataError, UsageError

# Returns the rows with these numbers: a list of rows, or a dict of columns.
Reader = Callable[[list[int]], Any]

_HUGGING_FACE = "Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict"
_FORMATTED_BY_THE_USER = "custom"  # by a transform, which may also need columns that nobody has asked for


def is_dataset(data: Any) -> bool:
    """Whether `data` is a Hugging Face `Dataset`."""
    return _is(data, "datasets", "Dataset")


def is_column(data: Any) -> bool:
    """Whether `data` is a column of a Hugging Face `Dataset`, as `dataset["name"]` returns it."""
    return _is(data, "datasets", "Column")


def is_array_record(data: Any) -> bool:
    """Whether `data` is the data source of ArrayRecord, or Grain's."""
    return _is(data, "array_record", "ArrayRecordDataSource") or _is(data, "grain", "ArrayRecordDataSource")


def is_numbered_only(data: Any) -> bool:
    """Whether `data` come from a library whose data Keras does not take, since only the numbers of examples are known.

    Those that have no numbers are among them, so that `require_numbered` explains what to do.
    """
    return _is(data, "datasets", *_HUGGING_FACE) or is_array_record(data)


def require_numbered(source: Any) -> None:
    """Raises `UsageError` if the examples of `source` have no numbers."""
    kind = type(source).__name__
    if _is(source, "datasets", "DatasetDict", "IterableDatasetDict"):
        raise UsageError(
            f"A `{kind}` has a dataset per split: {listed(source)}",
            f'pass one of them, for example `dataset["{next(iter(source), "train")}"]`',
        )
    if _is(source, "datasets", "IterableDataset"):
        raise UsageError(
            f"An `{kind}` can only be read from its start: its examples have no numbers",
            "load the dataset without `streaming=True`, or make a `tf.data.Dataset` with `from_generator`",
        )
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise UsageError(
            f"A `{kind}` lacks `__len__` or `__getitem__`: its examples have no numbers",
            "pass a Hugging Face `Dataset`, a data source of ArrayRecord, a Grain `MapDataset`, or any object with "
            "both methods",
        )


def rows(source: Any) -> Reader:
    """Reads rows one by one, or together where the source can."""
    if is_dataset(source):
        return _rows_of_dataset(source)
    if hasattr(source, "__getitems__"):
        return lambda numbers: list(source.__getitems__(numbers))
    return lambda numbers: [source[number] for number in numbers]


def column_names(dataset: Any) -> list[str] | None:
    """The names of the columns of a Hugging Face `Dataset`; `None` if a transform of the user's may change them."""
    return None if dataset.format["type"] == _FORMATTED_BY_THE_USER else list(dataset.column_names)


def columns(dataset: Any, names: Sequence[str]) -> Reader:
    """Reads columns of a Hugging Face `Dataset`: these, or all if there are no `names`."""
    if names and column_names(dataset):
        dataset = dataset.select_columns(list(names))  # so that the others are not decoded
    arrays, stored = _with_numpy(dataset), _columns_with_gaps(dataset)

    def read(numbers: list[int]) -> dict[str, Any]:
        _require_present(stored[numbers] if stored is not None else {}, numbers)
        return dict(arrays[numbers])

    return read


def column(of: Any) -> Reader:
    """Reads a column of a Hugging Face `Dataset`, or of one of its columns of dicts."""
    if not is_dataset(of.source):
        return lambda numbers: of[numbers]
    read = columns(of.source, [of.column_name])
    return lambda numbers: read(numbers)[of.column_name]


def stored(source: Any) -> Reader:
    """Reads what is the same at each call: of a Hugging Face `Dataset`, the rows before the user's transform."""
    if is_dataset(source):
        arrow = source.with_format("arrow")
        return lambda numbers: arrow[numbers].to_pylist()
    return rows(source)


def listed(names: Any) -> str:
    """The names in backticks."""
    return ", ".join(f"`{name}`" for name in names)


def _rows_of_dataset(dataset: Any) -> Reader:
    arrays, stored = _with_numpy(dataset), _columns_with_gaps(dataset)
    if stored is None:
        return lambda numbers: list(arrays.__getitems__(numbers))

    def read(numbers: list[int]) -> list[Any]:
        pairs = zip(arrays.__getitems__(numbers), stored.__getitems__(numbers), strict=True)
        return [row | values for row, values in pairs]

    return read


def _columns_with_gaps(dataset: Any) -> Any:
    """The columns in which values are missing, as Python's values; `None` if there are none.

    NumPy's format makes NaN of a missing number, and floats of the integers beside it: whoever has chosen it gets that.
    """
    if dataset.format["type"] is not None:
        return None
    names = [name for name in dataset.column_names if any(map(_lacks_values, dataset.data.column(name).chunks))]
    return dataset.select_columns(names) if names else None


def _lacks_values(array: Any) -> bool:
    """Whether values are missing in an array of Arrow's, or in the lists in it; the format keeps `None` in dicts."""
    array = getattr(array, "storage", array)  # of an extension, such as `Array2D`
    if hasattr(array, "field"):
        return False  # dicts, of which a picture is one
    return bool(array.null_count) or (hasattr(array, "values") and _lacks_values(array.values))


def _require_present(columns: dict[str, list[Any]], numbers: list[int]) -> None:
    for name, values in columns.items():
        for number, value in zip(numbers, values, strict=True):
            if _is_missing(value):
                raise DataError(
                    f"Example {number} of the `Dataset` lacks a value: `{name}` has `None`",
                    "leave such examples out with `dataset.filter`, or fill them in with `dataset.map` or `transform`",
                )


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, list) and any(map(_is_missing, value)))


def _with_numpy(dataset: Any) -> Any:
    """A `Dataset` that returns NumPy's arrays, unless the user has chosen another format."""
    return dataset.with_format("numpy") if dataset.format["type"] is None else dataset


def _is(data: Any, package: str, *names: str) -> bool:
    kinds = type(data).__mro__
    return any(kind.__name__ in names and kind.__module__.partition(".")[0] == package for kind in kinds)
