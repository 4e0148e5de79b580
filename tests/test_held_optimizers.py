"""All optimizers of a model, wherever it holds them, are a part of its training: found, saved and given back."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.test_checkpoint import KilledError, assert_same_bits, refuses
from tfdist.callbacks import Checkpoint
from tfdist.checkpointing import state as training_state
from tfdist.errors import CheckpointError
from tfdist.internals import keras as keras_internals

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
FIT = {"batch_size": 4, "verbose": 0}


class Adversaries(keras.Model):
    """As keras.io's GANs: no `call`, and optimizers that `compile` of Keras never sees."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.Sequential([keras.Input((4,)), layers.Dense(units)]) for units in (4, 1, 1)]
        self.error = keras.metrics.Mean(name="error")

    def compile(self, first, others, **options):
        super().compile(optimizer=None, jit_compile=False, **options)
        self.first_optimizer, self.others = first, others

    @property
    def metrics(self):
        return [self.error]

    def train_step(self, x):
        optimizers = self.first_optimizer, self.others["second"], self.others["more"][0]
        for part, optimizer in zip(self.parts, optimizers, strict=True):
            with tf.GradientTape() as tape:
                error = tf.reduce_mean((part(x) - 1.0) ** 2)
                loss = optimizer.scale_loss(error)
            gradients = tape.gradient(loss, part.trainable_variables)
            optimizer.apply_gradients(zip(gradients, part.trainable_variables, strict=True))
            self.error.update_state(error)
        return {"error": self.error.result()}


def adversaries(strategy, **options):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Adversaries()
        more = keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop(0.01))
        others = {"second": keras.optimizers.Adam(0.02), "more": [more]}
        model.compile(keras.optimizers.Adam(0.05), others, **options)
    return model


def strategy_of(name):
    return tfdist.strategy(name, devices=1 if name == "single" else 2, seed=0)


class KillAt(keras.callbacks.Callback):
    """Plays SIGKILL after a batch."""

    def __init__(self, epoch, batch):
        super().__init__()
        self.at = epoch, batch

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            raise KilledError


def state(model):
    return [np.asarray(v) for members in training_state.variables(model).values() for v in members]


def test_every_optimizer_is_found_once_in_the_order_of_the_model():
    model = adversaries(strategy_of("single"))
    scaled = model.others["more"][0]
    expected = [model.first_optimizer, model.others["second"], scaled]
    assert keras_internals.optimizers(model) == expected
    model.again = [scaled.inner_optimizer, model.others]
    assert keras_internals.optimizers(model) == expected
    model.optimizer = keras.optimizers.SGD()
    assert keras_internals.optimizers(model) == [model.optimizer, *expected]
    assert training_state.optimizer_class(model) == "SGD, Adam, Adam, LossScaleOptimizer(RMSprop)"
    outer = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    assert keras_internals.optimizers(outer) == []
    outer.inside = model
    assert keras_internals.optimizers(outer) == [model.optimizer, *expected]


@pytest.mark.thorough
@pytest.mark.parametrize("at", [(1, 3), (2, 0)], ids=["within an epoch", "at an epoch's end"])
@pytest.mark.parametrize("name", ["single", "custom", "mirrored"])
def test_a_killed_run_ends_as_an_unbroken_one(tmp_path, name, at):
    strategy = strategy_of(name)
    options = {} if at[1] == 0 else {"every_steps": 1}
    whole = adversaries(strategy)
    strategy.fit(whole, X, epochs=3, callbacks=[Checkpoint(tmp_path / "whole", **options), KillAt(9, 9)], **FIT)
    with pytest.raises(KilledError):
        broken = [Checkpoint(tmp_path / "broken", **options), KillAt(*at)]
        strategy.fit(adversaries(strategy), X, epochs=3, callbacks=broken, **FIT)
    model = adversaries(strategy)
    model.parts[0].set_weights([weight + 1 for weight in model.parts[0].get_weights()])
    keep = Checkpoint(tmp_path / "broken", resume=True, **options)
    strategy.fit(model, X, epochs=3, callbacks=[keep, KillAt(9, 9)], **FIT)
    assert keep.resumed_from is not None
    assert_same_bits(state(model), state(whole))


def test_another_optimizer_than_the_one_that_was_saved_is_refused(tmp_path):
    strategy = strategy_of("single")
    strategy.fit(adversaries(strategy), X, callbacks=[Checkpoint(tmp_path)], **FIT)
    model = adversaries(strategy)
    model.others["second"] = keras.optimizers.SGD()
    with refuses(CheckpointError, "`Adam, Adam, LossScale", "the model `Adam, SGD, LossScale"):
        strategy.fit(model, X, epochs=2, callbacks=[Checkpoint(tmp_path, resume=True)], **FIT)


def unbuilt():
    model = keras.Sequential([layers.Dense(1, name="late")], name="lazy")
    model.compile("adam", "mse", jit_compile=False)
    return model


@pytest.mark.parametrize("resume", [False, True])
def test_what_could_not_be_resumed_is_refused_before_the_first_step(tmp_path, resume):
    keep = Checkpoint(tmp_path, resume=resume)
    with refuses(CheckpointError, "`lazy` has no variables yet", "could not be resumed"):
        unbuilt().fit(X, X[:, :1], callbacks=[keep], **FIT)
    model = adversaries(strategy_of("single"))
    with refuses(CheckpointError, "The optimizer `adam", "` has no variables yet", "could not be resumed"):
        model.fit(X, callbacks=[keep], **FIT)
    eager = adversaries(strategy_of("single"), run_eagerly=True)
    with refuses(CheckpointError, "The optimizer `adam", "` has no variables yet"):
        strategy_of("single").fit(eager, X, callbacks=[keep], **FIT)
    assert not list(tmp_path.iterdir())
    strategy_of("single").fit(unbuilt(), X, X[:, :1], callbacks=[keep], **FIT)
    assert list(tmp_path.iterdir())


def test_a_model_that_runs_eagerly_is_resumed_from_the_end_of_an_epoch(tmp_path):
    def eager():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"], run_eagerly=True)
        return model

    strategy = strategy_of("single")
    whole, model = eager(), eager()
    strategy.fit(whole, X, X[:, :1], epochs=3, shuffle=False, callbacks=[KillAt(9, 9)], **FIT)
    with pytest.raises(KilledError):
        broken = [Checkpoint(tmp_path, every_steps=1), KillAt(1, 3)]
        strategy.fit(eager(), X, X[:, :1], epochs=3, shuffle=False, callbacks=broken, **FIT)
    keep = Checkpoint(tmp_path, every_steps=1, resume=True)
    strategy.fit(model, X, X[:, :1], epochs=3, shuffle=False, callbacks=[keep], **FIT)
    assert keep.resumed_from.name == "step-00000006.ckpt"
    assert_same_bits(state(model), state(whole))
