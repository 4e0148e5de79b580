"""`strategy.verify` in two processes: both pass what is equal, and both end with the same sentence on what is not."""

import pytest

from tests.processes.jobs import run_script

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


@pytest.mark.parametrize("strategy", ["multiworker", "horovod"])
def test_two_processes_verify_together(strategy, tmp_path):
    assert "NAMED The output of the layer `norm`" in run_script(VERIFIES, strategy, cwd=tmp_path)
