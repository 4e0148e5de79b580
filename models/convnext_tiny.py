"""`convnext_tiny`: a convolutional network with the design of vision transformers, from `keras.applications`.

Z. Liu and others, "A ConvNet for the 2020s", CVPR 2022.
"""

from __future__ import annotations

from typing import Any

import keras

from tfdist.data.spec import DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Factor

TASKS = ("classification",)
# Rate, batch and weight decay of the paper, table 5.
TRAINING = Training("adamw", learning_rate=4e-3, batch_size=4096, weight_decay=0.05)


def build(spec: DataSpec, *, width: Factor = 1.0) -> keras.Model:
    """Conv 4x4 with stride 4; stages of 3, 3, 9 and 3 blocks of a depthwise conv 7x7 and two dense layers; dense.

    28.6 million parameters on 224x224x3 with 1000 classes. The strides divide the sides of an image by 32: they are
    made for 224x224. Of 32x32 pixels the last stage sees one; smaller images are padded with zeros to 32x32. There is
    no stochastic depth, and as in the paper no dropout.

    Input `[B, H, W, C]`, pixels in [0, 1]. Output: logits `[B, spec.classes]`, float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        width: a factor on the number of filters and units.

    Raises:
        UsageError: the examples are not images.
    """
    _fit.require_images("convnext_tiny", spec)

    def change(layer: keras.layers.Layer, config: dict[str, Any]) -> None:
        if "projection_dim" in config:  # the scale of a block's output
            config["projection_dim"] = _fit.scaled(config["projection_dim"], width)

    # The preprocessing of keras.applications is for three channels from 0 to 255; a normalization follows the first
    # convolution.
    return _fit.adapted(
        keras.applications.ConvNeXtTiny, spec, width=width, pads=True, change=change, include_preprocessing=False
    )
