"""Feeds and pipelines: augmentation, resuming, streams, buckets; arrays in memory and files alike."""

from __future__ import annotations

import doctest
import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.test_data import flat, numbered
from tfdist import models
from tfdist.data import Source
from tfdist.data.formats import text
from tfdist.data.input import augmentation, bad_examples, order, padding
from tfdist.data.input.division import Division
from tfdist.errors import UnknownNameError, UsageError
from tfdist.jobs.world import World

SEED = 3


@pytest.mark.parametrize(
    "module", [order, augmentation, bad_examples, padding, text], ids=lambda module: module.__name__
)
def test_the_synopsis_of_a_module_runs(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


def pictures(examples: int = 20, size: int = 16) -> Source:
    """Random pictures with masks; a pixel of the mask is 1 where the picture's first channel is above a half."""
    x = np.random.default_rng(0).random((examples, size, size, 3), np.float32)
    mask = (x[..., 0] > 0.5).astype(np.int32)
    return Source.from_arrays("pictures", classes=2, task="segmentation", train=(x, mask))


def batches_of_feed(source: Source, batch_size: int, epoch: int = 0, first_batch: int = 0, **options) -> list:
    """The global batches as the loop fetches them, joined from two replicas' parts."""
    feed = source.feed("train", batch_size, seed=SEED, **options)
    state = feed.start(epoch, first_batch)
    batches = []
    for step in range(first_batch, feed.num_batches):
        batch = feed.batches.fetch(state, tf.constant(step))
        parts = [feed.batches.part(state, batch, index, Division(2))[0] for index in range(2)]
        batches.append(tf.nest.map_structure(lambda *p: np.concatenate(p), *parts))
    return batches


def batches_of_ranks(source: Source, batch_size: int, world_size: int, **options) -> list:
    """The global batches as pipelines give them, joined from the parts of all ranks."""
    ranks = [
        list(source.pipeline("train", batch_size, world=World(rank, world_size), seed=SEED, **options))
        for rank in range(world_size)
    ]
    return [tf.nest.map_structure(lambda *p: np.concatenate(p), *parts) for parts in zip(*ranks, strict=True)]


def segmenter(strategy, spec):
    import keras

    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.Input(spec.input_shape), keras.layers.Conv2D(spec.classes, 3, padding="same")]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def assert_same_batches(found: list, expected: list) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, one, other)


# Augmentation


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["crop_flip", "resized_crop"])
def test_augmented_examples_are_the_same_for_any_number_of_ranks_and_in_the_loop(name):
    data = pictures()
    alone = batches_of_ranks(data, 6, 1, augment=name, epoch=2)
    for world_size in (2, 3):
        assert_same_batches(batches_of_ranks(data, 6, world_size, augment=name, epoch=2), alone)
    assert_same_batches(batches_of_feed(data, 6, augment=name, epoch=2), alone)


@pytest.mark.parametrize("name", ["crop_flip", "resized_crop"])
def test_augmentation_follows_from_seed_epoch_and_example_and_not_from_the_batch(name):
    data = pictures()

    def by_example(batch_size: int, epoch: int) -> dict[int, bytes]:
        numbers = order.epoch_order(20, SEED, epoch)
        x = np.concatenate([x for x, _ in batches_of_ranks(data, batch_size, 1, augment=name, epoch=epoch)])
        return {int(number): picture.tobytes() for number, picture in zip(numbers, x, strict=True)}

    assert by_example(6, 0) == by_example(5, 0)
    first, second = by_example(6, 0), by_example(6, 1)
    # Of the few places that a small crop can have, an example may draw the same one twice.
    assert sum(first[number] != second[number] for number in range(20)) > 15


@pytest.mark.parametrize("name", ["crop_flip", "resized_crop"])
def test_a_mask_is_changed_as_its_picture_is(name):
    for x, mask in batches_of_ranks(pictures(size=32), 20, 1, augment=name):
        agreeing = (x[..., 0] > 0.5) == (mask == 1)
        # A crop at another size takes the nearest label and mixes the colours of four pixels.
        assert agreeing.mean() == 1 if name == "crop_flip" else agreeing.mean() > 0.75
        assert set(np.unique(mask)) == {0, 1}


