"""`bert`: an encoder that predicts masked words of a text from all others.

J. Devlin, M.-W. Chang, K. Lee and K. Toutanova, "BERT: pre-training of deep bidirectional transformers for language
understanding", NAACL 2019.
"""

from __future__ import annotations

import keras
from keras import ops

from tfdist.data.spec import PADDING, DataSpec
from tfdist.models import _transformer
from tfdist.models._training import Training
from tfdist.options import Count, Factor, Fraction

TASKS = ("masked_lm",)
# Rate, batch and decay of the paper's appendix A.2, with sequences of 512 tokens.
TRAINING = Training("adamw", learning_rate=1e-4, batch_size=256, weight_decay=0.01)


def build(
    spec: DataSpec,
    *,
    layers: Count = 12,
    units: Count = 768,
    heads: Count = 12,
    dropout: Fraction = 0.1,
    width: Factor = 1.0,
) -> keras.Model:
    """Embed words and positions; `layers` blocks of attention and two dense layers; dense; logits by the same table.

    BERT-base: with U units, V tokens and N positions U (V + N) + layers (12 U^2 + 13 U) + U^2 + 7 U parameters,
    109,483,776 for the paper's 30,522 tokens and 512 positions, where 110 million are published. As in the paper, the
    output is a dense layer with GELU, a normalization, and the table of the embedding, here without a bias.
    Normalization comes before attention and before the dense layers, so that no warm-up is needed; in the paper it
    comes afterwards. There is no prediction of the next sentence, and so no second segment and no pooled output.

    Input: tokens `[B, length]` up to the dataset's length, padded with 0. Output: logits `[B, length, spec.classes]`,
    float32 under every dtype policy.

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
    units = _transformer.units_per_token("bert", units, heads, width)
    table = keras.layers.ReversibleEmbedding(
        spec.vocabulary_size, units, reverse_dtype="float32", name="words_and_logits"
    )
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    mask = ops.not_equal(tokens, PADDING)
    values = table(tokens) + _transformer.embedded_positions(tokens, spec.input_shape[0], units)
    values = keras.layers.Dropout(dropout)(_transformer.normalized(values))
    for _ in range(layers):
        values = _transformer.attended(values, None, heads, dropout, mask=mask)
        values = _transformer.transformed(values, 4 * units, dropout)
    values = keras.layers.Dense(units, activation="gelu", name="transform")(_transformer.normalized(values))
    return keras.Model(tokens, table(_transformer.normalized(values), reverse=True), name="bert")
