"""`vgg11`: eight 3x3 convolutions and three dense layers.

K. Simonyan and A. Zisserman, "Very deep convolutional networks for large-scale image recognition", ICLR 2015,
configuration A.
"""

from __future__ import annotations

import keras
from keras import layers

from tfdist.data.spec import DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Factor, Fraction

TASKS = ("classification",)
# Rate, batch, momentum and weight decay of the paper, section 3.1.
TRAINING = Training("sgd", learning_rate=0.01, batch_size=256, momentum=0.9, weight_decay=5e-4)
GROUPS = ((64,), (128,), (256, 256), (512, 512), (512, 512))


def build(spec: DataSpec, *, dropout: Fraction = 0.5, width: Factor = 1.0) -> keras.Model:
    """Five groups of 1, 1, 2, 2 and 2 convolutions with 64 to 512 filters, each with a pool; dense 4096 twice; dense.

    132.9 million parameters on 224x224x3 with 1000 classes; 28.1 million on 32x32x3 with 10.

    Input `[B, H, W, C]`, 32x32 pixels or more. Output: logits `[B, spec.classes]`, float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        dropout: the fraction of dense units that are dropped in training, in [0, 1).
        width: a factor on the number of filters and hidden units.

    Raises:
        UsageError: the examples are not images, or too small.
    """
    _fit.require_images("vgg11", spec, smallest=32)
    model = keras.Sequential([keras.Input(spec.input_shape)], name="vgg11")
    for group in GROUPS:
        for filters in group:
            model.add(_convolution(_fit.scaled(filters, width)))
        model.add(layers.MaxPooling2D(2))
    model.add(layers.Flatten())
    for _ in range(2):
        model.add(layers.Dense(_fit.scaled(4096, width), activation="relu", kernel_initializer="he_normal"))
        model.add(layers.Dropout(dropout))
    model.add(layers.Dense(spec.classes, dtype="float32", name="logits"))
    return model


def _convolution(filters: int) -> layers.Layer:
    # The paper starts from pre-trained layers or Glorot's initialization; He's keeps the signal through all layers.
    return layers.Conv2D(filters, 3, padding="same", activation="relu", kernel_initializer="he_normal")
