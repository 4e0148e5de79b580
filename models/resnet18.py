"""`resnet18`: the residual network for ImageNet with 18 layers.

K. He, X. Zhang, S. Ren and J. Sun, "Deep residual learning for image recognition", CVPR 2016, table 1.
"""

from __future__ import annotations

import keras
from keras import layers

from tfdist.data.spec import DataSpec
from tfdist.models import _fit, _residual
from tfdist.models._training import Training
from tfdist.options import Factor

TASKS = ("classification",)
# Rate, batch, momentum and weight decay of the paper, section 3.4.
TRAINING = Training("sgd", learning_rate=0.1, batch_size=256, momentum=0.9, weight_decay=1e-4)


def build(spec: DataSpec, *, synchronized: bool = False, width: Factor = 1.0) -> keras.Model:
    """Conv 7x7 and pool, both of stride 2; four stages of two basic blocks with 64 to 512 filters; average; dense.

    11.7 million parameters on 224x224x3 with 1000 classes. Shortcuts that change shape are 1x1 convolutions (the
    paper's option B).

    Input `[B, H, W, C]`. Output: logits `[B, spec.classes]`, float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        synchronized: batch normalizations use the statistics of the global batch, not of a replica's part.
        width: a factor on the number of filters.

    Raises:
        UsageError: the examples are not images.
    """
    _fit.require_images("resnet18", spec)
    inputs = keras.Input(spec.input_shape)
    stages = [_fit.scaled(filters, width) for filters in (64, 128, 256, 512)]
    image = _residual.normalization(_residual.convolution(inputs, stages[0], 7, 2), synchronized)
    image = layers.MaxPooling2D(3, 2, padding="same")(layers.ReLU()(image))
    for number, filters in enumerate(stages):
        image = _residual.stage(image, filters, 2, 1 if number == 0 else 2, synchronized, projected=True)
    features = layers.GlobalAveragePooling2D()(image)
    return keras.Model(inputs, layers.Dense(spec.classes, dtype="float32", name="logits")(features), name="resnet18")
