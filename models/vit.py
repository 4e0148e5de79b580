"""`vit`: the vision transformer, an encoder over the patches of an image.

A. Dosovitskiy and others, "An image is worth 16x16 words: transformers for image recognition at scale", ICLR 2021.
"""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import layers, ops

from tfdist.data.spec import DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Count, CountOrZero, Factor, Fraction

TASKS = ("classification",)
# Rate, batch and weight decay of H. Touvron and others, "Training data-efficient image transformers & distillation
# through attention", ICML 2021, table 9; the rates of Dosovitskiy and others are for batches of 4096.
TRAINING = Training("adamw", learning_rate=5e-4, batch_size=512, weight_decay=0.05)


def build(
    spec: DataSpec,
    *,
    blocks: Count = 12,
    units: Count = 192,
    heads: Count = 3,
    patch: CountOrZero = 0,
    dropout: Fraction = 0.1,
    width: Factor = 1.0,
) -> keras.Model:
    """Embed patches, add a class token and positions; `blocks` of attention and two dense layers; class token; dense.

    By default ViT-Ti/16 of Touvron and others: 5.7 million parameters on 224x224x3 with 1000 classes. ViT-S/16 has
    `units=384` and `heads=6` (22.1 million), ViT-B/16 `units=768` and `heads=12` (86.6 million). Positions are learned,
    dense layers have 4 times the units and GELU, and normalization comes before attention and before the dense layers.
    There is no stochastic depth.

    Without `patch`, patches have 16x16 pixels, and fewer on small images, a power of two, so that there are about 8
    along the shorter side: 4x4 for 28x28 and 32x32. Images whose sides are not divisible by the patch are padded.

    Input `[B, H, W, C]`. Output: logits `[B, spec.classes]`, float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        blocks: the number of blocks.
        units: the length of a patch's vector.
        heads: the number of attention heads.
        patch: the pixels along each side of a patch; 0 chooses them by the size of the images.
        dropout: the fraction of values that are dropped in training after the embedding, after attention and after
            each dense layer of a block, in [0, 1).
        width: a factor on `units`.

    Raises:
        UsageError: the examples are not images.
    """
    _fit.require_images("vit", spec)
    units, patch = _fit.scaled(units, width), patch or _patch(spec)
    inputs = keras.Input(spec.input_shape)
    patches = layers.Conv2D(units, patch, patch, name="patches")(_fit.padded(inputs, patch))
    values = TokenAndPositions(name="token_and_positions")(layers.Reshape((-1, units))(patches))
    values = layers.Dropout(dropout)(values)
    for _ in range(blocks):
        values = _block(values, heads, dropout)
    token = _normalized(values)[:, 0]
    return keras.Model(inputs, layers.Dense(spec.classes, dtype="float32", name="logits")(token), name="vit")


def _patch(spec: DataSpec) -> int:
    """The power of two that gives about 8 patches along the shorter side, at most 16."""
    return 2 ** min(4, max(0, round(math.log2(min(spec.input_shape[:2]) / 8))))


def _block(values: Any, heads: int, dropout: float) -> Any:
    units = values.shape[-1]
    inputs = _normalized(values)
    attended = layers.MultiHeadAttention(heads, max(1, units // heads))(inputs, inputs)
    values = values + layers.Dropout(dropout)(attended)
    hidden = layers.Dropout(dropout)(layers.Dense(4 * units, activation="gelu")(_normalized(values)))
    return values + layers.Dropout(dropout)(layers.Dense(units)(hidden))


def _normalized(values: Any) -> Any:
    return layers.LayerNormalization(epsilon=1e-6)(values)


@keras.saving.register_keras_serializable("tfdist")
class TokenAndPositions(layers.Layer):
    """Puts a learned class token before the patches `[B, N, D]`, and adds learned positions: `[B, N + 1, D]`."""

    def build(self, shape: Any) -> None:
        initializer = keras.initializers.TruncatedNormal(stddev=0.02)
        self.token = self.add_weight(shape=(1, 1, shape[-1]), initializer=initializer, name="token")
        self.positions = self.add_weight(shape=(1, shape[1] + 1, shape[-1]), initializer=initializer, name="positions")

    def call(self, patches: Any) -> Any:
        token = ops.broadcast_to(self.token, (ops.shape(patches)[0], 1, patches.shape[-1]))
        return ops.concatenate([token, patches], axis=1) + self.positions
