"""What a fuzzed training is put together from, by name: inputs, layers, losses, metrics, optimizers and callbacks.

A `Case` (see `drawing.py`) holds the names, so that it can be printed, pasted and run again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, metrics, ops, optimizers

LENGTH, WORDS, CLASSES = 7, 11, 3


def _vectors(rng, examples):
    return rng.normal(size=(examples, 6)).astype("float32")


def _series(rng, examples):
    return rng.normal(size=(examples, LENGTH, 3)).astype("float32")


def _pictures(rng, examples):
    return rng.normal(size=(examples, 6, 6, 2)).astype("float32")


def _tokens(rng, examples):
    lengths = rng.integers(1, LENGTH + 1, examples)
    return (rng.integers(1, WORDS, (examples, LENGTH)) * (np.arange(LENGTH) < lengths[:, None])).astype("int32")


def _words(rng, examples):
    words = rng.choice(["red", "green", "blue", "other"], (examples, LENGTH))
    return tf.constant(words)  # Keras takes no arrays of them


# The kind of input: its shape without examples, its type, and how it is drawn.
INPUTS = {
    "vectors": ((6,), "float32", _vectors),
    "series": ((LENGTH, 3), "float32", _series),
    "pictures": ((6, 6, 2), "float32", _pictures),
    "tokens": ((LENGTH,), "int32", _tokens),
    "words": ((LENGTH,), "string", _words),
}


class Residual(layers.Layer):
    def build(self, shape):
        self.dense = layers.Dense(shape[-1], activation="tanh")

    def call(self, x):
        return x + self.dense(x)


class SelfAttention(layers.Layer):
    """Attention of a series to itself, by a layer that takes a query and a value."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def call(self, x):
        return self.attention(x, x)


class Listed(layers.Layer):
    """As `layers.Attention` takes its inputs."""

    def __init__(self):
        super().__init__()
        self.attention = layers.AdditiveAttention()

    def call(self, x):
        return self.attention([x, x])


class Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(0.05 * ops.mean(ops.square(x)))
        return x


class MovingCenter(layers.Layer):
    """Keeps a moving average that is linear in the batch, and a count of calls."""

    def build(self, shape):
        self.center = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="center")
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls")

    def call(self, x, training=False):
        shifted = x - self.center
        if training:
            mean = ops.mean(x, axis=tuple(range(len(x.shape) - 1)))
            self.center.assign(0.9 * self.center + 0.1 * mean)
            self.calls.assign_add(1)
        return shifted


class AsSeries(layers.Layer):
    def call(self, x):
        return ops.reshape(x, (-1, x.shape[1] * x.shape[2], x.shape[3]))


class TokensAndPositions(layers.Layer):
    def __init__(self, shared):
        super().__init__()
        self.tokens = layers.Embedding(WORDS, 4)
        self.positions = self.tokens if shared else layers.Embedding(LENGTH, 4)

    def call(self, x):
        return self.tokens(x) + self.positions(ops.arange(ops.shape(x)[1]))


class AddedPositions(layers.Layer):
    """Adds a trained vector to each position of a series."""

    def build(self, shape):
        self.table = layers.Embedding(shape[1], shape[2])

    def call(self, x):
        return x + self.table(ops.arange(x.shape[1]))


class Chain(layers.Layer):
    """Layers one after the other, as one layer."""

    def __init__(self, *chain):
        super().__init__()
        self.chain = list(chain)

    def call(self, x):
        for layer in self.chain:
            x = layer(x)
        return x


@dataclass(frozen=True)
class Block:
    """A layer to draw: what it takes and gives ("any" stands for what it took), and whether it keeps the length."""

    takes: str
    gives: str
    make: Callable[[], Any]
    keeps_length: bool = True


def _dense(**options):
    return lambda: layers.Dense(4, **{"activation": "tanh"} | options)


def _recurrent(kind, **options):
    return lambda: getattr(layers, kind)(3, **options)


SAME = {"padding": "same"}
STRIDED = {"strides": 2, "padding": "same"}

