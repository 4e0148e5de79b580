"""A cache of decoded examples on the disk: one file per example, written atomically when it is first decoded.

The folder's name depends on the decoded files, their sizes and times, so that other files have another folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfdist import files
from tfdist.cluster import consensus

FOLDER_VARIABLE = "TFDIST_CACHE_DIR"
DEFAULT_FOLDER = "~/.cache/tfdist"

# A file has height and width of the picture, then its pixels, then the target as int32.
_HEADER = np.dtype(np.int32)


def root() -> Path:
    """The folder of all caches: TFDIST_CACHE_DIR, else `~/.cache/tfdist`."""
    return Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER).expanduser()


def free_bytes() -> int:
    """The free space on the disk of the caches; 0 if it is unknown."""
    folder = root()
    with contextlib.suppress(OSError, StopIteration):
        return shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
    return 0


class DiskCache:
    """The cache of the examples of a split.

    Args:
        names: the names of the examples, all different.
        paths: the files that contain the examples.
    """

    def __init__(self, names: Sequence[str], paths: Sequence[str | Path]):
        found = [
            (str(path), stat.st_size, stat.st_mtime_ns) for path, stat in zip(paths, map(os.stat, paths), strict=True)
        ]
        self.folder = root() / consensus.fingerprint([list(names), found])

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

    def _path(self, index: int) -> Path:
        return self.folder / f"{index // 1000}" / f"{index}.raw"

    def _read(self, index: int) -> bytes:
        try:
            return self._path(int(index)).read_bytes()
        except FileNotFoundError:
            return b""

    def _write(self, index: int, picture: np.ndarray, target: np.ndarray) -> np.int32:
        content = np.array(picture.shape[:2], _HEADER).tobytes() + picture.tobytes() + target.astype(np.int32).tobytes()
        with contextlib.suppress(OSError):  # if the disk is full, the example is decoded again next time
            files.write_whole(self._path(int(index)), lambda temporary: _fill(temporary, content))
        return np.int32(0)


def _fill(path: Path, content: bytes) -> None:
    path.write_bytes(content)
