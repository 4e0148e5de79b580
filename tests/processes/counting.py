"""A dataset whose examples have numbers, and a model that counts how often it sees each: for `tfdist.train`."""

import os
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist import data
from tfdist.jobs.world import World

EXAMPLES = 320
STEPS_FILE = "TFDIST_TEST_STEPS"  # the chief adds a character to it at each step, which takes its time then
STEP_SECONDS = 0.1


def dataset(data_dir):
    """Digits, each with its number behind its pixels: x `[320, 65]`."""
    x, y = data.load("digits", data_dir=data_dir).limit(EXAMPLES).arrays("train")
    numbered = np.concatenate([x.reshape(EXAMPLES, 64), np.arange(EXAMPLES, dtype="float32")[:, None]], axis=1)
    return data.Source.from_arrays("numbered", classes=10, train=(numbered, y), test=(numbered[:32], y[:32]))


class Times(keras.metrics.Metric):
    """Of the times that each example was seen, `result`."""

    additive = True

    def __init__(self, name, result):
        super().__init__(name=name)
        self._result = result
        self.times = self.add_variable((EXAMPLES,), "zeros", name="times")

    def update_state(self, numbers):
        self.times.assign(self.times + tf.reduce_sum(tf.one_hot(numbers, EXAMPLES), 0))

    def result(self):
        return self._result(self.times)


class Counting(keras.Model):
    """Counts each example that it is trained on, or evaluated."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        numbers = tf.cast(x[:, 64], tf.int32)
        with tf.control_dependencies([tf.numpy_function(_step, [numbers], [])]):
            for counter in self.counters:
                counter.update_state(tf.identity(numbers))
        return super().compute_metrics(x, y, y_pred, sample_weight)


def _step(numbers):
    del numbers
    if STEPS_FILE not in os.environ:
        return
    time.sleep(STEP_SECONDS)
    if World.detect(os.environ).is_chief:
        with Path(os.environ[STEPS_FILE]).open("a") as file:
            file.write(".")


def model(spec):
    """A small one, compiled with plain SGD."""
    inputs = keras.Input(spec.input_shape)
    hidden = keras.layers.Dense(16, "tanh")(inputs[:, :64])
    found = Counting(inputs, keras.layers.Dense(spec.classes)(hidden))
    found.counters = [
        Times("seen_once", lambda times: tf.reduce_sum(tf.cast(tf.equal(times, 1.0), tf.float32))),
        Times("seen_at_most", tf.reduce_max),
    ]
    found.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return found
