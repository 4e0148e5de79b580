"""A `train_step` of the user's own, put together from pieces that run in the order in which a case names them."""

import math
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras import ops

import tfdist


@dataclass
class Run:
    """What the pieces of one step hand on to each other; of one replica, since several trace in turn."""

    x: Any
    y: Any
    weight: Any
    answer: Any = None
    loss_value: Any = None
    gradients: Any = None


class OwnStep(keras.Model):
    """A model around `net` whose step runs `pieces`, each of them a method below."""

    def __init__(self, net, pieces, second=None):
        super().__init__()
        self.net, self.pieces, self.second = net, pieces, second
        weights = net.trainable_variables
        if "average" in pieces:
            self.averages = [self.add_weight(shape=w.shape, initializer="zeros", trainable=False) for w in weights]
        if "statistics" in pieces:
            self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False, name="mean")
            self.sum = self.add_weight(shape=(), initializer="zeros", trainable=False, name="sum")
            self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")
        if "plain variables" in pieces:
            self.plain = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.MEAN)
            self.shown = self.add_weight(shape=(), initializer="zeros", trainable=False, name="shown")

    def call(self, x, training=False):
        return self.net(x, training=training)

    def train_step(self, data):
        if "in a function" in self.pieces:
            return tf.function(self._train_step)(data)
        return self._train_step(data)

    def _train_step(self, data):
        run = Run(*keras.utils.unpack_x_y_sample_weight(data))
        for piece in self.pieces:
            getattr(self, "_" + piece.replace(" ", "_"))(run)
        return self._logs(run)

    def _logs(self, run):
        if isinstance(run.y, dict):  # as Keras' own step
            self.metrics[0].update_state(ops.mean(run.loss_value))
            return self.compute_metrics(run.x, run.y, run.answer, run.weight)
        for metric in self.metrics:  # as Keras' guide
            if metric.name == "loss":
                metric.update_state(ops.mean(run.loss_value))
            else:
                metric.update_state(run.y, run.answer, run.weight)
        return {metric.name: metric.result() for metric in self.metrics}

    @property
    def _weights(self):
        return self.net.trainable_variables

    def _compute(self, run, loss):
        with tf.GradientTape() as tape:
            run.answer = self.net(run.x, training=True)
            run.loss_value = loss(run)
        run.gradients = tape.gradient(run.loss_value, self._weights)

    def _compiled_loss(self, run):
        return self.compute_loss(run.x, run.y, run.answer, run.weight, training=True)

    def _mean_of_answers(self, run):
        return ops.mean(ops.square(self._rows(run) - 0.3))

    def _rows(self, run):
        """All that the model answers, one row per example."""
        answers = keras.tree.flatten(run.answer)
        return ops.concatenate([ops.reshape(one, (-1, math.prod(one.shape[1:]))) for one in answers], axis=-1)

    def _in_a_function(self, run):
        pass  # of the whole step

    def _gradients(self, run):
        self._compute(run, self._compiled_loss)

    def _gradients_by_hand(self, run):
        self._compute(run, self._mean_of_answers)

    def _gradients_per_example(self, run):
        def per_example(run):
            return ops.mean(ops.square(self._rows(run) - 0.3), axis=-1) / 8.0

        self._compute(run, per_example)

    def _gradients_of_pairs(self, run):
        def of_pairs(run):
            rows = tfdist.gather(self._rows(run))
            return ops.mean(ops.square(rows @ ops.transpose(rows) - 0.1))

        self._compute(run, of_pairs)

    def _gradients_in_two_tapes(self, run):
        """The gradient's own norm is part of the loss."""
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                run.answer = self.net(run.x, training=True)
                value = self._mean_of_answers(run)
            inner_gradient = tf.convert_to_tensor(inner.gradient(value, self._weights[-1]))
            run.loss_value = value + 0.1 * ops.sum(ops.square(inner_gradient))
        run.gradients = outer.gradient(run.loss_value, self._weights)

    def _dense(self, run):
        return [tf.convert_to_tensor(gradient) for gradient in run.gradients]

    def _clip(self, run):
        run.gradients = tf.clip_by_global_norm(run.gradients, 0.1)[0]

    def _clip_each(self, run):
        run.gradients = [tf.clip_by_norm(gradient, 0.05) for gradient in self._dense(run)]

    def _apply(self, run):
        self.optimizer.apply(run.gradients, self._weights)

    def _apply_gradients(self, run):
        self.optimizer.apply_gradients(zip(run.gradients, self._weights, strict=True))

    def _apply_second(self, run):
        self.second.apply(run.gradients[-2:], self._weights[-2:])

    def _update_by_hand(self, run):
        for weight, gradient in zip(self._weights, self._dense(run), strict=True):
            weight.assign_sub(0.05 * gradient)

    def _decay(self, run):
        for weight in self._weights:
            weight.assign(weight * 0.99)

    def _clip_weights(self, run):
        for weight in self._weights:
            weight.assign(ops.clip(weight, -0.3, 0.3))

    def _normalize_a_weight(self, run):
        self._weights[-2].assign(self._weights[-2] / ops.norm(self._weights[-2]))

    def _set_the_rate(self, run):
        self.optimizer.learning_rate.assign(0.05 / (1.0 + ops.cast(self.optimizer.iterations, "float32")))

    def _average(self, run):
        for average, weight in zip(self.averages, self._weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)

    def _swap_in_averages(self, run):
        for average, weight in zip(self.averages, self._weights, strict=True):
            weight.assign(0.95 * weight + 0.05 * average)

    def _statistics(self, run):
        answer = self._rows(run)
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(answer))
        self.sum.assign_add(tfdist.all_reduce(ops.sum(ops.square(answer))))
        self.count.assign_add(1)

    def _plain_variables(self, run):
        self.plain.assign(0.5 * self.plain + ops.mean(self._rows(run)))
        self.shown.assign(self.plain)

    def _sharpness(self, run):
        """The weights are moved along the gradient and put back, as SAM does."""
        gradients = self._dense(run)
        norm = tf.linalg.global_norm(gradients) + 1e-3
        for weight, gradient in zip(self._weights, gradients, strict=True):
            weight.assign_add(0.05 * gradient / norm)
        self._gradients(run)
        for weight, gradient in zip(self._weights, gradients, strict=True):
            weight.assign_sub(0.05 * gradient / norm)


BEFORE = ("decay", "clip weights", "normalize a weight", "set the rate")
GRADIENTS = (
    "gradients",
    "gradients by hand",
    "gradients per example",
    "gradients of pairs",
    "gradients in two tapes",
)
BETWEEN = ("clip", "clip each", "sharpness", "decay", "statistics", "set the rate", "clip weights")
UPDATES = ("apply", "apply gradients", "apply second", "update by hand")
AFTER = ("average", "swap in averages", "clip weights", "statistics", "plain variables", "normalize a weight", "decay")
