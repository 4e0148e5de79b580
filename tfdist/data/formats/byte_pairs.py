"""Byte-pair encoding: a vocabulary of frequent sequences of bytes, made from a text, and texts as tokens of it.

R. Sennrich, B. Haddow and A. Birch, "Neural machine translation of rare words with subword units", ACL 2016; over bytes
as in A. Radford and others, "Language models are unsupervised multitask learners", 2019, so that every text can be
encoded. A vocabulary begins with the 256 bytes. A token is a string with one character per byte (Latin-1).

Synopsis:

    >>> tokenizer = BytePairs(learned("low lower lowest", 259))
    >>> tokenizer.vocabulary[256:]
    ('lo', 'low', ' low')
    >>> tokenizer.encode("a low é")
    [97, 258, 32, 195, 169]
    >>> tokenizer.decode(tokenizer.encode("a low é"))
    'a low é'
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from tfdist.data.formats import text as texts
from tfdist.errors import DataError

BYTES = tuple(map(chr, range(256)))
# No token goes beyond one of these pieces: words, numbers and other signs, each with the space before it, and white
# space. They are so short that the time for a text is proportional to its length.
_PIECE = re.compile(r" ?[^\W\d]{1,64}| ?\d{1,64}| ?[^\w\s]{1,64}|\s{1,64}(?!\S)|\s{1,64}")

Pair = tuple[str, str]


class BytePairs:
    """Encodes texts as numbers of tokens, and decodes them.

    Args:
        vocabulary: the tokens by number, which begin with the 256 bytes; the others in the order in which they are
            joined.

    Raises:
        DataError: the vocabulary does not begin with the bytes.
    """

    def __init__(self, vocabulary: Sequence[str]):
        self.vocabulary = tuple(vocabulary)
        if self.vocabulary[:256] != BYTES:
            raise DataError(
                f"A vocabulary of {len(self.vocabulary)} tokens does not begin with the 256 bytes",
                "use a vocabulary that a run with `--data-option unit=bpe` has written",
            )
        self._pieces: dict[str, list[int]] = {}

    @classmethod
    def read(cls, path: Path | str) -> BytePairs:
        """Reads the `vocabulary.txt` of a run.

        Raises:
            DataError: the file cannot be read, or is not a vocabulary of bytes.
        """
        return cls(texts.read_vocabulary(Path(path)))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text: in each piece, the adjacent pair with the smallest number is joined, and so on."""
        tokens: list[int] = []
        for piece in _PIECE.findall(text):
            if piece not in self._pieces:
                self._pieces[piece] = self._encoded(piece)
            tokens += self._pieces[piece]
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; bytes that are not UTF-8, as at the ends of a cut text, are replacement characters."""
        return "".join(self.vocabulary[token] for token in tokens).encode("latin-1").decode("utf-8", "replace")

    @cached_property
    def _number(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.vocabulary)}

    def _encoded(self, piece: str) -> list[int]:
        parts, number, none = _bytes(piece), self._number, len(self.vocabulary)
        while len(parts) > 1:
            joined = [number.get(first + second, none) for first, second in itertools.pairwise(parts)]
            smallest = min(joined)
            if smallest == none:
                break
            position = joined.index(smallest)
            parts[position : position + 2] = [self.vocabulary[smallest]]
        return [number[part] for part in parts]


def learned(text: str, size: int) -> tuple[str, ...]:
    """A vocabulary of at most `size` tokens: the bytes, and one token after the other for the most frequent pair.

    Among equally frequent pairs, the first in the order of bytes is joined; a pair that occurs once is not. The result
    depends on the text and the size only.
    """
    counts = Counter(_PIECE.findall(text))
    words, frequencies = [_bytes(piece) for piece in counts], list(counts.values())
    pairs: Counter[Pair] = Counter()
    words_with: defaultdict[Pair, set[int]] = defaultdict(set)
    for number, word in enumerate(words):
        for pair in itertools.pairwise(word):
            pairs[pair] += frequencies[number]
            words_with[pair].add(number)
    queue = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(queue)
    vocabulary = dict.fromkeys(BYTES)
    while len(vocabulary) < size and queue:
        count, pair = heapq.heappop(queue)
        if -count != pairs[pair]:
            continue  # the pair was counted again later
        if -count < 2:
            break
        vocabulary[pair[0] + pair[1]] = None
        changed = set()
        for number in sorted(words_with.pop(pair)):
            before, after = words[number], _joined(words[number], pair)
            for sign, word in ((-1, before), (1, after)):
                for neighbours in itertools.pairwise(word):
                    pairs[neighbours] += sign * frequencies[number]
                    changed.add(neighbours)
            for neighbours in itertools.pairwise(after):
                words_with[neighbours].add(number)
            words[number] = after
        for neighbours in changed:
            if pairs[neighbours] > 0:
                heapq.heappush(queue, (-pairs[neighbours], neighbours))
    return tuple(vocabulary)


def _bytes(piece: str) -> list[str]:
    return list(piece.encode().decode("latin-1"))


def _joined(word: list[str], pair: Pair) -> list[str]:
    """`word` with each occurrence of `pair`, from the left, as one token."""
    result: list[str] = []
    for token in word:
        if result and (result[-1], token) == pair:
            result[-1] += token
        else:
            result.append(token)
    return result