def test_crop_flip_moves_a_picture_by_an_eighth_at_most_and_flips_half_of_them():
    side, examples = 32, 400
    x = np.broadcast_to(np.arange(side, dtype=np.float32)[:, None] * side + np.arange(side), (examples, side, side))
    x = 1 + x[..., None]
    data = Source.from_arrays("ramp", classes=1, train=(x, np.zeros(examples, int)))
    (found, _), *_ = batches_of_ranks(data, examples, 1, augment="crop_flip")
    middle = found[:, side // 2, side // 2, 0] - 1
    rows, columns = middle // side, middle % side
    assert set(rows - side // 2) == set(range(-4, 5))
    flipped = found[:, side // 2, side // 2 + 1, 0] - 1 < middle
    assert set((columns - side // 2)[~flipped]) == set(range(-4, 5))
    assert 0.4 < flipped.mean() < 0.6
    assert (found == 0).any() and found.max() <= side * side


def test_resized_crops_have_the_areas_and_ratios_of_the_paper():
    draws = augmentation.table(2000, 5, SEED, 0)
    boxes = augmentation.random_boxes(tf.constant([300, 400]), draws, augmentation.CROPPED_AREA).numpy()
    height, width = boxes[:, 2] - boxes[:, 0], np.abs(boxes[:, 3] - boxes[:, 1])
    assert boxes.min() >= 0 and boxes.max() <= 1 + 1e-6
    assert 0.079 < (height * width).min() < 0.1 and (height * width).max() > 0.9
    free = (height < 1) & (width < 1)
    ratio = (width * 400 / (height * 300))[free]
    assert 0.74 < ratio.min() < 0.8 and 1.25 < ratio.max() < 1.34
    assert 0.45 < (boxes[:, 3] < boxes[:, 1]).mean() < 0.55


def test_what_an_autoencoder_shall_give_back_is_the_augmented_picture():
    data = pictures().for_autoencoding()
    assert data.spec.task == "autoencoding" and data.spec.target_shape == data.spec.input_shape
    for x, y in batches_of_ranks(data, 6, 1, augment="crop_flip"):
        np.testing.assert_array_equal(x, y)
    assert data.arrays("train")[0] is data.arrays("train")[1]


def test_an_augmentation_that_there_is_not_or_that_examples_cannot_have_is_refused():
    with pytest.raises(UnknownNameError, match="Unknown augmentation `crop`"):
        pictures().pipeline("train", 4, augment="crop")
    with pytest.raises(UsageError, match="`crop_flip` needs pictures, but an example of `numbered` has the shape"):
        numbered(5).feed("train", 4, augment="crop_flip")
    with pytest.raises(UsageError, match="and is not a picture"):
        numbered(5).for_autoencoding()


# Resuming, options


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["none", "crop_flip"])
@pytest.mark.parametrize("first_batch", [1, 3])
def test_a_pass_can_begin_at_any_batch(name, first_batch):
    data = pictures()
    whole = batches_of_ranks(data, 6, 2, augment=name)
    assert_same_batches(batches_of_ranks(data, 6, 2, augment=name, first_batch=first_batch), whole[first_batch:])
    assert_same_batches(batches_of_feed(data, 6, augment=name, first_batch=first_batch), whole[first_batch:])


def test_a_pipeline_can_have_threads_of_its_own_and_give_up_its_order():
    data = numbered(50)
    dataset = data.pipeline("train", 8, threads=2, deterministic=False)
    assert dataset.options().threading.private_threadpool_size == 2
    assert dataset.options().deterministic is False
    assert sorted(flat([x.numpy()[:, 0].astype(int).tolist() for x, _ in dataset])) == list(range(50))
    assert data.pipeline("train", 8).options().deterministic is True


@pytest.mark.parametrize(("batch_size", "world_size"), [(8, 1), (8, 2), (7, 3), (5, 4)])
def test_shards_of_whole_files_have_every_example_once_and_no_file_twice(batch_size, world_size):
    files = np.random.default_rng(0).integers(9, size=100)
    indices = order.epoch_order(100, SEED, 0)
    parts = [order.parts_by_file(indices, files, batch_size, rank, Division(world_size)) for rank in range(world_size)]
    ranks = [[of_rank.joined(step, step + 1) for step in range(len(of_rank))] for of_rank in parts]
    assert len({len(batches) for batches in ranks}) == 1
    mine = [np.concatenate(batches) for batches in ranks]
    assert sorted(np.concatenate(mine)) == list(range(100))
    for one, other in itertools.combinations(mine, 2):
        assert not set(files[one]) & set(files[other])
    assert max(map(len, mine)) - min(map(len, mine)) <= max(np.bincount(files))
    assert all(sum(len(batches[step]) for batches in ranks) <= batch_size for step in range(len(ranks[0])))


def test_arrays_have_no_files_to_be_dealt_out():
    with pytest.raises(UsageError, match="`numbered` are in no files"):
        numbered(5).pipeline("train", 2, by_file=True)


# Characters: rows that go on


def characters(examples: int = 23, steps: int = 4) -> Source:
    text = np.arange(examples * steps + 1) % 7
    x, y = text[:-1].reshape(examples, steps), text[1:].reshape(examples, steps)
    return Source.from_arrays("text", classes=7, task="characters", vocabulary_size=7, train=(x, y))


def test_each_row_of_a_batch_goes_on_in_the_next_one_and_only_the_tail_is_left_out():
    data = characters()
    batches = batches_of_feed(data, 5, epoch=4)
    assert len(batches) == 23 // 5
    for (x, y), (x_next, _) in itertools.pairwise(batches):
        np.testing.assert_array_equal(y[:, -1], x_next[:, 0])
        np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    assert_same_batches(batches_of_ranks(data, 5, 3), batches)
    seen = order.streams(23, 5)
    assert sorted(seen) == list(range(20))


def test_a_text_that_is_not_read_as_streams_keeps_its_tail_and_may_be_shorter_than_a_batch():
    for shuffle in (False, True):
        feed = characters().feed("train", 24, shuffle=shuffle)
        assert feed.num_batches == 1 and feed.examples == 23


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt", [True, False]),
        ("stateful_rnn", [None, None]),
        ("mlp", [True, False]),
        ("tests.test_data_pipeline:characters", [None, None]),
    ],
)
def test_only_models_without_a_state_take_pieces_of_a_text_in_random_order(model, expected):
    assert [models.shuffles(model), models.shuffles(model, "validation")] == expected


def test_a_batch_of_more_streams_than_examples_is_refused():
    with pytest.raises(UsageError, match="24 streams needs at least 24 examples, but `train` of `text` has 23"):
        characters().feed("train", 24)


# Sentences of similar lengths


def test_widths_are_rounded_up_to_multiples_and_what_is_added_is_padding():
    tokens, _ = sentences().arrays("train")
    trimmed = padding.Trimmed({"x": padding.lengths(tokens)}, 8, multiple=8)
    (widths,) = trimmed.extras(0, np.arange(16))
    assert set(widths.tolist()) <= {8, 16, 24} and (widths >= padding.lengths(tokens)[:16]).all()
    cut, _ = trimmed((tokens[:8], None), widths[:8])
    assert cut.shape[1] == min(widths[0], 20)


def sentences(examples: int = 103, bucketed: bool = True) -> Source:
    """Sentences of 1 to 20 tokens; the first is the number of the sentence."""
    generator = np.random.default_rng(0)
    tokens = [[number + 2, *[1] * generator.integers(20)] for number in range(examples)]
    x = padding.padded(tokens, 20)
    facts = {"classes": 2, "task": "text_classification", "vocabulary_size": examples + 2}
    return Source.from_arrays("mine", **facts, bucketed=bucketed, train=(x, np.zeros(examples, int)))


def test_buckets_hold_each_sentence_once_in_an_order_of_seed_and_epoch():
    data = sentences()
    epochs = [[x[:, 0] - 2 for x, _ in batches_of_feed(data, 8, epoch=epoch)] for epoch in (0, 0, 1)]
    for batches in epochs:
        assert sorted(np.concatenate(batches)) == list(range(103))
    assert all(np.array_equal(*pair) for pair in zip(epochs[0], epochs[1], strict=True))
    assert not all(np.array_equal(*pair) for pair in zip(epochs[0], epochs[2], strict=True))


def test_buckets_need_far_less_padding_and_are_cut_at_their_longest_sentence():
    def padding_share(batches: list) -> float:
        return float(np.mean([np.mean(x == 0) for x, _ in batches]))

    found = batches_of_feed(sentences(), 8)
    assert all(x.shape[1] == padding.lengths(x).max() for x, _ in found)
    assert padding_share(found) < 0.3 * padding_share(batches_of_feed(sentences(bucketed=False), 8))
    assert_same_batches(batches_of_ranks(sentences(), 8, 3), found)


def test_the_examples_of_a_source_are_in_memory_once():
    data = numbered(20)
    before = [array.copy() for array in data.arrays("train")]
    held = [tensor for tensor in data.feed("train", 8).arrays if tensor is not None]
    for array, tensor, copy in zip(data.arrays("train"), held, before, strict=True):
        assert np.shares_memory(array, np.asarray(tensor))
        np.testing.assert_array_equal(array, copy)
