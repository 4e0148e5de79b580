"""`vae`: a variational autoencoder, whose decoder turns normally distributed codes into pictures.

D. P. Kingma and M. Welling, "Auto-encoding variational Bayes", ICLR 2014.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tfdist.data.spec import DataSpec
from tfdist.models import _fit, _generative
from tfdist.models._training import Training
from tfdist.options import Count, CountOrZero, Factor, checks_arguments

TASKS = ("generation",)
# Keras' usual rate of Adam, at tfdist's choice of batch; the paper has Adagrad and a batch of 100.
TRAINING = Training("adam", learning_rate=1e-3, batch_size=128)


def build(spec: DataSpec, *, units: Count = 500, code: Count = 20, width: Factor = 1.0) -> keras.Model:
    """Dense `units` tanh, mean and log variance of the code; from a sampled code, dense `units` tanh, dense, sigmoid.

    The encoder and the decoder of the paper's appendix C.1, with its 500 hidden units and 20 numbers per code:
    815,824 parameters on 28x28x1. The loss is the negative evidence lower bound in nats per picture, the sum of
    `reconstruction`, the cross-entropy of the pixels, and `kl`, the divergence of the code from a standard normal
    distribution. Pixels between 0 and 1 are probabilities of a binary pixel.

    Input `[B, H, W, C]`, pixels in [0, 1]. Output: the pictures decoded from sampled codes, `[B, H, W, C]` in [0, 1],
    float32 under every dtype policy. `generate(count, seed)` decodes codes drawn from the standard normal distribution.

    Args:
        spec: the spec of the dataset.
        units: the hidden units of the encoder, and of the decoder.
        code: the length of a code.
        width: a factor on `units`.

    Raises:
        UsageError: the examples are not images.
    """
    _fit.require_images("vae", spec)
    units = _fit.scaled(units, width)
    picture = keras.Input(spec.input_shape)
    hidden = layers.Dense(units, activation="tanh")(layers.Flatten()(picture))
    mean, log_variance = (layers.Dense(code, dtype="float32", name=name)(hidden) for name in ("mean", "log_variance"))
    noise = _generative.Noise(dtype="float32")(mean)
    sampled = Code(dtype="float32", name="code")([mean, log_variance, noise])
    return VAE(picture, _decoder(spec, units, code)(sampled), name="vae")


def _decoder(spec: DataSpec, units: int, code: int) -> keras.Model:
    inputs = keras.Input((code,))
    hidden = layers.Dense(units, activation="tanh")(inputs)
    pixels = layers.Dense(math.prod(spec.input_shape), activation="sigmoid", dtype="float32", name="pixels")(hidden)
    picture = layers.Reshape(spec.input_shape, dtype="float32")(pixels)
    return keras.Model(inputs, picture, name="decoder")


@keras.saving.register_keras_serializable("tfdist")
class Code(layers.Layer):
    """A code from its mean, its log variance and standard normal noise, each `[B, code]`.

    Adds the loss KL(N(mean, variance) || N(0, 1)): the sum over a code, averaged over the batch.
    """

    def call(self, inputs: Any) -> Any:
        mean, log_variance, noise = inputs
        per_number = 0.5 * (ops.square(mean) + ops.exp(log_variance) - 1 - log_variance)
        self.add_loss(ops.mean(ops.sum(per_number, axis=-1)))
        return mean + ops.exp(0.5 * log_variance) * noise


@keras.saving.register_keras_serializable("tfdist")
class VAE(keras.Model):
    """A model from pictures to reconstructions, with a layer "code" that adds the divergence, and a model "decoder"."""

    def __init__(self, inputs: Any, outputs: Any, name: str | None = None, **options: Any):
        super().__init__(inputs, outputs, name=name, **options)
        self.reconstruction = keras.metrics.Mean("reconstruction")
        self.divergence = keras.metrics.Mean("kl")

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        """Returns the negative evidence lower bound, in nats per picture."""
        del y, sample_weight, training
        per_picture = ops.sum(ops.binary_crossentropy(x, y_pred), axis=(1, 2, 3))
        self.reconstruction.update_state(per_picture)
        self.divergence.update_state(self.get_layer("code").losses[0], sample_weight=ops.shape(x)[0])
        return ops.mean(per_picture) + sum(self.losses)

    @checks_arguments
    def generate(self, count: Count, seed: CountOrZero) -> np.ndarray:
        """Returns `count` pictures, float32 `[count, H, W, C]` in [0, 1]."""
        decoder = self.get_layer("decoder")
        codes = np.random.default_rng(seed).normal(size=(count, *decoder.input_shape[1:]))
        return ops.convert_to_numpy(decoder(codes.astype(np.float32), training=False))
