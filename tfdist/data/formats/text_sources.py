"""Makes sources of labelled sentences and of translated sentences: vocabularies, tokens, padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.data.formats import text
from tfdist.data.formats.text import OF_INPUT, OF_TARGET, Vocabulary
from tfdist.data.input import padding
from tfdist.data.input.arrays import Arrays
from tfdist.data.input.bad_examples import BadExamples
from tfdist.data.input.source import Source
from tfdist.data.spec import END, PADDING, START

# The words and the label of each sentence.
Sentences = list[tuple[list[str], int]]
# Each sentence and its translation.
Pairs = list[tuple[str, str]]


def labelled(
    name: str,
    parts: Mapping[str, Sentences],
    classes: int,
    *,
    length: int,
    words: int,
    buckets: bool,
    vocabulary: str | None,
    bad: BadExamples,
    class_names: tuple[str, ...] = (),
) -> Source:
    """A source for text classification; for arguments that are not listed see `tfdist.data.sources.sentences.load`.

    Args:
        name: the dataset's name.
        parts: the sentences of each split, at least of "train".
        bad: the bad examples that were left out.
        class_names: one name per class, or none.
    """
    of_input = _vocabulary(vocabulary, (sentence for sentence, _ in parts["train"]), words, OF_INPUT)

    def arrays(sentences: Sentences) -> Arrays:
        x = padding.padded([of_input.numbers(sentence) for sentence, _ in sentences], length)
        return x, np.array([label for _, label in sentences], np.int32)

    splits: dict[str, Any] = {split: arrays(sentences) for split, sentences in parts.items()}
    return Source.from_arrays(
        name,
        classes=classes,
        task="text_classification",
        bucketed=buckets,
        skipped=bad.sentences,
        vocabulary_size=len(of_input.tokens),
        vocabulary=of_input.tokens,
        class_names=class_names,
        **splits,
    )


def translated(
    name: str,
    parts: Mapping[str, Pairs],
    *,
    length: int,
    words: int,
    buckets: bool,
    vocabulary: str | None,
    target_vocabulary: str | None,
    bad: BadExamples,
) -> Source:
    """A source for translation; for arguments that are not listed see `tfdist.data.sources.parallel_text.load`.

    Args:
        name: the dataset's name.
        parts: the pairs of each split, at least of "train".
        bad: the bad examples that were left out.
    """
    in_words = {
        split: [(text.words(source), text.words(target)) for source, target in pairs] for split, pairs in parts.items()
    }
    of_source = _vocabulary(vocabulary, (source for source, _ in in_words["train"]), words, OF_INPUT)
    of_target = _vocabulary(target_vocabulary, (target for _, target in in_words["train"]), words, OF_TARGET)

    def arrays(pairs: list[tuple[list[str], list[str]]]) -> Arrays:
        source = padding.padded([of_source.numbers(sentence) for sentence, _ in pairs], length)
        targets = [of_target.numbers(sentence)[:length] for _, sentence in pairs]
        shifted = padding.padded([[START, *target] for target in targets], length + 1)
        return {"source": source, "target": shifted}, padding.padded([[*target, END] for target in targets], length + 1)

    splits: dict[str, Any] = {split: arrays(pairs) for split, pairs in in_words.items()}
    return Source.from_arrays(
        name,
        classes=len(of_target.tokens),
        task="translation",
        bucketed=buckets,
        skipped=bad.sentences,
        vocabulary_size=len(of_source.tokens),
        vocabulary=of_source.tokens,
        target_vocabulary=of_target.tokens,
        ignored_class=PADDING,
        **splits,
    )


def _vocabulary(file: str | None, sentences: Iterable[list[str]], size: int, specials: Sequence[str]) -> Vocabulary:
    if file is not None:
        return Vocabulary(text.read_vocabulary(Path(file)))
    return Vocabulary.of(sentences, size, specials)
