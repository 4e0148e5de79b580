"""Parts of transformers: blocks of attention and dense layers, and positions as angles.

A. Vaswani and others, "Attention is all you need", NeurIPS 2017; with the order of operations from R. Xiong and others,
"On layer normalization in the transformer architecture", ICML 2020: normalization comes before attention and before the
dense layers, so that no warm-up is needed.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tfdist.errors import UsageError
from tfdist.models import _fit

# The longest wavelength of the angles is 2 pi times this, in positions (section 3.5 of the paper).
BASE = 10_000.0


def units_per_token(model: str, units: int, heads: int, width: float, *, even: bool = False) -> int:
    """`units` times `width`, the length of a token's vector.

    Args:
        model: the model's name, for the message.
        units: the units at width 1.
        heads: the number of attention heads.
        width: the factor on `units`.
        even: whether the units of a head must be an even number, for pairs that are rotated.

    Raises:
        UsageError: the number of units is not divisible by the number of heads, or a head has an odd number.
    """
    units = _fit.scaled(units, width)
    if units % heads:
        raise UsageError(
            f"The model `{model}` has {units} units, which is not divisible by `heads` {heads}",
            "choose a multiple of `heads` for `units` times `width`",
        )
    if even and units // heads % 2:
        raise UsageError(
            f"The model `{model}` has {units // heads} units per head, which is odd, and `positions=rotary` rotates "
            "pairs of them",
            "choose a multiple of twice `heads` for `units` times `width`",
        )
    return units


def normalized(values: Any) -> Any:
    """Layer normalization over the last axis."""
    return layers.LayerNormalization(epsilon=1e-5)(values)


def attended(values: Any, context: Any, heads: int, dropout: float, *, mask: Any = None, causal: bool = False) -> Any:
    """`values` `[B, T, units]`, normalized, plus their attention to `context` `[B, S, units]`.

    Args:
        values: the queries, before the normalization.
        context: the keys and values of the attention; `None` for the normalized `values`.
        heads: the number of heads.
        dropout: the fraction of attention weights and outputs that are dropped in training.
        mask: which positions of the context exist, bool `[B, S]`; `None` if all do.
        causal: whether a position attends only to itself and earlier ones.
    """
    units = values.shape[-1]
    queries = normalized(values)
    attention = layers.MultiHeadAttention(heads, units // heads, dropout=dropout)
    attention_mask = None if mask is None else ops.expand_dims(mask, 1)
    context = queries if context is None else context
    outputs = attention(queries, context, attention_mask=attention_mask, use_causal_mask=causal)
    return values + layers.Dropout(dropout)(outputs)


def transformed(values: Any, hidden: int, dropout: float, activation: str = "gelu") -> Any:
    """`values` `[B, T, units]` plus two dense layers of the normalized values, the first of `hidden` units."""
    inner = layers.Dense(hidden, activation=activation)(normalized(values))
    return values + layers.Dropout(dropout)(layers.Dense(values.shape[-1])(inner))


def embedded_positions(tokens: Any, length: int, units: int, **options: Any) -> Any:
    """A learned vector for each position of `tokens` `[B, T]`, T at most `length`: `[B, T, units]`."""
    positions = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    return layers.Embedding(length, units, name="positions", **options)(positions)


def _angles(length: Any, size: int) -> Any:
    """Angles of positions from 0 at `size` wavelengths from 2 pi to 2 pi `BASE`: float32 `[length, size]`."""
    frequencies = BASE ** (-np.arange(size, dtype=np.float32) / np.float32(size))
    return ops.expand_dims(ops.arange(length, dtype="float32"), 1) * frequencies


@keras.saving.register_keras_serializable("tfdist")
class SinePositions(layers.Layer):
    """Adds the sines and cosines of positions to vectors `[B, T, units]` (Vaswani and others, section 3.5)."""

    def call(self, values: Any) -> Any:
        units = values.shape[-1]
        angles = _angles(ops.shape(values)[1], -(-units // 2))
        waves = ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)[:, :units]
        return values + ops.cast(waves, values.dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


@keras.saving.register_keras_serializable("tfdist")
class Rotary(layers.Layer):
    """Rotates pairs of numbers of each head by angles that grow with the position: `[B, T, heads, size]`, `size` even.

    The product of a query and a key then depends on their distance (J. Su and others, "RoFormer: enhanced transformer
    with rotary position embedding", Neurocomputing 2024). As in Llama, number i is paired with number i + size / 2.
    """

    def call(self, values: Any) -> Any:
        half = values.shape[-1] // 2
        angles = ops.expand_dims(_angles(ops.shape(values)[1], half), 1)
        cosines, sines = (ops.cast(waves, values.dtype) for waves in (ops.cos(angles), ops.sin(angles)))
        first, second = values[..., :half], values[..., half:]
        return ops.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape
