"""The option `recompute`: less memory, the same training.

`tests/contract/test_equality.py --strategies single_recompute` holds every case of equality with it.
"""

import json
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner
from keras import layers

import tfdist
from tests.contract import test_equality as equality
from tests.contract.cases import CASES, Penalty
from tfdist.errors import UnknownNameError, UsageError
from tfdist.internals import tensorflow_graphs as graphs
from tfdist.loop import recomputation

X = np.random.default_rng(0).normal(size=(11, 8, 8, 2)).astype("float32")
Y = np.arange(11) % 3
TOKENS = np.random.default_rng(1).integers(0, 9, (11, 6))
# What recomputation could do wrong: masks, added losses, sparse gradients, dtypes, gradients in a step of one's own.
TELLING = (
    *("mask", "add_loss", "activity regularizer", "sparse gradients, adam", "mixed float16, inf on one replica"),
    *("synchronized batch norm", "several inputs and outputs", "own train_step", "jit_compile"),
)


@pytest.fixture
def copied(monkeypatch):
    """The operations that are copied."""
    found = []
    original = graphs.copy

    def copy(operation, *arguments):
        found.append(operation)
        return original(operation, *arguments)

    monkeypatch.setattr(graphs, "copy", copy)
    return found


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(model, **options):
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), cross_entropy(), metrics=["accuracy"], **options)
    return model


def convolutional():
    """Random layers and moving averages, a skip connection, a nested model, a layer that is called twice."""
    inputs = keras.Input((8, 8, 2))
    first = layers.Conv2D(4, 3, padding="same", activation="relu", name="first")(inputs)
    x = layers.Dropout(0.3, seed=1)(layers.BatchNormalization(momentum=0.7)(first))
    twice = layers.Conv2D(4, 3, padding="same", name="twice", activity_regularizer="l2")
    x = layers.GaussianNoise(0.1)(twice(layers.ReLU()(twice(x))))
    x = layers.Add(name="both")([first, x])
    inner_inputs = keras.Input((8, 8, 4))
    inner = Penalty()(layers.Conv2D(4, 3, activation="tanh", name="narrow")(inner_inputs))
    x = keras.Model(inner_inputs, layers.MaxPooling2D(2)(layers.BatchNormalization()(inner)), name="inner")(x)
    return keras.Model(inputs, layers.Dense(3, name="last")(layers.Dropout(0.2)(layers.Flatten()(x))))


def recurrent():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(inputs)
    x = layers.LSTM(5, return_sequences=True, name="lstm")(layers.Dense(4, activation="tanh")(x))
    x = layers.MultiHeadAttention(2, 3, dropout=0.2, name="attention")(x, x, use_causal_mask=True)
    return keras.Model(inputs, layers.Dense(3)(layers.GRU(4)(layers.Dense(4, activation="gelu", name="gelu")(x))))


class Own(keras.Model):
    """A `call` and a step of its own, with the gradient of a gradient and two updates."""

    def __init__(self):
        super().__init__()
        self.hidden = [layers.Dense(7, activation="tanh", name=f"hidden_{index}") for index in range(3)]
        self.out, self.drop = layers.Dense(3), layers.Dropout(0.3)

    def call(self, x, training=None):
        x = keras.ops.reshape(x, (-1, 128))
        for layer in self.hidden:
            x = self.drop(keras.ops.square(layer(x)), training=training)
        return self.out(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = self.compute_loss(x, y, self(x, training=True))
            loss += tf.reduce_mean(tf.square(inner.gradient(loss, x)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def own():
    model = Own()
    model(X)
    return model


MODELS = {"convolutional": (convolutional, X), "recurrent": (recurrent, TOKENS), "own": (own, X)}
# For each model, layers whose outputs are held.
HELD = {"convolutional": ["first", "both"], "recurrent": ["lstm", "gelu"], "own": ["hidden_0", "hidden_2"]}


def trained(strategy, build, x, **options):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = compiled(build(), **options)
    history = strategy.fit(model, x, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    return [*model.get_weights(), *(variable.numpy() for variable in model.non_trainable_variables)], history


def assert_alike(found, expected):
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    for name, values in expected[1].items():
        np.testing.assert_allclose(found[1][name], values, rtol=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["named", "blocks"])
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_without_recomputation(name, how, copied):
    build, x = MODELS[name]
    expected = trained(tfdist.strategy("single", seed=7), build, x)
    recompute = "blocks" if how == "blocks" else HELD[name]
    assert_alike(trained(tfdist.strategy("single", seed=7, recompute=recompute), build, x), expected)
    assert copied
    assert not any(operation.op_def.is_stateful for operation in copied)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"name": "custom", "devices": 2},
        {"name": "mirrored", "devices": 2},
        {"name": "pipeline", "devices": 2, "micro_batches": 3, "stages": ["both"]},
        {"name": "pipeline", "devices": 2, "micro_batches": 3, "stages": ["both"], "schedule": "1f1b"},
    ],
    ids=lambda options: "-".join(map(str, list(options.values())[:3])) + options.get("schedule", ""),
)
def test_replicas_train_as_without_recomputation(options, copied):
    expected = trained(tfdist.strategy(seed=7, **options), convolutional, X)
    assert_alike(trained(tfdist.strategy(seed=7, recompute="blocks", **options), convolutional, X), expected)
    names = [operation.name for operation in copied]
    assert names and len(set(names)) == len(names)  # the step of one device is changed once, and then partitioned


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TELLING)
def test_equals_stock_keras_on_one_device(name, copied):
    case, expected = CASES[name], equality.reference(name)
    found = equality.train(case, tfdist.strategy("single", seed=7, recompute="blocks"))
    assert copied
    for what in ("weights", "history", "scores", "predictions"):
        assert equality.largest_difference(found[what], expected[what]) < case.tolerance, what


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["unet", "segnet", "resnet20"])
def test_models_of_the_zoo_train_as_without_recomputation(name, copied):
    task, shape = ("classification", (8, 8, 3)) if name == "resnet20" else ("segmentation", (32, 32, 3))
    source = tfdist.data.load("synthetic", task=task, shape=shape, classes=3, train=4)
    ((x, y),) = source.pipeline("train", 4, shuffle=False).as_numpy_iterator()

    def losses(recompute):
        keras.utils.set_random_seed(3)
        model = tfdist.models.build(name, source.spec, width=0.125)
        model.compile(keras.optimizers.SGD(0.01), cross_entropy())
        strategy = tfdist.strategy("single", seed=7, recompute=recompute)
        return strategy.fit(model, x, y, batch_size=4, epochs=2, verbose=0).history["loss"]

    np.testing.assert_allclose(losses("blocks"), losses(None), rtol=1e-4)
    assert copied


