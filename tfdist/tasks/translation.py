"""Translation of sentences: cross-entropy and accuracy of tokens, example translations, BLEU.

K. Papineni, S. Roukos, T. Ward and W.-J. Zhu, "BLEU: a method for automatic evaluation of machine translation", ACL
2002; as M. Post, "A call for clarity in reporting BLEU scores", WMT 2018, computes it (`sacrebleu`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdist import files, tasks
from tfdist.data.spec import END, PADDING, UNKNOWN, DataSpec
from tfdist.tasks import _targets

TRANSLATED, WRITTEN, TOGETHER = 1000, 20, 100


def loss(spec: DataSpec) -> keras.losses.Loss:
    """Cross-entropy, as a mean over all tokens except padding, in nats."""
    return _targets.cross_entropy(spec)


def metrics(spec: DataSpec) -> list[Any]:
    """The fraction of tokens, without padding, that are predicted correctly given the correct tokens before them."""
    return [_targets.accuracy(spec)]


def show(run: tasks.Run) -> None:
    """Writes translations as `translations.txt`, and computes `bleu` over the first thousand, by greedy decoding.

    BLEU is computed on the dataset's tokens, and a word outside the vocabulary is never correct. A custom model that
    `tfdist.models.seq2seq.translate` cannot use writes nothing.
    """
    from tfdist.models import seq2seq

    if not run.strategy.world.is_chief or not seq2seq.can_translate(run.model):
        return
    spec = run.source.spec
    x, y = run.examples(TRANSLATED)
    found = [
        row
        for first in range(0, len(y), TOGETHER)
        for row in seq2seq.translate(run.model, x["source"][first : first + TOGETHER], length=spec.target_shape[0])
    ]
    translations = [sentence(tokens, spec.target_vocabulary, "<unknown>") for tokens in found]
    references = [sentence(tokens, spec.target_vocabulary, "<rare>") for tokens in y]
    run.scores["bleu"] = bleu(translations, references)
    sources = [sentence(tokens, spec.vocabulary, "<rare>") for tokens in x["source"][:WRITTEN]]
    blocks = zip(sources, references, translations, strict=False)
    text = "\n".join(f"source       {s}\nreference    {r}\ntranslation  {t}\n" for s, r, t in blocks)
    files.write_text(run.file("translations", "translations.txt"), text)


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """BLEU of sentences whose tokens are split by spaces, with one reference each: 0 to 100."""
    import sacrebleu

    return float(sacrebleu.corpus_bleu(translations, [references], tokenize="none", force=True).score)


def sentence(tokens: np.ndarray, vocabulary: Sequence[str], unknown: str) -> str:
    """Tokens `[T]` up to the end or padding as words, `unknown` for a word outside the vocabulary."""
    words = []
    for token in map(int, tokens):
        if token in (END, PADDING):
            break
        words.append(unknown if token == UNKNOWN else vocabulary[token] if vocabulary else str(token))
    return " ".join(words)
