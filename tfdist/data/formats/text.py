"""Sources of labelled sentences and of translated sentences: their words, vocabularies and tokens.

Synopsis:

    >>> words("It's good; isn't it?")
    ["it's", 'good', ';', "isn't", 'it', '?']
    >>> vocabulary = Vocabulary.of([["a", "b", "a"], ["c"]], size=4)
    >>> vocabulary.tokens
    ('<padding>', '<unknown>', 'a', 'b')
    >>> vocabulary.numbers(["a", "z"])
    [2, 1]
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tfdist import files
from tfdist.data.input import padding
from tfdist.data.input.arrays import Arrays
from tfdist.data.input.source import Source
from tfdist.data.spec import END, PADDING, START, UNKNOWN
from tfdist.errors import DataError

# The first tokens of the vocabulary of targets, which are generated word by word, and of that of inputs.
OF_TARGET = ("<padding>", "<unknown>", "<start>", "<end>")
OF_INPUT = OF_TARGET[:2]

_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
_MARKUP = re.compile(r"<[A-Za-z/][^<>]*>")
_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*|[^\w\s]")

# The words and the label of each sentence.
Sentences = list[tuple[list[str], int]]
# The words of each sentence, and those of its translation.
Pairs = list[tuple[list[str], list[str]]]


def labelled(
    name: str,
    parts: Mapping[str, Sentences],
    classes: int,
    *,
    length: int,
    words: int,
    buckets: bool,
    vocabulary: str | None,
    skipped: Sequence[str] = (),
    class_names: tuple[str, ...] = (),
) -> Source:
    """A source for text classification; for arguments that are not listed see `tfdist.data.sources.sentences.load`.

    Args:
        name: the dataset's name.
        parts: the sentences of each split, at least of "train".
        skipped: the bad examples that were left out, one sentence each.
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
        skipped=skipped,
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
    skipped: Sequence[str] = (),
) -> Source:
    """A source for translation; for arguments that are not listed see `tfdist.data.sources.parallel_text.load`.

    Args:
        name: the dataset's name.
        parts: the pairs of each split, at least of "train".
        skipped: the bad examples that were left out, one sentence each.
    """
    of_source = _vocabulary(vocabulary, (source for source, _ in parts["train"]), words, OF_INPUT)
    of_target = _vocabulary(target_vocabulary, (target for _, target in parts["train"]), words, OF_TARGET)

    def arrays(pairs: Pairs) -> Arrays:
        source = padding.padded([of_source.numbers(sentence) for sentence, _ in pairs], length)
        targets = [of_target.numbers(sentence)[:length] for _, sentence in pairs]
        shifted = padding.padded([[START, *target] for target in targets], length + 1)
        return {"source": source, "target": shifted}, padding.padded([[*target, END] for target in targets], length + 1)

    splits: dict[str, Any] = {split: arrays(pairs) for split, pairs in parts.items()}
    return Source.from_arrays(
        name,
        classes=len(of_target.tokens),
        task="translation",
        bucketed=buckets,
        skipped=skipped,
        vocabulary_size=len(of_source.tokens),
        vocabulary=of_source.tokens,
        target_vocabulary=of_target.tokens,
        ignored_class=PADDING,
        **splits,
    )


def words(sentence: str) -> list[str]:
    """The words and punctuation marks of a sentence, in lower case and without markup such as `<br />`."""
    return _WORD.findall(_MARKUP.sub(" ", sentence).lower())


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary, whose first two tokens stand for padding and for unknown words.

    Attributes:
        tokens: the tokens, by number.
    """

    tokens: tuple[str, ...]

    @classmethod
    def of(cls, sentences: Iterable[Sequence[str]], size: int, specials: Sequence[str] = OF_INPUT) -> Vocabulary:
        """The vocabulary of the most frequent words; equally frequent words are in alphabetical order.

        Args:
            sentences: sequences of words.
            size: the largest number of tokens, including the special tokens.
            specials: the first tokens, `OF_INPUT` or `OF_TARGET`.
        """
        counts = Counter(word for sentence in sentences for word in sentence)
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        return cls((*specials, *ordered[: max(0, size - len(specials))]))

    def numbers(self, sentence: Sequence[str]) -> list[int]:
        """The numbers of a sentence's words."""
        return [self._number.get(word, UNKNOWN) for word in sentence]

    @cached_property
    def _number(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.tokens)}


def write_vocabulary(path: Path, tokens: Sequence[str]) -> None:
    """Writes one word per line, atomically; line breaks and backslashes are escaped."""
    escaped = (re.sub(r"[\\\n\r]", lambda match: _ESCAPES[match[0]], token) for token in tokens)
    files.write_text(path, "".join(f"{token}\n" for token in escaped))


def read_vocabulary(path: Path) -> tuple[str, ...]:
    """Reads what `write_vocabulary` wrote.

    Raises:
        DataError: the file cannot be read, or it is not a vocabulary.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = file.read().split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The vocabulary `{path}` cannot be read: {error}", "train again without it") from error
    unescaped = {escaped: character for character, escaped in _ESCAPES.items()}
    tokens = tuple(re.sub(r"\\[\\nr]", lambda match: unescaped[match[0]], line) for line in lines)
    if len(set(tokens)) != len(tokens) or not tokens:
        raise DataError(
            f"The vocabulary `{path}` has {len(tokens)} lines, {len(set(tokens))} of them different",
            "write each word once, on its own line",
        )
    return tokens


def keep_vocabulary(path: Path, tokens: Sequence[str]) -> None:
    """Writes the vocabulary of a new run, or checks that a resumed run has the same vocabulary.

    Raises:
        DataError: `path` has other words.
        OSError: the file cannot be written.
    """
    if not os.path.lexists(path):
        return write_vocabulary(path, tokens)
    files.require_regular(path)
    if read_vocabulary(path) != tuple(tokens):
        raise DataError(
            f"The vocabulary of the training data differs from `{path}`, with which the run began",
            "resume the run on the same files, or begin a new run",
        )


def _vocabulary(file: str | None, sentences: Iterable[list[str]], size: int, specials: Sequence[str]) -> Vocabulary:
    if file is not None:
        return Vocabulary(read_vocabulary(Path(file)))
    return Vocabulary.of(sentences, size, specials)
