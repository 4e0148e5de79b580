"""Next-character prediction: cross-entropy in nats per character, accuracy, a generated text."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfdist import files, tasks
from tfdist.data.spec import DataSpec
from tfdist.tasks import _targets

WRITTEN = 400


def loss(spec: DataSpec) -> keras.losses.Loss:
    """Cross-entropy, a mean over all characters, in nats."""
    return _targets.cross_entropy(spec)


def metrics(spec: DataSpec) -> list[Any]:
    """The fraction of characters that are predicted correctly."""
    return [_targets.accuracy(spec)]


def show(run: tasks.Run) -> None:
    """Writes a text that begins with data and is continued by the model, as `sample.txt`."""
    if not run.strategy.world.is_chief:
        return
    spec = run.source.spec
    x, _ = run.examples(1)
    begun = x[0]
    if not run.fits(_logits(run.model, begun), (len(begun), spec.classes)):
        return
    written = write(run.model, begun, WRITTEN, np.random.default_rng(run.seed))
    text = f"{_text(begun, spec)}\n\n--- from here on the model writes ---\n\n{_text(written, spec)}\n"
    files.write_text(run.file("sample", "sample.txt"), text)


def write(model: keras.Model, begun: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """Generates `count` characters after `begun`; each is drawn given as many earlier characters as `begun` has.

    Args:
        model: from characters, or from streams of them at position 0, to logits.
        begun: int32 `[steps]`.
        count: the number of characters to generate.
        generator: the random generator.

    Returns:
        int32 `[count]`.
    """
    text = list(map(int, begun))
    for _ in range(count):
        logits = _logits(model, text[-len(begun) :])[0, -1].astype(np.float64)
        # The largest of logits with Gumbel noise is a draw from their softmax.
        text.append(int(np.argmax(logits + generator.gumbel(size=logits.shape))))
    return np.array(text[len(begun) :], np.int32)


def _logits(model: keras.Model, tokens: Any) -> Any:
    """The outputs for one text; of a stateful model at position 0 of the first stream."""
    x, first = np.array([tokens], np.int32), np.zeros(1, np.int32)
    stateful = isinstance(model.input, dict)
    return model.predict_on_batch({"tokens": x, "stream": first, "position": first} if stateful else x)


def _text(tokens: np.ndarray, spec: DataSpec) -> str:
    return "".join(spec.vocabulary[token] for token in tokens) if spec.vocabulary else " ".join(map(str, tokens))