LAYERS = {
    "dense": Block("any", "any", _dense()),
    "dense relu": Block("any", "any", _dense(activation="relu")),
    "dense regularized": Block("any", "any", _dense(kernel_regularizer="l1", bias_regularizer="l2")),
    "dense constrained": Block("any", "any", _dense(kernel_constraint=keras.constraints.MaxNorm(0.5))),
    "dense, activity regularized": Block("any", "any", _dense(activity_regularizer="l2")),
    "dense, spectral normalization": Block("any", "any", lambda: layers.SpectralNormalization(layers.Dense(4))),
    "residual": Block("any", "any", Residual),
    "gelu": Block("any", "any", lambda: layers.Activation("gelu")),
    "prelu": Block("any", "any", lambda: layers.PReLU(alpha_initializer="uniform")),
    "add_loss": Block("any", "any", Penalty),
    "activity regularization": Block("any", "any", lambda: layers.ActivityRegularization(l2=0.01)),
    "moving center": Block("any", "any", MovingCenter),
    "dropout of nothing": Block("any", "any", lambda: layers.Dropout(0.0)),
    "batch normalization": Block("any", "any", lambda: layers.BatchNormalization(synchronized=True, momentum=0.8)),
    "layer normalization": Block("any", "any", layers.LayerNormalization),
    "rms normalization": Block("any", "any", layers.RMSNormalization),
    "group normalization": Block("any", "any", lambda: layers.GroupNormalization(1)),
    "unit normalization": Block("any", "any", layers.UnitNormalization),
    "rescaling": Block("any", "any", lambda: layers.Rescaling(0.5, 0.1)),
    "normalization": Block("any", "any", lambda: layers.Normalization(mean=0.1, variance=2.0)),
    "binned": Block("vector", "vector", lambda: layers.Discretization([-0.5, 0.0, 0.7], output_mode="multi_hot")),
    "binned and embedded": Block(
        "vector", "series", lambda: Chain(layers.Discretization([-0.5, 0.0, 0.7]), layers.Embedding(4, 3)), False
    ),
    "repeated": Block("vector", "series", lambda: layers.RepeatVector(3), False),
    "conv1d": Block("series", "series", lambda: layers.Conv1D(3, 3, padding="causal")),
    "separable conv1d": Block("series", "series", lambda: layers.SeparableConv1D(3, 3, **SAME)),
    "conv1d transposed": Block("series", "series", lambda: layers.Conv1DTranspose(3, 3, **STRIDED), False),
    "max pooling 1d": Block("series", "series", lambda: layers.MaxPooling1D(2, **SAME), False),
    "average pooling 1d": Block("series", "series", lambda: layers.AveragePooling1D(2, **SAME), False),
    "upsampling 1d": Block("series", "series", layers.UpSampling1D, False),
    "lstm": Block("series", "vector", _recurrent("LSTM")),
    "lstm, sequences": Block("series", "series", _recurrent("LSTM", return_sequences=True)),
    "gru": Block("series", "vector", _recurrent("GRU")),
    "gru backwards, sequences": Block("series", "series", _recurrent("GRU", return_sequences=True, go_backwards=True)),
    "simple rnn, unrolled": Block("series", "vector", _recurrent("SimpleRNN", unroll=True)),
    "bidirectional": Block("series", "vector", lambda: layers.Bidirectional(layers.GRU(2))),
    "attention": Block("series", "series", lambda: SelfAttention(layers.MultiHeadAttention(2, 3))),
    "grouped attention": Block("series", "series", lambda: SelfAttention(layers.GroupQueryAttention(2, 2, 1))),
    "additive attention": Block("series", "series", Listed),
    "time distributed": Block("series", "series", lambda: layers.TimeDistributed(layers.Dense(3))),
    "positions": Block("series", "series", AddedPositions),
    "global max pooling 1d": Block("series", "vector", layers.GlobalMaxPooling1D),
    "global average pooling 1d": Block("series", "vector", layers.GlobalAveragePooling1D),
    "flat series": Block("series", "vector", layers.Flatten),
    "conv2d": Block("picture", "picture", lambda: layers.Conv2D(3, 3, **SAME)),
    "conv2d strided": Block("picture", "picture", lambda: layers.Conv2D(3, 3, activation="relu", **STRIDED)),
    "depthwise conv2d": Block("picture", "picture", lambda: layers.DepthwiseConv2D(2, **SAME)),
    "separable conv2d": Block("picture", "picture", lambda: layers.SeparableConv2D(3, 2, **SAME)),
    "conv2d transposed": Block("picture", "picture", lambda: layers.Conv2DTranspose(2, 3, **STRIDED)),
    "max pooling 2d": Block("picture", "picture", lambda: layers.MaxPooling2D(2, **SAME)),
    "average pooling 2d": Block("picture", "picture", lambda: layers.AveragePooling2D(2, **SAME)),
    "zero padding 2d": Block("picture", "picture", layers.ZeroPadding2D),
    "picture as series": Block("picture", "series", AsSeries, False),
    "global average pooling 2d": Block("picture", "vector", layers.GlobalAveragePooling2D),
    "global max pooling 2d": Block("picture", "vector", layers.GlobalMaxPooling2D),
    "flat picture": Block("picture", "vector", layers.Flatten),
    "embedding": Block("tokens", "series", lambda: layers.Embedding(WORDS, 4)),
    "embedding, masked": Block("tokens", "series", lambda: layers.Embedding(WORDS, 4, mask_zero=True)),
    "embedding, frozen": Block("tokens", "series", lambda: layers.Embedding(WORDS, 4, trainable=False)),
    "tokens and positions": Block("tokens", "series", lambda: TokensAndPositions(False)),
    "tokens and positions of one table": Block("tokens", "series", lambda: TokensAndPositions(True)),
    "bag of tokens": Block("tokens", "vector", lambda: layers.CategoryEncoding(WORDS, output_mode="multi_hot")),
    "words, embedded": Block(
        "words", "series", lambda: Chain(layers.StringLookup(vocabulary=["red", "green"]), layers.Embedding(3, 4))
    ),
    "bag of words": Block(
        "words", "vector", lambda: layers.StringLookup(vocabulary=["red", "green", "blue"], output_mode="multi_hot")
    ),
}

