"""Masked language modelling: cross-entropy, accuracy and perplexity of the masked words, and example predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist import files, tasks
from tfdist.data.formats import text
from tfdist.data.spec import PADDING, UNKNOWN, DataSpec
from tfdist.tasks._targets import loss
from tfdist.tasks._targets import metrics_of_language as metrics

__all__ = ["loss", "metrics", "show"]

SHOWN = 20


def show(run: tasks.Run) -> None:
    """Writes texts with masks, and the predicted and the original words, as `masked_words.txt`."""
    spec = run.source.spec
    count = min(SHOWN, run.batch_size, spec.examples[run.split])
    pipeline = run.source.pipeline(run.split, count, shuffle=False, seed=run.seed)
    x, y = next(iter(pipeline.as_numpy_iterator()))
    logits = run.predict(x, (*spec.input_shape, spec.classes))
    if logits is None or not run.strategy.world.is_chief:
        return
    blocks = [_block(*example, spec) for example in zip(x, y, logits.argmax(axis=-1), strict=True)]
    files.write_text(run.file("masked_words", "masked_words.txt"), "\n".join(blocks))


def _block(x: np.ndarray, y: np.ndarray, predicted: np.ndarray, spec: DataSpec) -> str:
    chosen, words = y != spec.ignored_class, x != PADDING
    lines: dict[str, Any] = {
        "masked": x[words],
        "prediction": np.where(chosen, predicted, x)[words],
        "original": np.where(chosen, y, x)[words],
    }
    return "".join(f"{name:<11} {_text(tokens, spec)}\n" for name, tokens in lines.items())


def _text(tokens: Sequence[int], spec: DataSpec) -> str:
    if not spec.vocabulary:
        return " ".join(map(str, tokens))
    of_words = spec.vocabulary[UNKNOWN] == text.OF_INPUT[UNKNOWN]
    shown = (" " if of_words else "").join(spec.vocabulary[token] for token in tokens)
    if spec.byte_tokens:
        shown = shown.encode("latin-1").decode("utf-8", "replace")
    return shown.replace("\n", "\\n")
