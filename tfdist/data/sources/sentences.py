"""Text files of labelled sentences, in three common layouts of sentiment datasets.

| layout | files | line |
|---|---|---|
| rt-polarity | one per class: `--data-option train=rt-polarity.neg,rt-polarity.pos` | a sentence |
| SST-2 | one per split: `--data-option train=stsa.binary.train` | label, space, sentence |
| tab-separated | one per split: `--data-option train=imdb_train_6000.tsv.xz` | label, tab, ..., tab, sentence |

Sources: B. Pang and L. Lee, "Seeing Stars", ACL 2005; R. Socher and others, "Recursive Deep Models for Semantic
Compositionality Over a Sentiment Treebank", EMNLP 2013; A. Maas and others, "Learning Word Vectors for Sentiment
Analysis", ACL 2011.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path

import numpy as np

from tfdist.data.formats import local_files, text
from tfdist.data.input.bad_examples import BadExamples
from tfdist.data.input.source import Source
from tfdist.errors import UsageError
from tfdist.options import Count, CountOrZero

TASKS = ("text_classification",)
FILES = "local"


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    train: str,
    validation: str | None = None,
    test: str | None = None,
    classes: Count = 2,
    encoding: str = "utf-8",
    folds: CountOrZero = 0,
    fold: CountOrZero = 0,
    length: Count = 64,
    words: Count = 20_000,
    buckets: bool = False,
    vocabulary: str | None = None,
    on_bad_example: str = "fail",
) -> Source:
    """x int32 `[N, length]`, padded with 0 at the end, y int32 `[N]`.

    Args:
        data_dir: the folder.
        train: the training file; or several, separated by commas: one per class, in the order of the classes.
        validation: the same for validation; None uses the last tenth of the shuffled training sentences.
        test: the same for the test.
        classes: the number of classes.
        encoding: the encoding of the files.
        folds: the number of parts of the shuffled training sentences for cross-validation.
        fold: the part that is the test split, from 0.
        length: the largest number of words per sentence.
        words: the largest number of words in the vocabulary, including padding and unknown words.
        buckets: make batches of sentences of similar lengths.
        vocabulary: a file with the vocabulary of an earlier run; None makes one from the training sentences.
        on_bad_example: "fail" or "skip".

    Raises:
        UsageError: no folder is given, or `fold` and `folds` are out of range.
        DataError: a file does not exist, a label is outside the classes, or a line has another encoding.
    """
    directory, bad = local_files.folder(data_dir, "sentences"), BadExamples(on_bad_example)
    _check_folds(folds, fold, test)
    names_of = {"train": train, "validation": validation, "test": test}
    parts = {
        split: _read_all(local_files.find(directory, names, "sentences", split), classes, encoding, bad)
        for split, names in names_of.items()
        if names
    }
    if folds:
        parts["train"], parts["test"] = _split(parts["train"], folds, fold)
    if not validation:
        parts["train"], parts["validation"] = _split(parts["train"], 10, 0)
    return text.labelled(
        "sentences",
        parts,
        classes,
        length=length,
        words=words,
        buckets=buckets,
        vocabulary=vocabulary,
        skipped=bad.sentences,
    )


def _check_folds(folds: int, fold: int, test: str | None) -> None:
    if folds and test:
        raise UsageError("`folds` and `test` are both set", "use only one of them: a fold is the test split of its run")
    if not 0 <= fold < max(folds, 1) or folds == 1:
        raise UsageError(f"`fold` is {fold} of {folds}", "use 2 folds or more, and a fold from 0 to folds - 1")


def _read_all(files: list[Path], classes: int, encoding: str, bad: BadExamples) -> text.Sentences:
    """The sentences of a split: one file in its order, or several files, one per class, shuffled."""
    sentences: text.Sentences = []
    for index, path in enumerate(files):
        sentences += _read(path, index, len(files), classes, encoding, bad)
    if len(files) == 1:
        return sentences
    # Shuffled, so that the first examples have all classes.
    return [sentences[index] for index in np.random.default_rng(1).permutation(len(sentences))]


def _read(
    path: Path, index: int, count: int, classes: int, encoding: str, bad: BadExamples
) -> Iterator[tuple[list[str], int]]:
    """The words and the label of each sentence in a file, which is number `index` of the `count` files of a split."""
    for number, line in local_files.lines(path, encoding, bad):
        if line is None or not line.strip():
            continue
        label, sentence = (str(index), line) if count > 1 else _label_and_sentence(line)
        if not (label.isdigit() and int(label) < classes):
            bad.add(f"Line {number} of `{path}` has the label `{label}`, outside the {classes} classes")
            continue
        yield text.words(sentence), int(label)


def _label_and_sentence(line: str) -> tuple[str, str]:
    """The label and the sentence in a line: with tabs, the first and the last field; else before and after a space."""
    if "\t" in line:
        label, *_, sentence = line.split("\t")
    else:
        label, _, sentence = line.partition(" ")
    return label, sentence


def _split(sentences: text.Sentences, parts: int, part: int) -> tuple[text.Sentences, text.Sentences]:
    """All sentences except one part of `parts`, and that part; deterministic for the same sentences."""
    order = np.random.default_rng(0).permutation(len(sentences))
    inside = np.zeros(len(sentences), bool)
    inside[order[part::parts]] = True
    return (
        [sentence for sentence, out in zip(sentences, inside, strict=True) if not out],
        [sentence for sentence, out in zip(sentences, inside, strict=True) if out],
    )
