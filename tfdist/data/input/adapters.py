"""Turns what Keras' `fit`, `evaluate` and `predict` accept as data into a feed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from tfdist.data.input import example_feed, libraries, order
from tfdist.data.input.array_feed import ArrayFeed
from tfdist.data.input.dataset_feed import DatasetFeed, InOrder
from tfdist.data.input.division import PerProcess
from tfdist.data.input.examples import Examples, examples, of_columns
from tfdist.data.input.feed import NO_BATCHES, Feed
from tfdist.data.input.file_feed import LargeExamples
from tfdist.data.input.grain_feed import GrainFeed
from tfdist.errors import DataError, UsageError
from tfdist.internals import keras_data
from tfdist.jobs.world import World

ALONE = World()
DEFAULT_BATCH_SIZE = 32  # Keras' own, for arrays


@dataclass(frozen=True)
class Request:
    """The data arguments of one call of `fit`, `evaluate` or `predict`, as Keras defines them.

    Attributes:
        per_process: whether the user has marked the data with `per_process`.
        passes: whether each pass begins from the start, and has `steps` batches.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    class_weight: Any = None
    batch_size: int | None = None
    steps: int | None = None
    shuffle: Any = False
    per_process: bool = False
    passes: bool = False


def request(x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> Request:
    """The request for what the user passed as data.

    Raises:
        UsageError: `per_process` contains only some of it.
    """
    marked = isinstance(x, PerProcess)
    beside_x = {name: value for name, value in (("y", y), ("sample_weight", sample_weight)) if value is not None}
    misplaced = beside_x if marked else {name: data for name, data in beside_x.items() if isinstance(data, PerProcess)}
    if misplaced:
        raise UsageError(
            f"`{next(iter(misplaced))}` was passed beside `x`, but `per_process` takes all of a process's data at once",
            "pass `per_process((x, y))`, or `per_process((x, y, sample_weight))`",
        )
    if marked:
        x, y, sample_weight = keras_data.unpack_x_y_sample_weight(x.data)
    return Request(x, y, sample_weight, **options, per_process=marked)


def split(whole: Request, fraction: float) -> tuple[Request, Any]:
    """Splits off the last `fraction` of the examples; returns the rest, and the split as `validation_data`."""
    arrays = whole.x, whole.y, whole.sample_weight
    (x, y, sample_weight), last = keras_data.train_validation_split(arrays, validation_split=fraction)
    return replace(whole, x=x, y=y, sample_weight=sample_weight), PerProcess(last) if whole.per_process else last


def make(request: Request, seed: int, world: World = ALONE) -> Feed:
    """The feed for what the user passed to this process, whose place in the job is `world`.

    Raises:
        DataError: it has no batches.
        UsageError: it comes from a library that tfdist knows, but cannot be read as it is.
        ValueError: Keras refuses the combination of arguments.
    """
    if isinstance(request.x, Feed):
        return request.x
    numbered = _numbered(request)
    if numbered is not None:
        size = request.batch_size or DEFAULT_BATCH_SIZE
        order_of = _order(len(numbered), size, request.shuffle, seed)
        return example_feed.feed(
            numbered, size, order_of, ALONE if request.per_process else world, request.class_weight
        )
    x, shuffle = request.x, request.shuffle
    if keras_data.is_grain_dataset(x):
        _require_only_x(request, "class_weight")
        return GrainFeed(x)
    if isinstance(x, keras.utils.PyDataset):
        x, shuffle = InOrder(x, seed if shuffle and x.num_batches else None), False
    elif keras_data.is_tf_dataset(x):
        shuffle = False
    adapter = keras_data.get_data_adapter(
        x=x,
        y=request.y,
        sample_weight=request.sample_weight,
        batch_size=request.batch_size,
        steps_per_epoch=request.steps,
        shuffle=shuffle,
        class_weight=request.class_weight,
    )
    if request.passes and request.steps and isinstance(adapter, keras_data.GeneratorDataAdapter):
        adapter.generator = functools.partial(_pass_over_generator, adapter.generator, request.steps)
    if adapter.num_batches == 0:
        raise DataError(*NO_BATCHES)
    if isinstance(adapter, keras_data.ArrayDataAdapter):
        return _feed_of_arrays(adapter, shuffle, seed)
    return DatasetFeed(adapter, x if isinstance(x, InOrder) else None)


def _numbered(request: Request) -> Examples | None:
    """The examples that are read by their numbers, if the user passed such."""
    x = request.x
    flat = [*(x.values() if isinstance(x, dict) else (x,)), request.y]
    if any(map(libraries.is_column, flat)):
        return of_columns(x, request.y, request.sample_weight)
    if not isinstance(x, Examples):
        if not libraries.is_numbered_only(x):
            return None
        x = examples(x)
    _require_only_x(request)
    return x


def _require_only_x(request: Request, *others: str) -> None:
    """Raises `UsageError` if the user passed something beside data that contain it, or cannot be combined with it."""
    for name in ("y", "sample_weight", *others):
        if getattr(request, name) is not None:
            raise UsageError(
                f"`{name}` was passed beside a `{type(request.x).__name__}`",
                "let each element of the data be `(x, y)` or `(x, y, sample_weight)`",
            )


def _pass_over_generator(generator: Callable[[], Iterator[Any]], steps: int) -> Iterator[Any]:
    """The batches of one pass over a generator, which always skips exactly one further batch of the generator.

    Keras begins each pass with the first batches, which it keeps, and then continues where the generator is. Where that
    is depends on how many batches were prefetched, and so on timing; usually it is one batch.
    """
    batches = generator()
    for number, batch in enumerate(itertools.islice(batches, steps), 1):
        if number == steps:
            next(batches, None)
        yield batch


def _feed_of_arrays(adapter: Any, shuffle: Any, seed: int) -> Feed:
    examples, batch_size = keras_data.number_of_examples(adapter), adapter.batch_size
    with tf.device("CPU:0"):
        arrays = keras_data.sliceable(adapter)
    order_of = _order(examples, batch_size, shuffle, seed)
    if not order.is_computed(examples):
        return ArrayFeed(arrays, batch_size, order_of)
    feed = LargeExamples(arrays, batch_size, order_of).feed(ALONE)
    feed.arrays = arrays
    return feed


def _order(examples: int, batch_size: int, shuffle: Any, seed: int) -> order.OrderOf:
    """The order that Keras' argument `shuffle` asks for."""
    if shuffle == "batch":
        return lambda epoch: order.order_within_batches(examples, batch_size, seed, epoch)
    if shuffle:
        return lambda epoch: order.epoch_order(examples, seed, epoch)
    return lambda epoch: order.as_stored(examples)
