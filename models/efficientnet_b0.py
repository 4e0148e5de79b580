"""`efficientnet_b0`: depthwise convolutions in proportions found by search, from `keras.applications`.

M. Tan and Q. V. Le, "EfficientNet: rethinking model scaling for convolutional neural networks", ICML 2019, table 1.
"""

from __future__ import annotations

from typing import Any

import keras

from tfdist.data.spec import DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Factor, Fraction

TASKS = ("classification",)
# Keras' usual rate of Adam, at tfdist's choice of batch. The paper has RMSprop with a rate of 0.256, for batches of
# 4096 and hundreds of epochs.
TRAINING = Training("adam", learning_rate=1e-3, batch_size=32)
_STOCHASTIC_DEPTH = 0.2  # of keras.applications, and of the paper, section 5.2


def build(
    spec: DataSpec,
    *,
    dropout: Fraction = 0.2,
    stochastic_depth: Fraction = _STOCHASTIC_DEPTH,
    synchronized: bool = False,
    width: Factor = 1.0,
) -> keras.Model:
    """Conv 3x3; sixteen blocks that expand, convolve each channel, squeeze and excite, and project; conv 1x1; dense.

    5.3 million parameters on 224x224x3 with 1000 classes. The strides divide the sides of an image by 32: they are made
    for 224x224. Of 32x32 pixels the last blocks see one; smaller images are padded with zeros to 32x32.

    Input `[B, H, W, C]`, pixels in [0, 1]. Output: logits `[B, spec.classes]`, float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        dropout: the fraction of values that are dropped before the last layer in training, in [0, 1).
        stochastic_depth: the fraction of examples that skip the last block in training, in [0, 1); it grows linearly
            from 0 at the first block.
        synchronized: batch normalizations use the statistics of the global batch, not of a replica's part.
        width: a factor on the number of filters.

    Raises:
        UsageError: the examples are not images.
    """
    _fit.require_images("efficientnet_b0", spec)

    def change(layer: keras.layers.Layer, config: dict[str, Any]) -> None:
        if isinstance(layer, keras.layers.Dropout):
            whole_examples = config["noise_shape"] is not None
            config["rate"] = config["rate"] * stochastic_depth / _STOCHASTIC_DEPTH if whole_examples else dropout
        if isinstance(layer, keras.layers.Reshape):  # the averages of all channels, `(1, 1, channels)`
            *ones, channels = config["target_shape"]
            config["target_shape"] = (*ones, _fit.scaled(channels, width))
        if layer.name == "predictions":
            # That of keras.applications depends on the number of classes, and is made for 1000: with ten, the logits
            # of a new model are ten times as large, and its loss is four times that of guessing.
            config["kernel_initializer"] = "glorot_uniform"

    application = keras.applications.EfficientNetB0
    return _fit.adapted(application, spec, width=width, synchronized=synchronized, pads=True, change=change)
