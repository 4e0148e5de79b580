"""`stages` of `horovod` and `multiworker`: a pipeline in each process, and the weights of one device."""

import re

import pytest

from tests.processes.jobs import launched, require_horovod, train, unframed
from tests.processes.test_contract import CALLBACKS, EQUALITY, QUICK, equality_cases, run_together

pytestmark = pytest.mark.thorough

# Quick tests show the common mechanism over `multiworker`, and one continued run over Horovod.
STRATEGIES = [pytest.param("horovod", marks=pytest.mark.exhaustive), "multiworker"]


@pytest.fixture(params=STRATEGIES)
def name(request):
    if request.param == "horovod":
        require_horovod()
    return request.param


# Trains two epochs on one stage or two in each process, resumed, and compares with stock Keras on one device.
TRAINS = """
import sys
import tfdist

name, folder, epochs, *options = sys.argv[1:]
numbers = {name: int(number) for name, number in (option.split("=") for option in options)}
strategy = tfdist.strategy(name, seed=1, **numbers)
import keras
import numpy as np
from tfdist.callbacks import Checkpoint

x = np.random.default_rng(0).random((35, 30), "float32")
y = x[:, :7] ** 2


def made():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(50, "relu"), keras.layers.Dense(7)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


arguments = {"batch_size": 8, "epochs": int(epochs), "shuffle": False, "verbose": 0}
with strategy.scope():
    model = made()
history = strategy.fit(model, x, y, callbacks=[Checkpoint(folder, resume=True)], **arguments).history
reference = made()
expected = reference.fit(x, y, **arguments).history
for one, other in zip(model.variables, reference.variables, strict=True):
    np.testing.assert_allclose(one, other, rtol=5e-5, atol=5e-5, err_msg=other.path)
np.testing.assert_allclose(history["mae"], expected["mae"], rtol=1e-4)
np.testing.assert_allclose(strategy.predict(model, x, verbose=0), reference.predict(x, verbose=0), atol=1e-4)
print("PLACES", sorted({variable.value.device[-5:] for variable in model.variables}))
"""


@pytest.mark.exhaustive
def test_pipelines_of_two_processes_give_what_one_device_gives(tmp_path, name):
    # A model that cannot be cut is trained in one stage, which processes of `multiworker` cannot do later on.
    quick = [case for case in QUICK if name == "horovod" or case != "own train_step"]
    cases = equality_cases(f"{name}_stages", 2, quick)
    assert f"{len(quick)} passed" in run_together(f"{name}_stages", 2, *cases, cwd=tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("part", [EQUALITY, CALLBACKS])
def test_the_whole_suite(tmp_path, name, part, workers):
    last = run_together(f"{name}_stages", workers, part, cwd=tmp_path)
    assert re.search(r"^\d+ passed", last), last


def trained(folder, workers, *arguments):
    """The devices of the variables in each process."""
    (folder / "script.py").write_text(TRAINS)
    done = launched("--workers", str(workers), "--verbose", "script.py", *arguments, cwd=folder, timeout=240)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return re.findall(r"PLACES (.*)", done.stdout)


@pytest.mark.parametrize("name", ["horovod", pytest.param("multiworker", marks=pytest.mark.exhaustive)], indirect=True)
def test_a_run_of_two_stages_is_continued_by_three_processes_without_stages(tmp_path, name):
    assert trained(tmp_path, 2, name, "kept", "2", "stages=2", "micro_batches=3") == ["['CPU:0', 'CPU:1']"] * 2
    assert trained(tmp_path, 3, name, "kept", "4") == ["['CPU:0']"] * 3


def test_each_stage_is_in_the_record(tmp_path, name):
    with train("--strategy-option", "stages=2", run_dir=tmp_path / "run", strategy=name) as job:
        code, out, err = job.end()
    assert code == 0, out + err
    record = (tmp_path / "run" / "run.json").read_text()
    assert all(part in record for part in ('"micro_batches": 4', '"device": "CPU:1"', '"stages": 2')), record


@pytest.mark.parametrize(
    "options, part",
    [
        (["micro_batches=3"], "in one stage"),
        (["stages=2", "shard=optimizer"], "cannot be used together"),
        (["stages=9"], "9 stages were requested"),
        (["stages=2", "schedule=2bw"], "cannot have `2bw` as `schedule`"),
    ],
)
def test_bad_options_are_refused_with_a_sentence(tmp_path, name, options, part):
    chosen = [argument for option in options for argument in ("--strategy-option", option)]
    with train(*chosen, run_dir=tmp_path / "run", strategy=name) as job:
        code, out, err = job.end()
    assert code == 2, out + err
    assert part in unframed(out + err)
    assert "Traceback" not in out + err


# The process of rank 1 has other options than the chief.
DIFFERS = """
import sys
import tfdist
from tfdist.jobs.world import World
from tfdist.errors import DisagreementError

name, *options = sys.argv[1:]
given = dict(option.split("=") for option in options)
rank = World.detect().rank
try:
    tfdist.strategy(name, **{option: int(value.split(",")[rank]) for option, value in given.items()})
except DisagreementError as error:
    print("REFUSED", error.sentence)
"""


@pytest.mark.parametrize("options", [["stages=2,2", "micro_batches=2,3"], ["stages=1,2"]])
def test_processes_with_other_stages_or_micro_batches_are_refused(tmp_path, name, options):
    (tmp_path / "script.py").write_text(DIFFERS)
    done = launched("--workers", "2", "--verbose", "script.py", name, *options, cwd=tmp_path, timeout=120)
    told = done.stdout + done.stderr
    assert told.count("REFUSED") == 2, told[-4000:]
    assert "disagree on" in told
