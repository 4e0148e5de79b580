"""The evaluator of a job: a process that takes no part in the training, and evaluates each of its checkpoints."""

import csv

import pytest

from tests.processes.jobs import by_hand, start_by_hand

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
