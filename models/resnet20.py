"""`resnet20`: the residual network for CIFAR with 20 layers.

K. He, X. Zhang, S. Ren and J. Sun, "Deep residual learning for image recognition", CVPR 2016, section 4.2.
"""

from __future__ import annotations

import keras
from keras import layers

from tfdist.data.spec import DataSpec
from tfdist.models import _fit, _residual
from tfdist.models._training import Training
from tfdist.options import Factor

TASKS = ("classification",)
# Rate, batch, momentum and weight decay of the paper, section 4.2, without its step schedule.
TRAINING = Training("sgd", learning_rate=0.1, batch_size=128, momentum=0.9, weight_decay=1e-4)


def build(spec: DataSpec, *, synchronized: bool = False, width: Factor = 1.0) -> keras.Model:
    """Conv 3x3, three stages of three basic blocks with 16, 32 and 64 filters, average, dense.

    0.27 million parameters on 32x32x3 with 10 classes. Shortcuts that change shape have no parameters, as in the
    paper for CIFAR (option A).

    Input `[B, H, W, C]`. Output: logits `[B, spec.classes]`, float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        synchronized: batch normalizations use the statistics of the global batch, not of a replica's part.
        width: a factor on the number of filters.

    Raises:
        UsageError: the examples are not images.
    """
    _fit.require_images("resnet20", spec)
    inputs = keras.Input(spec.input_shape)
    first, *others = (_fit.scaled(filters, width) for filters in (16, 32, 64))
    image = _residual.normalization(_residual.convolution(inputs, first, 3), synchronized)
    image = _residual.stage(layers.ReLU()(image), first, 3, 1, synchronized, projected=False)
    for filters in others:
        image = _residual.stage(image, filters, 3, 2, synchronized, projected=False)
    features = layers.GlobalAveragePooling2D()(image)
    return keras.Model(inputs, layers.Dense(spec.classes, dtype="float32", name="logits")(features), name="resnet20")
