"""Point 2 over the zoo: every model, small, with its task's loss and metrics, equals stock Keras on one device.

Nothing in them is random (no dropout), and batch normalizations are synchronized; a last batch does not divide.
"""

import functools

import keras
import pytest

from tests import zoo
from tests.contract import contestants
from tests.contract.comparison import STOCK, assert_same, start
from tfdist import models, tasks

QUICK = [("stateful_rnn", "float32"), ("unet", "float32"), ("nbow", "mixed_float16")]
# An open question: its accuracy after an epoch differs from stock Keras' by 0.003 at 36x32 pixels, by 0.0003 at 100x96.
# It differs on one device too, where no replicas meet, so the model seems to amplify rounding.
OPEN = ("segnet",)
CASES = [
    pytest.param(case, marks=pytest.mark.xfail(reason="differs more than rounding does", strict=False))
    if case in OPEN
    else case
    for case in zoo.SMALL
]
TOLERANCE = {"float32": 5e-5, "mixed_bfloat16": 2e-2, "mixed_float16": 2e-3}
EXAMPLES = 2 * zoo.STREAMS + 3


def train(case, policy, strategy):
    """What a training of two epochs, an evaluation and a prediction leave."""
    small = zoo.SMALL[case]
    keras.config.set_dtype_policy(policy)
    x, y = zoo.data(case, EXAMPLES)
    options = {"batch_size": zoo.STREAMS, "verbose": 0}
    with strategy.scope():
        model = models.build(zoo.name_of(case), small.spec, **small.options)
        tasks.compile(model, small.spec, keras.optimizers.SGD(0.05))
    history = strategy.fit(model, x, y, epochs=2, shuffle=False, **options).history
    found = {"history": history, "weights": model.get_weights()}
    found["scores"] = strategy.evaluate(model, x, y, return_dict=True, **options)
    found["predictions"] = strategy.predict(model, x, **options)
    return found


@functools.cache
def reference(case, policy):
    return train(case, policy, start(STOCK))


def check(case, policy, contestant):
    assert_same(train(case, policy, start(contestant)), reference(case, policy), tolerance=TOLERANCE[policy])


@contestants.among({name: counts for name, counts in contestants.FEW.items() if name != "single"})
@pytest.mark.parametrize(("case", "policy"), QUICK)
def test_states_masks_and_half_precision_are_those_of_stock_keras_on_one_device(case, policy, contestant):
    check(case, policy, contestant)


@pytest.mark.thorough
@contestants.among(contestants.FEW)
@pytest.mark.parametrize("policy", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_a_model_of_the_zoo_equals_stock_keras_on_one_device(case, policy, contestant):
    check(case, policy, contestant)
