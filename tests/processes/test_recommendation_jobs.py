"""Models with large tables in jobs of two processes: the result of one device, or all steps on a parameter server."""

import numpy as np
import pytest

import tfdist.models.two_tower  # noqa: F401 - with the layer that loading its model needs
from tests.processes.jobs import RunningJob, record, weights

TASKS = {"two_tower": "recommendation", "dlrm": "click_prediction"}
# 4 steps per epoch, of which the last does not divide by two.
DATA = {"words": 40, "length": 5, "train": 61, "validation": 16, "test": 16}
METRIC = {"two_tower": "recall_at_10", "dlrm": "auc"}
MODELS = [pytest.param("two_tower", marks=pytest.mark.exhaustive), "dlrm"]


def trained(model, run_dir, *options):
    """The record of a short training."""
    data = [f"--data-option={name}={value}" for name, value in ({"task": TASKS[model]} | DATA).items()]
    usual = ["--model", model, "--model-option", "width=0.125", "--dataset", "synthetic", *data, "--seed", "1"]
    arguments = [*usual, "--batch-size", "16", "--epochs", "2", "--run-dir", run_dir, *options]
    with RunningJob(*arguments, module="tfdist.train", cwd=run_dir.parent) as job:
        code, _, err = job.end()
    assert code == 0, err
    return record(run_dir)


@pytest.mark.thorough
@pytest.mark.parametrize("model", MODELS)
def test_two_workers_end_with_the_weights_of_one_device(tmp_path, model):
    alone = trained(model, tmp_path / "alone", "--strategy", "single")
    together = trained(model, tmp_path / "together", "--strategy", "multiworker", "--workers", "2")
    for name in ("loss", METRIC[model]):
        assert together["test_metrics"][name] == pytest.approx(alone["test_metrics"][name], rel=1e-4)
    for found, expected in zip(weights(tmp_path / "together"), weights(tmp_path / "alone"), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("model", MODELS)
def test_a_parameter_server_takes_every_step_of_two_workers(tmp_path, model):
    found = trained(model, tmp_path / "run", "--strategy", "parameter_server", "--workers", "2")
    losses = [epoch["metrics"]["loss"] for epoch in found["epochs"]]
    assert len(losses) == 2 and np.isfinite(losses).all() and losses[1] < losses[0]
    assert 0 <= found["test_metrics"][METRIC[model]] <= 1
