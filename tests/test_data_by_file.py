"""`shuffle="files"`: TFRecord files in random order, read one after the other, shuffled within a buffer."""

import dataclasses
import io
import shutil
import tracemalloc
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import tfdist
import tfdist.data
from tests.contract.comparison import assert_same
from tests.interruption import InterruptionError, Interrupts
from tests.test_data_pipeline import assert_same_batches, batches_of_ranks
from tfdist.callbacks import Checkpoint
from tfdist.data import DataSpec
from tfdist.data.input import order, tfrecords
from tfdist.data.input.picture_files import Pictures
from tfdist.data.input.pictures import PictureSource
from tfdist.data.input.tfrecords import Records
from tfdist.errors import UsageError
from tfdist.jobs.world import World

SIZES = [7, 0, 12, 5, 9]
STARTS = np.cumsum([0, *SIZES])
EXAMPLES = int(STARTS[-1])


class TestTheOrder:
    @pytest.mark.parametrize("buffer", [1, 4, 7, 1000])
    def test_has_each_example_once_and_follows_from_seed_and_epoch(self, buffer):
        def epoch(seed, epoch):
            return order.order_by_file(STARTS, buffer, seed, epoch)[:].tolist()

        assert sorted(epoch(1, 0)) == list(range(EXAMPLES))
        assert epoch(1, 0) == epoch(1, 0)
        assert epoch(1, 0) != epoch(1, 1) != epoch(2, 1)

    @pytest.mark.parametrize("buffer", [1, 4, 7, 1000])
    def test_can_be_asked_for_in_pieces(self, buffer):
        whole = order.order_by_file(STARTS, buffer, 1, 0)[:]
        for begin in range(EXAMPLES):
            for end in (begin, begin + 1, begin + 6, EXAMPLES):
                piece = order.order_by_file(STARTS, buffer, 1, 0)[begin:end]
                np.testing.assert_array_equal(piece, whole[begin:end])

    def test_takes_the_files_one_after_the_other(self):
        taken = order.order_by_file(STARTS, 1, 1, 0)[:]
        files = np.searchsorted(STARTS, taken, side="right") - 1
        assert len(set(np.flatnonzero(np.diff(files)))) == np.count_nonzero(SIZES) - 1
        assert all((np.diff(taken[files == file]) == 1).all() for file in set(files))
        orders = {tuple(order.order_by_file(STARTS, 1, 1, epoch)[:]) for epoch in range(20)}
        assert len(orders) > 10

    def test_leaves_no_example_outside_of_its_block(self):
        in_order, shuffled = (order.order_by_file(STARTS, buffer, 1, 0)[:] for buffer in (1, 8))
        for begin in range(0, EXAMPLES, 8):
            assert sorted(shuffled[begin : begin + 8]) == sorted(in_order[begin : begin + 8])
        assert (shuffled != in_order).mean() > 0.5

    def test_shuffles_each_block_in_a_way_of_its_own(self):
        blocks = order.order_by_file(np.array([0, 80]), 8, 1, 0)[:].reshape(10, 8) % 8
        assert len({tuple(block) for block in blocks}) == 10

    def test_needs_the_memory_of_a_buffer(self):
        tracemalloc.start()
        starts = np.arange(0, 10**9 + 1, 10**6)
        piece = order.order_by_file(starts, 10_000, 1, 0)[500_000_000:500_001_024]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(set(piece.tolist())) == 1024
        assert peak < 2_000_000


def png(number):
    encoded = io.BytesIO()
    Image.fromarray(np.full((6, 6, 3), 7 * number, np.uint8)).save(encoded, "PNG")
    return encoded.getvalue()


@pytest.fixture
def records(tmp_path):
    """33 pictures in five TFRecord files; the label is the number of the picture."""
    paths, number = [], 0
    for file, size in enumerate(SIZES):
        paths.append(tmp_path / f"{file}.tfrecord")
        with tf.io.TFRecordWriter(str(paths[-1])) as writer:
            for _ in range(size):
                features = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[png(number)])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
                number += 1
    return Records(tuple(paths), tfrecords.index(paths), "label")


def source_of(records, cache="off", **options):
    options = {"shuffle": "files", "shuffle_buffer": 8} | options
    spec = DataSpec("mine", "classification", (6, 6, 3), EXAMPLES, {})
    return PictureSource(spec, {"train": records}, cache=cache, **options)


