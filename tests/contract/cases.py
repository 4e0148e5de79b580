"""The cases of equality: what is trained, how, and on what. Each name says what it adds to a small dense model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, optimizers

FEATURES, CLASSES, BATCH = 6, 3, 8


@dataclass(frozen=True)
class Case:
    """One training to repeat; `model` builds and compiles, `examples` leaves a remainder of 3 by default."""

    model: Callable[[], Any]
    examples: int = 3 * BATCH + 3
    data: Callable[[int], dict[str, Any]] = field(default_factory=lambda: classification)
    fit: dict[str, Any] = field(default_factory=dict)
    dtype_policy: str = "float32"
    tolerance: float = 5e-5


def classification(examples, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(examples, FEATURES)).astype("float32")
    return {"x": x, "y": rng.integers(0, CLASSES, examples).astype("int32")}


def weighted(examples):
    weights = np.random.default_rng(1).uniform(0, 2, examples).astype("float32")
    return classification(examples) | {"sample_weight": weights}


def regression(examples):
    x = classification(examples)["x"]
    return {"x": x, "y": np.tanh(x @ np.ones((FEATURES, 2), "float32"))}


def sequences(examples):
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 8, examples)
    x = rng.integers(1, 11, (examples, 7)) * (np.arange(7) < lengths[:, None])
    return {"x": x.astype("int32"), "y": rng.integers(0, 4, (examples, 7)).astype("int32")}


def tokens(examples):
    rng = np.random.default_rng(3)
    return {"x": rng.integers(0, 50, (examples, 4)).astype("int32"), "y": rng.integers(0, CLASSES, examples)}


def two_in_two_out(examples):
    data = regression(examples)
    y = {"kind": classification(examples)["y"], "value": data["y"]}
    return {"x": {"left": data["x"], "right": data["x"][:, ::-1].copy()}, "y": y}


def exploding(examples):
    """Example 5 makes an infinite gradient in half precision: on one replica only."""
    data = classification(examples)
    data["x"][5] = 6e4
    return data


def at_the_edge(examples):
    """Gradients within a factor of two of float16's range, which those of a remainder exceed."""
    x = classification(examples)["x"] / 64
    return {"x": x, "y": np.full((examples, 2), 64, "float32")}


def regression_at_the_edge():
    model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(2, use_bias=False, kernel_initializer="zeros")])
    model.compile(optimizers.LossScaleOptimizer(optimizers.SGD(0.01), initial_scale=4096.0), "mse")
    return model


def cross_entropy(**options):
    return losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def dense(optimizer=None, loss=None, hidden=None, **compile_options):
    def build():
        model = keras.Sequential([keras.Input((FEATURES,)), hidden() if hidden else layers.Dense(5, activation="tanh")])
        model.add(layers.Dense(CLASSES, dtype="float32"))
        model.compile(
            optimizer() if optimizer else optimizers.SGD(0.1),
            loss() if loss else cross_entropy(),
            **({"metrics": ["accuracy"]} | {k: v() if callable(v) else v for k, v in compile_options.items()}),
        )
        return model

    return build


def prebuilt(build):
    """Stock `fit` builds an optimizer inside its graph, where this one would start anew at every step."""

    def build_all():
        model = build()
        model.optimizer.build(model.trainable_variables)
        return model

    return build_all


def masked(reduction):
    def build():
        model = keras.Sequential(
            [keras.Input((7,), dtype="int32"), layers.Embedding(11, 4, mask_zero=True), layers.Dense(4)]
        )
        model.compile(
            optimizers.SGD(0.02 if reduction == "sum" else 0.5),
            cross_entropy(reduction=reduction),
            metrics=["accuracy"],
        )
        return model

    return build


def embedding(optimizer):
    def build():
        model = keras.Sequential(
            [keras.Input((4,), dtype="int32"), layers.Embedding(50, 3), layers.Flatten(), layers.Dense(CLASSES)]
        )
        model.compile(optimizer(), cross_entropy(), metrics=["accuracy"])
        return model

    return build


