"""Two texts whose lines are translations of each other, such as Multi30k.

Source: D. Elliott and others, "Multi30K: Multilingual English-German Image Descriptions", 2016.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from tfdist.data.formats import local_files, text
from tfdist.data.input.bad_examples import BadExamples
from tfdist.data.input.source import Source
from tfdist.errors import DataError, UsageError
from tfdist.options import Count

TASKS = ("translation",)
FILES = "local"


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    train: str,
    validation: str | None = None,
    test: str | None = None,
    encoding: str = "utf-8",
    length: Count = 40,
    words: Count = 10_000,
    buckets: bool = False,
    vocabulary: str | None = None,
    target_vocabulary: str | None = None,
    on_bad_example: str = "fail",
) -> Source:
    """x "source" int32 `[N, length]` and "target" int32 `[N, length + 1]`, y int32 `[N, length + 1]`.

    "target" is a start token and the sentence, y the sentence and an end token; padding is 0.

    Args:
        data_dir: the folder.
        train: the two training files, source and target, separated by a comma: `train.en.gz,train.de.gz`.
        validation: the same for validation.
        test: the same for the test.
        encoding: the encoding of the files.
        length: the largest number of words per sentence; longer sentences are cut.
        words: the largest number of words in each vocabulary.
        buckets: make batches of sentences of similar lengths.
        vocabulary: a file with the source's vocabulary of an earlier run; None makes one from the training sentences.
        target_vocabulary: the same for the target.
        on_bad_example: "fail" or "skip".

    Raises:
        UsageError: no folder is given, or a split does not have two files.
        DataError: a file does not exist, the files differ in length, or a line has another encoding.
    """
    directory, bad = local_files.folder(data_dir, "parallel_text"), BadExamples(on_bad_example)
    names_of = {"train": train, "validation": validation, "test": test}
    parts = {split: _read(directory, names, split, encoding, bad) for split, names in names_of.items() if names}
    return text.translated(
        "parallel_text",
        parts,
        length=length,
        words=words,
        buckets=buckets,
        vocabulary=vocabulary,
        target_vocabulary=target_vocabulary,
        skipped=bad.sentences,
    )


def _read(directory: Path, names: str, split: str, encoding: str, bad: BadExamples) -> text.Pairs:
    files = local_files.find(directory, names, "parallel_text", split)
    if len(files) != 2:
        raise UsageError(
            f"`{split}` of `parallel_text` is `{names}`, which is {len(files)} files",
            f"name the source and the target, as in `--data-option {split}=train.en.gz,train.de.gz`",
        )
    source, target = (list(local_files.lines(path, encoding, bad)) for path in files)
    if len(source) != len(target):
        raise DataError(
            f"`{files[0]}` has {len(source)} lines, but `{files[1]}` has {len(target)}",
            "name two files whose lines are translations of each other",
        )
    # If one line of a pair is bad, the pair is left out.
    return [
        (text.words(one), text.words(other))
        for (_, one), (_, other) in zip(source, target, strict=True)
        if one is not None and other is not None
    ]
