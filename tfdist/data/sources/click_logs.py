"""Logs of advertisements in Criteo's layout, with 13 whole numbers and 26 categories, for predicting a click.

A line has, separated by tabs, 1 for a click or 0, the numbers in decimal, and the categories in hexadecimal. Numbers
and categories may be missing. Source: Criteo's Display Advertising Challenge at Kaggle, 2014.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

import numpy as np

from tfdist.data.formats import local_files
from tfdist.data.input.arrays import Arrays, head
from tfdist.data.input.bad_examples import BadExamples
from tfdist.data.input.source import Source
from tfdist.data.spec import PADDING
from tfdist.errors import DataError, UsageError
from tfdist.options import Count

TASKS = ("click_prediction",)
FILES = "local"

NUMBERS, CATEGORIES = 13, 26


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    train: str = "train.txt",
    validation: str | None = None,
    test: str | None = None,
    words: Count = 100_000,
    on_bad_example: str = "fail",
) -> Source:
    """x "numbers" float32 `[N, 13]`, log(1 + number), and "categories" int32 `[N, 26]`; y int32 `[N]`.

    A missing or negative number counts as 0. A missing category is value 0 of its table, and the others are distributed
    over the other values by their remainder (the hashing trick: K. Weinberger and others, "Feature hashing for large
    scale multitask learning", ICML 2009), so that two categories may share a value.

    Args:
        data_dir: the folder.
        train: the training files, in the order of time, separated by commas.
        validation: the same for validation; None uses, if there is no `test` either, the last seventh of the training
            lines, which is the last day of Criteo's week: one half for validation, the other for the test.
        test: the same for the test.
        words: the number of values of each category, which is the number of rows of its table; at least 2.
        on_bad_example: "fail" or "skip", for lines in another layout.

    Raises:
        UsageError: no folder is given, or there are fewer than two values.
        DataError: a file does not exist or has no examples, or a line has another layout.
    """
    if words < 2:
        raise UsageError(f"`words` is {words}, but value 0 is for missing categories", "use 2 or more")
    directory, bad = local_files.folder(data_dir, "click_logs"), BadExamples(on_bad_example)
    names_of = {"train": train, "validation": validation, "test": test}
    parts = {
        split: _read(local_files.find(directory, names, "click_logs", split), words, bad)
        for split, names in names_of.items()
        if names
    }
    if set(parts) == {"train"}:
        parts = _divided(parts["train"])
    return Source.from_arrays(
        "click_logs",
        classes=2,
        task="click_prediction",
        train=parts["train"],
        validation=parts.get("validation"),
        test=parts.get("test"),
        skipped=bad.sentences,
        class_names=("no click", "click"),
        category_sizes=(words,) * CATEGORIES,
    )


def _divided(arrays: Arrays) -> dict[str, Arrays]:
    """The first six sevenths, and both halves of the last seventh."""
    count = len(arrays[1])
    first, second = count - count // 7, count - count // 14
    return {
        "train": head(arrays, first),
        "validation": _between(arrays, first, second),
        "test": _between(arrays, second, count),
    }


def _between(arrays: Arrays, begin: int, end: int) -> Arrays:
    x, y = arrays
    return {name: values[begin:end] for name, values in x.items()}, y[begin:end]


def _read(paths: Iterable[Path], words: int, bad: BadExamples) -> Arrays:
    # Arrays of the type of a model, since lists of Python's numbers would need eight times the memory.
    numbers, categories, clicks = array("f"), array("i"), array("b")
    for path in paths:
        for number, line in enumerate(local_files.raw_lines(path), 1):
            try:
                click, of_numbers, of_categories = _parsed(line, words)
            except ValueError:
                wanted = f"a click, {NUMBERS} numbers and {CATEGORIES} hexadecimal categories"
                bad.add(f"Line {number} of `{path}` is `{line[:80]!r}`, not {wanted}, separated by tabs")
                continue
            clicks.append(click)
            numbers.extend(of_numbers)
            categories.extend(of_categories)
    if not clicks:
        raise DataError(f"There are no examples in {', '.join(f'`{path}`' for path in paths)}", "name other files")
    x = {
        "numbers": np.log1p(np.frombuffer(numbers, np.float32).reshape(-1, NUMBERS)),
        "categories": np.frombuffer(categories, np.int32).reshape(-1, CATEGORIES),
    }
    return x, np.frombuffer(clicks, np.int8)


def _parsed(line: bytes, words: int) -> tuple[int, list[int], list[int]]:
    """The click, the numbers and the values of the categories in a line.

    Raises:
        ValueError: the line has another layout.
    """
    click, *fields = line.rstrip(b"\r\n").split(b"\t")
    if click not in (b"0", b"1") or len(fields) != NUMBERS + CATEGORIES:
        raise ValueError
    numbers = [max(0, int(field)) if field else 0 for field in fields[:NUMBERS]]
    values = [1 + int(field, 16) % (words - 1) if field else PADDING for field in fields[NUMBERS:]]
    return int(click), numbers, values
