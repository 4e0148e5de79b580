"""Makes a source of sentence pairs: two vocabularies, tokens, padding, and the target shifted by one word."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.data.formats import text
from tfdist.data.formats.text import OF_INPUT, OF_TARGET, Vocabulary, read_vocabulary
from tfdist.data.input import padding
from tfdist.data.input.arrays import Arrays
from tfdist.data.input.bad_examples import BadExamples
from tfdist.data.input.source import Source
from tfdist.data.spec import END, PADDING, START

# A sentence and its translation.
Pairs = list[tuple[str, str]]


def source_of(
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
    """A source for translation.

    Args:
        name: the dataset's name.
        parts: the pairs of each split; "train" must be there.
        length: the largest number of words per sentence.
        words: the largest number of words in each vocabulary.
        buckets: make batches of sentences of similar lengths.
        vocabulary: a file with the source's vocabulary; `None` makes one from the training sentences.
        target_vocabulary: the same for the target.
        bad: the bad examples that were left out.
    """
    in_words = {
        split: [(text.words(source), text.words(target)) for source, target in pairs] for split, pairs in parts.items()
    }
    files = (vocabulary, target_vocabulary)
    of_source, of_target = (
        Vocabulary.of((pair[side] for pair in in_words["train"]), words, specials)
        if file is None
        else Vocabulary(read_vocabulary(Path(file)))
        for side, (file, specials) in enumerate(zip(files, (OF_INPUT, OF_TARGET), strict=True))
    )

    def arrays(pairs: list[tuple[list[str], list[str]]]) -> Arrays:
        source = padding.padded([of_source.numbers(sentence) for sentence, _ in pairs], length)
        targets = [of_target.numbers(sentence)[:length] for _, sentence in pairs]
        begun = padding.padded([[START, *target] for target in targets], length + 1)
        return {"source": source, "target": begun}, padding.padded([[*target, END] for target in targets], length + 1)

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
