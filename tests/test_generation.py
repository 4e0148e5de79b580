"""Models that generate pictures: their losses by hand, their checkpoints, their files, and the samples of a run."""

from __future__ import annotations

import math
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.test_checkpoint import Kill, KilledError
from tfdist import data, models, tasks
from tfdist.callbacks import Checkpoint
from tfdist.errors import UsageError
from tfdist.models import ddpm

GENERATIVE = ("vae", "dcgan", "ddpm")
BATCH, STEPS = 4, 3
X, _ = zoo.arrays(zoo.SMALL["vae"].spec, BATCH * STEPS)


def compiled(name, optimizer=None, **options):
    small = zoo.SMALL[name]
    model = models.build(name, small.spec, **(small.options | options))
    tasks.compile(model, small.spec, optimizer or keras.optimizers.Adam(0.01))
    return model


def train(name, callbacks=(), seed=0):
    """Two epochs on two replicas, each with an evaluation."""
    keras.utils.set_random_seed(seed)
    strategy = tfdist.strategy("custom", devices=2, seed=7)
    with strategy.scope():
        # The gradient of a key's bias is zero but for roundings, which a small epsilon would amplify.
        model = compiled(name, keras.optimizers.Adam(0.01, epsilon=1e-3))
    options = {"validation_data": (X[:BATCH], X[:BATCH]), "batch_size": BATCH, "epochs": 2, "verbose": 0}
    history = strategy.fit(model, X, X, callbacks=list(callbacks), **options).history
    return SimpleNamespace(model=model, history=history)


@pytest.mark.parametrize("name", GENERATIVE)
@pytest.mark.sampled(1)
def test_a_training_that_is_resumed_ends_as_one_without_a_break(name, tmp_path):
    """Its draws too: the resuming process has another random seed."""
    unbroken = train(name)
    with pytest.raises(KilledError):
        train(name, [Checkpoint(tmp_path, every_steps=2), Kill(5)])
    resumed = train(name, [Checkpoint(tmp_path, every_steps=2, resume=True)], seed=1)
    for weights, expected in zip(resumed.model.get_weights(), unbroken.model.get_weights(), strict=True):
        np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)
    assert resumed.history["val_loss"][-1] == pytest.approx(unbroken.history["val_loss"][-1], rel=1e-5)


@pytest.mark.parametrize("name", GENERATIVE)
def test_a_saved_model_goes_on_with_its_optimizers_in_stock_keras(name, tmp_path):
    model = compiled(name)
    model.fit(X, X, batch_size=BATCH, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.generate(3, seed=1), model.generate(3, seed=1))
    np.testing.assert_array_equal(again.predict(X, verbose=0), model.predict(X, verbose=0))
    for loaded, saved in zip(again.variables, model.variables, strict=True):
        if "seed_generator_state" in saved.path:  # a file of Keras has no random states
            loaded.assign(saved)
    for each in (model, again):
        each.fit(X, X, batch_size=BATCH, shuffle=False, verbose=0)
    for weights, expected in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", GENERATIVE)
def test_samples_depend_on_the_seed_alone_and_are_pixels(name):
    model = compiled(name)
    samples = model.generate(5, seed=1)
    assert samples.shape == (5, *X.shape[1:]) and samples.min() >= 0 and samples.max() <= 1
    np.testing.assert_array_equal(model.generate(5, seed=1), samples)
    assert np.abs(model.generate(5, seed=2) - samples).max() > 1e-3
    for count, seed in ((-1, 1), (2, -1), ("many", 1)):
        with pytest.raises(UsageError, match=r"generate` cannot have `(-1|many)` as"):
            model.generate(count, seed=seed)


