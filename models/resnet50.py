"""`resnet50`: the residual network for ImageNet with 50 layers, from `keras.applications`.

K. He, X. Zhang, S. Ren and J. Sun, "Deep residual learning for image recognition", CVPR 2016, table 1.
"""

from __future__ import annotations

from typing import Any

import keras

from tfdist.data.spec import DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Factor

TASKS = ("classification",)
# Rate, batch, momentum and weight decay of the paper, section 3.4.
TRAINING = Training("sgd", learning_rate=0.1, batch_size=256, momentum=0.9, weight_decay=1e-4)


def build(spec: DataSpec, *, synchronized: bool = False, width: Factor = 1.0) -> keras.Model:
    """Conv 7x7, pool, four stages of 3, 4, 6 and 3 bottleneck blocks, average, dense; new weights.

    25.6 million parameters on 224x224x3 with 1000 classes. Keras' convolutions have a bias, unlike the paper's.

    Input `[B, H, W, C]`, 32x32 pixels or more. Output: logits `[B, spec.classes]`, float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        synchronized: batch normalizations use the statistics of the global batch, not of a replica's part.
        width: a factor on the number of filters.

    Raises:
        UsageError: the examples are not images, or too small.
    """
    _fit.require_images("resnet50", spec, smallest=32)

    def change(layer: keras.layers.Layer, config: dict[str, Any]) -> None:
        # Each block starts as the identity, so that new weights learn with large batches (Goyal and others, section
        # 5.1).
        if layer.name.endswith("_3_bn"):
            config["gamma_initializer"] = "zeros"

    application = keras.applications.ResNet50
    return _fit.adapted(
        application, spec, width=width, synchronized=synchronized, initializer="he_normal", change=change
    )
