"""The private parts of `tf.data` that tfdist calls: the state of iterators, and iterators over several devices.

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
    """The state of an iterator over a `tf.data.Dataset`: its position and buffers, such as the shuffle buffer.

    State inside functions of the input pipeline, such as a random generator, is left out. The public
    `tf.train.Checkpoint` rejects pipelines with stateful functions, such as a decoder in Python.

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
    """Restores the `iterator_state` of another iterator over the same input pipeline.

    Raises:
        tf.errors.OpError: `state` lacks a part of the pipeline, because it is from another pipeline.
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
    """An iterator that distributes elements to `devices` in turn, each prefetched to its device.

    `get_next()` returns a list of one element per device. `tf.distribute.MirroredStrategy` reads this iterator; the
    public `tf.data.experimental.prefetch_to_device` supports only one device.
    """
    return multi_device_iterator_ops.OwnedMultiDeviceIterator(dataset, list(devices))
