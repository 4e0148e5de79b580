"""One kernel updates a variable as Keras does; where there is no such kernel, Keras itself updates it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers

import tfdist
from tfdist.optimizers import fused as fused_optimizers

OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: optimizers.AdamW(0.01),
    "adamax": lambda: optimizers.Adamax(0.01),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.9),
    "centered rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "adadelta": lambda: optimizers.Adadelta(0.1),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01, amsgrad=True)),
}
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(20, 4)).astype("float32"), RANDOM.normal(size=(20, 1)).astype("float32")


@pytest.fixture
def bfloat16():
    keras.config.set_dtype_policy("bfloat16")
    yield
    keras.config.set_dtype_policy("float32")


def weights_after(fit, optimizer, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(OPTIMIZERS[optimizer](), "mse", **options)
    fit(model, X, Y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    return [np.float32(each) for each in model.get_weights()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_compiled_by_xla_the_weights_are_those_of_keras(optimizer):
    ours = weights_after(tfdist.strategy("single").fit, optimizer, jit_compile=True)
    stock = weights_after(keras.Model.fit, optimizer, jit_compile=True)
    for one, other in zip(ours, stock, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_variables_of_bfloat16_are_updated_by_keras_itself(optimizer):
    ours = weights_after(tfdist.strategy("single").fit, optimizer, jit_compile=False)
    stock = weights_after(keras.Model.fit, optimizer, jit_compile=False)
    for one, other in zip(ours, stock, strict=True):
        np.testing.assert_allclose(one, other, atol=0.02)  # bfloat16 has 8 bits


SLOW = {
    "adam": lambda: optimizers.Adam(0.01, beta_2=0.9999),
    "amsgrad": lambda: optimizers.Adam(0.01, beta_2=0.9999, amsgrad=True),
    "adamw": lambda: optimizers.AdamW(0.01),
    "adamax": lambda: optimizers.Adamax(0.01, beta_2=0.9999),
    "rmsprop": lambda: optimizers.RMSprop(0.01, rho=0.999, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "momentum": lambda: optimizers.SGD(0.01, momentum=0.9),
    "centered rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "adadelta": lambda: optimizers.Adadelta(0.1),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "ftrl": lambda: optimizers.Ftrl(
        0.1,
        l1_regularization_strength=0.01,
        l2_regularization_strength=0.02,
        l2_shrinkage_regularization_strength=0.03,
        beta=0.4,
    ),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-12)])
@pytest.mark.parametrize("name", SLOW)
def test_over_many_steps_a_kernel_stays_with_keras_whatever_the_decay(name, dtype, tolerance):
    """A kernel takes the difference of one and the decay in the type of the variable, and loses digits by it."""
    gradients = np.random.default_rng(1).normal(size=(200, 30)).astype(dtype)

    def trained(enabled):
        optimizer, variable = SLOW[name](), keras.Variable(np.ones(30, dtype), dtype=dtype)
        optimizer.build([variable])

        @tf.function
        def step(gradient):
            with fused_optimizers.fused(optimizer, enabled):
                optimizer.apply([gradient], [variable])

        for gradient in gradients:
            step(tf.constant(gradient))
        return variable.numpy()

    ours, stock = trained(True), trained(False)
    assert np.max(np.abs(ours - stock)) <= tolerance * np.max(np.abs(stock))
