"""`ddpm`: a denoising diffusion model, a small U-Net that predicts the noise in a picture.

J. Ho, A. Jain and P. Abbeel, "Denoising diffusion probabilistic models", NeurIPS 2020.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tfdist.data.spec import DataSpec
from tfdist.models import _fit, _generative
from tfdist.models._training import Training
from tfdist.options import Count, CountOrZero, Factor, Fraction, checks_arguments

TASKS = ("generation",)
# Adam as in the paper, whose rate is 2e-4 for a batch of 128; the network is smaller here, and the run shorter.
TRAINING = Training("adam", learning_rate=1e-3, batch_size=128)


def build(
    spec: DataSpec,
    *,
    steps: Count = 250,
    filters: Count = 32,
    multipliers: Sequence[Count] = (1, 2, 2),
    blocks: Count = 1,
    attention: CountOrZero = 1,
    dropout: Fraction = 0.0,
    width: Factor = 1.0,
) -> keras.Model:
    """A U-Net of residual blocks with group normalization and attention, told the time step by a sine embedding.

    1.11 million parameters on 28x28x1. With `filters=128`, `multipliers=1,2,2,2`, `blocks=2` and `dropout=0.1` it is
    the paper's network for 32x32x3, with 35.7 million. A picture gets noise of a random time step,
    and the loss is the mean squared error of the predicted noise. The variance of the noise grows linearly as in the
    paper, from 1e-4 to 0.02 for 1000 steps, and by as much more per step for fewer. The paper's exponential moving
    average of the weights is left out. In an evaluation the noise is the same for each batch, and the time steps are
    spread evenly over a batch.

    Input `[B, H, W, C]`, pixels in [0, 1]. Output: the estimate of the pictures after noise was added, `[B, H, W, C]`
    in [0, 1], float32 under every dtype policy. `generate(count, seed)` returns samples, after `steps` predictions.

    Args:
        spec: the spec of the dataset.
        steps: the number of time steps.
        filters: the filters of the first level.
        multipliers: the factor on `filters` for each level; each level has half the pixels per side of the one before.
        blocks: residual blocks per level on the way down; there is one more on the way up.
        attention: the level, counted from 0, whose blocks have attention; the lowest pixels always have.
        dropout: the fraction of values that are dropped in each residual block in training, in [0, 1).
        width: a factor on `filters`.

    Raises:
        UsageError: the examples are not images.
    """
    _fit.require_images("ddpm", spec)
    sizes = [_fit.scaled(filters, width) * multiplier for multiplier in multipliers]
    picture = keras.Input(spec.input_shape)
    noise = _generative.Noise(dtype="float32")(picture)
    time = TimeStep(steps, dtype="float32", name="time")(picture)
    noisy = Diffusion(steps, dtype="float32", name="diffusion")([picture, time, noise])
    predicted = _unet(spec, sizes, blocks, attention, dropout)([noisy, time])
    estimate = Estimate(steps, dtype="float32", name="estimate")([noisy, time, noise, predicted])
    return DDPM(picture, estimate, name="ddpm")


def _unet(spec: DataSpec, sizes: list[int], blocks: int, attention: int, dropout: float) -> keras.Model:
    """A model from pictures `[B, H, W, C]` in [-1, 1] plus noise, and time steps `[B]`, to the noise."""
    inputs, time = keras.Input(spec.input_shape), keras.Input((), dtype="int32")
    moment = SineEmbedding(sizes[0], dtype="float32")(time)
    moment = layers.Dense(4 * sizes[0], activation="silu")(moment)
    moment = layers.Activation("silu")(layers.Dense(4 * sizes[0])(moment))

    def block(image: Any, level: int) -> Any:
        image = _residual(image, moment, sizes[level], dropout)
        return _attended(image) if level == attention else image

    image = _convolution(_fit.padded(inputs, 2 ** (len(sizes) - 1)), sizes[0])
    connections = [image]
    for level, size in enumerate(sizes):
        for _ in range(blocks):
            image = block(image, level)
            connections.append(image)
        if level < len(sizes) - 1:
            image = _convolution(image, size, strides=2)
            connections.append(image)
    image = _residual(_attended(_residual(image, moment, sizes[-1], dropout)), moment, sizes[-1], dropout)
    for level, size in reversed(list(enumerate(sizes))):
        for _ in range(blocks + 1):
            image = block(layers.Concatenate()([image, connections.pop()]), level)
        if level:
            image = _convolution(layers.UpSampling2D(2)(image), size)
    image = layers.Activation("silu")(_normalized(image))
    channels = spec.input_shape[-1]
    image = layers.Conv2D(channels, 3, padding="same", kernel_initializer="zeros", dtype="float32", name="noise")(image)
    return keras.Model([inputs, time], _fit.cropped(image, spec), name="unet")


def _residual(image: Any, moment: Any, size: int, dropout: float) -> Any:
    hidden = _convolution(layers.Activation("silu")(_normalized(image)), size)
    hidden = hidden + layers.Reshape((1, 1, size))(layers.Dense(size)(moment))
    hidden = layers.Dropout(dropout)(layers.Activation("silu")(_normalized(hidden)))
    # Blocks begin as the identity.
    hidden = _convolution(hidden, size, initializer="zeros")
    return hidden + (image if image.shape[-1] == size else layers.Dense(size)(image))


def _attended(image: Any) -> Any:
    """Attention of each pixel to all pixels, with one head."""
    *_, height, width, channels = image.shape
    pixels = layers.Reshape((height * width, channels))(_normalized(image))
    attended = layers.MultiHeadAttention(1, channels)(pixels, pixels)
    return image + layers.Reshape((height, width, channels))(attended)


def _normalized(image: Any) -> Any:
    # 32 groups as in the paper, but of four channels at least, which is what its smallest level has: a group of one
    # channel would remove the brightness of a picture, which samples then do not have either.
    channels = image.shape[-1]
    return layers.GroupNormalization(math.gcd(32, channels, max(1, channels // 4)), epsilon=1e-6)(image)


def _convolution(image: Any, filters: int, strides: int = 1, initializer: str = "he_normal") -> Any:
    return layers.Conv2D(filters, 3, strides, padding="same", kernel_initializer=initializer)(image)


class _Scheduled(layers.Layer):
    """A layer that knows the number of time steps, and the share of the picture's variance that is left after each."""

    def __init__(self, steps: int, **options: Any):
        super().__init__(**options)
        self.steps = steps
        self.remaining = np.cumprod(1 - variances(steps))

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"steps": self.steps}

    def amplitudes(self, time: Any) -> tuple[Any, Any]:
        """The factors of the picture and of the noise at time steps `[B]`, each `[B, 1, 1, 1]`."""
        factors = np.sqrt([self.remaining, 1 - self.remaining]).astype(np.float32)
        picture, noise = (ops.reshape(ops.take(factor, time), (-1, 1, 1, 1)) for factor in factors)
        return picture, noise


