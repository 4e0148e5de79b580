"""`transformer`: a small encoder for texts and, with a causal mask, a model for the next character.

A. Vaswani and others, "Attention is all you need", NeurIPS 2017; with the order of operations from R. Xiong and others,
"On layer normalization in the transformer architecture", ICML 2020.
"""

from __future__ import annotations

import keras
from keras import ops

from tfdist.data.spec import PADDING, DataSpec
from tfdist.models import _transformer
from tfdist.models._training import Training
from tfdist.options import Count, Factor, Fraction

TASKS = ("text_classification", "characters")
# Rate and batch are tfdist's choice.
TRAINING = Training("adamw", learning_rate=1e-3, batch_size=32, weight_decay=0.01)


def build(
    spec: DataSpec,
    *,
    layers: Count = 4,
    units: Count = 128,
    heads: Count = 4,
    dropout: Fraction = 0.1,
    width: Factor = 1.0,
) -> keras.Model:
    """Embed tokens and positions; `layers` blocks of attention and two dense layers; normalize; dense.

    0.8 million parameters besides the embeddings. Normalization comes before attention and before the dense layers, so
    that no warm-up is needed, and positions are learned; the paper normalizes afterwards and uses sine positions. A
    text is classified by the average over its words; padding is ignored in attention and average.

    Input: tokens `[B, length]` up to the dataset's length, texts padded with 0. Output: logits
    `[B, spec.classes]` for texts, `[B, length, spec.classes]` for characters, float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        layers: the number of blocks.
        units: the length of a token's vector; a multiple of `heads`.
        heads: the number of attention heads.
        dropout: the fraction of values that are dropped in training, in [0, 1).
        width: a factor on `units`.

    Raises:
        UsageError: the number of units is not divisible by the number of heads.
    """
    units = _transformer.units_per_token("transformer", units, heads, width)
    causal = spec.task == "characters"
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    mask = None if causal else ops.not_equal(tokens, PADDING)
    values = keras.layers.Embedding(spec.vocabulary_size, units, name="words")(tokens)
    values = values + _transformer.embedded_positions(tokens, spec.input_shape[0], units)
    for _ in range(layers):
        values = _transformer.attended(values, None, heads, dropout, mask=mask, causal=causal)
        values = _transformer.transformed(values, 4 * units, dropout)
    values = _transformer.normalized(values)
    if mask is not None:
        weight = ops.expand_dims(ops.cast(mask, values.dtype), -1)
        values = ops.sum(values * weight, axis=1) / ops.maximum(ops.sum(weight, axis=1), 1)
    logits = keras.layers.Dense(spec.classes, dtype="float32", name="logits")(values)
    return keras.Model(tokens, logits, name="transformer")
