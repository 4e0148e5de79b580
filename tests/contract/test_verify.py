"""`strategy.verify` passes what is equal, names what is not, and leaves a model as it was."""

import functools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdist
from tests.contract import cases, contestants, test_steps
from tests.planted_rules import mean_of_means, plant
from tfdist import spmd
from tfdist.errors import DifferenceWarning, UsageError, VerificationError
from tfdist.spmd.rules import OpSharding
from tfdist.strategies import base

REPLICAS = contestants.FEW
EXAMPLES, BATCH = 19, 10
_rng = np.random.default_rng(0)
X = _rng.normal(size=(EXAMPLES, 4)).astype("float32")
Y = _rng.normal(size=(EXAMPLES, 1)).astype("float32")


def start(contestant):
    keras.utils.set_random_seed(11)
    strategy = contestants.start(*contestant)
    if not hasattr(strategy, "verify") or not strategy.as_one_device:
        pytest.skip("does not compute what one device does")
    return strategy


def verified(strategy, make, **named):
    with strategy.scope():
        model = make()
    return strategy.verify(model, X, Y, batch_size=BATCH, **{"steps": 1} | named)


def network(*inside, loss="mse", metrics=(), model=keras.Sequential, optimizer=None):
    made = model([keras.Input((4,)), layers.Dense(6, activation="tanh", name="before"), *inside, layers.Dense(1)])
    made.compile(optimizer or keras.optimizers.SGD(0.1), loss, metrics=list(metrics), jit_compile=False)
    return made


class Centred(layers.Layer):
    """A layer of one's own that takes the mean of the batch from each example."""

    def call(self, x):
        return x - ops.mean(x, axis=0)


class AddsSum(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


def by_numpy(function, values):
    """What `function` makes of `values`, which no graph shows."""
    return tf.numpy_function(lambda array: np.asarray(function(array), "float32"), [values], tf.float32)


class KeepsMedian(layers.Layer):
    """Keeps the median of the batch, which nothing of the step depends on."""

    def build(self, shape):
        self.median = self.add_weight(shape=(), initializer="zeros", trainable=False, name="median")

    def call(self, x):
        self.median.assign(tf.reshape(by_numpy(np.median, x), []))
        return x


def hardest_first(errors):
    """Errors that count by how large they are beside the largest, by NumPy."""
    return errors * tf.ensure_shape(by_numpy(lambda values: values / values.max(), errors), errors.shape)


class HardestFirst(keras.losses.Loss):
    """A value per example, that depends on the others of its batch."""

    def call(self, y_true, y_pred):
        return hardest_first(ops.square(y_true - y_pred)[:, 0])


class Own(keras.Sequential):
    """A step by hand, with a loss by hand."""

    def loss_of(self, x, y):
        raise NotImplementedError

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": tf.reduce_mean(loss)}


class SumByHand(Own):
    def loss_of(self, x, y):
        return tf.reduce_sum(tf.square(self(x, training=True) - y))


class HardestByHand(Own):
    def loss_of(self, x, y):
        return tf.reduce_mean(hardest_first(tf.square(self(x, training=True) - y)))


class HardestInComputeLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(hardest_first(ops.square(y - y_pred)))


class MeanOfBatchMeans(keras.metrics.Metric):
    additive = True  # which it is not

    def __init__(self):
        super().__init__(name="planted")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.mean(ops.abs(y_pred)))

    def result(self):
        return self.total


