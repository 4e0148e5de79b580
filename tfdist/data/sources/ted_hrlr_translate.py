"""Translated TED talks, from TensorFlow Datasets.

Source: Y. Qi and others, "When and Why Are Pre-trained Word Embeddings Useful for Neural Machine Translation?", NAACL
2018.
"""

from __future__ import annotations

from os import PathLike

from tfdist.data.formats import text, tfds
from tfdist.data.input.source import Source
from tfdist.errors import UnknownNameError
from tfdist.options import Count

TASKS = ("translation",)
FILES = "tfds"


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    pair: str = "pt_to_en",
    length: Count = 40,
    words: Count = 10_000,
    buckets: bool = False,
    vocabulary: str | None = None,
    target_vocabulary: str | None = None,
) -> Source:
    """x and y as in `parallel_text`; Portuguese and English have 51,785, 1,193 and 1,803 pairs per split.

    Args:
        data_dir: the folder of prepared datasets; see `tfdist.data.load`.
        pair: the name of the language pair in TFDS, such as `pt_to_en`; its languages are among az, be, en, es, fr, gl,
            he, it, pt, ru and tr.
        length: the largest number of words per sentence; longer sentences are cut.
        words: the largest number of words in each vocabulary.
        buckets: make batches of sentences of similar lengths.
        vocabulary: a file with the source's vocabulary of an earlier run; None makes one from the training sentences.
        target_vocabulary: the same for the target.

    Raises:
        UnknownNameError: there is no such pair.
        DataError: the dataset is not prepared and cannot be downloaded.
    """
    pairs = tfds.package().builder_cls("ted_hrlr_translate").builder_configs
    if pair not in pairs:
        raise UnknownNameError("pair of languages", pair, pairs)
    builder = tfds.builder_of(f"ted_hrlr_translate/{pair}", data_dir)
    source, target = builder.info.supervised_keys
    parts = {
        split: [
            (text.words(example[source].decode()), text.words(example[target].decode()))
            for example in tfds.examples(builder, split)
        ]
        for split in ("train", "validation", "test")
    }
    return text.translated(
        "ted_hrlr_translate",
        parts,
        length=length,
        words=words,
        buckets=buckets,
        vocabulary=vocabulary,
        target_vocabulary=target_vocabulary,
    )