KIND_OF_INPUT = {"vectors": "vector", "series": "series", "pictures": "picture", "tokens": "tokens", "words": "words"}


def _values(rng, examples):
    return np.tanh(rng.normal(size=(examples, 2))).astype("float32")


def _classes(rng, examples):
    return rng.integers(0, CLASSES, examples).astype("int32")


def _one_hot(rng, examples):
    return np.eye(CLASSES, dtype="float32")[_classes(rng, examples)]


def _marks(rng, examples):
    return rng.integers(0, 2, (examples, CLASSES)).astype("float32")


def _tags(rng, examples):
    return rng.integers(0, CLASSES, (examples, LENGTH)).astype("int32")


# The kind of target: how it is drawn, and the width and activation of the layer that answers.
TARGETS = {
    "values": (_values, 2, None),
    "classes": (_classes, CLASSES, None),
    "one hot": (_one_hot, CLASSES, "softmax"),
    "marks": (_marks, CLASSES, "sigmoid"),
    "tags": (_tags, CLASSES, None),
}


def dice_by_hand(y, p):
    return 1 - (2 * ops.sum(y * p) + 1) / (ops.sum(y) + ops.sum(p) + 1)


class DiceByHand(losses.Loss):
    def call(self, y_true, y_pred):
        return dice_by_hand(y_true, y_pred)


def mean_square(y, p):
    return ops.mean(ops.square(y - p))


def square_per_example(y, p):
    return ops.mean(ops.square(y - p), axis=-1)


class SquarePerExample(losses.Loss):
    def call(self, y_true, y_pred):
        return square_per_example(y_true, y_pred)


SPARSE = {"from_logits": True}
REDUCED = ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight")
# For each kind of target, losses by name; those in `OF_REDUCTION` take a reduction.
LOSSES = {
    "values": {
        "mse": losses.MeanSquaredError,
        "mae": losses.MeanAbsoluteError,
        "huber": lambda **o: losses.Huber(0.5, **o),
        "log_cosh": losses.LogCosh,
        "cosine": losses.CosineSimilarity,
        "a class": SquarePerExample,
        "a function": lambda: mean_square,
        "a function per example": lambda: square_per_example,
    },
    "classes": {
        "sparse crossentropy": lambda **o: losses.SparseCategoricalCrossentropy(**SPARSE, **o),
        "sparse crossentropy, a class ignored": lambda **o: losses.SparseCategoricalCrossentropy(
            ignore_class=1, **SPARSE, **o
        ),
        "circle": losses.Circle,
    },
    "one hot": {
        "crossentropy": lambda **o: losses.CategoricalCrossentropy(label_smoothing=0.1, **o),
        "focal": losses.CategoricalFocalCrossentropy,
        "kl": losses.KLDivergence,
        "hinge": losses.CategoricalHinge,
        "dice": losses.Dice,
    },
    "marks": {
        "binary crossentropy": losses.BinaryCrossentropy,
        "binary focal": lambda **o: losses.BinaryFocalCrossentropy(apply_class_balancing=True, **o),
        "dice": losses.Dice,
        "dice of each channel": lambda **o: losses.Dice(axis=(0,), **o),
        "tversky": lambda **o: losses.Tversky(alpha=0.3, beta=0.7, **o),
        "a class of the batch": DiceByHand,
        "a function of the batch": lambda: dice_by_hand,
        "squared hinge": losses.SquaredHinge,
    },
    "tags": {
        "sparse crossentropy": lambda **o: losses.SparseCategoricalCrossentropy(**SPARSE, **o),
        "sparse crossentropy, a class ignored": lambda **o: losses.SparseCategoricalCrossentropy(
            ignore_class=1, **SPARSE, **o
        ),
    },
}
WITHOUT_REDUCTION = ("a function", "a function per example", "a function of the batch")