class SetsFromMedian(keras.Sequential):
    """A weight that the step sets from the median of its part, after the update."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.layers[0].bias.assign(tf.reshape(by_numpy(np.median, data[0]), []) * ops.ones(6))
        return logs


# Steps whose parts by themselves are not what one device computes, as the names say.
OF_SEVERAL_EXAMPLES = {
    "a normalization": lambda: network(layers.BatchNormalization(name="planted")),
    "a layer that mixes examples": lambda: network(Centred(name="planted")),
    "state from a median": lambda: network(KeepsMedian(name="planted")),
    "a loss that compares examples": lambda: network(loss=HardestFirst(name="planted")),
    "a loss by hand that compares": lambda: network(model=HardestByHand),
    "compute_loss that compares": lambda: network(model=HardestInComputeLoss),
    "a metric that calls itself additive": lambda: network(metrics=[MeanOfBatchMeans()]),
    "a weight that is set from a median": lambda: network(model=SetsFromMedian),
}


@pytest.mark.thorough
@contestants.among({"custom": (2,), "mirrored": (2,)})
@pytest.mark.parametrize("name", OF_SEVERAL_EXAMPLES)
def test_what_several_examples_make_together_is_that_of_one_device(name, contestant):
    assert verified(start(contestant), OF_SEVERAL_EXAMPLES[name]).first is None


def running_sum_of_each_part(rule, operation, index, shard):
    return OpSharding([shard.axis, None], [shard.axis])


class RunningSum(layers.Layer):
    def call(self, x):
        return tf.cumsum(x, 0)


PLANTED = {
    "a sum of means": ("Mean", mean_of_means, lambda: network(Centred(name="planted")), "planted"),
    "a running sum": ("Cumsum", running_sum_of_each_part, lambda: network(RunningSum(name="planted")), "planted"),
    "beside dropout": (
        "Cumsum",
        running_sum_of_each_part,
        lambda: network(layers.Dropout(0.5), RunningSum(name="planted")),
        "planted",
    ),
}


@pytest.mark.sampled(1)
@contestants.among({"custom": (2,), "mirrored": (2,)})
@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_rule_of_the_partitioner_is_found_and_the_layer_named(name, contestant, monkeypatch):
    kind, wrong, make, layer = PLANTED[name]
    plant(kind, wrong, monkeypatch)
    with pytest.raises(VerificationError) as raised:
        verified(start(contestant), make)
    error = raised.value
    assert layer in error.layer, error
    assert "a bug in tfdist" in error.hint, error
    assert error.report.first.step == 0
    assert "differs" in str(error.report)


WRONG_SUMS = {
    "twice": lambda total, own: 2 * total,
    "nothing of the others": lambda total, own: own,
    "large tensors": lambda total, own: 1.5 * total if (total.shape.num_elements() or 0) > 20 else total,
}


class AddsWrongly(spmd.Mesh):
    def __init__(self, way, devices):
        super().__init__(devices)
        self.way = way

    def all_reduce(self, values, reduction, gradients=False):
        wrong = WRONG_SUMS[self.way]
        totals = zip(super().all_reduce(values, reduction, gradients), values, strict=True)
        return [
            [wrong(copies[0], terms[0])] if reduction == "sum" and copies[0].dtype.is_floating else copies
            for copies, terms in totals
        ]


class Wrong(base.Strategy):
    """A strategy of one's own, whose replicas compute their parts of a batch and add up wrongly."""

    name = "wrong"
    default_cpus = 2
    way = "twice"

    @functools.cached_property
    def mesh(self):
        return AddsWrongly(self.way, self.devices)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("way", "what"),
    [
        ("twice", "The sum of a 1 for each number in the part `x` of the batch, over all replicas, differs"),
        ("nothing of the others", "The sum of a 1 for each number in the part `x` of the batch, over all replicas"),
        ("large tensors", "The gradient of `sequential/before/kernel`, of the layer `before`, differs"),
    ],
)
def test_a_strategys_own_wrong_sums_are_named_as_such_and_not_blamed_on_the_model(way, what):
    keras.utils.set_random_seed(11)
    strategy = Wrong(devices=2)
    strategy.way = way
    with pytest.raises(VerificationError) as raised:
        verified(strategy, lambda: network(layers.Flatten()))
    assert raised.value.sentence.startswith(what)
    assert "the strategy `wrong` sums" in raised.value.sentence
    assert raised.value.hint.startswith("this is a bug in the strategy")


@pytest.mark.parametrize("scaled", [False, True])
@contestants.among({"custom": (2,), "mirrored": (2,)})
def test_accumulated_gradients_are_compared_up_to_their_update(contestant, scaled):
    def make():
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, global_clipnorm=0.05)
        return network(optimizer=keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer)

    report = verified(start(contestant), make)
    assert report.steps == 2 and report.first is None


