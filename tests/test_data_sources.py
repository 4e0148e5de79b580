"""Sources of plain files, on real data, and made-up examples for every task."""

from __future__ import annotations

import collections
import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest

import tfdist.data
from tests.shared_data import FILES, needs
from tfdist.data.formats import text
from tfdist.data.input import padding
from tfdist.data.input.arrays import main_input
from tfdist.data.spec import END, PADDING, START, TASKS, UNKNOWN
from tfdist.errors import DataError, UnknownNameError, UsageError


def load(name: str, folder: Path | str, **options):
    return tfdist.data.load(name, folder, **options)


def words_of(tokens: np.ndarray, vocabulary: tuple[str, ...]) -> list[str]:
    return [vocabulary[token] for token in tokens if token != PADDING]


# CIFAR's binary files


@needs("cifar10")
def test_cifar_binary_reads_the_pixels_of_each_record_packed_or_not(tmp_path):
    data = load("cifar_binary", FILES / "cifar10")
    assert data.spec.examples == {"train": 9000, "validation": 1000, "test": 2000}
    assert data.spec.class_names[:3] == ("airplane", "automobile", "bird")
    packed = (FILES / "cifar10" / "test_2000.bin.xz").read_bytes()
    records = np.frombuffer(lzma.decompress(packed), np.uint8).reshape(-1, 3073)
    x, y = data.arrays("test")
    assert x.shape == (2000, 32, 32, 3) and x.dtype == np.float32 and (x.min(), x.max()) == (0, 1)
    np.testing.assert_array_equal(y, records[:, 0])
    np.testing.assert_array_equal(x[7, 5, 9], records[7, 1:].reshape(3, 32, 32)[:, 5, 9] / np.float32(255))
    (tmp_path / "test_batch.bin").write_bytes(records[:3].tobytes())
    (tmp_path / "data_batch_1.bin").write_bytes(records[3:13].tobytes())
    (tmp_path / "data_batch_2.bin").write_bytes(records[13:23].tobytes())
    plain = load("cifar_binary", tmp_path)
    assert plain.spec.examples == {"train": 18, "validation": 2, "test": 3} and plain.spec.class_names == ()
    np.testing.assert_array_equal(plain.arrays("test")[0], x[:3])
    np.testing.assert_array_equal(plain.arrays("train")[0], x[3:21])


def cifar_records(labels: list[list[int]]) -> bytes:
    return b"".join(bytes(label) + bytes(3072) for label in labels)


def test_cifar_100_counts_the_fine_label(tmp_path):
    (tmp_path / "train.bin").write_bytes(cifar_records([[1, 50 + number] for number in range(10)]))
    (tmp_path / "test.bin").write_bytes(cifar_records([[3, 99]]))
    data = load("cifar_binary", tmp_path, classes=100)
    assert data.arrays("train")[1].tolist() == list(range(50, 59)) and data.arrays("test")[1].tolist() == [99]
    with pytest.raises(UsageError, match="CIFAR has 10 or 100 classes, but `classes` is 20"):
        load("cifar_binary", tmp_path, classes=20)


def test_a_bad_record_of_cifar_ends_the_run_or_is_left_out(tmp_path):
    train = tmp_path / "data_batch_1.bin"
    train.write_bytes(cifar_records([[1], [2], [10], [3]]) + b"half an example")
    (tmp_path / "test_batch.bin").write_bytes(cifar_records([[1]]))
    with pytest.raises(DataError, match=f"`{train}` is truncated: 15 bytes follow its 4 complete examples") as caught:
        load("cifar_binary", tmp_path)
    assert "`--on-bad-example skip`" in caught.value.hint
    data = load("cifar_binary", tmp_path, validation=0, on_bad_example="skip")
    assert data.arrays("train")[1].tolist() == [1, 2, 3]
    assert len(data.skipped) == 2 and f"Example 2 of `{train}` has the label 10" in data.skipped[1]


# Sentences


