"""Causal language modelling: the next character, byte or token of a text; perplexity, accuracy, a generated text.

The loss is the cross-entropy in nats per token. If the tokens have several bytes, the metric "nats_per_byte" compares
vocabularies.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfdist import files, tasks
from tfdist.data.formats import byte_pairs
from tfdist.data.spec import DataSpec
from tfdist.errors import UsageError
from tfdist.options import Count, CountOrZero, checks_arguments
from tfdist.tasks import _targets
from tfdist.tasks._targets import loss

__all__ = ["generate", "loss", "metrics", "show"]

GENERATED = 400  # tokens


def metrics(spec: DataSpec) -> list[Any]:
    """The metrics "accuracy", "perplexity" and, unless each token is one byte, "nats_per_byte"."""
    lengths = [len(token if spec.byte_tokens else token.encode()) for token in spec.vocabulary]
    return [*_targets.metrics_of_language(spec), *([_targets.NatsPerByte(lengths)] if set(lengths) - {1} else [])]


def show(run: tasks.Run) -> None:
    """Writes an example and its continuation by the model as `sample.txt`."""
    if not run.strategy.world.is_chief:
        return
    spec = run.source.spec
    x, _ = run.examples(1)
    prompt, model = x[0], run.model
    if run.strategy.world.world_size > 1:
        # The same layers outside the strategy: its steps would wait for the other processes.
        model = keras.Model(model.input, model.output)
    if not run.fits(_logits(model, prompt), (len(prompt), spec.classes)):
        return
    continuation = generate(model, prompt, GENERATED, np.random.default_rng(run.seed))
    text = f"{_text(prompt, spec)}\n\n--- from here on the model writes ---\n\n{_text(continuation, spec)}\n"
    files.write_text(run.file("sample", "sample.txt"), text)


@checks_arguments
def generate(
    model: keras.Model,
    prompt: Any,
    count: CountOrZero,
    generator: np.random.Generator,
    context: Count | None = None,
) -> np.ndarray:
    """Samples `count` tokens after `prompt`.

    Args:
        model: a model from tokens to logits; a stateful model is used at position 0 of a stream.
        prompt: int `[steps]`, tokens from 0 to the number of logits less 1.
        count: the number of tokens to generate.
        generator: the random generator.
        context: the number of tokens that a prediction depends on; by default the length of the prompt.

    Returns:
        int32 `[count]`.

    Raises:
        UsageError: the prompt is empty or has no tokens of the model, or another argument has an impossible value.
    """
    prompt, tokens = np.asarray(prompt), model.output.shape[-1]
    is_text = prompt.ndim == 1 and prompt.size and prompt.dtype.kind in "iu"
    if not is_text or not 0 <= prompt.min() <= prompt.max() < tokens:
        raise UsageError(
            f"`prompt` has the shape `{prompt.shape}` and the dtype `{prompt.dtype}`, and should be a list of "
            f"one or more tokens from 0 to {tokens - 1}",
            "turn a text into tokens with the vocabulary in the run's folder",
        )
    text, context = list(map(int, prompt)), context or len(prompt)
    for _ in range(count):
        logits = _logits(model, text[-context:])[0, -1].astype(np.float64)
        # The argmax of logits plus Gumbel noise is a sample from their softmax.
        text.append(int(np.argmax(logits + generator.gumbel(size=logits.shape))))
    return np.array(text[len(prompt) :], np.int32)


def _logits(model: keras.Model, tokens: Any) -> Any:
    """The outputs for one text; for a stateful model, at position 0 of the first stream."""
    x, first = np.array([tokens], np.int32), np.zeros(1, np.int32)
    stateful = isinstance(model.input, dict)
    return model.predict_on_batch({"tokens": x, "stream": first, "position": first} if stateful else x)


def _text(tokens: np.ndarray, spec: DataSpec) -> str:
    if spec.byte_tokens:
        return byte_pairs.BytePairs(spec.vocabulary).decode(tokens)
    return "".join(spec.vocabulary[token] for token in tokens) if spec.vocabulary else " ".join(map(str, tokens))
