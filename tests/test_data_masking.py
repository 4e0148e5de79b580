"""Masked words: which, as what, and that they are the same on any number of replicas and after a resumption."""

from __future__ import annotations

import doctest

import keras
import numpy as np
import pytest

import tfdist
from tfdist import data, models, tasks
from tfdist.data import IndexedSource, Source
from tfdist.data.input import masking
from tfdist.data.input.division import Division
from tfdist.data.spec import DataSpec
from tfdist.data.tools import for_model
from tfdist.errors import UsageError
from tfdist.jobs.world import World

LENGTH, WORDS = 64, 1000


@pytest.fixture(scope="module")
def source():
    return data.load("synthetic", task="masked_lm", words=WORDS, length=LENGTH, train=500, validation=40, test=0)


def batches(source, split="train", size=100, **options):
    """x, y and the words of one epoch."""
    found = list(source.pipeline(split, size, **options).as_numpy_iterator())
    return [np.concatenate(arrays) for arrays in zip(*found, strict=True)]


def test_the_synopsis_runs():
    result = doctest.testmod(masking)
    assert result.attempted and not result.failed


def test_of_15_percent_of_the_words_80_percent_are_masked_and_10_percent_are_others(source):
    words, _ = source.arrays("train")
    x, y = batches(source, shuffle=False)
    chosen, real = y != masking.NOT_CHOSEN, words != 0
    np.testing.assert_array_equal(y[chosen], words[chosen])
    np.testing.assert_array_equal(x[~chosen], words[~chosen])
    assert real[chosen].all()
    masked, others = x[chosen] == WORDS - 1, (x != words) & (x != WORDS - 1)
    count = real.sum()
    assert chosen.sum() / count == pytest.approx(0.15, abs=4 * (0.15 * 0.85 / count) ** 0.5)
    deviation = 4 * (0.8 * 0.2 / chosen.sum()) ** 0.5
    assert masked.mean() == pytest.approx(0.8, abs=deviation)
    assert others.sum() / chosen.sum() == pytest.approx(0.1, abs=deviation)
    # Other words are any but padding and mask, and all alike.
    assert x[others].min() >= 1 and x[others].max() <= WORDS - 2
    assert x[others].mean() == pytest.approx(WORDS / 2, abs=4 * WORDS / (12 * others.sum()) ** 0.5)


def test_each_epoch_has_its_masks_and_validation_has_the_same_ones_in_all(source):
    def first(split, **options):
        return batches(source, split, shuffle=False, **options)[0]

    np.testing.assert_array_equal(first("train", seed=1, epoch=2), first("train", seed=1, epoch=2))
    assert (first("train", seed=1, epoch=2) != first("train", seed=1, epoch=3)).any()
    assert (first("train", seed=1, epoch=2) != first("train", seed=2, epoch=2)).any()
    np.testing.assert_array_equal(first("validation", epoch=0), first("validation", epoch=3))


def test_an_example_has_the_same_masks_in_any_batch_process_and_after_a_resumption(source):
    x, y = batches(source, seed=3, epoch=1)
    parts = [batches(source, seed=3, epoch=1, world=World(rank=rank, world_size=2), size=100) for rank in range(2)]
    halves = [np.split(part, 5) for pair in parts for part in pair]  # x and y of rank 0, x and y of rank 1
    np.testing.assert_array_equal(np.concatenate([np.concatenate(pair) for pair in zip(*halves[::2], strict=True)]), x)
    np.testing.assert_array_equal(batches(source, seed=3, epoch=1, size=50)[1], y)
    np.testing.assert_array_equal(batches(source, seed=3, epoch=1, first_batch=3)[0], x[300:])
    feed = source.feed("train", 100, seed=3)
    state = feed.start(1, 3)
    (x_of_step, y_of_step), _ = feed.batches.part(state, feed.batches.fetch(state, 3), 0, Division(1))
    np.testing.assert_array_equal(x_of_step, x[300:400])
    np.testing.assert_array_equal(y_of_step, y[300:400])


