"""A text as a stream of characters, for predicting the next character (A. Karpathy's char-rnn, 2015)."""

from __future__ import annotations

from os import PathLike

import numpy as np

from tfdist.data.formats import local_files
from tfdist.data.input.arrays import Arrays
from tfdist.data.input.source import Source
from tfdist.errors import DataError
from tfdist.options import Count, Fraction

TASKS = ("characters",)
FILES = "local"


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    file: str = "input.txt",
    steps: Count = 64,
    validation: Fraction = 0.1,
    encoding: str = "utf-8",
) -> Source:
    """x `[N, steps]`: consecutive pieces of the text; y `[N, steps]`: the same pieces one character later.

    Global batches of B examples read the text as B streams: row i of a batch is continued by row i of the next batch.
    The end of the text is not used if it does not fill all rows.

    Args:
        data_dir: the folder.
        file: the name of the text file.
        steps: the number of characters per example.
        validation: the fraction of the text, from the end, for validation.
        encoding: the encoding of the text.

    Raises:
        DataError: the file does not exist, has another encoding, or is too short for one example.
    """
    directory = local_files.folder(data_dir, "characters")
    (path,) = local_files.find(directory, file, "characters", "file")[:1]
    text = local_files.text(path, encoding)
    vocabulary = tuple(sorted(set(text)))
    number = {character: index for index, character in enumerate(vocabulary)}
    tokens = np.fromiter(map(number.__getitem__, text), np.int32, len(text))
    first = len(tokens) - int(len(tokens) * validation)
    parts = {"train": _pieces(tokens[:first], steps), "validation": _pieces(tokens[first:], steps)}
    if not len(parts["train"][1]):
        raise DataError(
            f"`{path}` has {len(tokens)} characters, too few for one example of {steps} steps",
            "use fewer steps with `--data-option steps=16`",
        )
    return Source.from_arrays(
        "characters",
        classes=len(vocabulary),
        task="characters",
        train=parts["train"],
        validation=parts["validation"] if len(parts["validation"][1]) else None,
        vocabulary_size=len(vocabulary),
        vocabulary=vocabulary,
        target_vocabulary=vocabulary,
    )


def _pieces(tokens: np.ndarray, steps: int) -> Arrays:
    examples = max(0, len(tokens) - 1) // steps
    used = examples * steps
    return tokens[:used].reshape(examples, steps), tokens[1 : used + 1].reshape(examples, steps)
