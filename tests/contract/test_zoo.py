"""Point 2 over the zoo: every model, small, with the loss and the metrics of its task, equals stock Keras on one device.

Nothing in them is random (no dropout), and batch normalizations are synchronized; a last batch does not divide.
"""

import functools

import keras
import pytest

from tests import zoo
from tests.contract import contestants
from tests.contract.comparison import STOCK, assert_same, start
from tfdist import models, tasks

REPLICAS = {"single": (1,), "mirrored": (2,), "custom": (2,)} | {
    name: contestants.REPLICAS[name] for name in ("multiworker", "parameter_server")
}
# One of each kind of layer and task; the rest show what these show in part.
QUICK = ("unet", "nbow", "seq2seq", "stateful_rnn")
QUICK_MIXED = ("mixed_bfloat16", "stateful_rnn")
TOLERANCE = {"float32": 5e-5, "mixed_bfloat16": 2e-2, "mixed_float16": 2e-3}
EXAMPLES = 2 * zoo.STREAMS + 3


def cases():
    for policy in TOLERANCE:
        for case in zoo.SMALL:
            quick = case in QUICK if policy == "float32" else (policy, case) == QUICK_MIXED
            yield pytest.param(case, policy, id=f"{case}-{policy}", marks=() if quick else pytest.mark.thorough)


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


@pytest.mark.parametrize(("case", "policy"), cases())
def test_a_model_of_the_zoo_equals_stock_keras_on_one_device(case, policy, contestant):
    assert_same(train(case, policy, start(contestant)), reference(case, policy), tolerance=TOLERANCE[policy])