def batch_norm(optimizer=optimizers.SGD):
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(5),
            layers.BatchNormalization(synchronized=True, momentum=0.8),
            layers.Dense(CLASSES),
        ]
    )
    model.compile(optimizer(0.1), cross_entropy(), metrics=["accuracy"])
    return model


def scaled_sgd(learning_rate):
    return optimizers.LossScaleOptimizer(optimizers.SGD(learning_rate))


def several_outputs():
    left, right = keras.Input((FEATURES,), name="left"), keras.Input((FEATURES,), name="right")
    both = layers.Dense(6, activation="tanh")(layers.Concatenate()([left, right]))
    outputs = {"kind": layers.Dense(CLASSES, name="kind")(both), "value": layers.Dense(2, name="value")(both)}
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile(
        optimizers.SGD(0.1),
        {"kind": cross_entropy(), "value": "mse"},
        loss_weights={"kind": 1.0, "value": 0.3},
        metrics={"kind": "accuracy", "value": "mae"},
    )
    return model


class Penalty(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.05 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


class OwnTrainStep(keras.Model):
    """As Keras' guide on customizing `fit` writes it."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(5, activation="tanh"), layers.Dense(CLASSES)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def call(self, x):
        return self.out(self.hidden(x))

    @property
    def metrics(self):
        return [self.loss_tracker, self.accuracy]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.accuracy.update_state(y, logits)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        x, y = data
        logits = self(x, training=False)
        self.loss_tracker.update_state(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)))
        self.accuracy.update_state(y, logits)
        return {metric.name: metric.result() for metric in self.metrics}


class OwnComputeLoss(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(5, activation="tanh"), layers.Dense(CLASSES)

    def call(self, x):
        return self.out(self.hidden(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))


def compiled(model_class, optimizer=lambda: optimizers.SGD(0.1)):
    def build():
        model = model_class()
        model.build((None, FEATURES))
        model.compile(optimizer(), metrics=["accuracy"] if model_class is OwnComputeLoss else None)
        return model

    return build


def schedule():
    return optimizers.schedules.ExponentialDecay(0.2, decay_steps=2, decay_rate=0.5)


def adam(**options):
    return lambda: optimizers.Adam(0.02, **options)


def sgd(**options):
    return lambda: optimizers.SGD(0.1, **options)


REGULARIZED = {"kernel_regularizer": "l2", "bias_regularizer": "l1"}

CASES = {
    "plain": Case(dense(), examples=4 * BATCH),
    "remainder 1": Case(dense(), examples=2 * BATCH + 1),
    "remainder batch-1": Case(dense(), examples=3 * BATCH - 1),
    "single batch of one example": Case(dense(), examples=1),
    "batch not divisible by the replicas": Case(dense(), fit={"batch_size": 7}),
    "sgd momentum": Case(dense(sgd(momentum=0.9))),
    "sgd nesterov": Case(dense(sgd(momentum=0.9, nesterov=True))),
    "adam": Case(dense(adam())),
    "adam amsgrad": Case(dense(adam(amsgrad=True))),
    "adamw": Case(dense(lambda: optimizers.AdamW(0.02, weight_decay=0.1))),
    "adamax": Case(dense(lambda: optimizers.Adamax(0.02))),
    "nadam": Case(dense(lambda: optimizers.Nadam(0.02))),
    "rmsprop": Case(dense(lambda: optimizers.RMSprop(0.01))),
    "rmsprop momentum": Case(dense(lambda: optimizers.RMSprop(0.01, momentum=0.5))),
    "rmsprop centered": Case(dense(lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True))),
    "adagrad": Case(dense(lambda: optimizers.Adagrad(0.1))),
    "adadelta": Case(dense(lambda: optimizers.Adadelta(1.0))),
    "ftrl": Case(
        dense(
            lambda: optimizers.Ftrl(
                0.1,
                l1_regularization_strength=0.001,
                l2_regularization_strength=0.01,
                l2_shrinkage_regularization_strength=0.01,
                beta=0.1,
            )
        )
    ),
    "lion": Case(dense(lambda: optimizers.Lion(0.005))),
    "lamb": Case(dense(lambda: optimizers.Lamb(0.02))),
    "adafactor": Case(dense(lambda: optimizers.Adafactor(0.05))),
    "schedule-free adamw": Case(prebuilt(dense(lambda: optimizers.ScheduleFreeAdamW(0.02)))),
    "muon": Case(dense(lambda: optimizers.Muon(0.02))),
    "clipnorm": Case(dense(sgd(clipnorm=0.05))),
    "clipvalue": Case(dense(sgd(clipvalue=0.01))),
    "global clipnorm": Case(dense(adam(global_clipnorm=0.05))),
    "weight decay": Case(dense(sgd(weight_decay=0.05, momentum=0.5))),
    "ema": Case(dense(adam(use_ema=True, ema_momentum=0.9))),
    "ema overwriting": Case(dense(adam(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2))),
    "gradient accumulation": Case(dense(adam(gradient_accumulation_steps=2))),
    "accumulation and clipping": Case(dense(sgd(gradient_accumulation_steps=2, global_clipnorm=0.05))),
    "loss scaling": Case(dense(lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), dynamic_growth_steps=2))),
    "loss scaling, fixed": Case(dense(adam(loss_scale_factor=128.0))),
    "mixed float16, inf on one replica": Case(
        dense(sgd()), data=exploding, dtype_policy="mixed_float16", tolerance=2e-3
    ),
    "mixed float16, at the edge of its range": Case(
        regression_at_the_edge, data=at_the_edge, dtype_policy="mixed_float16", tolerance=2e-3
    ),
    "mixed bfloat16": Case(dense(sgd()), dtype_policy="mixed_bfloat16", tolerance=2e-2),
    "learning rate schedule": Case(dense(lambda: optimizers.Adam(schedule()))),
    "constraint": Case(dense(adam(), hidden=lambda: layers.Dense(5, kernel_constraint=keras.constraints.MaxNorm(0.5)))),
    "loss sum": Case(dense(lambda: optimizers.SGD(0.01), lambda: cross_entropy(reduction="sum"))),
    "loss mean_with_sample_weight": Case(
        dense(loss=lambda: cross_entropy(reduction="mean_with_sample_weight")), data=weighted
    ),
    "loss given by name": Case(
        dense(loss=lambda: "mse", metrics=["mae"]),
        data=lambda n: {"x": classification(n)["x"], "y": np.eye(3, dtype="f")[classification(n)["y"]]},
    ),
    "loss as a function": Case(
        dense(loss=lambda: lambda y, p: keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, p, True)))
    ),
    "sample weights": Case(dense(weighted_metrics=["accuracy"]), data=weighted),
    "class weights": Case(dense(), fit={"class_weight": {0: 0.5, 1: 2.0, 2: 1.0}}),
    "mask": Case(masked("sum_over_batch_size"), data=sequences),
    "mask, loss sum": Case(masked("sum"), data=sequences),
    "mask, mean_with_sample_weight": Case(masked("mean_with_sample_weight"), data=sequences),
    "regularizers": Case(dense(hidden=lambda: layers.Dense(5, **REGULARIZED))),
    "activity regularizer": Case(dense(hidden=lambda: layers.Dense(5, activity_regularizer="l2"))),
    "add_loss": Case(dense(hidden=Penalty)),
    "synchronized batch norm": Case(batch_norm),
    "synchronized batch norm, loss scaling": Case(lambda: batch_norm(scaled_sgd)),
    "sparse gradients, sgd": Case(embedding(sgd()), data=tokens),
    "sparse gradients, adam": Case(embedding(adam()), data=tokens),
    "sparse gradients, adagrad": Case(embedding(lambda: optimizers.Adagrad(0.1)), data=tokens),
    "sparse gradients, clipnorm": Case(embedding(adam(global_clipnorm=0.1)), data=tokens),
    "several inputs and outputs": Case(several_outputs, data=two_in_two_out),
    "own train_step": Case(compiled(OwnTrainStep)),
    "own compute_loss": Case(compiled(OwnComputeLoss)),
    "auc": Case(
        dense(
            loss=lambda: losses.BinaryCrossentropy(from_logits=True),
            metrics=lambda: [keras.metrics.AUC(from_logits=True, num_thresholds=20)],
        ),
        data=lambda n: {"x": classification(n)["x"], "y": np.eye(3, dtype="f")[classification(n)["y"]]},
    ),
    "run eagerly": Case(dense(adam(), run_eagerly=True)),
    "jit_compile": Case(dense(adam(), jit_compile=True)),
}

# What the number of replicas could change.
OF_THE_NUMBER = {
    "plain",
    "remainder 1",
    "remainder batch-1",
    "single batch of one example",
    "batch not divisible by the replicas",
    "global clipnorm",
    "gradient accumulation",
    "mixed float16, inf on one replica",
    "mixed float16, at the edge of its range",
    "loss sum",
    "sample weights",
    "mask",
    "regularizers",
    "synchronized batch norm",
    "synchronized batch norm, loss scaling",
    "sparse gradients, adam",
    "several inputs and outputs",
    "own train_step",
}
# An optimizer's formula, which sees one gradient, however many replicas it came from.
FORMULAS = {
    *("sgd momentum", "sgd nesterov", "adam", "adam amsgrad", "adamw", "adamax", "nadam", "rmsprop"),
    *("rmsprop momentum", "rmsprop centered", "adagrad", "adadelta", "ftrl", "lion", "lamb", "adafactor"),
    *("schedule-free adamw", "muon", "clipnorm", "clipvalue", "weight decay", "ema", "ema overwriting"),
    *("accumulation and clipping", "loss scaling, fixed", "learning rate schedule", "constraint"),
}
# Some of which keep several slots, or work on all of them.
OF_MIRRORED = {
    "sgd momentum",
    "adam",
    "ema overwriting",
    "clipnorm",
    "accumulation and clipping",
    "loss scaling, fixed",
}
# Where one replica takes another way than several, or than Keras' own loop.
OF_ONE = {"plain", "remainder 1", "gradient accumulation", "sparse gradients, adagrad", "run eagerly", "jit_compile"}
assert set(CASES) >= OF_THE_NUMBER | FORMULAS | OF_ONE
# Besides formulas; three replicas of `mirrored` meet as those of `custom` do.
SHOWN = {
    **dict.fromkeys((("single", 1), ("custom", 1), ("mirrored", 1)), OF_ONE),
    ("mirrored", 2): OF_THE_NUMBER | OF_ONE,
    ("custom", 3): OF_THE_NUMBER,
    ("mirrored", 3): {"remainder 1", "mask", "synchronized batch norm"},
}


def shows(name, contestant):
    """Whether the case shows something of `contestant` that it does not show of others; `make test-all` runs all.

    One replica runs Keras' own step, but for the update of the variables: plain ones, as those of `custom` are.
    """
    strategy, _ = contestant
    if strategy.startswith("pipeline"):  # the update is that of `custom`
        return name in {("pipeline", 1): OF_ONE, ("pipeline", 3): OF_THE_NUMBER}.get(contestant, ())
    if strategy not in ("single", "mirrored", "custom"):
        return True
    if name in FORMULAS:
        return contestant == ("single", 1) or (contestant == ("mirrored", 2) and name in OF_MIRRORED)
    if contestant == ("custom", 2):
        return True
    return name in SHOWN[contestant]
