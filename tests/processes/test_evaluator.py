"""The evaluator of a job: a process that takes no part in the training, and evaluates each of its checkpoints."""

import csv
import json
import subprocess
import sys

import pytest

from tests.processes.jobs import ROOT, by_hand, clean_environment, configs, free_addresses, start_by_hand

EVALUATOR = {
    "cluster": {"chief": ["localhost:1"], "worker": ["localhost:2"]},
    "task": {"type": "evaluator", "index": 0},
}


def rows(path):
    with path.open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.thorough
def test_each_checkpoint_is_evaluated_with_the_numbers_of_the_validation(tmp_path):
    run_dir = tmp_path / "run"
    with by_hand(run_dir, "--epochs", "5", roles=("master", "worker", "evaluator")) as processes:
        outputs = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0], outputs
    trained, evaluated = rows(run_dir / "history.csv"), rows(run_dir / "evaluator-0" / "history.csv")
    assert [row["epoch"] for row in evaluated] == [row["epoch"] for row in trained] == [1, 2, 3, 4, 5]
    for name in ("val_loss", "val_accuracy"):
        assert [row[name] for row in evaluated] == pytest.approx([row[name] for row in trained], rel=1e-5)
    assert list((run_dir / "tensorboard" / "evaluator-0").glob("events.out.tfevents.*"))
    assert not (run_dir / "evaluator-0" / "checkpoints").exists()


@pytest.mark.thorough
def test_one_that_finds_no_run_ends_with_a_sentence(tmp_path):
    process = start_by_hand(tmp_path / "run", EVALUATOR, environment={"TFDIST_START_SECONDS": "0.1"})
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 3
    assert f"there is no run in `{tmp_path / 'run'}`" in errors
    assert "on a file system that the evaluator shares with the chief" in errors


SCRIPT = """
import keras, numpy as np, tfdist
from tfdist.world import World

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")

def build_and_compile():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

if World.detect().is_evaluator:
    model = build_and_compile()
    rows = tfdist.evaluate_checkpoints(model, "checkpoints", x, x[:, :1], batch_size=32, seconds=100)
    print([row["epoch"] for row in rows])
else:
    strategy = tfdist.strategy("multiworker")
    with strategy.scope():
        model = build_and_compile()
    strategy.prepare(model)
    model.fit(x, x[:, :1], epochs=3, batch_size=32, verbose=0, callbacks=[tfdist.callbacks.Checkpoint("checkpoints")])
"""


@pytest.mark.thorough
def test_a_script_evaluates_what_its_other_processes_train(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    started = []
    try:
        roles = ("chief", "worker", "evaluator")
        for config in configs(roles, free_addresses(3)):
            environment = clean_environment() | {"TF_CONFIG": json.dumps(config), "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "script.py"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes))
        outputs = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0, 0], outputs
    assert outputs[2][0] == "[1, 2, 3]\n"
