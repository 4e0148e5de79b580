"""Splits sentences into words, and numbers the words with a vocabulary.

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

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tfdist import files
from tfdist.data.spec import UNKNOWN
from tfdist.errors import DataError

SPECIALS = ("<padding>", "<unknown>", "<start>", "<end>")
# The first tokens of the vocabulary of inputs, and of that of targets, which are generated word by word.
OF_INPUT, OF_TARGET = SPECIALS[:2], SPECIALS

_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
_MARKUP = re.compile(r"<[A-Za-z/][^<>]*>")
_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*|[^\w\s]")


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
    if not path.exists():
        write_vocabulary(path, tokens)
    elif read_vocabulary(path) != tuple(tokens):
        raise DataError(
            f"The vocabulary of the training data differs from `{path}`, with which the run began",
            "resume the run on the same files, or begin a new run",
        )
