"""`conv_autoencoder`: convolutions that shrink an image, and transposed convolutions that restore it.

J. Masci, U. Meier, D. Cireşan and J. Schmidhuber, "Stacked convolutional auto-encoders for hierarchical feature
extraction", ICANN 2011.
"""

from __future__ import annotations

import keras
from keras import layers

from tfdist.data.spec import DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Count, Factor

TASKS = ("autoencoding",)
# Keras' usual rate of Adam, at its usual batch; the paper has none.
TRAINING = Training("adam", learning_rate=1e-3, batch_size=32)
FILTERS = (32, 64)


def build(spec: DataSpec, *, code: Count = 8, width: Factor = 1.0) -> keras.Model:
    """Conv 32 and 64 3x3 with stride 2, conv `code` 3x3, transposed conv 64 and 32 with stride 2, conv C 3x3, sigmoid.

    The code of an image is `[H/4, W/4, code]`: half of the numbers of 28x28x1, a sixth of 32x32x3. Strides replace
    the paper's max-pooling, and all layers are trained together.

    Input `[B, H, W, C]`, pixels in [0, 1]. Output: pixels `[B, H, W, C]` in [0, 1], float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        code: the channels of the code.
        width: a factor on the number of filters and on `code`.

    Raises:
        UsageError: the examples are not images.
    """
    _fit.require_images("conv_autoencoder", spec)
    filters = [_fit.scaled(number, width) for number in FILTERS]
    inputs = keras.Input(spec.input_shape)
    image = _fit.padded(inputs, 2 ** len(filters))
    for number in filters:
        image = layers.Conv2D(number, 3, 2, padding="same", activation="relu")(image)
    image = layers.Conv2D(_fit.scaled(code, width), 3, padding="same", activation="relu", name="code")(image)
    for number in reversed(filters):
        image = layers.Conv2DTranspose(number, 3, 2, padding="same", activation="relu")(image)
    channels = spec.input_shape[-1]
    pixels = layers.Conv2D(channels, 3, padding="same", activation="sigmoid", dtype="float32", name="pixels")(image)
    return keras.Model(inputs, _fit.cropped(pixels, spec), name="conv_autoencoder")
