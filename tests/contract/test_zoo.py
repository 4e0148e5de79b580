"""Point 2 over the zoo: every model, small, with its task's loss and metrics, equals stock Keras on one device.

Nothing in them is random (no dropout), and batch normalizations are synchronized; a last batch does not divide.
"""

import functools

import keras
import numpy as np
import pytest

from tests import zoo
from tests.contract import contestants
from tests.contract.comparison import STOCK, assert_same, start
from tfdist import models, tasks
from tfdist.loop import programs

pytestmark = pytest.mark.thorough

QUICK = [
    ("stateful_rnn", "float32"),
    pytest.param("unet", "float32", marks=pytest.mark.exhaustive),
    ("nbow", "mixed_float16"),
]
# Many batch normalizations, one after the other, over few numbers at the lowest pixels: a rounding of the pictures
# changes the weights of `segnet` by a hundredth in these six steps, in stock Keras too. In float64 there is enough
# left to compare.
AMPLIFYING = ("segnet", "resnet18", "resnet50", "mobilenet_v3_small", "efficientnet_b0")
TOLERANCE = {"float32": 5e-5, "mixed_bfloat16": 2e-2, "mixed_float16": 2e-3}
ROUNDING = {"float32": 2**-23, "mixed_bfloat16": 2**-9, "mixed_float16": 2**-12}
EXAMPLES = 2 * zoo.STREAMS + 3
SHARES = ("accuracy", "mean_iou", "recall_at_10", "auc")


@pytest.fixture
def in_float64():
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def with_float64_outputs(model):
    """The same model, also where tfdist's own computes in float32 under every policy."""

    def cloned(operation):
        dtype = {"dtype": "float64"} if isinstance(operation, keras.Layer) else {}
        return operation.from_config(operation.get_config() | dtype)

    return keras.models.clone_model(model, clone_function=cloned)


def train(case, policy, strategy, rounded_otherwise=False):
    """What a training of two epochs, an evaluation and a prediction leave."""
    small = zoo.SMALL[case]
    keras.config.set_dtype_policy(policy)
    x, y = zoo.data(case, EXAMPLES)
    options = {"batch_size": zoo.STREAMS, "verbose": 0}
    with strategy.scope():
        model = models.build(zoo.name_of(case), small.spec, **small.options)
        model = with_float64_outputs(model) if policy == "float64" else model
        if rounded_otherwise:
            change_by(model, ROUNDING[policy])
        tasks.compile(model, small.spec, keras.optimizers.SGD(small.learning_rate))
    history = strategy.fit(model, x, y, epochs=2, shuffle=False, **options).history
    found = {"history": history, "weights": model.get_weights()}
    found["scores"] = strategy.evaluate(model, x, y, return_dict=True, **options)
    found["predictions"] = strategy.predict(model, x, **options)
    return found


@functools.cache
def reference(case, policy):
    return train(case, policy, start(STOCK))


def start_for(case, contestant):
    if case == "dcgan" and contestant[0] == "pipeline":
        pytest.skip("a model with a custom `call` cannot be cut into stages")
    return start(contestant)


def check(case, policy, contestant):
    assert_same(train(case, policy, start_for(case, contestant)), reference(case, policy), tolerance=TOLERANCE[policy])


@contestants.among({name: counts for name, counts in contestants.FEW.items() if name != "single"})
@pytest.mark.parametrize(("case", "policy"), QUICK)
def test_states_masks_and_half_precision_are_those_of_stock_keras_on_one_device(case, policy, contestant):
    check(case, policy, contestant)


@pytest.mark.exhaustive
@contestants.among(contestants.FEW)
@pytest.mark.parametrize("case", [case for case in zoo.SMALL if case not in AMPLIFYING])
def test_a_model_of_the_zoo_equals_stock_keras_on_one_device(case, contestant):
    check(case, "float32", contestant)


@pytest.mark.exhaustive
@contestants.among(contestants.FEW)
@pytest.mark.parametrize("case", AMPLIFYING)
def test_a_model_that_amplifies_roundings_equals_stock_keras_in_float64(case, contestant, in_float64):
    found = train(case, "float64", start(contestant))
    assert found["predictions"].dtype == np.float64
    assert_same(found, reference(case, "float64"), tolerance=1e-6)


@pytest.mark.exhaustive
@contestants.among(contestants.FEW)
@pytest.mark.parametrize("policy", ROUNDING)
@pytest.mark.parametrize("case", zoo.SMALL)
def test_a_model_of_the_zoo_is_no_further_from_stock_keras_than_roundings_take_it(case, policy, contestant):
    found, expected = continuous(train(case, policy, start_for(case, contestant))), continuous(reference(case, policy))
    assert_same(found, expected, tolerance=max(TOLERANCE[policy], 2 * spread(case, policy)))


def share_repeated(case):
    """The share of a step's floating-point operations that each of two replicas repeats."""
    small = zoo.SMALL[case]
    x, y = zoo.data(case, zoo.STREAMS)
    strategy = start(("custom", 2))
    with strategy.scope():
        model = models.build(zoo.name_of(case), small.spec, **small.options)
        tasks.compile(model, small.spec, keras.optimizers.SGD(small.learning_rate))
    strategy.fit(model, x, y, batch_size=zoo.STREAMS, verbose=0)
    return programs.cost(model).repeated_share


SEVERAL_KINDS = ("stateful_rnn", "transformer", "unet")


@pytest.mark.parametrize("case", SEVERAL_KINDS)
def test_replicas_repeat_next_to_nothing_of_a_step(case):
    assert share_repeated(case) < 0.005


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [case for case in zoo.SMALL if case not in SEVERAL_KINDS])
def test_replicas_repeat_next_to_nothing_of_a_step_of_any_model(case):
    assert share_repeated(case) < 0.005


@functools.cache
def spread(case, policy):
    """The largest difference between stock Keras and itself when its first weights are rounded otherwise."""
    rounded = continuous(train(case, policy, start(STOCK), rounded_otherwise=True))
    pairs = zip(keras.tree.flatten(rounded), keras.tree.flatten(continuous(reference(case, policy))), strict=True)
    return max(np.abs(np.subtract(here, there)).max() for here, there in pairs)


def change_by(model, rounding):
    """Multiplies each weight by 1 + `rounding` or 1 - `rounding`."""
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(variable * (1 + rounding * rng.choice([-1.0, 1.0], variable.shape).astype(variable.dtype)))


def continuous(found):
    """Without the shares of right answers and orders, of which a rounding turns one of eleven."""

    def smooth(logs):
        return {name: value for name, value in logs.items() if name not in SHARES}

    return found | {"history": smooth(found["history"]), "scores": smooth(found["scores"])}
