"""Drawn trainings in the processes of a job: each of them passes all."""

import pytest

from tests.processes.test_contract import run_together

IN_A_JOB = "tests/fuzz/test_fuzz.py::test_a_drawn_training_ends_as_on_one_device_in_a_job"
FOUND = "tests/fuzz/test_found.py"


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["multiworker", "horovod"])
@pytest.mark.parametrize("seed", range(300, 305))
def test_two_processes_end_drawn_trainings_as_one_device(tmp_path, strategy, seed):
    assert "1 passed" in run_together(strategy, 2, f"{IN_A_JOB}[{seed}-30]", cwd=tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["multiworker", "horovod"])
def test_two_processes_end_what_was_found_as_one_device(tmp_path, strategy):
    assert "passed" in run_together(strategy, 2, FOUND, cwd=tmp_path)