@pytest.mark.thorough
@contestants.among({"custom": (2,)})
def test_a_report_shows_its_verdict_first_in_print_at_the_prompt_and_in_a_notebook(contestant, monkeypatch):
    equal = verified(start(contestant), lambda: network(layers.Flatten()))
    plant("Mean", mean_of_means, monkeypatch)
    with pytest.raises(VerificationError) as raised:
        verified(start(contestant), lambda: network(Centred(name="planted")))
    different = raised.value.report
    assert equal.verdict == "The steps of `custom` on 2 replicas equal those of one device."
    verdict = "The steps of `custom` on 2 replicas differ from those of one device, first in the output `"
    assert different.verdict.startswith(verdict) and "planted` in step 0: by " in different.verdict
    for report in (equal, different):
        assert str(report) == repr(report) == f"{report.verdict}\n\n{report.table}"
        assert report._repr_html_().startswith(f"<p><strong>{report.verdict}</strong></p>\n<pre>")


def noisy():
    drops = [layers.Dropout(0.4), layers.GaussianNoise(0.3), layers.GaussianDropout(0.2), layers.AlphaDropout(0.2)]
    return network(*drops, layers.BatchNormalization(synchronized=True), optimizer=keras.optimizers.Adam(0.01))


class DrawsByTensorFlow(layers.Layer):
    def call(self, x):
        unseeded = keras.random.normal(ops.shape(x)) + keras.random.uniform((6,))
        chosen = keras.random.categorical(x, 2, dtype="int32")
        return x + tf.random.normal(tf.shape(x)) + tf.random.uniform([6]) + unseeded + ops.cast(chosen[:, :1], x.dtype)


EQUAL = {
    "random layers": noisy,
    "random numbers of TensorFlow, and without a seed": lambda: network(DrawsByTensorFlow()),
    "a sum in add_loss": lambda: network(AddsSum()),
    "a loss by hand that is a sum": lambda: network(model=SumByHand),
    "metrics": lambda: network(metrics=["mae", keras.metrics.RootMeanSquaredError()]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", EQUAL)
def test_what_is_equal_passes(name, contestant):
    report = verified(start(contestant), EQUAL[name])
    assert report.first is None
    assert len(report) > 8
    kernel = next(name for name in report if name.startswith("weight") and name.endswith("before/kernel"))
    assert report[kernel].difference < 1e-5


@pytest.mark.sampled(1)
@contestants.among({"custom": (2,), "mirrored": (2,)})
def test_a_gradient_to_which_examples_of_two_classes_add_up_to_almost_zero_is_equal_up_to_rounding(contestant):
    """As at the beginning of a training with as many examples of each class."""
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    strategy = start(contestant)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        kernel = keras.initializers.RandomNormal(stddev=1e-3)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1, kernel_initializer=kernel)])
        model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    y = np.arange(64, dtype="float32")[:, None] % 2
    assert strategy.verify(model, np.concatenate([x, -x]), y, batch_size=64).first is None


class SpreadOfNoise(keras.Model):
    """As the generator of a GAN: its loss is of a statistic of what it makes of noise."""

    def __init__(self):
        super().__init__()
        self.planted = layers.Dense(3, name="planted")

    def train_step(self, data):
        with tf.GradientTape() as tape:
            made = self.planted(tf.random.normal([tf.shape(data[0])[0], 4]))
            loss = tf.sqrt(tf.math.reduce_variance(made) + 1e-6)
        self.optimizer.apply(tape.gradient(loss, self.planted.trainable_variables), self.planted.trainable_variables)
        return {"loss": loss}


@pytest.mark.sampled(1)
@contestants.among({"custom": (2,), "mirrored": (2,)})
def test_a_statistic_of_random_examples_is_that_of_one_device(contestant):
    def model():
        made = SpreadOfNoise()
        made.planted.build((None, 4))
        made.compile("sgd")
        return made

    assert verified(start(contestant), model).first is None