@pytest.mark.parametrize("name", GENERATIVE)
def test_evaluations_are_comparable_and_trainings_draw_anew(name):
    model = compiled(name, keras.optimizers.SGD(0.0))
    for weight in model.trainable_variables:
        weight.assign(5 * weight)  # the losses of a new model hardly depend on the draws
    first, second = (model.evaluate(X, X, batch_size=BATCH, verbose=0, return_dict=True) for _ in range(2))
    assert first == second
    first, second = (model.train_on_batch(X, X, return_dict=True)["loss"] for _ in range(2))
    assert first != second


def test_the_loss_of_a_vae_is_the_negative_evidence_lower_bound():
    model = compiled("vae")
    found = model.evaluate(X, X, batch_size=len(X), verbose=0, return_dict=True)
    means, logs = (
        np.asarray(keras.Model(model.input, model.get_layer(name).output)(X)) for name in ("mean", "log_variance")
    )
    pixels = model.predict(X, batch_size=len(X), verbose=0)
    reconstruction = -(X * np.log(pixels) + (1 - X) * np.log(1 - pixels)).sum(axis=(1, 2, 3)).mean()
    divergence = 0.5 * (means**2 + np.exp(logs) - 1 - logs).sum(axis=1).mean()
    assert found["reconstruction"] == pytest.approx(reconstruction, rel=1e-4)
    assert found["kl"] == pytest.approx(divergence, rel=1e-4)
    assert found["loss"] == pytest.approx(reconstruction + divergence, rel=1e-4)


def test_both_networks_of_a_dcgan_are_updated_from_the_weights_before_the_step():
    model = compiled("dcgan", keras.optimizers.SGD(0.1))
    assert model.discriminator_optimizer is not model.optimizer
    codes = model.codes(X, training=False)
    model.codes.call = lambda pictures, training: codes  # the draws of this step are known
    with tf.GradientTape(persistent=True) as tape:
        samples = model.generator(codes, training=True)
        real, fake = (model.discriminator(pictures, training=True) for pictures in (X, samples))
        entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        of_generator = entropy(tf.ones_like(fake), fake)
        of_discriminator = entropy(tf.ones_like(real), real) + entropy(tf.zeros_like(fake), fake)
    expected = []
    for network, loss in ((model.generator, of_generator), (model.discriminator, of_discriminator)):
        variables = network.trainable_variables
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        expected += [variable.numpy() - 0.1 * gradient for variable, gradient in zip(variables, gradients, strict=True)]
    logs = model.train_on_batch(X, X, return_dict=True)
    assert logs["generator_loss"] == pytest.approx(float(of_generator), rel=1e-5)
    assert logs["discriminator_loss"] == pytest.approx(float(of_discriminator), rel=1e-5)
    trained = [*model.generator.trainable_variables, *model.discriminator.trainable_variables]
    for variable, value in zip(trained, expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-4, atol=1e-6)


def test_samples_of_a_trained_ddpm_have_the_brightness_of_the_pictures():
    """With a group per channel in the normalization, they were as bright as the first noise happened to be."""
    keras.utils.set_random_seed(0)
    model = models.build("ddpm", zoo.pictures(8, 8, 1), width=0.25, steps=50, multipliers=(1, 2))
    tasks.compile(model, zoo.SMALL["ddpm"].spec, keras.optimizers.Adam(0.003))
    pictures = np.random.default_rng(0).uniform(0.1, 0.5, (640, 8, 8, 1)).astype(np.float32)
    model.fit(pictures, pictures, batch_size=64, epochs=8, verbose=0)
    brightness = model.generate(100, seed=0).mean(axis=(1, 2, 3))
    assert brightness.mean() == pytest.approx(0.3, abs=0.05)
    assert brightness.std() < 0.05  # 0.014 for the pictures


