"""Translation of sentences: cross-entropy and accuracy of tokens, example translations, BLEU.

K. Papineni, S. Roukos, T. Ward and W.-J. Zhu, "BLEU: a method for automatic evaluation of machine translation", ACL
2002; computed as in M. Post, "A call for clarity in reporting BLEU scores", WMT 2018 (`sacrebleu`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdist import extras, files, models, tasks
from tfdist.data.spec import END, PADDING, UNKNOWN
from tfdist.tasks._targets import loss
from tfdist.tasks._targets import metrics_of_language as metrics

__all__ = ["bleu", "loss", "metrics", "sentence", "show"]

# Sentences that are translated, that are written to the file, and per batch.
TRANSLATED, WRITTEN, PER_BATCH = 1000, 20, 100


def show(run: tasks.Run) -> None:
    """Translates by greedy decoding, writes examples as `translations.txt`, and computes `bleu` over 1000 sentences.

    BLEU is computed on the dataset's tokens, and a word outside the vocabulary is never correct. Nothing is written for
    a custom model that `tfdist.models.translate` cannot use.
    """
    if not run.strategy.world.is_chief or not models.can_translate(run.model):
        return
    spec = run.source.spec
    x, y = run.examples(TRANSLATED)
    outputs = [
        row
        for first in range(0, len(y), PER_BATCH)
        for row in models.translate(run.model, x["source"][first : first + PER_BATCH], length=spec.target_shape[0])
    ]
    translations = [sentence(tokens, spec.target_vocabulary, "<unknown>") for tokens in outputs]
    references = [sentence(tokens, spec.target_vocabulary, "<rare>") for tokens in y]
    run.scores["bleu"] = bleu(translations, references)
    sources = [sentence(tokens, spec.vocabulary, "<rare>") for tokens in x["source"][:WRITTEN]]
    blocks = zip(sources, references, translations, strict=False)
    text = "\n".join(f"source       {s}\nreference    {r}\ntranslation  {t}\n" for s, r, t in blocks)
    files.write_text(run.file("translations", "translations.txt"), text)


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """The corpus BLEU, 0 to 100, of sentences with space-separated tokens and one reference per sentence."""
    with extras.importing("train", "BLEU"):
        import sacrebleu

    return float(sacrebleu.corpus_bleu(translations, [references], tokenize="none", force=True).score)


def sentence(tokens: np.ndarray, vocabulary: Sequence[str], unknown: str) -> str:
    """Converts tokens `[T]` up to the end token or padding to words, with `unknown` for unknown words."""
    words = []
    for token in map(int, tokens):
        if token in (END, PADDING):
            break
        words.append(unknown if token == UNKNOWN else vocabulary[token] if vocabulary else str(token))
    return " ".join(words)
