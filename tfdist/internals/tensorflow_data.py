"""The private parts of TensorFlow's datasets that tfdist calls: the state of iterators, and iterators over devices.

Written for TensorFlow 2.21.0; `tests/test_tensorflow_internals.py` fails when TensorFlow changes a part that is used.
"""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops


def iterator_state(iterator: Any) -> bytes:
    """The state of an iterator over a `tf.data.Dataset`: its position and buffers, such as that of a shuffle.

    The state inside the functions of the pipeline, such as that of random numbers, is left out. The public
    `tf.train.Checkpoint` refuses pipelines with stateful functions; a decoder in Python counts as one.

    Raises:
        tf.errors.OpError: a part of the pipeline cannot save its state, such as a Python generator.
    """
    handle = iterator._iterator_resource
    state = tf.raw_ops.SerializeIterator(resource_handle=handle, external_state_policy=_IGNORE_FUNCTIONS)
    with tempfile.TemporaryDirectory() as folder, io.BytesIO() as packed:
        # Only a file can hold tensors of this type.
        tf.raw_ops.SaveV2(prefix=f"{folder}/it", tensor_names=["it"], shape_and_slices=[""], tensors=[state])
        with zipfile.ZipFile(packed, "w") as archive:
            for path in sorted(Path(folder).iterdir()):
                archive.write(path, path.name)
        return packed.getvalue()


def restore_iterator(iterator: Any, state: bytes) -> None:
    """Restores the `iterator_state` of another iterator over the same pipeline.

    Raises:
        tf.errors.OpError: a part of the pipeline has no state in `state`, which is thus of another pipeline.
    """
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(io.BytesIO(state)) as archive:
            archive.extractall(folder)
        (restored,) = tf.raw_ops.RestoreV2(
            prefix=f"{folder}/it", tensor_names=["it"], shape_and_slices=[""], dtypes=[tf.variant]
        )
        tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=restored)


_IGNORE_FUNCTIONS = 1  # the value in `ExternalStatePolicy` of TensorFlow's dataset options


def device_iterator(dataset: tf.data.Dataset, devices: Sequence[str]) -> Any:
    """An iterator whose elements go to `devices` in turn, each copied to its device before it is asked for.

    `get_next()` returns a list of one element per device. It is what `tf.distribute.MirroredStrategy` reads; the public
    `tf.data.experimental.prefetch_to_device` is for one device.
    """
    return multi_device_iterator_ops.OwnedMultiDeviceIterator(dataset, list(devices))
