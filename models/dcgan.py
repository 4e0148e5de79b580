"""`dcgan`: a generator and a discriminator of convolutions, trained against each other.

A. Radford, L. Metz and S. Chintala, "Unsupervised representation learning with deep convolutional generative
adversarial networks", ICLR 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tfdist.data.spec import DataSpec
from tfdist.models import _fit, _generative
from tfdist.models._training import Training
from tfdist.options import Count, CountOrZero, Factor, checks_arguments

TASKS = ("generation",)
# Rate, batch and first momentum of the paper, section 4.
TRAINING = Training("adam", learning_rate=2e-4, batch_size=128, beta_1=0.5)
SMALLEST = 8


def build(spec: DataSpec, *, code: Count = 100, filters: Count = 64, width: Factor = 1.0) -> keras.Model:
    """Dense, transposed convolutions 5x5 with stride 2; a discriminator of convolutions 5x5 with stride 2, dense.

    As in the paper, batch normalization follows each layer but the generator's last and the discriminator's first, with
    ReLU in the generator and leaky ReLU in the discriminator, and weights begin with a standard deviation of 0.02. The
    number of convolutions of each network is the largest that leaves 4 pixels per side: 4 for 64x64, 3 for 32x32, 2 for
    28x28. Each convolution away from the picture has twice the filters. With `filters=128`, the generator for 64x64x3
    is that of the paper's figure 1, with 1024 to 128 filters; the paper does not state numbers of parameters.

    The model has an optimizer for each network; both begin as copies of the one that it is compiled with. In a step,
    both losses are computed from the same samples, and then both networks are updated. `discriminator_loss` is the mean
    cross-entropy of real and generated pictures, `generator_loss` that of generated pictures called real, and `loss`
    their sum. In an evaluation all samples come from the same codes, and batch normalizations use moving averages.

    Input `[B, H, W, C]`, pixels in [0, 1], 8x8 pixels or more. Output: a sample for each input, `[B, H, W, C]` in
    [0, 1], float32 under every dtype policy. `generate(count, seed)` returns samples.

    Args:
        spec: the spec of the dataset.
        code: the numbers that a sample is made from, drawn from the standard normal distribution.
        filters: the filters of the convolutions next to the picture.
        width: a factor on `filters`.

    Raises:
        UsageError: the examples are not images, or too small.
    """
    _fit.require_images("dcgan", spec, smallest=SMALLEST)
    levels = math.floor(math.log2(min(spec.input_shape[:2]) / 4))
    sizes = [_fit.scaled(filters, width) * 2**level for level in range(levels)]
    return DCGAN(_generator(spec, code, sizes), _discriminator(spec, sizes), name="dcgan")


def _generator(spec: DataSpec, code: int, sizes: list[int]) -> keras.Model:
    *sides, channels = spec.input_shape
    height, width = (-(-side // 2 ** len(sizes)) for side in sides)
    inputs = keras.Input((code,))
    image = layers.Dense(height * width * sizes[-1], use_bias=False, kernel_initializer=_initializer())(inputs)
    image = layers.ReLU()(_normalized(layers.Reshape((height, width, sizes[-1]))(image)))
    for number in reversed(sizes[:-1]):
        image = layers.ReLU()(_normalized(_convolution(layers.Conv2DTranspose, number, use_bias=False)(image)))
    # Pixels in [0, 1], where the paper has tanh and pixels in [-1, 1].
    image = _convolution(layers.Conv2DTranspose, channels, activation="sigmoid", dtype="float32", name="pixels")(image)
    return keras.Model(inputs, _fit.cropped(image, spec), name="generator")


def _discriminator(spec: DataSpec, sizes: list[int]) -> keras.Model:
    inputs = keras.Input(spec.input_shape)
    image = layers.Rescaling(2.0, -1.0)(_fit.padded(inputs, 2 ** len(sizes)))
    for level, number in enumerate(sizes):
        image = _convolution(layers.Conv2D, number, use_bias=level == 0)(image)
        image = layers.LeakyReLU(0.2)(image if level == 0 else _normalized(image))
    logits = layers.Dense(1, kernel_initializer=_initializer(), dtype="float32", name="logits")(layers.Flatten()(image))
    return keras.Model(inputs, logits, name="discriminator")


def _convolution(kind: Callable[..., Any], filters: int, **options: Any) -> Any:
    return kind(filters, 5, 2, padding="same", kernel_initializer=_initializer(), **options)


def _initializer() -> keras.initializers.Initializer:
    return keras.initializers.RandomNormal(stddev=0.02)


def _normalized(image: Any) -> Any:
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(image)


@keras.saving.register_keras_serializable("tfdist")
class DCGAN(keras.Model):
    """Two networks and their optimizers.

    Args:
        generator: a model from codes `[B, code]` to pictures `[B, H, W, C]` in [0, 1].
        discriminator: a model from pictures to logits `[B, 1]`, positive for real pictures.
        **options: the options of every Keras model.
    """

    def __init__(self, generator: keras.Model, discriminator: keras.Model, **options: Any):
        super().__init__(**options)
        self.generator, self.discriminator = generator, discriminator
        self.codes = _generative.Noise(generator.input_shape[1:], dtype="float32")
        self.loss_tracker = keras.metrics.Mean("loss")
        self.generator_loss = keras.metrics.Mean("generator_loss")
        self.discriminator_loss = keras.metrics.Mean("discriminator_loss")
        self.build(discriminator.input_shape)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_tracker, self.generator_loss, self.discriminator_loss]

    def build(self, input_shape: Any) -> None:
        """Does nothing: both networks are built."""

    def call(self, pictures: Any, training: bool = False) -> Any:
        """Returns as many samples as there are pictures."""
        return self.generator(self.codes(pictures, training=training), training=training)

    def compile(self, optimizer: Any, loss: Any = None, **options: Any) -> None:
        """Compiles the model, with `optimizer` for the generator and a copy of it for the discriminator."""
        super().compile(optimizer, loss, **options)
        self.discriminator_optimizer = type(self.optimizer).from_config(self.optimizer.get_config())

    def compile_from_config(self, config: dict[str, Any]) -> None:
        self.compile(**keras.saving.deserialize_keras_object(config))
        self.optimizer.build(self.generator.trainable_variables)
        self.discriminator_optimizer.build(self.discriminator.trainable_variables)

    def train_step(self, data: Any) -> dict[str, Any]:
        pictures, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        updated = (self.generator, self.optimizer), (self.discriminator, self.discriminator_optimizer)
        with tf.GradientTape(persistent=True) as tape:
            losses = self._losses_of(pictures, training=True)
            scaled = [
                optimizer.scale_loss(loss + sum(network.losses))
                for loss, (network, optimizer) in zip(losses, updated, strict=True)
            ]
        # Both gradients are those of the weights before the step.
        gradients = [
            tape.gradient(loss, network.trainable_variables) for loss, (network, _) in zip(scaled, updated, strict=True)
        ]
        for gradient, (network, optimizer) in zip(gradients, updated, strict=True):
            optimizer.apply_gradients(zip(gradient, network.trainable_variables, strict=True))
        return self._reported(pictures, *losses)

    def test_step(self, data: Any) -> dict[str, Any]:
        pictures, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self._reported(pictures, *self._losses_of(pictures, training=False))

    def _losses_of(self, pictures: Any, training: bool) -> tuple[Any, Any]:
        """The losses of the generator and of the discriminator."""
        samples = self(pictures, training=training)
        real, fake = (self.discriminator(each, training=training) for each in (pictures, samples))
        # The cross-entropy of a logit with the target 1 is softplus(-logit), and with 0 softplus(logit).
        return ops.mean(ops.softplus(-fake)), ops.mean(ops.softplus(-real)) + ops.mean(ops.softplus(fake))

    def _reported(self, pictures: Any, generator_loss: Any, discriminator_loss: Any) -> dict[str, Any]:
        values = generator_loss + discriminator_loss, generator_loss, discriminator_loss
        for metric, value in zip(self.metrics, values, strict=True):
            metric.update_state(value, sample_weight=ops.shape(pictures)[0])
        return self.get_metrics_result()

    @checks_arguments
    def generate(self, count: Count, seed: CountOrZero) -> np.ndarray:
        """Returns `count` pictures, float32 `[count, H, W, C]` in [0, 1]."""
        codes = np.random.default_rng(seed).normal(size=(count, *self.generator.input_shape[1:]))
        return ops.convert_to_numpy(self.generator(codes.astype(np.float32), training=False))

    def get_config(self) -> dict[str, Any]:
        networks = {"generator": self.generator, "discriminator": self.discriminator}
        parts = {name: keras.saving.serialize_keras_object(network) for name, network in networks.items()}
        return {"name": self.name, **parts}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> DCGAN:
        parts = ("generator", "discriminator")
        networks = {name: keras.saving.deserialize_keras_object(config[name], custom_objects) for name in parts}
        return cls(**config | networks)
