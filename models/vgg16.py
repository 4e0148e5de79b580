"""`vgg16`: thirteen 3x3 convolutions and three dense layers, from `keras.applications`.

K. Simonyan and A. Zisserman, "Very deep convolutional networks for large-scale image recognition", ICLR 2015,
configuration D.
"""

from __future__ import annotations

import keras

from tfdist.data.spec import DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Factor

TASKS = ("classification",)
# The paper's SGD starts from pre-trained layers. From new weights its rate ends all learning after some steps on small
# images; with Adam, at a rate and a batch of tfdist's choice, the loss falls at once.
TRAINING = Training("adam", learning_rate=1e-4, batch_size=32)


def build(spec: DataSpec, *, width: Factor = 1.0) -> keras.Model:
    """Five groups of 2, 2, 3, 3 and 3 convolutions with 64 to 512 filters, each with a pool; dense 4096 twice; dense.

    138.4 million parameters on 224x224x3 with 1000 classes; 33.6 million on 32x32x3 with 10. As in Keras, without
    the paper's dropout between the dense layers.

    Input `[B, H, W, C]`, 32x32 pixels or more. Output: logits `[B, spec.classes]`, float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        width: a factor on the number of filters and hidden units.

    Raises:
        UsageError: the examples are not images, or too small.
    """
    _fit.require_images("vgg16", spec, smallest=32)
    # The paper starts from pre-trained layers; with Keras' initialization activations shrink 270 times.
    return _fit.adapted(keras.applications.VGG16, spec, width=width, initializer="he_normal")
