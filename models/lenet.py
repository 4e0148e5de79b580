"""`lenet`: the small convolutional network with dropout of the PyTorch and Horovod MNIST examples.

After Y. LeCun, L. Bottou, Y. Bengio and P. Haffner, "Gradient-based learning applied to document
recognition", Proceedings of the IEEE, 1998.
"""

from __future__ import annotations

import keras

from tfdist.data.spec import DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Factor, Fraction

TASKS = ("classification",)
# The batch of PyTorch's and Horovod's MNIST examples; with Adam instead of their SGD.
TRAINING = Training("adam", learning_rate=1e-3, batch_size=64)


def build(spec: DataSpec, *, dropout: Fraction = 0.5, width: Factor = 1.0) -> keras.Model:
    """Conv 10 5x5, pool 2, ReLU, conv 20 5x5, dropout, pool 2, ReLU, dense 50 ReLU, dropout, dense.

    21,840 parameters on 28x28x1 with 10 classes. Convolutions are unpadded; for smaller images (below 16 pixels),
    convolutions and pools pad.

    Input `[B, H, W, C]`. Output: logits `[B, spec.classes]`, float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        dropout: the fraction of feature maps and of dense units that are dropped in training, in [0, 1).
        width: a factor on the number of filters and hidden units.

    Raises:
        UsageError: the examples are not images.
    """
    _fit.require_images("lenet", spec)
    padding = _fit.padding(spec, kernel=5)
    return keras.Sequential(
        [
            keras.Input(spec.input_shape),
            keras.layers.Conv2D(_fit.scaled(10, width), 5, padding=padding),
            keras.layers.MaxPooling2D(2, padding=padding),
            keras.layers.ReLU(),
            keras.layers.Conv2D(_fit.scaled(20, width), 5, padding=padding),
            # Drops whole feature maps, as in the examples, because neighbouring pixels are strongly correlated.
            keras.layers.SpatialDropout2D(dropout),
            keras.layers.MaxPooling2D(2, padding=padding),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(_fit.scaled(50, width), activation="relu"),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(spec.classes, dtype="float32", name="logits"),
        ],
        name="lenet",
    )