def test_replicas_mask_the_words_that_one_device_masks():
    source = data.load("synthetic", task="masked_lm", words=30, length=12, train=22, validation=8, test=0)
    found = []
    for devices in (1, 2):
        keras.utils.set_random_seed(1)
        strategy = tfdist.strategy("custom", devices=devices, seed=0)
        with strategy.scope():
            model = models.build("bert", source.spec, layers=1, units=8, heads=2)
            tasks.compile(model, source.spec, keras.optimizers.SGD(0.5))
        feeds = {split: source.feed(split, 4, seed=5) for split in ("train", "validation")}
        history = strategy.fit(model, feeds["train"], validation_data=feeds["validation"], epochs=2, verbose=0).history
        found.append([history[name] for name in ("loss", "perplexity", "val_loss", "val_perplexity")])
    np.testing.assert_allclose(found[0], found[1], rtol=5e-5)


def test_a_dataset_of_sentences_or_characters_is_used_without_its_labels(tmp_path):
    x = np.array([[2, 3, 0], [4, 2, 3]], np.int32)
    names = ("<padding>", "<unknown>", "a", "b", "c")
    sentences = Source.from_arrays(
        "mine", classes=2, train=(x, np.array([0, 1])), task="text_classification", vocabulary_size=5, vocabulary=names
    ).for_masked_lm()
    assert sentences.spec.vocabulary == (*names, "<mask>") and sentences.spec.classes == 6
    np.testing.assert_array_equal(sentences.arrays("train")[1], x)

    (tmp_path / "input.txt").write_text("abcab" * 20)
    characters = for_model.load("bert", "characters", tmp_path, steps=4)
    assert characters.spec.vocabulary == ("<padding>", "a", "b", "c", "<mask>")
    np.testing.assert_array_equal(characters.arrays("train")[0][:2], [[1, 2, 3, 1], [2, 1, 2, 3]])
    assert characters.spec.target_shape == (4,) and characters.for_masked_lm() is characters


def test_the_vocabulary_of_a_run_is_read_again(tmp_path):
    from tfdist.data.formats import text

    (tmp_path / "input.txt").write_text("abcab" * 20)
    first = for_model.load("bert", "characters", tmp_path, steps=4)
    text.write_vocabulary(tmp_path / "vocabulary.txt", first.spec.vocabulary)
    again = for_model.load("bert", "characters", tmp_path, steps=4, vocabulary=str(tmp_path / "vocabulary.txt"))
    assert again.spec == first.spec
    np.testing.assert_array_equal(again.arrays("train")[0], first.arrays("train")[0])


def test_another_process_makes_the_same_source_from_its_origin(tmp_path):
    (tmp_path / "input.txt").write_text("abcab" * 20)
    source = for_model.load("bert", "characters", tmp_path, steps=4)
    again = data.load_origin(source.origin)
    assert again.spec == source.spec and again.origin == source.origin


def test_texts_that_are_read_by_number_are_masked_alike():
    spec = DataSpec("texts", "text_classification", (6,), 2, {"train": 50}, vocabulary_size=20)
    x = np.random.default_rng(0).integers(2, 20, (50, 6)).astype(np.int32)
    y = np.zeros(50, np.int32)
    indexed = IndexedSource(spec, lambda split, indices: (x[indices], y[indices])).for_masked_lm()
    stored = Source(spec, lambda split, count: (x[:count], y[:count])).for_masked_lm()
    for seen, expected in zip(batches(indexed, size=8, seed=2), batches(stored, size=8, seed=2), strict=True):
        np.testing.assert_array_equal(seen, expected)


def test_a_batch_in_which_no_word_is_chosen_has_a_finite_loss(source):
    loss = tasks._module(source.spec).loss(source.spec)
    assert float(loss(np.full((2, 3), masking.NOT_CHOSEN), np.ones((2, 3, WORDS), np.float32))) == 0


def test_what_cannot_be_masked_is_refused():
    with pytest.raises(UsageError, match="`digits` is for classification, and has no texts of which words"):
        data.load("digits").for_masked_lm()
    buckets = data.load("synthetic", task="text_classification", buckets=True)
    with pytest.raises(
        UsageError, match=r"have different widths, in which no words are masked\n\nhint: load .*`buckets`"
    ):
        buckets.for_masked_lm()


def test_tokens_per_example_leave_padding_out(source):
    words, _ = source.arrays("train")
    assert source.tokens_per_example("train") == (words != 0).sum() / len(words)
    translation = data.load("synthetic", task="translation", train=9, length=5)
    assert translation.tokens_per_example("train") == (translation.arrays("train")[1] != 0).sum() / 9
    assert data.load("synthetic", task="characters", length=7).tokens_per_example("train") == 7
    assert data.load("digits").tokens_per_example("train") is None