class LargestAnswer(metrics.Metric):
    """No sum: a maximum."""

    def __init__(self):
        super().__init__(name="largest")
        self.largest = self.add_variable((), keras.initializers.Constant(-9.0), name="largest")

    def update_state(self, y, p, sample_weight=None):
        self.largest.assign(ops.maximum(self.largest, ops.max(p)))

    def result(self):
        return self.largest + 0.0  # see `drawing.py`

    def reset_state(self):
        self.largest.assign(-9.0)


class MeanOfBatches(metrics.Metric):
    """No sum over examples: each batch counts once."""

    def __init__(self):
        super().__init__(name="of_batches")
        self.total = self.add_variable((), "zeros", name="total")
        self.batches = self.add_variable((), "zeros", name="batches")

    def update_state(self, y, p, sample_weight=None):
        self.total.assign_add(ops.mean(ops.abs(p)))
        self.batches.assign_add(1.0)

    def result(self):
        return self.total / ops.maximum(self.batches, 1.0)


class MovingAnswer(metrics.Metric):
    """Depends on the order of the batches, and on how many there were."""

    def __init__(self):
        super().__init__(name="moving")
        self.value = self.add_variable((), "zeros", name="value")
        self.steps = self.add_variable((), "zeros", dtype="int32", name="steps")

    def update_state(self, y, p, sample_weight=None):
        self.value.assign(0.5 * self.value + 0.5 * ops.std(p))
        self.steps.assign_add(1)

    def result(self):
        return self.value + 0.1 * ops.cast(self.steps, "float32")


class AdditiveAnswer(MeanOfBatches):
    """Says of itself that it is a sum."""

    additive = True

    def update_state(self, y, p, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(p)))
        self.batches.assign_add(ops.cast(ops.size(p), "float32"))


def spread(y, p):
    return ops.max(p) - ops.min(p)


def size_per_example(y, p):
    return ops.mean(ops.abs(p), axis=-1)


METRICS_OF_ANY = {
    "largest": LargestAnswer,
    "of batches": MeanOfBatches,
    "moving": MovingAnswer,
    "additive": AdditiveAnswer,
    "spread": lambda: spread,
    "size per example": lambda: size_per_example,
}
_OF_MARKS = {
    "auc": lambda: metrics.AUC(num_thresholds=20),
    "auc, several labels": lambda: metrics.AUC(num_thresholds=20, multi_label=True, num_labels=CLASSES),
    "precision": metrics.Precision,
    "recall at precision": lambda: metrics.RecallAtPrecision(0.4, num_thresholds=20),
    "f1": lambda: metrics.F1Score(threshold=0.5),
    "binary accuracy": lambda: "accuracy",
    "binary iou": metrics.BinaryIoU,
}
METRICS = {
    "values": {
        "mae": lambda: "mae",
        "rmse": metrics.RootMeanSquaredError,
        "r2": metrics.R2Score,
        "cosine": metrics.CosineSimilarity,
        "pearson": metrics.PearsonCorrelation,
        "mape": lambda: "mape",
    },
    "classes": {
        "accuracy": lambda: "accuracy",
        "top 2": lambda: metrics.SparseTopKCategoricalAccuracy(k=2),
        "crossentropy": lambda: metrics.SparseCategoricalCrossentropy(from_logits=True),
        "mean iou": lambda: metrics.MeanIoU(CLASSES, sparse_y_pred=False),
    },
    "one hot": {
        "accuracy": lambda: "accuracy",
        "f1": lambda: metrics.F1Score(average="macro"),
        "one hot iou": lambda: metrics.OneHotMeanIoU(CLASSES),
        "auc": lambda: metrics.AUC(num_thresholds=20),
        "kl": metrics.KLDivergence,
    },
    "marks": _OF_MARKS,
    "tags": {
        "accuracy": lambda: "accuracy",
        "crossentropy": lambda: metrics.SparseCategoricalCrossentropy(from_logits=True),
    },
}