QUICK_CASES = [
    "remainder 1",
    "run eagerly",
    "mixed bfloat16",
    "mixed float16, inf on one replica",
    "synchronized batch norm",
    "auc",
]
ALL_CASES = [
    pytest.param(name, marks=() if name in QUICK_CASES else pytest.mark.exhaustive, id=name) for name in cases.CASES
]
QUICK_STEPS = ["weights clipped after each of several updates", "variables of TensorFlow", "a loss over pairs"]
ALL_STEPS = [
    pytest.param(name, marks=() if name in QUICK_STEPS else pytest.mark.exhaustive, id=name)
    for name in test_steps.STEPS
]
ON_PARTS = {"mirrored": (3,)} | contestants.OF_THE_JOB


@pytest.mark.thorough
@contestants.among(ON_PARTS)
@pytest.mark.parametrize("case_name", ALL_CASES)
def test_cases_that_are_equal_pass(case_name, contestant):
    case = cases.CASES[case_name]
    keras.config.set_dtype_policy(case.dtype_policy)
    strategy = start(contestant)
    with strategy.scope():
        model = case.model()
    options = {name: value for name, value in case.fit.items() if name in ("batch_size", "class_weight")}
    data = case.data(case.examples)
    assert strategy.verify(model, **data, **{"batch_size": cases.BATCH} | options, steps=2).first is None


@pytest.mark.thorough
@contestants.among(ON_PARTS)
@pytest.mark.parametrize("step_name", ALL_STEPS)
def test_steps_that_are_equal_pass(step_name, contestant):
    make, optimizer = test_steps.STEPS[step_name]
    strategy = start(contestant)
    with strategy.scope():
        model = make()
        model.build((None, 4))
        chosen = (optimizer or (lambda: keras.optimizers.SGD(0.1)))()
        chosen.build(model.trainable_variables)
        model.compile(chosen, jit_compile=False)
    assert verified_model(strategy, model).first is None


@contestants.among({"custom": (2,), "mirrored": (2,)})
@pytest.mark.parametrize(
    ("make", "run_eagerly"),
    [(test_steps.Regression, True), (test_steps.InAFunction, False), (test_steps.InAFunction, True)],
)
def test_a_training_after_a_verification_equals_one_without_it(make, run_eagerly, contestant):
    weights = []
    for verifies in (False, True):
        strategy = start(contestant)
        with strategy.scope():
            model = make()
            model.build((None, 4))
            # The first step makes the slots.
            model.compile(keras.optimizers.Adam(0.05), jit_compile=False, run_eagerly=run_eagerly)
        if verifies:
            assert verified_model(strategy, model).first is None
        strategy.fit(model, X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        if verifies:
            assert verified_model(strategy, model).first is None
        weights.append(model.get_weights())
    for without, after in zip(*weights, strict=True):
        np.testing.assert_array_equal(without, after)


def verified_model(strategy, model):
    return strategy.verify(model, X, Y, batch_size=BATCH, steps=2)


def data_of(kind):
    if kind == "arrays":
        return {"x": X, "y": Y, "batch_size": BATCH}
    if kind == "dataset":
        return {"x": tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(EXAMPLES, seed=3).batch(BATCH)}
    batches = [(X[i : i + 5], Y[i : i + 5]) for i in range(0, 15, 5)]
    if kind == "generator":
        return {"x": (batch for _ in range(2) for batch in batches), "steps_per_epoch": 3}
    spec = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]))
    return {"x": tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)}


@pytest.mark.thorough
@contestants.among({"custom": (2,)} | contestants.OF_THE_JOB)
@pytest.mark.parametrize(
    "kind",
    [
        "arrays",
        "generator",
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("dataset", "dataset of a generator")),
    ],
)
def test_a_training_is_the_same_with_and_without_a_verification_before_it(kind, contestant):
    def trained(verify):
        strategy = start(contestant)
        with strategy.scope():
            model = network(layers.Dropout(0.4), layers.BatchNormalization(synchronized=True))
        strategy.prepare(model, verify=verify)
        history = model.fit(**data_of(kind), epochs=2, verbose=0).history
        draws = [float(np.random.random()), float(keras.random.uniform(()))]
        return history, [value.tolist() for value in model.get_weights()], draws

    assert trained(True) == trained(False)


