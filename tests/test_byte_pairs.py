"""Byte pairs: every text comes back, the vocabulary depends on the text alone, and it is that of the training part."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from tfdist import data
from tfdist.data.formats import byte_pairs
from tfdist.data.formats import text as texts
from tfdist.errors import DataError, UsageError
from tfdist.tasks import characters

TEXT = "the lowest of the low, lower than the rest;\nnew and newer, the newest in the world\n" * 4


def test_the_synopsis_runs():
    result = doctest.testmod(byte_pairs)
    assert result.attempted and not result.failed


@given(some.text(max_size=60))
def test_every_text_comes_back(text):
    tokenizer = byte_pairs.BytePairs(byte_pairs.learned(text + TEXT, 290))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_most_frequent_pairs_are_joined_as_in_the_paper():
    """Figure 1 of Sennrich and others, with a space in place of their sign for the end of a word."""
    counts = {"low": 5, "lower": 2, "newest": 6, "widest": 3}
    text = "\n".join(word for word, count in counts.items() for _ in range(count))
    joined = byte_pairs.learned(text, 256 + 3)[256:]
    assert joined == ("es", "est", "lo")


def test_a_longer_vocabulary_begins_with_the_shorter_one():
    longer = byte_pairs.learned(TEXT, 300)
    assert byte_pairs.learned(TEXT, 270) == longer[:270] and len(set(longer)) == len(longer)
    assert byte_pairs.learned(TEXT, 256) == byte_pairs.BYTES


def test_pairs_that_occur_once_are_not_joined():
    assert byte_pairs.learned("abcdef", 300) == byte_pairs.BYTES


def test_the_text_that_was_learned_is_encoded_as_it_was_joined():
    vocabulary = byte_pairs.learned(TEXT, 280)
    tokens = byte_pairs.BytePairs(vocabulary).encode(TEXT)
    assert len(tokens) < len(TEXT) / 2 and max(tokens) == len(vocabulary) - 1


def test_a_cut_text_is_decoded_with_replacement_characters():
    tokenizer = byte_pairs.BytePairs(byte_pairs.BYTES)
    assert tokenizer.decode(tokenizer.encode("aé")[:-1]) == "a\N{REPLACEMENT CHARACTER}"


def test_a_vocabulary_survives_its_file(tmp_path):
    vocabulary = byte_pairs.learned(TEXT, 300)
    texts.write_vocabulary(tmp_path / "vocabulary.txt", vocabulary)
    assert byte_pairs.BytePairs.read(tmp_path / "vocabulary.txt").vocabulary == vocabulary
    texts.write_vocabulary(tmp_path / "words.txt", ("a", "b"))
    with pytest.raises(DataError, match="2 tokens does not begin with the 256 bytes\n\nhint: "):
        byte_pairs.BytePairs.read(tmp_path / "words.txt")


@pytest.fixture
def folder(tmp_path):
    # The last tenth has words that the rest does not have.
    (tmp_path / "input.txt").write_text(TEXT * 9 + "zzyzx é " * 40)
    return tmp_path


def text_of(source, split):
    x, _ = source.arrays(split)
    return "".join(byte_pairs.BytePairs(source.spec.vocabulary).decode(row) for row in x)


def test_the_characters_of_a_text_may_be_bytes_or_byte_pairs(folder):
    of = {
        tokens: data.load("characters", folder, tokens=tokens, vocabulary_size=270, steps=8)
        for tokens in ("characters", "bytes", "bpe")
    }
    assert of["bytes"].spec.classes == 256 and of["bpe"].spec.classes == 270
    assert of["bytes"].spec.examples["train"] > 1.9 * of["bpe"].spec.examples["train"]
    for source in (of["bytes"], of["bpe"]):
        assert (TEXT * 9).startswith(text_of(source, "train"))
        x, y = source.arrays("train")
        np.testing.assert_array_equal(x.ravel()[1:], y.ravel()[:-1])
    # Only the training part was counted.
    assert not any("zz" in token for token in of["bpe"].spec.vocabulary[256:])
    assert not of["characters"].spec.byte_tokens


def test_another_text_is_read_with_the_vocabulary_of_an_earlier_run(folder, tmp_path):
    first = data.load("characters", folder, tokens="bpe", vocabulary_size=270, steps=8)
    texts.write_vocabulary(tmp_path / "vocabulary.txt", first.spec.vocabulary)
    (tmp_path / "other.txt").write_text("a newer world, ô\n" * 20)
    options = {"file": "other.txt", "steps": 8, "vocabulary": str(tmp_path / "vocabulary.txt")}
    again = data.load("characters", folder, tokens="bpe", **options)
    assert again.spec.vocabulary == first.spec.vocabulary
    assert "a newer world, ô\n" in text_of(again, "train")
    known = data.load("characters", folder, steps=8).spec.vocabulary
    texts.write_vocabulary(tmp_path / "vocabulary.txt", known)
    with pytest.raises(DataError, match=r"lacks `ô` of the text\n\nhint: .*tokens=bytes"):
        data.load("characters", folder, **options)


def test_fewer_tokens_than_bytes_are_refused(folder):
    with pytest.raises(UsageError, match="`vocabulary_size` is 100, fewer than the 256 bytes"):
        data.load("characters", folder, tokens="bpe", vocabulary_size=100)
    with pytest.raises(UsageError, match="cannot have `words` as `tokens`"):
        data.load("characters", folder, tokens="words")


def test_losses_per_byte_compare_vocabularies(folder):
    """A model that gives each byte a probability of 1/256 has the same loss per byte with every vocabulary."""
    source = data.load("characters", folder, tokens="bpe", vocabulary_size=270, steps=8)
    (metric,) = [metric for metric in characters.metrics(source.spec) if "per_byte" in getattr(metric, "name", "")]
    _, y = source.arrays("train")
    lengths = np.array([len(token) for token in source.spec.vocabulary])
    # The other classes have the rest of the probability, so that the logits are log probabilities.
    chosen = -np.log(256) * lengths[y]
    logits = np.log((1 - np.exp(chosen)) / (len(lengths) - 1))[..., None] * np.ones(len(lengths))
    np.put_along_axis(logits, y[..., None], chosen[..., None], axis=-1)
    metric.update_state(y, logits.astype("float32"))
    assert float(metric.result()) == pytest.approx(np.log(256), rel=1e-5)
    of_bytes = data.load("characters", folder, tokens="bytes", steps=8)
    assert not any("per_byte" in getattr(metric, "name", "") for metric in characters.metrics(of_bytes.spec))
