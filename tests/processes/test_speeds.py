"""`speeds` in jobs of several processes: parts in proportion, and the weights of one device."""

import re

import pytest

from tests.processes.jobs import require_horovod, run_script
from tests.processes.test_contract import EQUALITY, equality_cases, run_together

pytestmark = pytest.mark.thorough

QUICK = [
    "remainder 1",
    "single batch of one example",
    "global clipnorm",
    "mask, loss sum",
    "synchronized batch norm",
    "sparse gradients, adam",
    "own train_step",
    "auc",
]

MEASURES = """
import tfdist

strategy = tfdist.strategy("multiworker", seed=1, speeds="auto")
import keras
import numpy as np
from tfdist.errors import TfdistError, UsageError

print("MEASURED", strategy.speeds)
strategy = tfdist.strategy("multiworker", seed=1, speeds="3,1")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((8, 4), "float32")
try:
    strategy.fit(model, tfdist.data.per_process((x, x[:, :1])), verbose=0)
except UsageError as error:
    print("REFUSED", error.sentence)
try:
    tfdist.strategy("multiworker", seed=1, speeds=("3,1", "2,1")[strategy.world.rank])
except TfdistError as error:
    print("REFUSED", error.sentence)
"""


@pytest.mark.parametrize(
    ("strategy", "workers"), [("multiworker", 2), pytest.param("horovod", 3, marks=pytest.mark.exhaustive)]
)
def test_the_weights_are_those_of_one_device(tmp_path, strategy, workers):
    if strategy == "horovod":
        require_horovod()
    name = f"{strategy}_uneven"
    assert f"{len(QUICK)} passed" in run_together(name, workers, *equality_cases(name, workers, QUICK), cwd=tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("strategy", ["multiworker", "horovod"])
def test_all_cases_of_equality(tmp_path, strategy, workers):
    if strategy == "horovod":
        require_horovod()
    last = run_together(f"{strategy}_uneven", workers, EQUALITY, "-k", "equals", cwd=tmp_path)
    assert re.search(r"^\d+ passed", last), last


def test_processes_measure_the_same_and_refuse_what_cannot_be(tmp_path):
    printed = run_script(MEASURES, cwd=tmp_path)
    measured = re.findall(r"MEASURED (.*)", printed)
    assert len(measured) == 2 and len(set(measured)) == 1
    refused = re.findall(r"REFUSED (.*)", printed)
    assert sum("each process brings its own part of the data" in sentence for sentence in refused) == 2
    assert sum("3,1" in sentence and "2,1" in sentence for sentence in refused) == 2
