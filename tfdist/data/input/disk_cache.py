"""A cache of decoded examples on the disk, in a few files, to which an example is added when it is first decoded.

The folder's name depends on the decoded files, their sizes and times, so that other files have another folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.input import cache_folder
from tfdist.data.input.packed_files import PackedFiles

# An example has height and width of the picture, then its pixels, then the target as int32.
_HEADER = np.dtype(np.int32)


class DiskCache:
    """The cache of the examples of a split.

    Args:
        what: tells the examples of these files from others: which there are, and how they are decoded.
        paths: the files that contain the examples.
        count: the number of examples.
    """

    def __init__(self, what: Any, paths: Sequence[str | Path], count: int):
        folder = cache_folder.root() / cache_folder.fingerprint(["packed", what], paths)
        self._files = PackedFiles(folder, count)

    def through(
        self, index: tf.Tensor, decode: Callable[[], tuple[tf.Tensor, tf.Tensor]], channels: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The cached result of `decode` for example `index`: picture uint8 `[h, w, C]` and target int32."""
        kept = tf.ensure_shape(tf.numpy_function(self._read, [index], tf.string), [])

        def unpacked() -> tuple[tf.Tensor, tf.Tensor]:
            size = tf.io.decode_raw(tf.strings.substr(kept, 0, 2 * _HEADER.itemsize), tf.int32)
            pixels = size[0] * size[1] * channels
            picture = tf.io.decode_raw(tf.strings.substr(kept, 2 * _HEADER.itemsize, pixels), tf.uint8)
            target = tf.io.decode_raw(tf.strings.substr(kept, 2 * _HEADER.itemsize + pixels, -1), tf.int32)
            # A label is one number; a mask has one number per pixel.
            shape = tf.cond(tf.size(target) == 1, lambda: tf.zeros(0, tf.int32), lambda: size)
            return tf.reshape(picture, [size[0], size[1], channels]), tf.reshape(target, shape)

        def packed() -> tuple[tf.Tensor, tf.Tensor]:
            picture, target = decode()
            written = tf.numpy_function(self._write, [index, picture, target], tf.int32)
            with tf.control_dependencies([written]):
                return tf.identity(picture), tf.identity(target)

        return tf.cond(tf.strings.length(kept) > 0, unpacked, packed)

    def _read(self, index: int) -> bytes:
        return self._files.read(int(index))

    def _write(self, index: int, picture: np.ndarray, target: np.ndarray) -> np.int32:
        content = np.array(picture.shape[:2], _HEADER).tobytes() + picture.tobytes() + target.astype(np.int32).tobytes()
        with contextlib.suppress(OSError):  # if the disk is full, the example is decoded again next time
            self._files.write(int(index), content)
        return np.int32(0)