@keras.saving.register_keras_serializable("tfdist")
class TimeStep(_Scheduled):
    """A time step for each example, int32 `[B]` from 0: at random in training, spread evenly over a batch otherwise."""

    def __init__(self, steps: int, **options: Any):
        super().__init__(steps, **options)
        self.generator = keras.random.SeedGenerator()

    def call(self, values: Any, training: bool = False) -> Any:
        count = ops.shape(values)[0]
        if training:
            return keras.random.randint((count,), 0, self.steps, seed=self.generator)
        return ops.arange(count, dtype="int32") * self.steps // count


@keras.saving.register_keras_serializable("tfdist")
class Diffusion(_Scheduled):
    """Pictures `[B, H, W, C]` in [0, 1], scaled to [-1, 1], with the noise of their time steps `[B]`."""

    def call(self, inputs: Any) -> Any:
        picture, time, noise = inputs
        amplitude, of_noise = self.amplitudes(time)
        return amplitude * (2 * picture - 1) + of_noise * noise


@keras.saving.register_keras_serializable("tfdist")
class Estimate(_Scheduled):
    """The pictures in [0, 1] without the predicted noise; adds the mean squared error of the prediction as a loss."""

    def call(self, inputs: Any) -> Any:
        noisy, time, noise, predicted = inputs
        self.add_loss(ops.mean(ops.square(predicted - noise)))
        amplitude, of_noise = self.amplitudes(time)
        return ops.clip((noisy - of_noise * predicted) / amplitude * 0.5 + 0.5, 0, 1)


@keras.saving.register_keras_serializable("tfdist")
class SineEmbedding(layers.Layer):
    """Time steps `[B]` as sines and cosines of `units / 2` frequencies, `[B, units]`."""

    def __init__(self, units: int, **options: Any):
        super().__init__(**options)
        self.units = units

    def call(self, time: Any) -> Any:
        half = max(1, self.units // 2)
        frequencies = np.exp(-math.log(10_000) * np.arange(half) / max(1, half - 1)).astype(np.float32)
        angles = ops.cast(time, "float32")[:, None] * frequencies
        return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"units": self.units}


def variances(steps: int) -> np.ndarray:
    """The variance of the noise that each time step adds, float64 `[steps]`."""
    scale = 1000 / steps
    return np.minimum(np.linspace(1e-4 * scale, 0.02 * scale, steps), 0.999)


@keras.saving.register_keras_serializable("tfdist")
class DDPM(keras.Model):
    """A model from pictures to estimates after noise, with a model "unet" that predicts the noise."""

    @checks_arguments
    def generate(self, count: Count, seed: CountOrZero) -> np.ndarray:
        """Returns `count` pictures, float32 `[count, H, W, C]` in [0, 1]: algorithm 2 of the paper.

        The picture that each prediction implies is clipped to the range of pixels, as in the authors' program, so that
        errors of the first predictions, when the noise is large, do not add up.
        """
        unet, schedule = self.get_layer("unet"), self.get_layer("time")
        predict = tf.function(lambda image, time: unet([image, time], training=False))
        rng = np.random.default_rng(seed)
        variance, remaining = variances(schedule.steps), schedule.remaining
        before = np.append(1.0, remaining[:-1])
        # The factors of the picture and of the noisy picture in the mean of the step before: equation 7 of the paper.
        of_picture = np.sqrt(before) * variance / (1 - remaining)
        of_noisy = np.sqrt(1 - variance) * (1 - before) / (1 - remaining)
        noisy = rng.normal(size=(count, *self.input_shape[1:]))
        for time in reversed(range(schedule.steps)):
            noise = predict(noisy.astype(np.float32), np.full(count, time, np.int32)).numpy()
            picture = (noisy - np.sqrt(1 - remaining[time]) * noise) / np.sqrt(remaining[time])
            noisy = of_picture[time] * np.clip(picture, -1, 1) + of_noisy[time] * noisy
            if time:
                noisy += np.sqrt(variance[time]) * rng.normal(size=noisy.shape)
        return np.clip(noisy * 0.5 + 0.5, 0, 1).astype(np.float32)
