"""The order of examples: asked for by range, drawn where it is short, computed where it is long."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.test_data import flat
from tests.test_data_pipeline import (
    assert_same_batches,
    batches_of_feed,
    batches_of_ranks,
    characters,
    pictures,
    sentences,
)
from tfdist.data.input import array_feed, augmentation, file_feed, order
from tfdist.data.input.division import Division
from tfdist.data.input.order import Permutation
from tfdist.errors import UsageError
from tfdist.jobs.world import World

SEED = 3
BILLION = 10**9


@pytest.fixture
def computed(monkeypatch):
    """Orders of more than four examples are computed, as those of very large datasets."""
    monkeypatch.setattr(order, "LARGEST_DRAWN", 4)


# The computed permutation


def test_every_number_comes_once_for_any_size():
    powers = [2**power + more for power in (9, 10, 15, 16, 17) for more in (-1, 0, 1)]
    for size in (*range(1, 400), *powers, 3 * 2**16):
        found = Permutation(size, SEED, epoch=size % 7).between(0, size)
        np.testing.assert_array_equal(np.sort(found), np.arange(size))


@pytest.mark.parametrize("size", [2**31 - 1, 2**32 + 5, 2**40, 2**62])
def test_sizes_beyond_32_bits_have_distinct_numbers_over_the_whole_range(size):
    begin = size // 3
    found = Permutation(size, SEED, 0).between(begin, begin + 100_000)
    assert found.dtype == np.int64 and len(np.unique(found)) == len(found)
    assert 0 <= found.min() < size // 1000 and size - size // 1000 < found.max() < size


def test_a_range_is_what_the_whole_has_there():
    whole = Permutation(100_003, SEED, 1).between(0, 100_003)
    for begin, end in ((0, 1), (32_767, 32_769), (5, 99_999), (100_003, 100_003)):
        np.testing.assert_array_equal(Permutation(100_003, SEED, 1).between(begin, end), whole[begin:end])


def test_other_seeds_and_epochs_have_other_permutations():
    found = [Permutation(10_000, seed, epoch).between(0, 10_000) for seed in range(4) for epoch in range(4)]
    for one, other in itertools.combinations(found, 2):
        assert (one == other).sum() < 12  # 1 is expected; 12 has the probability 1e-9
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.06  # 6 standard deviations


def deviations(rounds: int, size: int = 1 << 10, trials: int = 400) -> np.ndarray:
    """By how many standard deviations permutations differ from chance: fixed points, neighbours that stay neighbours,
    and, as chi-square, where numbers of each of 16 ranges come to lie, and their lowest bits."""
    counts = np.zeros(4)
    positions = np.arange(size)
    for epoch in range(trials):
        found = Permutation(size, SEED, epoch, rounds).between(0, size)
        of_range = np.histogram2d(positions * 16 // size, found * 16 // size, bins=16)[0]
        of_bits = np.histogram2d(positions % 16, found % 16, bins=16)[0]
        chi_squares = [((cells - size / 256) ** 2 / (size / 256)).sum() for cells in (of_range, of_bits)]
        counts += (found == positions).sum(), (np.diff(found) == 1).sum(), *chi_squares
    freedom = 15**2 * size / (size - 1)  # the sums of rows and columns are given
    expected = np.array([trials, trials, trials * freedom, trials * freedom])
    spread = np.sqrt([trials, trials, 2 * trials * freedom, 2 * trials * freedom])
    return (counts - expected) / spread


def test_permutations_are_like_drawn_ones_and_fewer_rounds_are_not():
    assert np.abs(deviations(order.FEISTEL_ROUNDS)).max() < 4
    assert np.abs(deviations(order.FEISTEL_ROUNDS, size=1500)).max() < 4
    for rounds in (1, 2, 3):
        assert np.abs(deviations(rounds)).max() > 5, rounds


def test_random_numbers_by_index_are_uniform_and_the_same_in_any_company():
    found = order.uniform(np.arange(100_000), 3, [SEED, 0, 1])
    assert found.dtype == np.float32 and found.min() >= 0 and found.max() < 1
    counts = np.stack([np.histogram(column, 100, (0, 1))[0] for column in found.T])
    chi_square = ((counts - 1000) ** 2 / 1000).sum(axis=1)
    assert (np.abs(chi_square - 99) < 5 * np.sqrt(2 * 99)).all()
    together = np.corrcoef(np.concatenate([found[:-1], found[1:]], axis=1).T)
    assert np.abs(together - np.eye(6)).max() < 0.02
    some = np.array([70_000, 3, 5_000_000_000])
    np.testing.assert_array_equal(order.uniform(some, 3, [SEED, 0, 1])[:2], found[some[:2]])
    high = order.uniform(np.array([5, 2**32 + 5]), 3, [SEED, 0, 1])
    assert (high[0] != high[1]).all()


# Orders


def orders(examples: int) -> dict[str, order.Order]:
    return {
        "shuffled": order.epoch_order(examples, SEED, 2),
        "within batches": order.order_within_batches(examples, 7, SEED, 2),
        "bucketed": order.bucketed_order(np.arange(examples) % 13, 7, SEED, 2),
        "streams": order.streams(examples, 7),
        "stored": order.as_stored(examples),
    }


def test_a_small_order_is_the_one_that_earlier_versions_drew():
    """Checkpoints of earlier versions are resumed with it."""
    drawn = np.random.default_rng([SEED, 2])
    np.testing.assert_array_equal(order.epoch_order(1000, SEED, 2)[:], drawn.permutation(1000))
    keys = np.random.default_rng([SEED, 2]).random(1000)
    within = np.lexsort((keys, np.arange(1000) // 7))
    np.testing.assert_array_equal(order.order_within_batches(1000, 7, SEED, 2)[:], within)
    assert order.epoch_order(6, 3, 1)[:].tolist() == [1, 2, 0, 4, 5, 3]


@pytest.mark.parametrize("name", orders(9))
@pytest.mark.parametrize("drawn", [True, False])
def test_a_range_of_an_order_is_what_the_whole_order_has_there(name, drawn, request):
    if not drawn:
        request.getfixturevalue("computed")
    asked = orders(100)[name]
    whole = asked[:]
    assert len(asked) == len(whole) == (98 if name == "streams" else 100) and whole.dtype == np.int32
    assert sorted(whole) == list(range(len(whole)))
    for begin, end in ((0, 0), (3, 40), (20, 21), (95, 200), (50, 20)):
        np.testing.assert_array_equal(asked[begin:end], whole[begin:end])
    assert (asked[4], asked[-1]) == (whole[4], whole[-1]) and list(asked) == whole.tolist()
    with pytest.raises(IndexError):
        asked[100]


def test_a_computed_order_within_batches_leaves_each_example_in_its_batch(computed):
    found = order.order_within_batches(100, 7, SEED, 0)[:]
    np.testing.assert_array_equal(found // 7, np.arange(100) // 7)
    other = order.order_within_batches(100, 7, SEED, 1)[:]
    assert (found != np.arange(100)).mean() > 0.7 and (found != other).mean() > 0.7


def test_the_length_of_an_order_is_known_without_drawing_it(monkeypatch):
    def draw(*arguments):
        raise AssertionError("drawn")

    monkeypatch.setattr(np.random, "default_rng", draw)
    assert [len(asked) for asked in orders(1000).values()] == [1000, 1000, 1000, 994, 1000]


def test_numbers_that_int32_cannot_hold_are_int64():
    examples = 3 * 2**31
    for make in (order.epoch_order(examples, SEED, 0), order.as_stored(examples), order.streams(examples, 256)):
        last = make[examples - 1000 :]
        assert last.dtype == np.int64 and last.min() >= 0 and last.max() > 2**31
    within = order.order_within_batches(examples, 1000, SEED, 0)[examples - 1000 :]
    assert within.dtype == np.int64 and within.min() >= examples - 2000


# Parts


@pytest.mark.parametrize(("batch_size", "world_size"), [(8, 1), (8, 2), (7, 3), (5, 4), (3, 5), (200, 3)])
def test_parts_of_all_ranks_make_the_batches_from_any_step_to_any_other(batch_size, world_size):
    indices = order.epoch_order(100, SEED, 0)
    ranks = [order.Parts(indices, batch_size, rank, Division(world_size)) for rank in range(world_size)]
    assert {len(of_rank) for of_rank in ranks} == {-(-100 // batch_size)}
    for step in range(len(ranks[0])):
        batch = np.concatenate([of_rank.joined(step, step + 1) for of_rank in ranks])
        np.testing.assert_array_equal(batch, indices[step * batch_size : (step + 1) * batch_size])
        assert [of_rank.length(step) for of_rank in ranks] == [len(of_rank.joined(step, step + 1)) for of_rank in ranks]
    for of_rank, first in itertools.product(ranks, range(len(ranks[0]) + 1)):
        one_by_one = [of_rank.joined(step, step + 1) for step in range(first, len(of_rank))]
        np.testing.assert_array_equal(of_rank.joined(first, len(of_rank)), np.concatenate([indices[:0], *one_by_one]))
        runs = of_rank.runs(first)
        assert [step for begin, end, _ in runs for step in range(begin, end)] == list(range(first, len(of_rank)))
        for begin, end, length in runs:
            assert {of_rank.length(step) for step in range(begin, end - 1)} <= {length}
            assert of_rank.length(end - 1) <= length


# What uses a computed order


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at_once", [1, 1 << 16])
@pytest.mark.parametrize("augment", ["none", "crop_flip"])
def test_computed_batches_are_the_same_for_any_number_of_ranks_and_from_any_batch(
    computed, monkeypatch, augment, at_once
):
    monkeypatch.setattr("tfdist.data.input.file_feed.AT_ONCE", at_once)
    data = pictures()
    alone = batches_of_ranks(data, 6, 1, augment=augment, epoch=2)
    assert [len(x) for x, _ in alone] == [6, 6, 6, 2]
    for world_size in (2, 3):
        assert_same_batches(batches_of_ranks(data, 6, world_size, augment=augment, epoch=2), alone)
    feed = data.feed("train", 6, seed=SEED, augment=augment)
    assert not isinstance(feed, array_feed.ArrayFeed)
    assert_same_batches(batches_of_feed(data, 6, augment=augment, epoch=2), alone)
    assert_same_batches(batches_of_feed(data, 6, augment=augment, epoch=2, first_batch=2), alone[2:])
    assert_same_batches(batches_of_ranks(data, 6, 2, augment=augment, epoch=2, first_batch=3), alone[3:])


def test_augmentation_of_a_computed_order_follows_from_the_example_and_the_epoch(computed):
    numbers = np.arange(20)
    rows = augmentation.rows(20, 3, SEED, 0)
    np.testing.assert_array_equal(rows(numbers)[[4, 2]], rows(np.array([4, 2])))
    assert (rows(numbers) != augmentation.rows(20, 3, SEED, 1)(numbers)).all()


def test_streams_and_buckets_are_the_same_where_orders_are_not_tensors(request):
    expected = [batches_of_feed(data, 8, epoch=1) for data in (sentences(), characters())]
    request.getfixturevalue("computed")
    found = [batches_of_feed(data, 8, epoch=1) for data in (sentences(), characters())]
    for one, other in zip(found, expected, strict=True):
        assert_same_batches(one, other)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_fit_on_arrays_sees_every_example_once_in_a_computed_order(computed, weighted):
    import keras

    x = np.arange(23, dtype=np.float32)[:, np.newaxis]
    seen: list[list[float]] = []

    class Seeing(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, _, *weights = data
            assert len(weights) == weighted
            tf.numpy_function(lambda x: seen.append(x[:, 0].tolist()), [x], [])
            return super().train_step(data)

    strategy = tfdist.strategy("single", seed=SEED)
    with strategy.scope():
        model = Seeing()
        model.compile("sgd", "mse")
    weights = {"sample_weight": np.ones(23)} if weighted else {}
    strategy.fit(model, x, x / 23, batch_size=5, epochs=2, verbose=0, **weights)
    batches = [batch for batch in seen if len(batch) > 0][-10:]
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3] * 2
    for epoch in range(2):
        found = flat(batches[5 * epoch : 5 * epoch + 5])
        assert found == order.epoch_order(23, SEED, epoch)[:].tolist()


def test_more_batches_than_a_step_can_count_are_refused():
    dataset = tf.data.Dataset.range(3).batch(1)
    with pytest.raises(UsageError, match="An epoch has 5,000,000,000 batches"):
        file_feed.FileFeed(lambda epoch, first: dataset, lambda *batches: None, 5 * BILLION, 1, World())
