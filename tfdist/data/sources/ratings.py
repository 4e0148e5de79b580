"""Ratings of items by users, in the three layouts of MovieLens, for predicting the next item of a user.

| files of | file | line |
|---|---|---|
| MovieLens 100K | `u.data` | user, item, rating and time, separated by tabs |
| MovieLens 1M and 10M | `ratings.dat` | the same, separated by `::` |
| MovieLens 20M and later, and your own | `ratings.csv` | the same, separated by commas, after a line of names |

Source: F. M. Harper and J. A. Konstan, "The MovieLens datasets: history and context", ACM Transactions on Interactive
Intelligent Systems, 2015.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

import numpy as np

from tfdist.data.formats import local_files, text
from tfdist.data.input import padding
from tfdist.data.input.arrays import Arrays
from tfdist.data.input.bad_examples import BadExamples
from tfdist.data.input.source import Source
from tfdist.data.spec import UNKNOWN
from tfdist.errors import DataError
from tfdist.options import Count, Finite

TASKS = ("recommendation",)
FILES = "local"

NAMES = ("ratings.csv", "ratings.dat", "u.data")
_SEPARATORS = {".dat": "::", ".data": "\t"}


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    file: str | None = None,
    least: Finite = 0.0,
    length: Count = 50,
    words: Count = 100_000,
    vocabulary: str | None = None,
    encoding: str = "utf-8",
    on_bad_example: str = "fail",
) -> Source:
    """x int32 `[N, length]`: the last items of a user in the order of time, padded with 0 at the end; y the next item.

    Of each user, the last item is the target of a test example, the one before it of a validation example, and those
    before it, except the first, of training examples. A target is left out if training does not have it as an item.

    Args:
        data_dir: the folder.
        file: the name of the file; None uses the first of `ratings.csv`, `ratings.dat` and `u.data` that exists.
        least: the lowest rating that counts; lower ones are left out.
        length: the largest number of items per user; the last ones are used.
        words: the largest number of items, of which two stand for padding and for unknown items; the most frequent in
            training are used.
        vocabulary: a file with the items of an earlier run; None takes those of the training examples.
        encoding: the encoding of the file.
        on_bad_example: "fail" or "skip", for lines that are not ratings.

    Raises:
        UsageError: no folder is given.
        DataError: a file does not exist, a line is not a rating, or no user has enough ratings for a training example.
    """
    directory, bad = local_files.folder(data_dir, "ratings"), BadExamples(on_bad_example)
    path = _path(directory, file)
    histories = _histories(path, least, encoding, bad)
    known = _items(vocabulary, histories, words)
    numbers = [known.numbers(items) for items in histories]
    train = _examples(((items, end) for items in numbers for end in range(1, len(items) - 2)), length)
    if not len(train[1]):
        raise DataError(
            f"`{path}` has no user with four ratings of {least:g} or more, of which two are for training",
            "use more ratings, or a lower `least`",
        )
    return Source.from_arrays(
        "ratings",
        classes=len(known.tokens),
        task="recommendation",
        train=train,
        validation=_examples(((items, len(items) - 2) for items in numbers), length),
        test=_examples(((items, len(items) - 1) for items in numbers), length),
        skipped=bad.sentences,
        vocabulary_size=len(known.tokens),
        vocabulary=known.tokens,
    )


def _items(file: str | None, histories: list[list[str]], words: int) -> text.Vocabulary:
    """The items in a file of an earlier run, or those that training has."""
    if file is not None:
        return text.Vocabulary(text.read_vocabulary(Path(file)))
    return text.Vocabulary.of((items[:-2] for items in histories), words)


def _path(directory: Path, file: str | None) -> Path:
    names = [name for name in NAMES if (directory / name).is_file()] if file is None else [file]
    return local_files.find(directory, names[0] if names else NAMES[0], "ratings", "file")[0]


def _histories(path: Path, least: float, encoding: str, bad: BadExamples) -> list[list[str]]:
    """The items of each user in the order of their times, and for equal times of their lines."""
    ratings: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for user, item, rating, time in _ratings(path, encoding, bad):
        if rating >= least:
            ratings[user].append((time, item))
    return [[item for _, item in sorted(rated, key=lambda pair: pair[0])] for rated in ratings.values()]


def _ratings(path: Path, encoding: str, bad: BadExamples) -> Iterator[tuple[str, str, float, float]]:
    """The user, item, rating and time of each line."""
    separator = _SEPARATORS.get(Path(path.name.removesuffix(".gz").removesuffix(".xz")).suffix, ",")
    for number, line in local_files.lines(path, encoding, bad):
        if line is None or not line.strip() or (number == 1 and separator == ","):
            continue
        try:
            user, item, rating, time = line.split(separator)
            yield user, item, float(rating), float(time)
        except ValueError:
            bad.add(f"Line {number} of `{path}` is `{line:.80}`, not a user, an item, a rating and a time")


def _examples(ends: Iterator[tuple[list[int], int]], length: int) -> Arrays:
    """For each pair of a user's items and a position, the items before it, and the item there if it is known."""
    kept = [(items[max(0, end - length) : end], items[end]) for items, end in ends if end > 0 and items[end] != UNKNOWN]
    return padding.padded([items for items, _ in kept], length), np.array([item for _, item in kept], np.int32)
