"""Examples are held in the type of their file, and a model sees what it would see of floats, bit by bit."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
import tfdist.data
from tests.contract.comparison import assert_same
from tests.interruption import InterruptionError, Interrupts
from tfdist.callbacks import Checkpoint
from tfdist.data import DataSpec, IndexedSource
from tfdist.data.input import device_feed
from tfdist.data.input.arrays import label_type
from tfdist.data.input.division import Division
from tfdist.data.input.source import Source

EXAMPLES = 41  # the last batch of 8 has one example


def pixels(shape=(9, 7, 3)):
    """Bytes of all values; an example has a number of bytes that is no multiple of four."""
    drawn = np.random.default_rng(0).integers(0, 256, (EXAMPLES, *shape), np.uint8)
    drawn.reshape(-1)[:256] = np.arange(256)
    return drawn


def of_bytes(divisor=255, **options):
    return Source.from_arrays("mine", classes=3, divisor=divisor, train=(pixels(), labels(np.uint8)), **options)


def of_floats(divisor=255, **options):
    x = np.divide(pixels(), np.float32(divisor))
    return Source.from_arrays("mine", classes=3, train=(x, labels(np.int32)), **options)


def labels(dtype):
    return (np.arange(EXAMPLES) % 3).astype(dtype)


def in_a_pipeline(source, **options):
    return list(source.pipeline("train", 8, seed=3, epoch=1, **options).as_numpy_iterator())


def in_a_graph(source, budget=None, first=1, **options):
    """The parts of both replicas of the last batches, in a graph that TensorFlow rewrites as it does a training's."""
    strategy = tfdist.strategy("custom", devices=["CPU:1", "CPU:2"], device_data_bytes=budget)
    feed = strategy.placed(source.feed("train", 8, seed=3, **options))
    state, batches = feed.start(1, first), feed.batches

    @tf.function
    def parts(step):
        batch, found = batches.fetch(state, step), []
        for index, device in enumerate(strategy.devices):
            with tf.device(device):
                found.append(batches.part(state, batch, index, Division(2)))
        return found

    return [tf.nest.map_structure(np.asarray, parts(tf.constant(step))) for step in range(first, feed.num_batches)]


BUDGETS = pytest.mark.parametrize("budget", [None, 0, 1 << 30], ids=["on the host", "prefetched", "resident"])


class TestAModelSees:
    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("augment", ["none", "crop_flip", "resized_crop"])
    def test_the_same_in_a_pipeline(self, augment):
        assert_same(in_a_pipeline(of_bytes(), augment=augment), in_a_pipeline(of_floats(), augment=augment), 0)
        last = {"augment": augment, "first_batch": 4}
        assert_same(in_a_pipeline(of_bytes(), **last), in_a_pipeline(of_floats(), **last), 0)

    @pytest.mark.sampled(1)
    @BUDGETS
    @pytest.mark.parametrize("augment", ["none", "crop_flip", "resized_crop"])
    def test_the_same_in_the_graph_of_a_training(self, augment, budget):
        seen = in_a_graph(of_bytes(), budget, augment=augment)
        assert_same(seen, in_a_graph(of_floats(), augment=augment), 0)
        (x, y), _ = seen[0][0]
        assert (x.dtype, y.dtype) == (np.float32, np.int32)

    @pytest.mark.parametrize("divisor", [1, 16, 255])
    def test_the_same_of_every_byte_whatever_it_is_divided_by(self, divisor):
        assert_same(in_a_graph(of_bytes(divisor), first=0), in_a_graph(of_floats(divisor), first=0), 0)

    @BUDGETS
    def test_the_same_where_a_picture_is_its_own_target(self, budget):
        seen = in_a_graph(of_bytes().for_autoencoding(), budget)
        assert_same(seen, in_a_graph(of_floats().for_autoencoding()), 0)

    @pytest.mark.sampled(2)
    @BUDGETS
    @pytest.mark.parametrize("augment", ["none", "crop_flip"])
    def test_the_same_masks(self, augment, budget):
        def source(dtype):
            masks = (np.arange(EXAMPLES * 63).reshape(EXAMPLES, 9, 7) % 3).astype(dtype)
            return Source.from_arrays("mine", classes=3, task="segmentation", divisor=255, train=(pixels(), masks))

        assert source(np.uint8).feed("train", 8).arrays[1].dtype == tf.uint8
        seen = in_a_graph(source(np.uint8), budget, augment=augment)
        assert_same(seen, in_a_graph(source(np.int32), augment=augment), 0)

    @pytest.mark.thorough
    def test_the_same_of_a_reader_by_number(self):
        spec = DataSpec("mine", "classification", (9, 7, 3), 3, {"train": EXAMPLES})

        def source(x, y):
            return IndexedSource(spec, lambda split, indices: (x[indices], y[indices]))

        x, y = pixels(), labels(np.uint8)
        floats = source(x.astype(np.float32), y.astype(np.int32))
        assert_same(in_a_pipeline(source(x, y)), in_a_pipeline(floats), 0)
        assert_same(in_a_pipeline(source(x, y)), in_a_pipeline(of_bytes(divisor=1)), 0)

    def test_the_same_arrays_where_it_asks_for_all(self):
        assert_same(of_bytes().arrays("train"), of_floats().arrays("train"), 0)
        x, y = of_bytes().arrays("train")
        assert (x.dtype, y.dtype) == (np.float32, np.int32)