@needs("mr")
def test_rt_polarity_has_one_file_a_class_and_folds_that_are_all_of_it_once():
    options = {"train": "rt-polarity.neg,rt-polarity.pos", "encoding": "latin-1", "folds": 10}
    counts: collections.Counter[bytes] = collections.Counter()
    for fold in (0, 9):
        data = load("sentences", FILES / "mr", fold=fold, **options)
        assert sum(data.spec.examples.values()) == 10_662
        assert abs(data.spec.examples["test"] - 1066) <= 1 and data.spec.vocabulary_size < 20_000
        x, y = data.arrays("test")
        assert abs(y.mean() - 0.5) < 0.05 and x.dtype == np.int32
        assert abs(data.limit(500).arrays("train")[1].mean() - 0.5) < 0.1
        vocabulary = data.spec.vocabulary
        counts.update(" ".join(words_of(row, vocabulary)).encode() for row in x)
    assert len(counts) > 2100  # two folds have no sentence in common
    assert data.spec.vocabulary[:3] == ("<padding>", "<unknown>", ".")


@needs("sst2")
def test_sst2_has_a_label_and_a_sentence_a_line():
    options = {"train": "stsa.binary.train", "validation": "stsa.binary.dev", "test": "stsa.binary.test"}
    data = load("sentences", FILES / "sst2", **options)
    assert data.spec.examples == {"train": 6920, "validation": 872, "test": 1821}
    assert data.arrays("train")[1].sum() == 3610 and data.arrays("test")[1].sum() == 909
    first = (FILES / "sst2" / "stsa.binary.train").read_text().splitlines()[0]
    x, y = data.arrays("train")
    assert str(y[0]) == first[0]
    assert words_of(x[0], data.spec.vocabulary) == text.words(first[2:])


@needs("imdb")
@pytest.mark.slow
def test_tab_separated_sentences_are_read_packed_cut_and_without_markup():
    data = load(
        "sentences", FILES / "imdb", train="imdb_test_4000.tsv.xz", test="imdb_test_4000.tsv.xz", length=100, words=5000
    )
    assert data.spec.examples == {"train": 3600, "validation": 400, "test": 4000}
    assert data.spec.vocabulary_size == 5000 and data.spec.input_shape == (100,)
    x, y = data.arrays("test")
    assert y.sum() == 2000 and x.max() < 5000 and (padding.lengths(x) == 100).mean() > 0.8
    assert "br" not in data.spec.vocabulary[:1000]


