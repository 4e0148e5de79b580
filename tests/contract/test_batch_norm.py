"""`batch_norm="per_replica"`: the statistics of a batch normalization are those of each replica's examples."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.contract import contestants
from tfdist.errors import UsageError

EXAMPLES, BATCH = 20, 8  # the last batch has 4
_rng = np.random.default_rng(0)
IMAGES = _rng.normal(size=(EXAMPLES, 5, 5, 2)).astype("float32")
VECTORS = _rng.normal(size=(EXAMPLES, 4)).astype("float32")
Y = _rng.normal(size=(EXAMPLES, 1)).astype("float32")
PARTITIONED = {name: counts for name, counts in contestants.FEW.items() if name in ("custom", "mirrored", "pipeline")}


def of_images():
    x = inputs = keras.Input(IMAGES.shape[1:])
    x = layers.BatchNormalization(momentum=0.8)(layers.Conv2D(3, 3)(x))
    x = layers.BatchNormalization(axis=1, scale=False, center=False)(layers.Activation("tanh")(x))
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))


def of_vectors():
    return keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.BatchNormalization(), layers.Dense(1)])


def compiled(build):
    keras.utils.set_random_seed(3)
    model = build()
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return model


def by_hand(model, x, replicas):
    """Trains as replicas with statistics of their own do, of which the moving averages are the mean."""
    for begin in range(0, len(x), BATCH):
        batch, target = x[begin : begin + BATCH], Y[begin : begin + BATCH]
        parts = list(zip(np.array_split(batch, replicas), np.array_split(target, replicas), strict=True))
        before = [one.numpy() for one in model.non_trainable_variables]
        moving = [np.zeros_like(one) for one in before]
        with tf.GradientTape() as tape:
            loss = 0.0
            for part, wanted in parts:
                for variable, value in zip(model.non_trainable_variables, before, strict=True):
                    variable.assign(value)
                loss += tf.reduce_sum((model(part, training=True) - wanted) ** 2)
                share = len(part) / len(batch)
                moving = [
                    one + share * new.numpy() for one, new in zip(moving, model.non_trainable_variables, strict=True)
                ]
            loss /= len(batch)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        for variable, value in zip(model.non_trainable_variables, moving, strict=True):
            variable.assign(value)
    return model


@pytest.mark.thorough
@contestants.among(PARTITIONED)
@pytest.mark.parametrize(("build", "x"), [(of_images, IMAGES), (of_vectors, VECTORS)], ids=["images", "vectors"])
def test_each_replica_normalizes_its_own_examples(build, x, contestant):
    strategy = contestants.start(*contestant, batch_norm="per_replica")
    with strategy.scope():
        model = compiled(build)
    strategy.fit(model, x, Y, batch_size=BATCH, shuffle=False, verbose=0)
    expected = by_hand(compiled(build), x, strategy.num_replicas)
    for one, other in zip(model.variables, expected.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=2e-5, atol=2e-6, err_msg=other.path)
    np.testing.assert_allclose(
        strategy.predict(model, x, batch_size=BATCH, verbose=0), expected.predict(x, verbose=0), atol=1e-5
    )


@contestants.among({"custom": (2,)})
def test_a_synchronized_layer_still_normalizes_the_global_batch(contestant):
    def build():
        norm = layers.BatchNormalization(synchronized=True)
        return keras.Sequential([keras.Input((4,)), layers.Dense(3), norm, layers.Dense(1)])

    found = compiled(build)
    contestants.start(*contestant, batch_norm="per_replica").fit(
        found, VECTORS, Y, batch_size=BATCH, shuffle=False, verbose=0
    )
    expected = compiled(build)
    expected.fit(VECTORS, Y, batch_size=BATCH, shuffle=False, verbose=0)
    for one, other in zip(found.variables, expected.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=2e-5, atol=2e-6, err_msg=other.path)


def test_one_replica_has_no_use_for_it():
    with pytest.raises(UsageError, match="`batch_norm` is `per_replica`, and `single` does not divide a batch"):
        tfdist.strategy("single", batch_norm="per_replica")
