"""Makes a source of labelled sentences: vocabulary of the training sentences, tokens, padding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.data.formats.text import Vocabulary, read_vocabulary
from tfdist.data.input import padding
from tfdist.data.input.arrays import Arrays
from tfdist.data.input.bad_examples import BadExamples
from tfdist.data.input.source import Source

# The words and the label of each sentence.
Sentences = list[tuple[list[str], int]]


def source_of(
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
    """A source for text classification.

    Args:
        name: the dataset's name.
        parts: the sentences of each split; "train" must be there.
        classes: the number of classes.
        length: the largest number of words per sentence.
        words: the largest number of words in the vocabulary.
        buckets: make batches of sentences of similar lengths.
        vocabulary: a file with the vocabulary; `None` makes one from the training sentences.
        bad: the bad examples that were left out.
        class_names: one name per class, or none.
    """
    if vocabulary is None:
        known = Vocabulary.of((sentence for sentence, _ in parts["train"]), words)
    else:
        known = Vocabulary(read_vocabulary(Path(vocabulary)))

    def arrays(sentences: Sentences) -> Arrays:
        x = padding.padded([known.numbers(sentence) for sentence, _ in sentences], length)
        return x, np.array([label for _, label in sentences], np.int32)

    splits: dict[str, Any] = {split: arrays(sentences) for split, sentences in parts.items()}
    return Source.from_arrays(
        name,
        classes=classes,
        task="text_classification",
        bucketed=buckets,
        skipped=bad.sentences,
        vocabulary_size=len(known.tokens),
        vocabulary=known.tokens,
        class_names=class_names,
        **splits,
    )
