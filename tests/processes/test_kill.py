"""Point 5 on real processes: a run that is killed with SIGKILL and resumed ends where an unbroken one ends."""

import os
import random
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from tfdist.run.folder import load_record

OPTIONS = ["--dataset", "synthetic", "--model", "mlp", "--epochs", "12", "--quiet"]


def start(strategy, folder, *more):
    return subprocess.Popen(
        [sys.executable, "-m", "tfdist.train", "--strategy", strategy, *OPTIONS, "--run-dir", folder, *more],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )


def finish(strategy, folder, *more):
    process = start(strategy, folder, *more)
    try:
        assert process.wait(timeout=180) == 0
    finally:
        process.kill()
        process.wait()


def kill_after_an_epoch(strategy, folder, delay_seconds, *more):
    process = start(strategy, folder, *more)
    end = time.monotonic() + 120
    try:
        while not list((folder / "checkpoints").glob("*.ckpt")):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        time.sleep(delay_seconds)
    finally:
        process.kill()
        process.wait()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [*(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("single", "mirrored")), "custom"]
)
def test_a_killed_run_that_is_resumed_ends_as_an_unbroken_one(strategy, tmp_path):
    moments = random.Random(strategy)
    finish(strategy, tmp_path / "unbroken")
    kill_after_an_epoch(strategy, tmp_path / "broken", moments.uniform(0, 0.8))
    kill_after_an_epoch(strategy, tmp_path / "broken", moments.uniform(4, 7), "--resume")
    finish(strategy, tmp_path / "broken", "--resume")
    unbroken, broken = (load_record(tmp_path / name) for name in ("unbroken", "broken"))
    assert [epoch.metrics for epoch in broken.epochs] == [epoch.metrics for epoch in unbroken.epochs]
    weights = [
        keras.models.load_model(tmp_path / name / "model.keras").get_weights() for name in ("unbroken", "broken")
    ]
    for left, right in zip(*weights, strict=True):
        np.testing.assert_array_equal(left, right)
