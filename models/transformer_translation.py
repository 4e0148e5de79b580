"""`transformer_translation`: a transformer with an encoder and a decoder, for translation.

A. Vaswani and others, "Attention is all you need", NeurIPS 2017; with the order of operations from R. Xiong and others,
"On layer normalization in the transformer architecture", ICML 2020.

    source ── embed ── sines ── blocks of the encoder ── encoded [B, S, units]
                                                             │
    target ── embed ── sines ── blocks of the decoder: causal, then to encoded ── logits [B, T, classes]
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from tfdist.data.spec import PADDING, DataSpec
from tfdist.models import _transformer
from tfdist.models._decoding import States, Step
from tfdist.models._training import Training
from tfdist.options import Count, Factor, Fraction

TASKS = ("translation",)
# The highest rate of the paper's schedule, at its batch of 25,000 tokens per language: some 1,000 sentences.
TRAINING = Training("adam", learning_rate=7e-4, batch_size=1000)
# The layers that `decoder` uses.
PARTS = {"encoded", "source_words", "target_words_and_logits"}


def build(
    spec: DataSpec,
    *,
    layers: Count = 6,
    units: Count = 512,
    heads: Count = 8,
    dropout: Fraction = 0.1,
    width: Factor = 1.0,
) -> keras.Model:
    """Embed words and add sines; `layers` blocks in the encoder and in the decoder; logits by the target's table.

    The paper's base model. With U units and tables for S source and T target tokens there are U (S + T) + layers
    (28 U^2 + 32 U) + 4 U parameters, 44,140,544 besides the tables. The paper has one table of 37,000 tokens for both
    languages and states 65 million; with one table these would be 63.1 million. Normalization comes before attention
    and before the dense layers, so that training needs no warm-up; in the paper it comes afterwards. The loss is not
    smoothed.

    Input: a dict of `source` `[B, S]`, tokens padded with 0, and `target` `[B, T]`, the start token and the sentence
    (teacher forcing). Output: logits `[B, T, spec.classes]` of the sentence and the end token, float32 under every
    dtype policy.

    Args:
        spec: the spec of the dataset.
        layers: the number of blocks of the encoder, and of the decoder.
        units: the length of a token's vector; a multiple of `heads`.
        heads: the number of attention heads.
        dropout: the fraction of values that are dropped in training, in [0, 1).
        width: a factor on `units`.

    Raises:
        UsageError: the number of units is not divisible by the number of heads.
    """
    units = _transformer.units_per_token("transformer_translation", units, heads, width)
    source = keras.Input((None,), dtype="int32", name="source")
    target = keras.Input((None,), dtype="int32", name="target")
    mask = ops.not_equal(source, PADDING)
    values = _embedded(_table(spec.vocabulary_size, units, "source_words"), source, dropout)
    for _ in range(layers):
        values = _transformer.attended(values, None, heads, dropout, mask=mask)
        values = _transformer.transformed(values, 4 * units, dropout, "relu")
    encoded = keras.layers.LayerNormalization(epsilon=1e-5, name="encoded")(values)

    table = _table(spec.classes, units, "target_words_and_logits")
    values = _embedded(table, target, dropout)
    for _ in range(layers):
        values = _transformer.attended(values, None, heads, dropout, causal=True)
        values = _transformer.attended(values, encoded, heads, dropout, mask=mask)
        values = _transformer.transformed(values, 4 * units, dropout, "relu")
    logits = table(_transformer.normalized(values), reverse=True)
    return keras.Model({"source": source, "target": target}, logits, name="transformer_translation")


def _table(tokens: int, units: int, name: str) -> keras.layers.Layer:
    """Vectors of tokens, of length 1 on average, so that the logits of normalized values have a deviation of 1."""
    vectors = keras.initializers.RandomNormal(stddev=units**-0.5)
    return keras.layers.ReversibleEmbedding(
        tokens, units, embeddings_initializer=vectors, reverse_dtype="float32", name=name
    )


def _embedded(table: keras.layers.Layer, tokens: Any, dropout: float) -> Any:
    # Section 3.4 of the paper multiplies the vectors by this root, so that they are as large as the sines.
    vectors = table(tokens)
    return keras.layers.Dropout(dropout)(_transformer.SinePositions()(vectors * vectors.shape[-1] ** 0.5))


def decoder(model: keras.Model, source: np.ndarray) -> tuple[Step, States]:
    """One step of the decoder, and its states before the first token, for sentences `source` int `[B, S]`.

    A step computes the decoder for all earlier tokens again: a cache of its keys and values would need a second graph
    of the same layers, and most of the time of short sentences is not there.
    """
    encoded = model.get_layer("encoded").output
    encoder = keras.Model(model.input["source"], encoded)
    rest = keras.Model([model.input["source"], encoded, model.input["target"]], ops.log_softmax(model.output[:, -1]))

    def step(tokens: np.ndarray, current: States) -> tuple[np.ndarray, States]:
        before = np.concatenate([current["before"], tokens[:, None].astype(np.int32)], axis=1)
        log_probabilities = rest.predict_on_batch([current["source"], current["encoded"], before])
        return log_probabilities, current | {"before": before}

    before = np.zeros((len(source), 0), np.int32)
    return step, {"source": source, "encoded": encoder.predict_on_batch(source), "before": before}