def write_sentences(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "train.txt"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return path


GOOD = [f"{number % 2} sentence number {number}" for number in range(20)]


def test_a_line_that_is_not_in_its_encoding_ends_the_run_or_is_left_out(tmp_path):
    path = write_sentences(tmp_path, *GOOD, b"1 caf\xe9")
    with pytest.raises(DataError, match=f"Line 21 of `{path}` is not `utf-8`: byte 0xe9 at 5") as caught:
        load("sentences", tmp_path, train="train.txt")
    assert "`--data-option encoding=latin-1`" in caught.value.hint
    data = load("sentences", tmp_path, train="train.txt", on_bad_example="skip")
    assert sum(data.spec.examples.values()) == 20 and "byte 0xe9" in data.skipped[0]
    assert "café" in load("sentences", tmp_path, train="train.txt", encoding="latin-1").spec.vocabulary
    with pytest.raises(UsageError, match="There is no encoding `latin-99`"):
        load("sentences", tmp_path, train="train.txt", encoding="latin-99")


@pytest.mark.parametrize("label", ["2", "-1", "good"])
def test_a_label_outside_the_classes_ends_the_run_or_is_left_out(tmp_path, label):
    path = write_sentences(tmp_path, *GOOD, f"{label} never seen")
    with pytest.raises(DataError, match=f"Line 21 of `{path}` has the label `{label}`, outside the 2 classes"):
        load("sentences", tmp_path, train="train.txt")
    assert len(load("sentences", tmp_path, train="train.txt", on_bad_example="skip").skipped) == 1
    with pytest.raises(UnknownNameError, match="policy for bad examples `ignore`"):
        load("sentences", tmp_path, train="train.txt", on_bad_example="ignore")


def test_what_cannot_be_asked_of_sentences_is_refused(tmp_path):
    write_sentences(tmp_path, *GOOD)
    with pytest.raises(UsageError, match="`sentences` reads your own files, but no folder is given"):
        tfdist.data.load("sentences", train="train.txt")
    with pytest.raises(UsageError, match="The dataset `sentences` needs the option `train`"):
        tfdist.data.load("sentences", tmp_path)
    with pytest.raises(DataError, match=f"no file `dev.txt` in `{tmp_path}`, which has `train.txt`"):
        load("sentences", tmp_path, train="train.txt", validation="dev.txt")
    with pytest.raises(DataError, match="is not a folder"):
        load("sentences", tmp_path / "nowhere", train="train.txt")
    for folds, fold in ((10, 10), (1, 0), (0, 1)):
        with pytest.raises(UsageError, match=f"`fold` is {fold} of {folds}"):
            load("sentences", tmp_path, train="train.txt", folds=folds, fold=fold)
    with pytest.raises(UsageError, match="`folds` and `test` are both set"):
        load("sentences", tmp_path, train="train.txt", test="train.txt", folds=10)


def test_a_damaged_archive_is_named(tmp_path):
    path = tmp_path / "train.txt.gz"
    path.write_bytes(gzip.compress("\n".join(GOOD).encode())[:-20])
    with pytest.raises(DataError, match=f"`{path}` cannot be read"):
        load("sentences", tmp_path, train="train.txt.gz")


# Vocabularies


def test_a_vocabulary_is_ordered_by_frequency_then_alphabet_and_is_kept(tmp_path):
    sentences = [["b", "a", "c"], ["a", "b"], ["d"]]
    vocabulary = text.Vocabulary.of(sentences, 5)
    assert vocabulary.tokens == ("<padding>", "<unknown>", "a", "b", "c")
    assert vocabulary == text.Vocabulary.of(reversed(sentences), 5)
    assert vocabulary.numbers(["d", "c"]) == [UNKNOWN, 4]
    for tokens in (vocabulary.tokens, ("\n", "\\n", "\\", "\r", " ", "\u2028", "é")):
        text.write_vocabulary(tmp_path / "vocabulary.txt", tokens)
        assert text.read_vocabulary(tmp_path / "vocabulary.txt") == tokens


def test_a_vocabulary_that_is_missing_or_names_a_word_twice_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        text.read_vocabulary(tmp_path / "none.txt")
    (tmp_path / "twice.txt").write_text("a\nb\na\n")
    with pytest.raises(DataError, match="has 3 lines, 2 of them different"):
        text.read_vocabulary(tmp_path / "twice.txt")


def test_a_run_keeps_its_vocabulary_and_goes_on_with_no_other(tmp_path):
    for _ in range(2):
        text.keep_vocabulary(tmp_path / "vocabulary.txt", ("a", "b"))
    with pytest.raises(DataError, match="with which the run began") as caught:
        text.keep_vocabulary(tmp_path / "vocabulary.txt", ("a", "c"))
    assert "resume the run on the same files" in caught.value.hint


def test_a_kept_vocabulary_gives_the_same_numbers_on_other_sentences(tmp_path):
    write_sentences(tmp_path, *GOOD)
    first = load("sentences", tmp_path, train="train.txt")
    text.write_vocabulary(tmp_path / "vocabulary.txt", first.spec.vocabulary)
    write_sentences(tmp_path, *GOOD[:5], *(f"0 other words {number}" for number in range(15)))
    again = load("sentences", tmp_path, train="train.txt", vocabulary=str(tmp_path / "vocabulary.txt"))
    assert again.spec.vocabulary == first.spec.vocabulary


# Parallel text


@needs("multi30k")
def test_parallel_text_reads_pairs_packed_or_not(tmp_path):
    for language in ("en", "de"):
        with gzip.open(FILES / "multi30k" / f"val.{language}.gz") as file:
            (tmp_path / f"val.{language}").write_bytes(file.read())
    data = load("parallel_text", FILES / "multi30k", train="val.en.gz,val.de.gz", words=2000, length=20)
    assert data.spec.examples["train"] == 1014 and data.spec.ignored_class == PADDING
    assert (data.spec.vocabulary_size, data.spec.classes) == (1974, 2000)
    assert data.spec.input_shape == (20,) and data.spec.target_shape == (21,)
    x, y = data.arrays("train")
    plain = load("parallel_text", tmp_path, train="val.en,val.de", words=2000, length=20).arrays("train")
    np.testing.assert_array_equal(plain[0]["source"], x["source"])
    english, german = ((tmp_path / f"val.{language}").read_text().splitlines()[0] for language in ("en", "de"))
    known = [word if word in data.spec.vocabulary else "<unknown>" for word in text.words(english)]
    assert words_of(x["source"][0], data.spec.vocabulary) == known[:20]
    target = [word if word in data.spec.target_vocabulary else "<unknown>" for word in text.words(german)][:20]
    assert words_of(y[0], data.spec.target_vocabulary) == [*target, "<end>"]
    assert words_of(x["target"][0], data.spec.target_vocabulary) == ["<start>", *target]


def test_the_target_is_one_word_later_than_what_the_decoder_sees():
    x, y = tfdist.data.load("synthetic", task="translation", train=50, words=30, length=6).arrays("train")
    assert (x["target"][:, 0] == START).all() and ((y == END).sum(axis=1) == 1).all()
    there = x["target"][:, 1:] != PADDING
    np.testing.assert_array_equal(x["target"][:, 1:][there], y[:, :-1][there])


def test_a_sentence_that_is_cut_has_an_end_too(tmp_path):
    (tmp_path / "a").write_text("one two three four\nfive\n")
    (tmp_path / "b").write_text("eins zwei drei vier\nsechs\n")
    data = load("parallel_text", tmp_path, train="a,b", length=2)
    x, y = data.arrays("train")
    assert [words_of(row, data.spec.vocabulary) for row in x["source"]] == [["one", "two"], ["five"]]
    seen, shall = ([words_of(row, data.spec.target_vocabulary) for row in rows] for rows in (x["target"], y))
    assert seen == [["<start>", "eins", "zwei"], ["<start>", "sechs"]]
    assert shall == [["eins", "zwei", "<end>"], ["sechs", "<end>"]]


def test_texts_that_are_not_parallel_are_refused_and_a_bad_line_takes_its_pair_along(tmp_path):
    (tmp_path / "a").write_bytes(b"one\ntwo\nthree\n")
    (tmp_path / "b").write_bytes(b"eins\nzw\xffei\ndrei\n")
    (tmp_path / "c").write_bytes(b"eins\nzwei\n")
    with pytest.raises(DataError, match=f"`{tmp_path}/a` has 3 lines, but `{tmp_path}/c` has 2"):
        load("parallel_text", tmp_path, train="a,c")
    with pytest.raises(UsageError, match="`train` of `parallel_text` is `a`, which is 1 files"):
        load("parallel_text", tmp_path, train="a")
    with pytest.raises(DataError, match=f"Line 2 of `{tmp_path}/b` is not `utf-8`"):
        load("parallel_text", tmp_path, train="a,b")
    data = load("parallel_text", tmp_path, train="a,b", on_bad_example="skip")
    assert data.spec.vocabulary[2:] == ("one", "three") and len(data.skipped) == 1


# Characters


@needs("tinyshakespeare")
def test_characters_are_the_text_without_its_tail():
    data = load("characters", FILES / "tinyshakespeare", steps=64)
    whole = (FILES / "tinyshakespeare" / "input.txt").read_text()
    assert data.spec.classes == data.spec.vocabulary_size == 65
    x, y = data.arrays("train")
    assert "".join(data.spec.vocabulary[token] for token in x.reshape(-1)) == whole[: x.size]
    assert "".join(data.spec.vocabulary[token] for token in y.reshape(-1)) == whole[1 : x.size + 1]
    assert x.size > 0.9 * len(whole) - 65
    first = data.arrays("validation")[0][0]
    begin = len(whole) - int(0.1 * len(whole))
    assert "".join(data.spec.vocabulary[token] for token in first) == whole[begin : begin + 64]


def test_a_text_that_is_too_short_or_no_text_is_refused(tmp_path):
    (tmp_path / "input.txt").write_bytes(b"short\nand br\xffken")
    with pytest.raises(DataError, match=r"Line 2 of `.*input.txt` is not `utf-8`: byte 0xff at 6"):
        load("characters", tmp_path)
    with pytest.raises(DataError, match="has 16 characters, too few for one example of 64 steps") as refused:
        load("characters", tmp_path, encoding="latin-1")
    assert "steps=14" in refused.value.hint
    assert load("characters", tmp_path, encoding="latin-1", steps=14).spec.examples["train"] == 1
    (tmp_path / "input.txt").write_text("a")
    with pytest.raises(DataError, match="has 1 characters, too few") as refused:
        load("characters", tmp_path)
    assert refused.value.hint == "use a longer text"


# Made up


@pytest.mark.parametrize("task", TASKS)
def test_synthetic_has_examples_for_every_task(task):
    data = tfdist.data.load("synthetic", task=task, train=50, validation=20, test=10)
    again = tfdist.data.load("synthetic", task=task, train=50, validation=20, test=10).arrays("train")
    assert data.spec.task == task
    for split, count in data.spec.examples.items():
        x, y = data.arrays(split)
        first = main_input(x)
        assert first.shape == (count, *data.spec.input_shape) and y.shape == (count, *data.spec.target_shape)
        assert first.dtype == (np.int32 if data.spec.vocabulary_size else np.float32)
        if data.spec.vocabulary_size:
            assert first.min() >= 0 and first.max() < data.spec.vocabulary_size
    np.testing.assert_array_equal(data.arrays("train")[1], again[1])
    assert not np.array_equal(data.arrays("train")[1][:10], data.arrays("test")[1])


def test_synthetic_targets_can_be_learned():
    x, mask = tfdist.data.load("synthetic", task="segmentation", train=50, classes=3).arrays("train")
    colours = np.stack([x[mask == label].mean(axis=0) for label in range(3)])
    nearest = np.argmin(((x[..., None, :] - colours) ** 2).sum(-1), axis=-1)
    assert (nearest == mask).mean() > 0.9
    x, y = tfdist.data.load("synthetic", task="text_classification", train=500, classes=4).arrays("train")
    votes = np.stack([((x % 4 == label) & (x != PADDING)).sum(axis=1) for label in range(4)], axis=1)
    assert (votes.argmax(axis=1) == y).mean() > 0.95
    x, y = tfdist.data.load("synthetic", task="translation", train=500, words=50).arrays("train")
    pairs = {(s, t) for s, t in zip(x["source"].reshape(-1), y[:, :-1].reshape(-1), strict=True) if s and t != END}
    assert len(pairs) == 50 - (END + 1)
    x, y = tfdist.data.load("synthetic", task="characters", train=500, classes=8).arrays("train")
    assert len({*zip(x.reshape(-1), y.reshape(-1), strict=True)}) <= 16 and set(np.unique(y)) == set(range(8))


def test_what_synthetic_cannot_make_is_refused():
    with pytest.raises(UnknownNameError, match="Unknown task `poetry`"):
        tfdist.data.load("synthetic", task="poetry")
    with pytest.raises(UsageError, match=r"`shape` is `\(16,\)`, but `segmentation` needs pictures"):
        tfdist.data.load("synthetic", task="segmentation", shape=(16,))
    with pytest.raises(UsageError, match="`buckets` is set, but all examples of `click_prediction` have the same size"):
        tfdist.data.load("synthetic", task="click_prediction", buckets=True)
    with pytest.raises(UsageError, match="`words` is 4, too few for `translation`"):
        tfdist.data.load("synthetic", task="translation", words=4)
