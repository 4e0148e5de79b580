"""What two processes promise over any engine: scripts that share one started job for each strategy."""

import json

import pytest

from tests.processes import test_any_model, test_communicators, test_data
from tests.processes.jobs import Several, require_horovod

# Both processes pass what is equal, and both end with the same sentence on what is not.
VERIFIES = """
import sys
import tfdist

strategy = tfdist.strategy(sys.argv[1], seed=0)
import keras
import numpy as np
from tfdist.errors import VerificationError

rng = np.random.default_rng(0)
x, y = rng.normal(size=(19, 4)).astype("float32"), rng.normal(size=(19, 1)).astype("float32")


def made(synchronized):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        inside = [keras.layers.Dropout(0.3), keras.layers.BatchNormalization(name="norm", synchronized=synchronized)]
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6), *inside, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def trained(verify):
    model = strategy.prepare(made(True), verify=verify)
    model.fit(x, y, batch_size=10, epochs=2, verbose=0)
    return [value.tolist() for value in model.get_weights()]


report = strategy.verify(made(True), x, y, batch_size=10)
assert report.first is None and len(report) > 20, report
assert trained(True) == trained(False)
try:
    strategy.verify(made(False), x, y, batch_size=10)
except VerificationError as error:
    assert error.layer == "norm"
    assert len(set(strategy.exchange(str(error).encode()))) == 1
    print("NAMED", error.sentence)
"""

ENGINES = {"multiworker": "sockets", "horovod": "Gloo"}


@pytest.fixture(scope="module", params=ENGINES)
def job(request, tmp_path_factory):
    strategy = request.param
    if strategy == "horovod":
        require_horovod()
    scripts = {
        "predictions": (test_any_model.OUTPUTS, [strategy, "{}"]),
        "single batches": (test_any_model.ON_BATCH, [strategy]),
        "verify": (VERIFIES, [strategy]),
    }
    if strategy == "multiworker":
        scripts["alike"] = (test_data.FIT_ALIKE, [strategy])
    # The last one, since it changes constants.
    scripts["operations"] = (test_communicators.SCRIPT, [ENGINES[strategy]])
    return Several(tmp_path_factory.mktemp(strategy), scripts)


def test_predictions_of_any_type_are_those_of_one_device(job):
    assert job.printed("predictions") == ["ALL RIGHT\n"] * 2


def test_single_batches_are_those_of_one_device(job):
    assert job.printed("single batches") == ["ALL RIGHT\n"] * 2


def test_all_operations_give_every_process_what_they_promise(job):
    assert job.printed("operations") == ["ALL RIGHT\n"] * 2


def test_two_processes_verify_together(job):
    for printed in job.printed("verify"):
        assert "NAMED The output of the layer `norm`" in printed


@pytest.mark.parametrize("job", ["multiworker"], indirect=True)
def test_what_draws_without_a_seed_gives_every_process_the_same_batches(job):
    for printed in job.printed("alike"):
        test_data.check_alike(json.loads(printed))