@pytest.mark.thorough
@contestants.among({"custom": (2,), "mirrored": (2,)} | contestants.OF_THE_JOB)
def test_variables_and_generators_of_the_script_are_after_it_what_they_were(contestant):
    """Keras does not know them: a layer's function has them from the code around it."""

    def trained(verify):
        keras.backend.clear_session(free_memory=False)
        strategy = start(contestant)
        with strategy.scope():
            count, names = tf.Variable(0.0), tf.Variable("none")
            generator = tf.random.Generator.from_seed(3)

            class Counts(layers.Layer):
                def call(self, x, training=False):
                    if not training:
                        return x
                    count.assign_add(1.0)
                    names.assign(tf.strings.as_string(count))
                    return x + 0.1 * count + generator.normal([6]) + keras.random.normal((6,))

            model = network(Counts())
        if verify:
            assert verified(strategy, lambda: model, steps=2).first is None
            assert (float(count), names.numpy()) == (0, b"none")
        history = strategy.fit(model, X, Y, batch_size=BATCH, epochs=2, verbose=0).history
        draws = [random.random(), float(keras.random.uniform(()))]
        return history, [value.tolist() for value in model.get_weights()], float(count), names.numpy(), draws

    assert trained(True) == trained(False)


@pytest.mark.thorough
@contestants.among({"mirrored": (2,)})
def test_a_prepared_model_is_verified_by_its_first_fit_before_it_trains(contestant, monkeypatch):
    plant("Cumsum", running_sum_of_each_part, monkeypatch)
    strategy = start(contestant)
    with strategy.scope():
        model = network(RunningSum(name="planted"))
    strategy.prepare(model, verify=True)
    before = [value.tolist() for value in model.get_weights()]
    with pytest.raises(VerificationError, match="planted"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert [value.tolist() for value in model.get_weights()] == before
    assert int(model.optimizer.iterations.numpy()) == 0
    with pytest.warns(DifferenceWarning, match="a bug in tfdist"):  # whoever insists
        model.fit(X, Y, batch_size=BATCH, verbose=0)


@pytest.mark.thorough
@contestants.among({"custom": (2,)})
def test_an_error_in_a_step_leaves_the_model_as_it_was(contestant):
    class Fails(keras.Sequential):
        fails = True

        def train_step(self, data):
            logs = super().train_step(data)
            if self.fails and not tf.executing_eagerly():
                raise RuntimeError("planted")
            return logs

    strategy = start(contestant)
    model = network(model=Fails)
    before, values = model.layers[0].kernel._value, [value.tolist() for value in model.get_weights()]
    with pytest.raises(RuntimeError, match="planted"):
        strategy.verify(model, X, Y, batch_size=BATCH)
    assert model.layers[0].kernel._value is before
    assert [value.tolist() for value in model.get_weights()] == values
    assert "train_step" not in vars(model)
    model.fails = False
    assert strategy.verify(model, X, Y, batch_size=BATCH).first is None


@pytest.mark.sampled(1)
@contestants.among({"custom": (2,), "mirrored": (2,)})
def test_a_step_of_ones_own_need_not_use_the_metrics_that_the_model_was_compiled_with(contestant):
    strategy = start(contestant)
    with strategy.scope():
        model = network(model=HardestByHand, metrics=["mae"])
    assert list(strategy.fit(model, X, Y, batch_size=BATCH, verbose=0).history) == ["loss"]


def test_a_strategy_that_differs_by_design_refuses():
    class Differs(type(tfdist.strategy("single"))):
        as_one_device = False

    with pytest.raises(UsageError, match="by design"):
        Differs().verify(network(), X, Y)
    with pytest.raises(UsageError, match="by design"):
        Differs().prepare(network(), verify=True)
