"""Datasets by name: `load` returns a `Source` with a spec, arrays and pipelines.

Each file of `tfdist/data/sources/` registers one dataset under its own name. Importing this package and listing
the names does not import TensorFlow.

Synopsis:

    >>> {"digits", "mnist", "synthetic"} <= set(names())
    True
    >>> source = load("digits")
    >>> source.spec.input_shape, source.spec.classes
    ((8, 8, 1), 10)
    >>> x, y = source.arrays("test")
    >>> x.shape, x.dtype, y.dtype
    ((300, 8, 8, 1), dtype('float32'), dtype('int32'))
"""

from __future__ import annotations

import inspect
from os import PathLike
from typing import Any

from tfdist import registry
from tfdist.data.input import origin
from tfdist.data.input.arrays import check_labels
from tfdist.data.input.indexed import IndexedSource
from tfdist.data.input.per_process import per_process, shard
from tfdist.data.input.source import Source
from tfdist.data.spec import SPLITS, DataSpec
from tfdist.errors import UsageError

__all__ = [
    "SPLITS",
    "DataSpec",
    "IndexedSource",
    "Source",
    "check_labels",
    "knows",
    "load",
    "load_origin",
    "names",
    "per_process",
    "shard",
]

_SOURCES = "tfdist.data.sources"


def names() -> list[str]:
    """The names of the datasets that come with tfdist, sorted."""
    return registry.names(_SOURCES)


def knows(name: str, option: str) -> bool:
    """Whether the dataset `name` has this option."""
    return option in inspect.signature(registry.find(name, "dataset", _SOURCES, "load")).parameters


def load(name: str, data_dir: str | PathLike[str] | None = None, **options: Any) -> Source:
    """Loads the dataset `name`; downloads and prepares it if necessary.

    Args:
        name: one of `names()`, or the name of a custom function as `module:function`, where
            `function(data_dir, **options)` returns a `Source`.
        data_dir: the folder of prepared datasets, for datasets that have files; by default the environment
            variable TFDS_DATA_DIR, else `~/tensorflow_datasets`.
        **options: options of the dataset, such as `classes` for `synthetic`.

    Raises:
        UnknownNameError: there is no such dataset.
        UsageError: the dataset does not have an option, or `module:function` does not return a source.
        DataError: the files are missing or damaged and cannot be fetched.
    """
    function = registry.find(name, "dataset", _SOURCES, "load")
    source = registry.call(function, data_dir, kind="dataset", name=name, options=options)
    if not isinstance(source, Source):
        raise UsageError(
            f"The dataset `{name}` returned a `{type(source).__name__}`, not a `tfdist.data.Source`",
            "return `tfdist.data.Source.from_arrays(...)`; docs/datasets.md has an example",
        )
    source.origin = origin.of(name, data_dir, options)
    return source


def load_origin(described: origin.Origin) -> Source:
    """The source that another process has loaded."""
    source = load(described.name, described.data_dir, **dict(described.options))
    if described.limit is not None:
        source = source.limit(described.limit)
    if described.autoencoding:
        source = source.for_autoencoding()
    return source.cached() if described.cached else source
