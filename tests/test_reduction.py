"""Which tensors travel together, and that they come back as they were."""

import keras
import pytest
import tensorflow as tf

import tfdist
from tfdist.groups import joining
from tfdist.groups.packing import Packing, packed

FLOATS = tf.constant([1.0, 2.0])  # 8 bytes


def sent(tensors, packing):
    """The sizes of what is sent, in its order, having seen that twice each tensor comes back."""
    sizes = []

    def double(buffer):
        if isinstance(buffer, tf.IndexedSlices):
            sizes.append("rows")
            return tf.IndexedSlices(2 * buffer.values, buffer.indices)
        sizes.append((buffer.dtype.name, int(tf.size(buffer))))
        return 2 * buffer

    def all_reduce(buffers):
        return [double(buffer) for buffer in buffers]

    for tensor, result in zip(tensors, packed(all_reduce, packing)(tensors), strict=True):
        before, after = (t.values if isinstance(t, tf.IndexedSlices) else t for t in (tensor, result))
        assert after.dtype == before.dtype and after.shape == before.shape
        assert (after.numpy() == 2 * before.numpy()).all()
    return sizes


def test_small_tensors_share_buffers_that_are_filled_from_the_last_and_large_ones_go_alone():
    tensors = [FLOATS, tf.ones([2, 3]), tf.ones([100]), FLOATS, FLOATS]
    assert sent(tensors, Packing(buffer_bytes=32)) == [("float32", 4), ("float32", 100), ("float32", 8)]


def test_without_a_size_one_buffer_of_each_type_has_all():
    tensors = [FLOATS, tf.ones([100]), tf.ones([3], tf.float64), FLOATS]
    assert sent(tensors, Packing(None)) == [("float32", 104), ("float64", 3)]


def test_rows_of_a_table_go_as_rows():
    assert sent([FLOATS, tf.IndexedSlices(tf.ones([1, 4]), [5])], Packing(None)) == ["rows", ("float32", 2)]


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_only_float32_is_narrowed_on_its_way(dtype):
    tensors = [tf.cast(FLOATS, dtype)] * 2
    assert sent(tensors, Packing(None, tf.bfloat16)) == [("bfloat16" if dtype == tf.float32 else "float64", 4)]


@pytest.mark.parametrize("strategy", ["custom", "mirrored"])
def test_the_gradients_of_all_layers_are_added_in_one_exchange(strategy, monkeypatch):
    sent = []
    strategy = tfdist.strategy(strategy, devices=2)
    original = strategy.mesh.all_reduce

    def all_reduce(values, reduction, gradients=False):
        if gradients:
            sent.append(sum(parts[0].shape.num_elements() for parts in values))
        return original(values, reduction, gradients)

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(3))])
        model.compile("sgd", "mse", jit_compile=False)
    monkeypatch.setattr(strategy.mesh, "all_reduce", all_reduce)
    strategy.fit(model, tf.random.normal([8, 4]), tf.zeros([8, 4]), batch_size=4, verbose=0)
    assert sent == [3 * (4 * 4 + 4)]


def test_horovod_looks_for_tensors_less_often_the_more_processes_there_are():
    milliseconds = [float(joining.horovod_settings(size, 20.0)["HOROVOD_CYCLE_TIME"]) for size in (1, 2, 8, 20, 512)]
    assert milliseconds == [0.1, 0.1, 0.4, 1.0, 1.0]
