"""One example from its files: read, decode, check, fit to size. In a graph, and in Python to say what is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.data import augment as augmentations
from tfdist.data.augment import Augmentation
from tfdist.data.spec import DataSpec
from tfdist.errors import DataError

if TYPE_CHECKING:
    from tfdist.data.pictures import Pictures


class Decoder:
    """The examples of a split, by their numbers.

    Args:
        spec: of the dataset.
        files: of the split.
        augmentation: of a crop of random size the decoder itself cuts it out, of the whole picture; every other one
            is for whole batches.
    """

    def __init__(self, spec: DataSpec, files: Pictures, augmentation: Augmentation | None = None):
        self._spec = spec
        self._files = files
        self._crops = augmentation is augmentations.RESIZED_CROP
        self.of_batch = None if self._crops else augmentation
        self._channels = spec.input_shape[2]
        self._masks = spec.task == "segmentation"
        with tf.init_scope(), tf.device("CPU:0"):
            self._pictures = tf.constant(list(files.pictures))
            self._targets: Any = None if files.draw is not None else tf.constant(files.targets)

    def __len__(self) -> int:
        return len(self._files)

    def __call__(self, index: tf.Tensor, draws: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Example number `index`.

        Args:
            index: int32 scalar.
            draws: float32 `[draws]`, its random numbers.

        Returns:
            x float32 `[H, W, C]` in [0, 1], and y, int32 scalar or `[H, W]`.
        """
        picture = self._picture(self._pictures[index])
        if not self._masks:
            x, _ = self._fit(picture, None, draws)
            return x, self._label(index)
        mask = self._mask(index, tf.shape(picture)[:2])
        return self._fit(picture, mask, draws)

    def read(self, index: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """The bytes of an example's files: a stage of its own to be timed."""
        paths = [self._pictures[index]]
        if self._masks and self._targets is not None:
            paths.append(self._targets[index])
        return tuple(tf.io.read_file(path) for path in paths)

    def decoded(self, index: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """An example's picture and mask as they are in its files: a stage of its own to be timed."""
        picture = self._picture(self._pictures[index])
        return (picture, self._read_mask(index)) if self._masks else (picture,)

    def apply(self, x: tf.Tensor, y: tf.Tensor, draws: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """What is done to a batch of examples once they are decoded."""
        if self.of_batch is not None:
            return self.of_batch(self._spec, (x, y), draws)
        return x, (x if self._spec.task == "autoencoding" else y)

    def problem(self, index: int) -> str | None:
        """What is wrong with example number `index`, in one sentence; `None` if it is good."""
        path = self._files.pictures[index]
        try:
            picture = self._picture(tf.constant(path))
        except tf.errors.OpError as error:
            return f"`{path}` {_reason(error)}"
        if not self._masks:
            return None
        drawn = self._files.draw is not None
        name = f"The mask of `{path}`" if drawn else f"The mask `{self._files.targets[index]}`"
        try:
            mask = self._read_mask(tf.constant(index)).numpy()
        except tf.errors.OpError as error:
            return f"{name} {_reason(error)}"
        if mask.shape != tuple(picture.shape[:2]):
            found, expected = (f"{shape[0]}x{shape[1]}" for shape in (mask.shape, picture.shape))
            return f"{name} is {found}, and its picture {'' if drawn else f'`{path}` '}is {expected}"
        outside = mask[~_is_class(mask, self._spec)]
        return f"{name} has the label {outside[0]}, outside the {self._spec.classes} classes" if len(outside) else None

    def _label(self, index: tf.Tensor) -> tf.Tensor:
        # Of an autoencoder the pictures are the targets, whatever else they have.
        return tf.constant(0) if self._spec.task == "autoencoding" else self._targets[index]

    def _picture(self, path: tf.Tensor) -> tf.Tensor:
        """uint8 `[h, w, C]`."""
        return tf.io.decode_image(tf.io.read_file(path), channels=self._channels, expand_animations=False)

    def _read_mask(self, index: tf.Tensor) -> tf.Tensor:
        """uint8 `[h, w]`."""
        draw = self._files.draw
        if draw is None:
            path = self._targets[index]
            return tf.io.decode_image(tf.io.read_file(path), channels=1, expand_animations=False)[..., 0]
        mask = tf.numpy_function(lambda number: draw(self._files.targets[number]), [index], tf.uint8)
        return tf.ensure_shape(mask, [None, None])

    def _mask(self, index: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        """int32 `[h, w]`, checked."""
        mask = self._read_mask(index)
        checks = [
            tf.debugging.assert_equal(tf.shape(mask), size),
            tf.debugging.Assert(tf.reduce_all(_is_class(mask, self._spec)), [index]),
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            return tf.cast(mask, tf.int32)

    def _fit(self, picture: tf.Tensor, mask: tf.Tensor | None, draws: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """The part of the picture that is wanted, at the size of the dataset; its mask alike."""
        size = self._spec.input_shape[:2]
        found = tf.shape(picture)[:2]
        if self._crops:
            area = augmentations.CROPPED_AREA if mask is None else augmentations.CROPPED_AREA_OF_MASKS
            boxes = augmentations.random_boxes(found, draws[tf.newaxis], area)
        else:
            boxes = _whole(found, size, keep_all=mask is not None)

        def resized() -> tf.Tensor:
            return augmentations.cut_out(picture[tf.newaxis], boxes, size)[0]

        def resized_mask() -> tf.Tensor:
            return augmentations.cut_out_mask(tf.expand_dims(mask, 0), boxes, size)[0]

        fits = tf.constant(False) if self._crops else tf.reduce_all(found == size)
        x = tf.cond(fits, lambda: tf.cast(picture, tf.float32), resized) / 255.0
        x = tf.ensure_shape(x, self._spec.input_shape)
        if mask is None:
            return x, None
        return x, tf.ensure_shape(tf.cond(fits, lambda: mask, resized_mask), size)


@contextlib.contextmanager
def explained(explain: Callable[[], DataError | None]) -> Iterator[None]:
    """Names the bad example where TensorFlow only says that there is one."""
    try:
        yield
    except tf.errors.OpError as error:
        told = explain()
        if told is None:
            raise
        raise told from error


def _whole(found: tf.Tensor, size: Any, keep_all: bool) -> tf.Tensor:
    """The box `[1, 4]` of the whole picture; of pictures without masks the middle that has the ratio of `size`."""
    if keep_all:
        return tf.constant([[0.0, 0.0, 1.0, 1.0]])
    height, width = tf.cast(found[0], tf.float32), tf.cast(found[1], tf.float32)
    scale = tf.minimum(height / size[0], width / size[1])
    share = tf.stack([scale * size[0] / height, scale * size[1] / width])
    return tf.concat([(1 - share) / 2, (1 + share) / 2], 0)[tf.newaxis]


def _is_class(mask: Any, spec: DataSpec) -> Any:
    inside = mask < spec.classes
    return inside if spec.ignored_class is None else inside | (mask == spec.ignored_class)


def _reason(error: tf.errors.OpError) -> str:
    if isinstance(error, tf.errors.NotFoundError):
        return "does not exist"
    message = error.message.partition("\n")[0]
    return f"cannot be decoded: {message.rpartition('} ')[2] or message}"
