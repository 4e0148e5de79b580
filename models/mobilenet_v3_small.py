"""`mobilenet_v3_small`: a small network of depthwise convolutions for telephones, from `keras.applications`.

A. Howard and others, "Searching for MobileNetV3", ICCV 2019, table 2.
"""

from __future__ import annotations

from typing import Any

import keras

from tfdist.data.spec import DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Factor, Fraction

TASKS = ("classification",)
# Keras' usual rate of Adam, at tfdist's choice of batch. The paper has RMSprop with a rate of 0.1 for batches of 4096,
# and 5 % decay per epoch, which is for hundreds of epochs.
TRAINING = Training("adam", learning_rate=1e-3, batch_size=32)


def build(spec: DataSpec, *, dropout: Fraction = 0.2, synchronized: bool = False, width: Factor = 1.0) -> keras.Model:
    """Conv 3x3; eleven blocks that expand, convolve each channel, squeeze and excite, and project; conv 1x1; dense.

    2.5 million parameters on 224x224x3 with 1000 classes. The strides divide the sides of an image by 32: they are made
    for 224x224. Of 32x32 pixels the last blocks see one; smaller images are padded with zeros to 32x32.

    Input `[B, H, W, C]`, pixels in [0, 1]. Output: logits `[B, spec.classes]`, float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        dropout: the fraction of values that are dropped before the last layer in training, in [0, 1).
        synchronized: batch normalizations use the statistics of the global batch, not of a replica's part.
        width: a factor on the number of filters.

    Raises:
        UsageError: the examples are not images.
    """
    _fit.require_images("mobilenet_v3_small", spec)

    def change(layer: keras.layers.Layer, config: dict[str, Any]) -> None:
        if isinstance(layer, keras.layers.Dropout):
            config["rate"] = dropout

    application = keras.applications.MobileNetV3Small
    return _fit.adapted(application, spec, width=width, synchronized=synchronized, pads=True, change=change)
