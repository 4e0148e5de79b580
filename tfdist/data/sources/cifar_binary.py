"""CIFAR's binary files: for each example one or two labels of a byte, and 3,072 bytes of pixels as colour planes.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import numpy as np

from tfdist.data.formats import local_files
from tfdist.data.input.arrays import Arrays
from tfdist.data.input.bad_examples import BadExamples
from tfdist.data.input.source import Source
from tfdist.errors import UsageError
from tfdist.options import Count, Fraction

TASKS = ("classification",)
FILES = "local"
_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    train: str | None = None,
    test: str = "test*.bin*",
    classes: Count = 10,
    validation: Fraction = 0.1,
    on_bad_example: str = "fail",
) -> Source:
    """x `[N, 32, 32, 3]` in [0, 1], from files in a folder that are uncompressed, `.gz` or `.xz`.

    Args:
        data_dir: the folder.
        train: the names of the training files, or patterns, separated by commas; None uses all but the test files.
        test: the names of the test files.
        classes: 10 for CIFAR-10; 100 for CIFAR-100, whose fine labels are used, not the coarse ones.
        validation: the fraction of the training examples, from the end, for validation.
        on_bad_example: "fail" or "skip".

    Raises:
        UsageError: no folder is given, or CIFAR does not have this number of classes.
        DataError: a file does not exist or is truncated, or a label is outside the classes.
    """
    if classes not in (10, 100):
        raise UsageError(
            f"CIFAR has 10 or 100 classes, but `classes` is {classes}", "use `classes=10` or `classes=100`"
        )
    directory, bad = local_files.folder(data_dir, "cifar_binary"), BadExamples(on_bad_example)
    test_files = local_files.find(directory, test, "cifar_binary", "test")
    train_files = local_files.find(directory, train or "*.bin*", "cifar_binary", "train")
    x, y = _read([path for path in train_files if path not in test_files], classes, bad)
    first = len(y) - round(len(y) * validation)
    return Source.from_arrays(
        "cifar_binary",
        classes=classes,
        divisor=255,
        class_names=_class_names(directory, classes),
        train=(x[:first], y[:first]),
        validation=(x[first:], y[first:]) if first < len(y) else None,
        test=_read(test_files, classes, bad),
        skipped=bad.sentences,
    )


def _read(files: list[Path], classes: int, bad: BadExamples) -> Arrays:
    parts = [_read_file(path, classes, bad) for path in files]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def _read_file(path: Path, classes: int, bad: BadExamples) -> Arrays:
    labels = 2 if classes == 100 else 1
    data = np.frombuffer(local_files.content(path), np.uint8)
    records, rest = divmod(len(data), labels + _PIXELS)
    if rest:
        bad.add(f"`{path}` is truncated: {rest} bytes follow its {records} complete examples", "fetch it again")
    examples = data[: len(data) - rest].reshape(records, labels + _PIXELS)
    y = examples[:, labels - 1]
    for index in np.flatnonzero(y >= classes):
        bad.add(f"Example {index} of `{path}` has the label {y[index]}, outside the {classes} classes")
    examples = examples[y < classes]
    pixels = examples[:, labels:].reshape(-1, *_SHAPE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pixels), np.ascontiguousarray(examples[:, labels - 1])


def _class_names(directory: Path, classes: int) -> tuple[str, ...]:
    name = "batches.meta.txt" if classes == 10 else "fine_label_names.txt"
    path = directory / name
    names = tuple(path.read_text().split()) if path.exists() else ()
    return names if len(names) == classes else ()