def graph_of_step(recompute):
    """The operations of a training step."""
    seen = []
    original = recomputation.Recomputation.traced

    def traced(self):
        seen.append(tf.compat.v1.get_default_graph())
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recomputation.Recomputation, "traced", traced)
        trained(tfdist.strategy("single", seed=7, recompute=recompute), convolutional, X)
    return seen[0].get_operations()


@pytest.mark.thorough
def test_without_the_option_the_graph_is_as_ever():
    names = [operation.name for operation in graph_of_step(None)]
    assert not any("recomputing" in name or "again" in name or "tfdist_backward" in name for name in names)


def test_the_backward_pass_uses_nothing_of_the_forward_pass_between_the_layers_that_are_held():
    used = {
        tensor.op.name
        for operation in graph_of_step(["first", "both"])
        if recomputation.is_backward(operation) and operation.type not in graphs.OF_SHAPE
        for tensor in operation.inputs
        if not recomputation.is_backward(tensor.op) and graphs.bytes_of(tensor, 4) > 4 * 4 * 64
    }
    between = {name for name in used if "/twice" in name or "re_lu" in name or "/dropout/" in name}
    assert not between
    assert any("/first" in name for name in used)
    assert any("/both" in name for name in used)


SCRIPT = """
import numpy as np, keras, tfdist
from keras import layers
from benchmarks.checkpoints import peak, reset_peak

x, y = np.zeros((32, 48, 48, 3), "f"), np.zeros((32, 2))
strategy = tfdist.strategy("single", seed=1, threads=1, recompute={recompute!r})
before = reset_peak()
blocks = [layer for _ in range(12) for layer in (layers.Conv2D(24, 3, padding="same"), layers.BatchNormalization(),
          layers.ReLU(), layers.Dropout(0.1))]
model = keras.Sequential([keras.Input((48, 48, 3)), *blocks, layers.GlobalAveragePooling2D(), layers.Dense(2)])
model.compile("sgd", "mse")
strategy.fit(model, x, y, batch_size=32, epochs=2, verbose=0)
print(peak() - before)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_a_process_takes_less_memory():
    peaks = {}
    for recompute in (None, "blocks"):
        script = SCRIPT.format(recompute=recompute)
        command = [sys.executable, "-c", script]
        root = Path(tfdist.__file__).parent.parent
        found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
        peaks[recompute] = int(found.stdout.splitlines()[-1])
    assert peaks["blocks"] < 0.7 * peaks[None]


def own_gradients():
    class InFunction(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        @tf.function
        def gradients(self, x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.dense(tf.reshape(x, [-1, 128]))))
            return tape.gradient(loss, self.trainable_variables)

        def call(self, x):
            return self.dense(tf.reshape(x, [-1, 128]))

        def train_step(self, data):
            self.optimizer.apply(self.gradients(*data), self.trainable_variables)
            return {"loss": 0.0}

    model = InFunction()
    model(X)
    return model


@pytest.mark.parametrize(
    ("recompute", "build", "options", "sentence", "hint"),
    [
        ("", convolutional, {}, "`recompute` is ``", 'use "blocks"'),
        (3, convolutional, {}, "Unknown layer of the model `.*` `3`", "use one of"),
        ([], convolutional, {}, r"`recompute` is `\[\]`", "names of the layers"),
        ("blocks", convolutional, {"run_eagerly": True}, "runs eagerly, without a graph", "run_eagerly=True"),
        ("blocks", own_gradients, {}, "computes no gradients in its own graph", "tf.function"),
    ],
)
def test_bad_input_is_one_sentence_with_a_hint(recompute, build, options, sentence, hint):
    with pytest.raises(UsageError, match=sentence) as raised:
        trained(tfdist.strategy("single", recompute=recompute), build, X, **options)
    assert hint in str(raised.value)


def test_an_unknown_layer_is_named_with_those_that_there_are():
    with pytest.raises(UnknownNameError, match=r"`middle`.*`first`"):
        trained(tfdist.strategy("single", recompute=["middle"]), convolutional, X)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("typed", "recorded"), [("blocks", "blocks"), ("dense,logits", ["dense", "logits"])])
def test_the_command_takes_the_option_and_records_it(typed, recorded, working_folder):
    from tfdist import train

    options = f"--strategy single --strategy-option recompute={typed}"
    arguments = f"{options} --model mlp --dataset digits --limit 64 --epochs 1 --run-dir run --quiet".split()
    result = CliRunner().invoke(train.command, arguments)
    assert result.exit_code == 0, result.output
    (path,) = working_folder.rglob("run.json")
    assert json.loads(path.read_text())["strategy"]["options"]["recompute"] == recorded
