"""IMDb, 50,000 film reviews: A. Maas and others, "Learning Word Vectors for Sentiment Analysis", ACL 2011."""

from __future__ import annotations

from os import PathLike

from tfdist.data.formats import text, tfds
from tfdist.data.input.source import Source
from tfdist.options import Count

TASKS = ("text_classification",)
FILES = "tfds"


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    length: Count = 256,
    words: Count = 20_000,
    buckets: bool = False,
    vocabulary: str | None = None,
) -> Source:
    """x int32 `[N, length]`, y int32 `[N]`: 22,500 training, 2,500 validation and 25,000 test reviews.

    Args:
        data_dir: the folder of prepared datasets; see `tfdist.data.load`.
        length: the largest number of words per review.
        words: the largest number of words in the vocabulary.
        buckets: make batches of reviews of similar lengths.
        vocabulary: a file with the vocabulary of an earlier run; None makes one from the training reviews.

    Raises:
        DataError: the dataset is not prepared and cannot be downloaded.
    """
    builder = tfds.builder_of("imdb_reviews", data_dir)
    count = builder.info.splits["train"].num_examples
    first = count - count // 10
    slices = {"train": f"train[:{first}]", "validation": f"train[{first}:]", "test": "test"}
    parts = {
        split: [
            (text.words(example["text"].decode()), int(example["label"])) for example in tfds.examples(builder, stored)
        ]
        for split, stored in slices.items()
    }
    return text.labelled(
        "imdb_reviews",
        parts,
        2,
        length=length,
        words=words,
        buckets=buckets,
        vocabulary=vocabulary,
        class_names=("negative", "positive"),
    )
