"""`tfdist verify` answers whether a strategy computes what one device does, by its exit code and a table."""

import re

import pytest
from click.testing import CliRunner

from tests.planted_rules import mean_of_means, plant
from tfdist import verify

PLANTED = """
import keras
import numpy as np
import tensorflow as tf
from keras import layers

class Centred(layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0)

class ByPosition(layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=(64, shape[-1]), name="table")

    def call(self, x):
        return x + tf.gather(self.table, tf.range(tf.shape(x)[0]))

class Unseeded(layers.Layer):
    def call(self, x):
        return x + tf.random.stateless_normal(tf.shape(x), seed=(1, 2))

class Penalty(layers.Layer):
    def build(self, shape):
        self.scores = self.add_weight(shape=(shape[-1], 1), name="scores")

    def call(self, x):
        self.add_loss(tf.reduce_sum(tf.tanh(tf.reduce_mean(x, 0, keepdims=True)) @ self.scores))
        return x

class Keeps(layers.Layer):
    def build(self, shape):
        self.median = self.add_weight(name="median", initializer="zeros", trainable=False)

    def call(self, x):
        self.median.assign(tf.reshape(tf.numpy_function(np.median, [x], tf.float32), []))
        return x

def hardest_first(y, outputs):
    loss = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
    largest = tf.ensure_shape(tf.numpy_function(lambda one: one / one.max(), [loss], tf.float32), [None])
    return loss * largest

class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(hardest_first(y, self(x, training=True)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}

class MeanOfMeans(keras.metrics.Metric):
    additive = True

    def __init__(self):
        super().__init__(name="planted")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_mean(y_pred))

    def result(self):
        return self.total

def model(spec, *inside, kind=keras.Model):
    inputs = keras.Input(spec.input_shape)
    x = layers.Flatten()(inputs)
    for layer in inside:
        x = layer(x)
    return kind(inputs, layers.Dense(10)(x))

def compiled(model, loss=None, metrics=()):
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=list(metrics))
    return model

def equal(spec):
    return model(spec, layers.Dropout(0.5))

def normalized(spec):
    return model(spec, layers.Dense(8), layers.BatchNormalization(name="planted"))

def centred(spec):
    return model(spec, layers.Dense(8), Centred(name="planted"))

def by_position(spec):
    return model(spec, layers.Dense(8), ByPosition(name="planted"))

def unseeded(spec):
    return model(spec, layers.Dense(8), Unseeded(name="planted"))

def penalty(spec):
    return model(spec, layers.Dense(8), Penalty(name="planted"))

def keeps(spec):
    return model(spec, layers.Dense(8), Keeps(name="planted"))

def compared(spec):
    return compiled(model(spec), hardest_first)

def own_step(spec):
    return compiled(model(spec, kind=OwnStep))

def mean_of_means(spec):
    return compiled(model(spec), metrics=[MeanOfMeans()])
"""


@pytest.fixture
def verified(working_folder, capfd):
    """`verified(*options)`: the exit code, and what is written to the terminal."""

    def run(*options):
        result = verification(working_folder, *options)
        said = capfd.readouterr()
        return result.exit_code, result.output + said.out + said.err

    return run


def verification(folder, *options):
    (folder / "planted.py").write_text(PLANTED)
    typed = ["--strategy", "custom", "--devices", "2", "--dataset", "digits", "--limit", "128", *options]
    return CliRunner().invoke(verify.command, typed)


@pytest.mark.thorough
def test_an_equal_model_ends_with_a_table_and_exit_code_0(verified, working_folder):
    code, output = verified("--model", "planted:equal", "--verify-steps", "2")
    assert code == 0, output
    assert "(steps: 2)" in output
    assert re.search(r"^weight .*dense.*kernel", output, re.MULTILINE), output
    assert "The steps of `custom` on 2 replicas equal those of one device." in output
    assert not list(working_folder.rglob("run.json"))


LAYER = "the layer `planted`"


OF_SEVERAL_EXAMPLES = (
    "normalized",
    "centred",
    "by_position",
    "unseeded",
    "penalty",
    "keeps",
    "compared",
    "own_step",
    "mean_of_means",
)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["custom", "pipeline"])
@pytest.mark.parametrize("model", OF_SEVERAL_EXAMPLES)
def test_what_a_model_makes_of_several_examples_together_is_equal_where_the_step_is_partitioned(
    verified, model, strategy
):
    code, output = verified("--model", f"planted:{model}", "--strategy", strategy)
    assert code == 0, output
    assert "equal those of one device" in output


@pytest.mark.thorough
def test_a_difference_ends_with_its_place_its_cause_and_exit_code_1(verified, monkeypatch):
    plant("Mean", mean_of_means, monkeypatch)
    code, output = verified("--model", "planted:centred")
    assert code == 1, output
    assert re.search(LAYER, output) and "differs from one device" in output
    assert "a bug in tfdist" in output
    assert re.search(r"^output .* differs$", output, re.MULTILINE), output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--model", "mlp", "--verify-steps", "0"), "`--verify-steps` is 0"),
        (("--model", "mlp", "--strategy", "mpi_split", "--devices", "1"), "differ from those of one device by design"),
        (("--model", "none"), "Unknown model `none`"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(verified, options, sentence):
    code, output = verified(*options)
    assert code == 2, output
    assert sentence in output
    assert "hint:" in output
