"""Datasets by name: `load` returns a `Source` with a spec, arrays and pipelines.

Each file in `tfdist/data/sources/` is one dataset with that name. Importing this package and listing the names does not
import TensorFlow.

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
from tfdist.data.input.arrays import check_labels
from tfdist.data.input.division import per_process, shard
from tfdist.data.input.examples import Examples, examples
from tfdist.data.input.source import IndexedSource, Origin, Source, origin_of
from tfdist.data.spec import SPLITS, DataSpec
from tfdist.errors import UsageError

__all__ = [
    "SPLITS",
    "DataSpec",
    "Examples",
    "IndexedSource",
    "Source",
    "check_labels",
    "examples",
    "knows",
    "load",
    "load_origin",
    "names",
    "per_process",
    "shard",
]

SOURCES = "tfdist.data.sources"


def names() -> list[str]:
    """The names of the datasets that come with tfdist, sorted."""
    return registry.names(SOURCES)


def knows(name: str, option: str) -> bool:
    """Whether the dataset `name` has this option."""
    return option in inspect.signature(registry.find(name, "dataset", SOURCES, "load")).parameters


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
    function = registry.find(name, "dataset", SOURCES, "load")
    source = registry.call(function, data_dir, kind="dataset", name=name, options=options)
    if not isinstance(source, Source):
        raise UsageError(
            f"The dataset `{name}` returned a `{type(source).__name__}`, not a `tfdist.data.Source`",
            "return `tfdist.data.Source.from_arrays(...)`; docs/datasets.md has an example",
        )
    source.origin = origin_of(name, data_dir, options)
    return source


def load_origin(origin: Origin) -> Source:
    """Loads a source in the same way as another process has loaded it."""
    source = load(origin.name, origin.data_dir, **dict(origin.options))
    if origin.limit is not None:
        source = source.limit(origin.limit)
    if origin.autoencoding:
        source = source.for_autoencoding()
    if origin.masked_lm:
        source = source.for_masked_lm()
    return source.cached() if origin.cached else source
