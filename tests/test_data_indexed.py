"""Sources whose examples are read by their numbers, up to 10⁹ of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import tfdist
from benchmarks import large_order
from tests.test_data_pipeline import SEED, assert_same_batches, batches_of_ranks, pictures, segmenter
from tfdist.data import DataSpec, IndexedSource, Source
from tfdist.data.input.division import WHOLE
from tfdist.data.input.source import FeedOrigin
from tfdist.errors import DataError, UsageError
from tfdist.jobs.world import World

BILLION = 10**9


def indexed_of(source: Source, read: list | None = None) -> IndexedSource:
    """The same examples, read by their numbers, which are noted in `read`."""
    x, y = source.arrays("train")

    def read_at(split: str, indices: np.ndarray) -> tuple:
        if read is not None:
            read.extend(indices.tolist())
        return x[indices], y[indices]

    return IndexedSource(source.spec, read_at)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("augment", ["none", "crop_flip"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_examples_that_are_read_by_number_are_those_of_memory(augment, world_size):
    expected = batches_of_ranks(pictures(), 6, 1, augment=augment, epoch=2)
    found = indexed_of(pictures())
    assert_same_batches(batches_of_ranks(found, 6, world_size, augment=augment, epoch=2), expected)
    resumed = batches_of_ranks(found, 6, world_size, augment=augment, epoch=2, first_batch=2)
    assert_same_batches(resumed, expected[2:])


def test_each_rank_reads_only_its_own_examples():
    read: list[list[int]] = [[], []]
    for rank in range(2):
        list(indexed_of(pictures(), read[rank]).pipeline("train", 6, world=World(rank, 2), seed=SEED))
    assert [len(numbers) for numbers in read] == [10, 10] and sorted(read[0] + read[1]) == list(range(20))


def test_a_look_at_the_first_batches_reads_no_others():
    read: list[int] = []
    first = indexed_of(pictures(), read).feed("train", 4, seed=SEED).first(2)
    assert [len(x) for x, _ in first] == [4, 4] and len(read) == 8


@pytest.mark.thorough
def test_training_on_examples_that_are_read_gives_the_weights_of_training_in_memory():
    weights = []
    for data, replicas in ((pictures(), 1), (indexed_of(pictures()), 1), (indexed_of(pictures()), 2)):
        strategy = tfdist.strategy("custom", devices=replicas, seed=SEED)
        model = segmenter(strategy, data.spec)
        strategy.fit(model, data.feed("train", 6, seed=SEED), epochs=2, verbose=0)
        weights.append(np.concatenate([weight.reshape(-1) for weight in model.get_weights()]))
    np.testing.assert_allclose(weights[0], weights[1], atol=1e-6)
    np.testing.assert_allclose(weights[0], weights[2], atol=5e-5)


def test_an_autoencoder_gets_what_it_reads_as_its_target():
    data = indexed_of(pictures()).for_autoencoding().limit(4)
    for x, y in data.pipeline("train", 4):
        np.testing.assert_array_equal(x, y)


def test_examples_that_do_not_fit_the_spec_are_named_when_training_meets_them():
    spec = DataSpec("wrong", "segmentation", (16, 16, 3), 2, {"train": 20, "validation": 0, "test": 0}, (), (16, 16))
    strategy = tfdist.strategy("single", seed=SEED)
    for read_at, message in (
        (lambda split, i: (np.zeros((len(i), 8)), np.zeros((len(i), 16, 16), int)), "promises x of shape"),
        (lambda split, i: (np.zeros((len(i), 16, 16, 3)), np.full((len(i), 16, 16), 5)), "is `5`, outside its 2"),
    ):
        with pytest.raises(DataError, match=message):
            strategy.fit(segmenter(strategy, spec), IndexedSource(spec, read_at).feed("train", 4), verbose=0)


def test_positions_in_streams_are_refused():
    spec = DataSpec("text", "characters", (4,), 7, {"train": 20, "validation": 0, "test": 0}, (), (4,), 7)
    with pytest.raises(UsageError, match="without their positions in streams"):
        IndexedSource(spec, lambda split, i: (i, i)).feed("train", 4, stream_positions=True)


# 10⁹ examples


def test_the_order_of_a_billion_examples_and_its_parts_take_few_megabytes():
    found = large_order.measure("order", BILLION)
    assert found["added by the order, MiB"] < 50
    assert found["peak of the process, MiB"] < 200


@pytest.mark.exhaustive
def test_batches_of_a_billion_examples_are_read_from_any_step_in_little_memory():
    found = large_order.measure("source", BILLION)
    assert found["added by the source, MiB"] < 200


@pytest.mark.thorough
def test_the_last_of_a_billion_examples_come_in_the_last_batches():
    spec = DataSpec("large", "classification", (1,), 10, {"train": BILLION, "validation": 0, "test": 0})
    data = IndexedSource(spec, lambda split, indices: (indices[:, np.newaxis] / BILLION, indices % 10))
    steps = -(-BILLION // 1000)
    for shuffle in (True, False):
        options = {"seed": SEED, "shuffle": shuffle, "first_batch": steps - 3}
        alone = batches_of_ranks_of(data, 1, options)
        assert [len(y) for _, y in alone] == [1000] * 3
        assert_same_batches(batches_of_ranks_of(data, 3, options), alone)
    assert alone[-1][1].tolist() == [*range(10)] * 100
    odd = IndexedSource(dataclasses.replace(spec, examples={**spec.examples, "train": BILLION - 1}), data._read_at)
    (_, y), *_ = odd.pipeline("train", 1000, first_batch=steps - 1)
    assert len(y) == 999


def batches_of_ranks_of(data: Source, world_size: int, options: dict) -> list:
    options = {"epoch": 1, **options}
    ranks = [list(data.pipeline("train", 1000, world=World(rank, world_size), **options)) for rank in range(world_size)]
    return [tuple(np.concatenate(part) for part in zip(*parts, strict=True)) for parts in zip(*ranks, strict=True)]


def test_some_batches_of_a_pass_are_read_without_the_others():
    read: list = []
    feed = indexed_of(tfdist.data.load("synthetic", train=50), read).feed("train", 8, seed=3)
    whole = [x.numpy() for x, _ in feed.start(1, 0)]
    read.clear()
    some = [x.numpy() for x, _ in feed.range(1, 2, 4)]
    assert len(some) == 2 and len(read) == 2 * 8
    np.testing.assert_array_equal(np.stack(some), np.stack(whole[2:4]))


def test_another_process_can_make_a_source_and_its_feed_from_their_origin():
    source = tfdist.data.load("synthetic", train=50, shape=(4, 4, 1)).limit(30).for_autoencoding()
    feed = source.feed("train", 8, seed=3)
    assert feed.origin is not None
    origin = FeedOrigin.from_json(feed.origin.to_json())
    again = tfdist.data.load_origin(origin.source)
    assert again.spec == source.spec and again.origin == source.origin
    np.testing.assert_array_equal(again.arrays("train")[0], source.arrays("train")[0])
    x, y = source.arrays("train")
    assert Source.from_arrays("mine", classes=0, task="autoencoding", train=(x, y)).origin is None


def test_a_cached_source_reads_each_example_once_and_has_the_same_batches():
    read: list[int] = []
    found = indexed_of(pictures(), read).cached().feed("train", 6, seed=SEED)
    expected = pictures().feed("train", 6, seed=SEED)
    for epoch in range(2):
        for feed_of_both in zip(passed(found, epoch), passed(expected, epoch), strict=True):
            for one, other in zip(*feed_of_both, strict=True):
                np.testing.assert_array_equal(one, other)
    assert sorted(read) == list(range(20))


def passed(feed, epoch):
    """The global batches of a pass."""
    state = feed.start(epoch, 0)
    return [feed.batches.part(state, batch, 0, WHOLE)[0] for batch in feed.batches.take(state, 0, feed.num_batches)]


def test_a_repeated_batch_takes_the_place_of_all_and_nothing_else_is_read():
    read: list[int] = []
    source = indexed_of(pictures(), read)
    ((x, y),) = source.feed("train", 6, seed=SEED, augment="crop_flip").first(1)
    found = source.repeated_feed("train", 6, seed=SEED, augment="crop_flip")
    assert (found.examples, found.batch_size, found.num_batches) == (20, 6, 4)
    batches = [*passed(found, 0), *passed(found, 1)]
    assert [len(of_batch) for of_batch, _ in batches] == [6, 6, 6, 2] * 2
    for number, (found_x, found_y) in enumerate(batches):
        np.testing.assert_array_equal(found_x, x[: len(found_x)], err_msg=f"batch {number}")
        np.testing.assert_array_equal(found_y, y[: len(found_y)])
    assert len(read) == 12  # the first batch, when it was looked at, and again


def test_batches_of_different_widths_have_none_that_could_be_repeated():
    source = tfdist.data.load("synthetic", task="text_classification", train=64, length=8, buckets=True)
    with pytest.raises(UsageError, match="different widths"):
        source.repeated_feed("train", 8)


@pytest.mark.parametrize("make", [Source, IndexedSource])
def test_a_source_without_a_spec_is_refused(make):
    with pytest.raises(UsageError, match=r"`spec` of a source is `3`, of type `int`"):
        make(3, lambda split, which: None)


@pytest.mark.parametrize("data", [np.zeros(3), [1, 2, 3]], ids=["array", "list"])
def test_only_a_dataset_of_tensorflow_is_sharded(data):
    with pytest.raises(UsageError, match=r"takes a `tf.data.Dataset`, and this is of type") as raised:
        tfdist.data.shard(data)
    assert "per_process" in raised.value.hint