def test_sampling_with_the_true_noise_ends_at_the_picture():
    """A network that knows the only picture there is, and so the noise of every noisy one."""
    steps, remaining = 20, np.cumprod(1 - ddpm.variances(20)).astype(np.float32)
    inputs, time = keras.Input((2, 3, 1)), keras.Input((), dtype="int32")
    left = keras.ops.reshape(keras.ops.take(remaining, time), (-1, 1, 1, 1))
    noise = (inputs - keras.ops.sqrt(left) * (2 * X[0, :2, :3] - 1)) / keras.ops.sqrt(1 - left)
    unet = keras.Model([inputs, time], noise, name="unet")
    picture = keras.Input((2, 3, 1))
    number = ddpm.TimeStep(steps, name="time")(picture)
    model = ddpm.DDPM(picture, unet([picture, number]))
    np.testing.assert_allclose(model.generate(2, seed=0), [X[0, :2, :3]] * 2, atol=1e-5)


def test_a_diffusion_of_any_length_ends_in_noise():
    assert np.allclose(ddpm.variances(1000), np.linspace(1e-4, 0.02, 1000))  # the paper, section 4
    for steps in (50, 250, 1000):
        assert np.prod(1 - ddpm.variances(steps)) < 1e-4


UNET_OF_THE_PAPER = {"filters": 128, "multipliers": (1, 2, 2, 2), "blocks": 2, "dropout": 0.1}


@pytest.mark.parametrize(
    ("spec", "options", "parameters"),
    [(zoo.pictures(32, 32, 3), UNET_OF_THE_PAPER, 35_746_307), (zoo.pictures(28, 28, 1), {}, 1_112_801)],
)
def test_the_unet_has_the_documented_parameters(spec, options, parameters):
    with tf.Graph().as_default():
        weights = models.build("ddpm", spec, **options).trainable_variables
    assert sum(math.prod(weight.shape) for weight in weights) == parameters


def test_the_encoder_and_decoder_of_the_paper_have_their_parameters():
    encoder, decoder = 784 * 500 + 500 + 2 * (500 * 20 + 20), 20 * 500 + 500 + 500 * 784 + 784
    assert models.build("vae", zoo.pictures(28, 28, 1)).count_params() == encoder + decoder


@pytest.mark.parametrize(
    ("size", "convolutions"), [((64, 64, 3), 4), ((32, 32, 3), 3), ((28, 28, 1), 2), ((9, 30, 1), 1)]
)
def test_a_dcgan_has_as_many_convolutions_as_leave_four_pixels(size, convolutions):
    model = models.build("dcgan", zoo.pictures(*size), filters=2)
    layers = [layer for layer in model.discriminator.layers if isinstance(layer, keras.layers.Conv2D)]
    assert [layer.filters for layer in layers] == [2 * 2**level for level in range(convolutions)]
    assert model.generator.output_shape[1:] == size


def test_pictures_too_small_for_a_dcgan_are_refused():
    with pytest.raises(UsageError, match="`dcgan` takes images of 8x8 pixels or more"):
        models.build("dcgan", zoo.pictures(7, 9, 1))


def test_a_dataset_of_pictures_for_another_task_is_used_for_generation():
    source = data.load("digits").for_task("generation")
    assert source.spec.task == "generation" and source.spec.target_shape == (8, 8, 1) and source.spec.classes == 0
    x, y = next(iter(source.pipeline("train", 3).as_numpy_iterator()))
    np.testing.assert_array_equal(x, y)
    with pytest.raises(UsageError, match="is not a picture\n\nhint: use a dataset of pictures for generation"):
        data.load("synthetic", shape=(4,), train=5, validation=0, test=0).for_task("generation")


def test_a_model_that_generates_nothing_is_named(tmp_path):
    source = data.load("synthetic", task="generation", shape=(8, 8, 1), train=8, validation=0, test=0)
    strategy = tfdist.strategy("single", seed=0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Identity()], name="plain")
    run = tasks.Run(model, source, strategy, tmp_path, 4)
    tasks.show(run)
    assert "a method `generate(count, seed)`" in run.skipped and "`plain` does not have" in run.skipped
    assert not list(tmp_path.iterdir())
