"""Reads, decodes, checks and resizes examples in a graph, and explains in Python what is wrong with a bad example.

A `Decoder` returns one example; `DecodedBatches` makes pipelines in which examples are decoded in parallel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.input import augmentation as augmentations
from tfdist.data.input import file_feed, order, picture_headers
from tfdist.data.input.augmentation import Augmentation
from tfdist.data.input.disk_cache import DiskCache
from tfdist.data.input.feed import graph_function
from tfdist.data.input.picture_files import Pictures
from tfdist.data.input.tfrecords import Records
from tfdist.data.spec import DataSpec

# How many examples `all_examples` decodes into one pair of arrays.
_DECODED_TOGETHER = 64


class Decoder:
    """Returns the examples of a split by their numbers.

    Args:
        spec: the spec of the dataset.
        files: the files of the split.
        augmentation: the augmentation of each example. Crops of random size are cut from the original picture; all
            other augmentations are applied to resized pictures.
        cache: the disk cache of decoded examples, or `None`.
    """

    def __init__(
        self,
        spec: DataSpec,
        files: Pictures | Records,
        augmentation: Augmentation | None = None,
        cache: DiskCache | None = None,
    ):
        self._spec = spec
        self._files = files
        self._crops = augmentation is augmentations.RESIZED_CROP
        self._augmentation = None if self._crops else augmentation
        self._masks = spec.task == "segmentation"
        self._cache = cache
        if isinstance(files, Pictures):
            with tf.init_scope(), tf.device("CPU:0"):
                self._pictures = tf.constant(list(files.pictures))
                self._targets: Any = None if files.draw is not None else tf.constant(files.targets)

    def __len__(self) -> int:
        return len(self._files)

    def __call__(self, index: tf.Tensor, draws: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Example number `index`, augmented.

        Args:
            index: integer scalar.
            draws: the random numbers of the example, float32 `[draws]`.

        Returns:
            x float32 `[H, W, C]` in [0, 1], and y: int32 scalar or `[H, W]`, or x again for autoencoding.
        """
        x, y = self.fitted(index, draws)
        if self._augmentation is None:
            return x, (x if self._spec.targets_are_inputs else y)
        # One by one, since examples are decoded in parallel, and there are few batches.
        data = (x[tf.newaxis], y[tf.newaxis])
        x, y = self._augmentation(self._spec, data, draws[tf.newaxis])
        return x[0], y[0]

    def fitted(self, index: tf.Tensor, draws: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Example number `index`, checked and resized but not augmented."""
        picture, target = self.decoded(index) if self._cache is None else self._through_cache(self._cache, index)
        if not self._masks:
            x, _ = self._fit(picture, None, draws)
            return x, target
        checks = [
            tf.debugging.assert_equal(tf.shape(target), tf.shape(picture)[:2]),
            tf.debugging.Assert(tf.reduce_all(_is_class(target, self._spec)), [index]),
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            return self._fit(picture, tf.identity(target), draws)

    def read(self, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The contents of an example's files: the encoded picture, and the label or the encoded or drawn mask."""
        files = self._files
        if isinstance(files, Records):
            kind = tf.string if files.masks else tf.int64
            features = {
                "image": tf.io.FixedLenFeature([], tf.string),
                files.target: tf.io.FixedLenFeature([], kind),
            }
            example = tf.ensure_shape(tf.numpy_function(files.read, [index], tf.string), [])
            parsed = tf.io.parse_single_example(example, features)
            return parsed["image"], parsed[files.target]
        picture = tf.io.read_file(self._pictures[index])
        draw = files.draw
        if draw is not None:
            return picture, tf.numpy_function(lambda number: draw(files.targets[number]), [index], tf.uint8)
        target = self._targets[index]
        return picture, tf.io.read_file(target) if self._masks else target

    def will_read(self, indices: np.ndarray) -> None:
        """Makes the operating system read the records with these numbers ahead."""
        assert isinstance(self._files, Records)
        self._files.will_read(indices)

    def decoded(self, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """A decoded example at its original size: uint8 `[h, w, C]`, and its label or its mask `[h, w]`, int32."""
        picture, target = self.read(index)
        pixels = self._pixels(picture, self._spec.input_shape[2])
        if self._masks and target.dtype == tf.string:
            target = self._pixels(target, 1)[..., 0]
        if self._masks:
            target = tf.ensure_shape(target, [None, None])
        elif self._spec.targets_are_inputs:
            target = tf.constant(0)  # the picture is the target, whatever the label is
        return pixels, tf.cast(target, tf.int32) - getattr(self._files, "first_label", 0)

    def _pixels(self, encoded: tf.Tensor, channels: int) -> tf.Tensor:
        """The pixels of an encoded picture, which is decoded only if it is not too large."""
        count = tf.ensure_shape(tf.numpy_function(_pixel_count, [encoded], tf.int64), [])
        fits = tf.debugging.Assert(count <= self._files.max_pixels, [count])
        with tf.control_dependencies([] if fits is None else [fits]):
            return tf.io.decode_image(tf.identity(encoded), channels=channels, expand_animations=False)

    def bytes_decoded(self) -> int:
        """The size of the first example in a disk cache; `sys.maxsize` if it cannot be decoded."""
        try:
            picture, target = self.decoded(tf.constant(0))
        except tf.errors.OpError:
            return sys.maxsize
        return int(tf.size(picture)) + 4 * int(tf.size(target))

    def _through_cache(self, cache: DiskCache, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        channels = self._spec.input_shape[2]
        picture, target = cache.through(index, lambda: self.decoded(index), channels)
        return tf.ensure_shape(picture, [None, None, channels]), tf.ensure_shape(target, [None] * 2 * self._masks)

    def problem(self, index: int) -> str | None:
        """What is wrong with example number `index`, in one sentence; `None` if it is good."""
        name, name_of_mask = self._files.name(index), self._files.name_of_mask(index)
        if (too_large := self.too_large(index)) is not None:
            return too_large
        try:
            picture, target = self.decoded(tf.constant(index))
        except tf.errors.OpError as error:
            return self._decoding_problem(index, error)
        if not self._masks:
            return None
        mask = target.numpy()
        if mask.shape != tuple(picture.shape[:2]):
            actual, expected = (f"{shape[0]}x{shape[1]}" for shape in (mask.shape, picture.shape))
            return f"{name_of_mask} is {actual}, but its picture `{name}` is {expected}"
        outside = mask[~_is_class(mask, self._spec)]
        if not len(outside):
            return None
        return f"{name_of_mask} has the label {outside[0]}, outside the {self._spec.classes} classes"

    def too_large(self, index: int) -> str | None:
        """A sentence about a picture or a mask of example number `index` with too many pixels; `None` without one."""
        contents: tuple[tf.Tensor, ...] = ()
        with contextlib.suppress(tf.errors.OpError):
            contents = self.read(tf.constant(index))
        names = f"`{self._files.name(index)}`", self._files.name_of_mask(index)
        for name, content in zip(names, contents, strict=False):
            size = picture_headers.size_of(content.numpy()) if content.dtype == tf.string else None
            if size is not None and size.pixels > self._files.max_pixels:
                return f"{name} has {size}, and at most {self._files.max_pixels:,} pixels are decoded"
        return None

    def _decoding_problem(self, index: int, error: tf.errors.OpError) -> str:
        """Says whether the picture or the mask cannot be decoded; decodes the picture alone to find out."""
        name = f"`{self._files.name(index)}`"
        with contextlib.suppress(tf.errors.OpError):
            only_picture = Decoder(dataclasses.replace(self._spec, task="autoencoding"), self._files)
            only_picture.decoded(tf.constant(index))
            name = self._files.name_of_mask(index) if self._masks else name
        return f"{name} {_reason(error)}"

    def _fit(self, picture: tf.Tensor, mask: tf.Tensor | None, draws: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """The chosen part of the picture, resized to the size of the dataset, and the same part of the mask."""
        size = self._spec.input_shape[:2]
        picture_size = tf.shape(picture)[:2]
        if self._crops:
            area = augmentations.CROPPED_AREA if mask is None else augmentations.CROPPED_AREA_OF_MASKS
            boxes = augmentations.random_boxes(picture_size, draws[tf.newaxis], area)
        else:
            boxes = _largest_box(picture_size, size, keep_all=mask is not None)

        def resized() -> tf.Tensor:
            return augmentations.cut_out(picture[tf.newaxis], boxes, size)[0]

        def resized_mask() -> tf.Tensor:
            return augmentations.cut_out_mask(tf.expand_dims(mask, 0), boxes, size)[0]

        fits = tf.constant(False) if self._crops else tf.reduce_all(picture_size == size)
        x = tf.cond(fits, lambda: tf.cast(picture, tf.float32), resized) / 255.0
        x = tf.ensure_shape(x, self._spec.input_shape)
        if mask is None:
            return x, None
        return x, tf.ensure_shape(tf.cond(fits, lambda: mask, resized_mask), size)


class DecodedBatches:
    """Batches of examples that are decoded in parallel, for any epoch and from any batch on.

    Args:
        decoder: decodes the examples.
        parts_of: this rank's examples in each batch of an epoch.
        draws: the number of random numbers per example.
        draws_of: the random numbers of an epoch: float32 `[n, draws]` for the examples int `[n]`; not called for 0.
        deterministic: whether the batches come in order.
        read_ahead: how many examples are read ahead together, in the order in which they are stored; 0 for none.
    """

    def __init__(
        self,
        decoder: Decoder,
        parts_of: Callable[[int], order.Parts],
        draws: int = 0,
        draws_of: Callable[[int], Callable[[np.ndarray], np.ndarray]] | None = None,
        deterministic: bool = True,
        read_ahead: int = 0,
    ):
        self._decoder = decoder
        # An epoch's order and random numbers are drawn once, even if training alternates with reading another epoch.
        self._parts_of = functools.lru_cache(maxsize=2)(parts_of)
        self._draws_of = functools.lru_cache(maxsize=2)(draws_of) if draws and draws_of else None
        self._specs = [tf.TensorSpec([None], order.index_type(len(decoder))), tf.TensorSpec([None, draws], tf.float32)]
        self._deterministic = deterministic
        self._read_ahead = read_ahead
        self._dataset_of_length = functools.cache(self._make_dataset_of_length)

    def of_epoch(self, epoch: int, first_batch: int = 0, end_batch: int | None = None) -> tf.data.Dataset:
        """The batches from number `first_batch` on, up to but not including `end_batch`."""
        runs = self._parts_of(epoch).runs(first_batch)
        if end_batch is not None:
            runs = [(begin, min(end, end_batch), length) for begin, end, length in runs if begin < end_batch]
        datasets = [self._of_run(epoch, *run) for run in runs or [(0, 0, 1)]]
        return functools.reduce(tf.data.Dataset.concatenate, datasets).prefetch(tf.data.AUTOTUNE)

    def _of_run(self, epoch: int, begin: int, end: int, length: int) -> tf.data.Dataset:
        dataset = self._dataset_of_length(length)
        with tf.init_scope(), tf.device("CPU:0"):
            return dataset(*(tf.constant(number, tf.int64) for number in (epoch, begin, end)))

    def _make_dataset_of_length(self, length: int) -> Callable[..., tf.data.Dataset]:
        """A graph for batches of `length` examples, of which the last may have fewer: `dataset(epoch, begin, end)`."""
        decoder, parallel = tf.autograph.experimental.do_not_convert(self._decoder.__call__), tf.data.AUTOTUNE

        def dataset(epoch: tf.Tensor, begin: tf.Tensor, end: tf.Tensor) -> tf.data.Dataset:
            steps = epoch, begin, end
            rows = file_feed.by_range(self._rows, self._specs, max(length, 1), steps, self._read_ahead)
            examples = rows.flat_map(lambda *columns: tf.data.Dataset.from_tensor_slices(columns))
            decoded = examples.map(decoder, num_parallel_calls=parallel, deterministic=self._deterministic)
            if length:
                return decoded.batch(length, num_parallel_calls=parallel, deterministic=self._deterministic)
            # A rank that has no part of a batch gets an empty batch.
            empty = tf.nest.map_structure(lambda spec: tf.zeros([0, *spec.shape], spec.dtype), decoded.element_spec)
            return tf.data.Dataset.from_tensors(empty).repeat(end - begin)

        return graph_function(dataset)

    def _rows(self, epoch: int, begin: int, end: int) -> Sequence[np.ndarray]:
        """The numbers of the examples of these batches, and their random numbers."""
        indices = self._parts_of(epoch).joined(begin, end).astype(self._specs[0].dtype.as_numpy_dtype, copy=False)
        if self._read_ahead:
            self._decoder.will_read(indices)
        if self._draws_of is None:
            return indices, np.zeros((len(indices), 0), np.float32)
        return indices, self._draws_of(epoch)(indices)


def all_examples(decoder: Decoder) -> Any:
    """All examples in stored order, as pairs of NumPy arrays of a few examples each."""
    stored = order.Parts(order.as_stored(len(decoder)), _DECODED_TOGETHER)
    return DecodedBatches(decoder, lambda epoch: stored).of_epoch(0).as_numpy_iterator()


def numbers_of_good(decoder: Decoder) -> np.ndarray:
    """The numbers of the examples that can be decoded, in order: int64 `[n]`."""

    @tf.autograph.experimental.do_not_convert
    def decode(index: tf.Tensor) -> tuple[tf.Tensor, ...]:
        x, y = decoder(index, tf.zeros(0))
        return index, tf.reduce_max(x), tf.reduce_max(y)  # TensorFlow would skip a computation without a result

    numbers = tf.data.Dataset.range(len(decoder))
    good = numbers.map(decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).ignore_errors()
    return np.fromiter((index for index, _, _ in good.as_numpy_iterator()), np.int64)


def _largest_box(picture_size: tf.Tensor, size: Any, keep_all: bool) -> tf.Tensor:
    """The whole picture as a box `[1, 4]` or, unless `keep_all`, the largest centred box with the ratio of `size`."""
    if keep_all:
        return tf.constant([[0.0, 0.0, 1.0, 1.0]])
    height, width = tf.cast(picture_size[0], tf.float32), tf.cast(picture_size[1], tf.float32)
    scale = tf.minimum(height / size[0], width / size[1])
    fraction = tf.stack([scale * size[0] / height, scale * size[1] / width])
    return tf.concat([(1 - fraction) / 2, (1 + fraction) / 2], 0)[tf.newaxis]


def _is_class(mask: Any, spec: DataSpec) -> Any:
    inside = mask < spec.classes
    return inside if spec.ignored_class is None else inside | (mask == spec.ignored_class)


def _pixel_count(encoded: bytes | np.ndarray) -> np.int64:
    """The number of pixels according to the header; 0 without a header, so that the decoder reports it.

    Args:
        encoded: the picture; outside of a graph, TensorFlow passes an array of objects `[]`.
    """
    size = picture_headers.size_of(encoded if isinstance(encoded, bytes) else encoded.item())
    return np.int64(0 if size is None else size.pixels)


def _reason(error: tf.errors.OpError) -> str:
    if isinstance(error, tf.errors.NotFoundError):
        return "does not exist"
    # The part of TensorFlow's message between the name of the node and the operation.
    message = error.message.partition("\n")[0].rpartition("} ")[2].partition(" [Op:")[0]
    return f"cannot be decoded: {message}"