class TestRecords:
    @pytest.mark.thorough
    @pytest.mark.parametrize("augment", ["none", "crop_flip"])
    @pytest.mark.parametrize("cache", ["off", "disk", "memory"])
    def test_give_the_same_global_batches_to_any_number_of_ranks(self, records, cache, augment):
        alone = batches_of_ranks(source_of(records), 5, 1, augment=augment)
        assert sorted(np.concatenate([y for _, y in alone])) == list(range(EXAMPLES))
        assert_same_batches(batches_of_ranks(source_of(records, cache), 5, 3, augment=augment), alone)

    def test_are_told_apart_by_the_lengths_of_their_examples_wherever_their_folder_lies(self, records, tmp_path):
        (tmp_path / "copies").mkdir()
        paths = tuple(Path(shutil.copy(path, tmp_path / "copies" / path.name)) for path in records.paths)
        copies = dataclasses.replace(records, paths=paths, ranges=tfrecords.index(paths))
        assert copies.listing() == records.listing()
        longer = records.ranges.copy()
        longer[-1, 2] += 1
        assert dataclasses.replace(records, ranges=longer).listing() != records.listing()

    def test_come_in_the_order_of_their_epoch(self, records):
        source = source_of(records)
        expected = order.order_by_file(STARTS, 8, 3, 1)[:]
        batches = [y for _, y in source.pipeline("train", 5, seed=3, epoch=1).as_numpy_iterator()]
        np.testing.assert_array_equal(np.concatenate(batches), expected)
        feed = source.feed("train", 5, seed=3)
        later = [batch[1] for batch in feed.batches.take(feed.start(1, 3), 3, 4)]
        np.testing.assert_array_equal(np.concatenate(later), expected[15:])

    def test_are_as_stored_where_nothing_is_shuffled(self, records):
        batches = source_of(records).pipeline("train", 5, shuffle=False).as_numpy_iterator()
        assert np.concatenate([y for _, y in batches]).tolist() == list(range(EXAMPLES))

    def test_that_are_left_out_by_a_limit_do_not_come(self, records):
        batches = source_of(records).limit(10).pipeline("train", 4, seed=1).as_numpy_iterator()
        assert sorted(np.concatenate([y for _, y in batches])) == list(range(10))

    def test_of_whole_files_per_rank_come_once(self, records):
        ranks = [World(rank, 2) for rank in range(2)]
        parts = [source_of(records).pipeline("train", 6, world=world, seed=1, by_file=True) for world in ranks]
        labels = [y for part in parts for _, y in part.as_numpy_iterator()]
        assert sorted(np.concatenate(labels)) == list(range(EXAMPLES))

    def test_are_read_ahead_in_the_order_of_the_file(self, records, monkeypatch):
        asked = []
        monkeypatch.setattr(tfrecords.os, "posix_fadvise", lambda file, *place: asked.append((file, *place[:2])))
        records.will_read(np.array([14, 2, 0, 1, 13, 18, 5]))
        first = records.ranges[:, 1:]
        files = [records._descriptors[file] for file in (0, 0, 2, 2)]
        places = [(first[0], first[2]), (first[5], first[5]), (first[13], first[14]), (first[18], first[18])]
        assert asked == [
            (file, begin[0], end.sum() - begin[0]) for file, (begin, end) in zip(files, places, strict=True)
        ]
        asked.clear()
        list(source_of(records).pipeline("train", 5, seed=3))
        assert len(asked) >= EXAMPLES // 8

    def test_are_read_where_the_system_takes_no_advice_to_read_ahead(self, records, monkeypatch):
        monkeypatch.delattr(tfrecords.os, "posix_fadvise")  # as on macOS
        batches = source_of(records).pipeline("train", 5, seed=3).as_numpy_iterator()
        assert sorted(np.concatenate([y for _, y in batches])) == list(range(EXAMPLES))

    def test_resume_within_an_epoch(self, records, tmp_path):
        interrupted = [Checkpoint(tmp_path / "saved", every_steps=2), Interrupts()]
        with pytest.raises(InterruptionError):
            trained(source_of(records), callbacks=interrupted)
        resumed = trained(source_of(records), callbacks=[Checkpoint(tmp_path / "saved", resume=True)])
        assert_same(resumed, trained(source_of(records)), 0)


def trained(source, **fit):
    keras.utils.set_random_seed(3)
    strategy = tfdist.strategy("single", seed=7)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((6, 6, 3)), keras.layers.Flatten(), keras.layers.Dense(EXAMPLES)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    strategy.fit(model, source.feed("train", 5, seed=3), epochs=2, verbose=0, **fit)
    return model.get_weights()


def test_what_cannot_be_shuffled_so_is_refused(records):
    with pytest.raises(UsageError, match=r"`shuffle` is `shards`"):
        source_of(records, shuffle="shards")
    with pytest.raises(UsageError, match=r"`shuffle_buffer` is `0`"):
        source_of(records, shuffle_buffer=0)
    with pytest.raises(UsageError, match=r"`shuffle` is `files`, but each of these files has only one example"):
        source_of(Pictures(["a.png"], np.zeros(1, np.int32)))
