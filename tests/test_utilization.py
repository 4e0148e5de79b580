"""The FLOPs of a training step, and their share of the machine's peak."""

import doctest

import keras
import pytest
import tensorflow as tf

import tfdist
from tests.test_train import QUICK, run
from tfdist import data, terminal
from tfdist.loop import model_flops, traced_step
from tfdist.run import peak, utilization
from tfdist.run.config import TrainConfig
from tfdist.run.folder import load_record

BATCH = 4


def flops(model, x, y, loss="mse", unknown_length=1):
    if not model.compiled:
        model.compile("sgd", loss)
    operations = traced_step.operations(tfdist.strategy("single"), model, BATCH, (x, y), unknown_length)
    return model_flops.of_step(operations)


def floats(*shape):
    return tf.TensorSpec([None, *shape], tf.float32)


def numbers(*shape):
    return tf.TensorSpec([None, *shape], tf.int32)


def test_the_synopsis_runs():
    assert doctest.testmod(model_flops).failed == 0


def test_each_product_counts_once_forward_and_twice_backward_and_the_input_needs_no_gradient():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(7)])
    assert flops(model, floats(5), floats(7)) == 2 * BATCH * (2 * 5 * 6 + 3 * 6 * 7)


def test_convolutions_are_counted_by_their_output_and_a_depthwise_one_by_its_own_channel():
    model = keras.Sequential([keras.Input((8, 8, 2)), keras.layers.Conv2D(4, 3, padding="same", strides=2)])
    assert flops(model, floats(8, 8, 2), floats(4, 4, 4)) == 2 * 2 * BATCH * (4 * 4 * 4) * (3 * 3 * 2)
    model = keras.Sequential([keras.Input((8, 8, 2)), keras.layers.DepthwiseConv2D(3, padding="same")])
    assert flops(model, floats(8, 8, 2), floats(8, 8, 2)) == 2 * 2 * BATCH * (8 * 8 * 2) * (3 * 3)
    grouped = keras.layers.Conv2D(4, 3, padding="same", groups=2)
    model = keras.Sequential([keras.Input((8, 8, 2)), grouped])
    assert flops(model, floats(8, 8, 2), floats(8, 8, 4)) == 2 * 2 * BATCH * (8 * 8 * 4) * (3 * 3 * 1)


@pytest.mark.parametrize(("layer", "gates"), [(keras.layers.LSTM, 4), (keras.layers.SimpleRNN, 1)])
def test_a_recurrent_layer_counts_once_per_word(layer, gates):
    model = keras.Sequential([keras.Input((None,)), keras.layers.Embedding(9, 3), layer(5)])
    assert flops(model, numbers(None), floats(5), unknown_length=11) == 3 * 2 * BATCH * 11 * gates * (3 * 5 + 5 * 5)


def test_attention_counts_the_products_of_queries_keys_and_values():
    tokens, units, heads = 6, 4, 2
    inputs = keras.Input((tokens, units))
    outputs = keras.layers.MultiHeadAttention(heads, units // heads)(inputs, inputs)
    projections, mixing = 4 * tokens * units * units, 2 * tokens * tokens * units
    expected = 2 * BATCH * (3 * projections - 3 * tokens * units * units + 3 * mixing)  # the input needs no gradient
    assert flops(keras.Model(inputs, outputs), floats(tokens, units), floats(tokens, units)) == expected


def test_the_step_that_the_user_wrote_is_what_is_counted():
    class Twice(keras.Model):
        """Updates twice per batch, the second time only its last layer."""

        def __init__(self):
            super().__init__()
            self.first, self.last = keras.layers.Dense(6), keras.layers.Dense(7)

        def call(self, x):
            return self.last(self.first(x))

        def train_step(self, data):
            x, y = data
            for part in (self, self.last):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(y=y, y_pred=self(x))
                variables = part.trainable_variables
                self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    once, again = 2 * 5 * 6 + 3 * 6 * 7, 5 * 6 + 2 * 6 * 7
    assert flops(Twice(), floats(5), floats(7)) == 2 * BATCH * (once + again)


@pytest.mark.parametrize("most", [None, 3])
def test_a_loop_whose_iterations_depend_on_the_data_has_no_known_flops(most):
    class Halves(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(5, 5), name="kernel")

        def call(self, x):
            is_large, halved = lambda x: tf.reduce_max(x) > 1, lambda x: (0.5 * x @ self.kernel,)
            return tf.while_loop(is_large, halved, (x,), maximum_iterations=most)[0]

    model = keras.Sequential([keras.Input((5,)), Halves()])
    assert flops(model, floats(5), floats(5)) is None


def test_the_flops_of_resnet20_are_those_of_its_paper():
    # K. He and others, arXiv 1512.03385, section 4.2: by its layers 40.6 million multiplications and additions, and the
    # pictures need no gradient.
    source = data.load("synthetic", shape=(32, 32, 3), train=8, validation=0, test=0)
    config = TrainConfig("single", "resnet20", "synthetic", batch_size=BATCH)
    first = 32 * 32 * 16 * 27
    found = utilization.flops_per_step(config, {}, source)
    assert found == pytest.approx(2 * BATCH * (3 * 40.6e6 - first), rel=0.01)


def test_a_sentence_is_as_long_as_the_longest_of_the_first_batch():
    def counted(length):
        source = data.load("synthetic", task="characters", length=length, classes=9, train=8, validation=0, test=0)
        config = TrainConfig("single", "stateful_rnn", "synthetic", batch_size=BATCH)
        return utilization.flops_per_step(config, {"streams": BATCH, "width": 0.05}, source)

    assert counted(12) == 2 * counted(6)


def test_the_peak_is_measured_on_the_cores_of_the_job_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first = peak.of_cores(1)
    assert first > 1e8
    assert peak.of_cores(1) >= first
    assert len(list(tmp_path.rglob("cpu-peak-*.json"))) == 1


@pytest.mark.parametrize(
    ("number", "text"),
    [(12, "12 FLOPs"), (999, "999 FLOPs"), (1_290_000, "1.29 MFLOPs"), (5.5e13, "55 TFLOPs"), (2e21, "2e+03 EFLOPs")],
)
def test_flops_have_three_digits_and_a_prefix(number, text):
    assert terminal.flops(number) == text


@pytest.mark.thorough
def test_all_strategies_record_the_same_flops_and_their_share_of_the_peak(tmp_path):
    found = []
    for name in ("single", "mirrored", "custom"):
        options = [*QUICK, "--epochs", 2, "--run-dir", name, "--devices", 1 if name == "single" else 2]
        done = run("--strategy", name, *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "per step" in done.stdout and "% of the measured peak (MFU)" in done.stdout
        found.append(load_record(tmp_path / name).utilization)
    assert len({figures.flops_per_step for figures in found}) == 1
    for figures in found:
        assert figures.mfu == pytest.approx(figures.flops_per_second / figures.peak_flops_per_second)
        assert 0 < figures.mfu < 1


def test_a_text_of_fewer_pieces_than_a_batch_trains_a_model_without_a_state_and_its_flops_are_counted(tmp_path):
    options = ["--model", "gpt", "--dataset", "synthetic", "--batch-size", 128, "--epochs", 1, "--run-dir", "run"]
    for name in ("task=characters", "train=100", "validation=50", "test=20"):
        options += ["--data-option", name]
    for name in ("layers=1", "units=16", "heads=2"):
        options += ["--model-option", name]
    done = run("--strategy", "single", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_record(tmp_path / "run").utilization.flops_per_step > 0
