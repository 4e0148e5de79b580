"""A text as a stream of characters, bytes or byte pairs, for predicting the next (A. Karpathy's char-rnn, 2015)."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Literal

import numpy as np

from tfdist.data.formats import byte_pairs, local_files, text
from tfdist.data.input import masking
from tfdist.data.input.arrays import Arrays
from tfdist.data.input.source import Source
from tfdist.errors import DataError, UsageError
from tfdist.options import Count, Fraction

Unit = Literal["characters", "bytes", "bpe"]

TASKS = ("characters",)
FILES = "local"


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    file: str = "input.txt",
    steps: Count = 64,
    validation: Fraction = 0.1,
    encoding: str = "utf-8",
    unit: Unit = "characters",
    vocabulary_size: Count = 512,
    vocabulary: str | None = None,
) -> Source:
    """x `[N, steps]`: consecutive pieces of the text; y `[N, steps]`: the same pieces one token later.

    Global batches of B examples read the text as B streams: row i of a batch is continued by row i of the next batch.
    The end of the text is not used if it does not fill all rows. A model without a state is trained on the pieces in
    random order.

    Args:
        data_dir: the folder.
        file: the name of the text file.
        steps: the number of tokens per example.
        validation: the fraction of the text, from the end, for validation.
        encoding: the encoding of the text.
        unit: what a token is: "characters", "bytes" of UTF-8, or "bpe", byte pairs learned from the training part.
        vocabulary_size: the largest number of tokens for "bpe", of which 256 are the bytes.
        vocabulary: a file with the vocabulary of an earlier run; None makes one.

    Raises:
        DataError: the file does not exist, has another encoding, has a character that the vocabulary lacks, or is too
            short for one example; or a vocabulary for bytes has other tokens.
        UsageError: `vocabulary_size` is below 256.
    """
    if vocabulary_size < len(byte_pairs.BYTES):
        raise UsageError(f"`vocabulary_size` is {vocabulary_size}, fewer than the 256 bytes", "use for example 512")
    directory = local_files.folder(data_dir, "characters")
    (path,) = local_files.find(directory, file, "characters", "file")[:1]
    content = local_files.text(path, encoding)
    first = len(content) - int(len(content) * validation)
    train, rest = content[:first], content[first:]
    known = _vocabulary(content, train, unit, vocabulary_size, vocabulary)
    pieces, others = (_pieces(_tokens(part, known, unit), steps) for part in (train, rest))
    if not len(pieces[1]):
        longest = len(_tokens(train, known, unit)) - 1
        raise DataError(
            f"`{path}` has {len(content)} characters, too few for one example of {steps} steps",
            f"use a longer text, or `--data-option steps={longest}`" if longest > 0 else "use a longer text",
        )
    return Source.from_arrays(
        "characters",
        classes=len(known),
        task="characters",
        train=pieces,
        validation=others if len(others[1]) else None,
        vocabulary_size=len(known),
        vocabulary=known,
        target_vocabulary=known,
        byte_tokens=unit != "characters",
    )


def _vocabulary(content: str, train: str, unit: Unit, size: int, file: str | None) -> tuple[str, ...]:
    if file is not None:
        return masking.without_special_tokens(text.read_vocabulary(Path(file)))
    if unit == "characters":
        return tuple(sorted(set(content)))
    return byte_pairs.learned(train, size) if unit == "bpe" else byte_pairs.BYTES


def _tokens(content: str, known: tuple[str, ...], unit: Unit) -> np.ndarray:
    """The numbers of the tokens of a text, int32 `[n]`."""
    if unit != "characters":
        return np.array(byte_pairs.BytePairs(known).encode(content), np.int32)
    number = {character: index for index, character in enumerate(known)}
    if missing := sorted(set(content) - set(known)):
        raise DataError(
            f"The vocabulary of {len(known)} characters lacks `{missing[0]}` of the text",
            "make a new vocabulary, or use `--data-option unit=bytes`",
        )
    return np.fromiter(map(number.__getitem__, content), np.int32, len(content))


def _pieces(tokens: np.ndarray, steps: int) -> Arrays:
    examples = max(0, len(tokens) - 1) // steps
    used = examples * steps
    return tokens[:used].reshape(examples, steps), tokens[1 : used + 1].reshape(examples, steps)