class TestATraining:
    @pytest.mark.sampled(1)
    @BUDGETS
    @pytest.mark.parametrize(("name", "devices"), [("single", "CPU:1"), ("custom", ["CPU:1", "CPU:2"])])
    def test_ends_with_the_same_weights(self, name, devices, budget):
        assert_same(trained(of_bytes(), name, devices, budget), trained(of_floats(), name, devices, None), 0)

    @pytest.mark.thorough
    def test_that_is_resumed_within_an_epoch_ends_with_the_same_weights(self, tmp_path):
        with pytest.raises(InterruptionError):
            trained(of_bytes(), "custom", 2, 0, callbacks=[Checkpoint(tmp_path, every_steps=2), Interrupts()])
        resumed = trained(of_bytes(), "custom", 2, 0, callbacks=[Checkpoint(tmp_path, resume=True)])
        assert_same(resumed, trained(of_floats(), "custom", 2, None), 0)


def trained(source, name, devices, budget, **fit):
    keras.utils.set_random_seed(3)
    strategy = tfdist.strategy(name, devices=devices, seed=7, device_data_bytes=budget)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((9, 7, 3)), keras.layers.Flatten(), keras.layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    feed = source.feed("train", 8, seed=3, augment="crop_flip")
    strategy.fit(model, feed, epochs=2, verbose=0, **fit)
    return model.get_weights()


class TestMemoryHolds:
    def test_bytes_as_bytes_on_the_host_and_on_devices(self):
        held = of_bytes().feed("train", 8).arrays
        assert [one.dtype for one in held] == [tf.uint8, tf.uint8]
        of_one_copy = pixels().nbytes + EXAMPLES
        assert device_feed.size_bytes(held) == of_one_copy
        strategy = tfdist.strategy("single", devices="CPU:1", device_data_bytes=of_one_copy)
        (copy,), _ = strategy.placed(of_bytes().feed("train", 8)).start(0, 0)
        # A GPU gathers no bytes: they are there as the words of each example.
        assert [(one.dtype, one.shape.as_list()) for one in copy] == [
            (tf.float32, [EXAMPLES, 48]),
            (tf.float32, [EXAMPLES, 1]),
        ]

    def test_what_is_narrower_than_what_a_model_sees_and_nothing_wider(self):
        def held(x, y):
            source = Source.from_arrays("mine", classes=3, train=(np.zeros((3, 2), x), np.arange(3, dtype=y)))
            return [one.dtype.name for one in source.feed("train", 2).arrays]

        assert held("int8", "int8") == ["int8", "int8"]
        assert held("float16", "uint8") == ["float32", "uint8"]  # TensorFlow's copy has Keras' type of floats
        assert held("float64", "int64") == ["float32", "int32"]
        assert held("int32", "uint32") == ["float32", "int32"]
        assert held(">i2", ">u2") == ["int16", "uint16"]
        assert held("bool", "int32") == ["bool", "int32"]

    @pytest.mark.thorough
    def test_floats_of_bytes_only_while_someone_uses_them(self):
        source = of_bytes()
        x, _ = source.arrays("train")
        assert source.arrays("train")[0] is x
        floats = weakref.ref(x)
        del x
        gc.collect()
        assert floats() is None

    def test_masks_in_the_smallest_type_of_their_classes(self):
        def of(classes, ignored=None):
            facts = {"target_shape": (4, 4), "ignored_class": ignored}
            return label_type(DataSpec("mine", "segmentation", (4, 4, 3), classes, {"train": 1}, **facts))

        assert [of(3), of(21, 255), of(256, 256), of(70_000)] == [np.uint8, np.uint8, np.uint16, np.uint32]
        assert of(21, -1) == np.int16

    @pytest.mark.parametrize("name", ["digits"])
    def test_datasets_by_name_as_bytes(self, name):
        assert tfdist.data.load(name).feed("train", 8).arrays[0].dtype == tf.uint8


@pytest.mark.parametrize(
    "dtype", [tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.uint32, tf.uint64, tf.bool, tf.float16, tf.int64]
)
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 2), (5, 0)])
def test_rows_of_any_type_come_back_from_a_device_as_they_are(dtype, shape):
    array = tf.cast(np.arange(np.prod(shape)).reshape(shape) * 37 - 3, dtype)
    packed = device_feed._packed(array)
    assert packed.dtype in device_feed._GATHERED
    rows = device_feed._unpacked(tf.gather(packed, [4, 0]), tf.TensorSpec(array.shape, array.dtype))
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, tf.gather(array, [4, 0]))