OPTIMIZERS = {
    "sgd": lambda **o: optimizers.SGD(**{"learning_rate": 0.1} | o),
    "nesterov": lambda **o: optimizers.SGD(**{"learning_rate": 0.05} | o, momentum=0.9, nesterov=True),
    "adam": lambda **o: optimizers.Adam(**{"learning_rate": 0.02} | o, epsilon=1e-3),
    "amsgrad": lambda **o: optimizers.Adam(**{"learning_rate": 0.02} | o, amsgrad=True, epsilon=1e-3),
    "adamw": lambda **o: optimizers.AdamW(**{"learning_rate": 0.02, "weight_decay": 0.1} | o, epsilon=1e-3),
    "adamax": lambda **o: optimizers.Adamax(**{"learning_rate": 0.02} | o, epsilon=1e-3),
    "nadam": lambda **o: optimizers.Nadam(**{"learning_rate": 0.02} | o, epsilon=1e-3),
    "rmsprop": lambda **o: optimizers.RMSprop(**{"learning_rate": 0.01} | o, momentum=0.5, centered=True, epsilon=1e-2),
    "adagrad": lambda **o: optimizers.Adagrad(**{"learning_rate": 0.1} | o),
    "adadelta": lambda **o: optimizers.Adadelta(**{"learning_rate": 1.0} | o, epsilon=1e-3),
    "ftrl": lambda **o: optimizers.Ftrl(**{"learning_rate": 0.1} | o, l2_regularization_strength=0.01, beta=0.1),
    "lion": lambda **o: optimizers.Lion(**{"learning_rate": 0.005} | o),
    "lamb": lambda **o: optimizers.Lamb(**{"learning_rate": 0.02} | o, epsilon=1e-3),
    "adafactor": lambda **o: optimizers.Adafactor(**{"learning_rate": 0.05} | o),
    "schedule-free": lambda **o: optimizers.ScheduleFreeAdamW(**{"learning_rate": 0.02} | o, epsilon=1e-3),
    "muon": lambda **o: optimizers.Muon(**{"learning_rate": 0.02} | o),
}


def _schedule():
    return optimizers.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.7)


OPTIONS = {
    "clipnorm": lambda: {"clipnorm": 0.05},
    "clipvalue": lambda: {"clipvalue": 0.01},
    "global clipnorm": lambda: {"global_clipnorm": 0.05},
    "weight decay": lambda: {"weight_decay": 0.05},
    "ema": lambda: {"use_ema": True, "ema_momentum": 0.9},
    "ema overwriting": lambda: {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2},
    "accumulation": lambda: {"gradient_accumulation_steps": 2},
    "loss scale": lambda: {"loss_scale_factor": 128.0},
    "schedule": lambda: {"learning_rate": _schedule()},
}


class LogsOfBatches(keras.callbacks.Callback):
    """Keeps what each batch logs."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def on_train_batch_end(self, batch, logs=None):
        self.kept.append(dict(logs))


class Shrinks(keras.callbacks.Callback):
    """Changes a weight between epochs."""

    def on_epoch_end(self, epoch, logs=None):
        weight = self.model.trainable_variables[0]
        weight.assign(weight * 0.9)


class Predicts(keras.callbacks.Callback):
    """Uses the model between epochs, as confusion matrices do; the logs get what it says."""

    def __init__(self, x):
        super().__init__()
        self.x = x

    def on_epoch_end(self, epoch, logs=None):
        found = keras.tree.flatten(self.model.predict(self.x, verbose=0, batch_size=4))
        logs["predicted"] = float(np.mean(found[0]))


CALLBACKS = {
    "logs of batches": lambda x: LogsOfBatches(),
    "early stopping": lambda x: keras.callbacks.EarlyStopping("loss", patience=0, restore_best_weights=True),
    "plateau": lambda x: keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=10.0),
    "scheduled": lambda x: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
    "swapped averages": lambda x: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    "shrinks": lambda x: Shrinks(),
    "predicts": Predicts,
    "nan": lambda x: keras.callbacks.TerminateOnNaN(),
}
