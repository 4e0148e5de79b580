"""`tfdist compare` with jobs: what they send is counted, and a strategy that cannot run here is told by the doctor."""

import os
import shutil
import subprocess
import sys

import pytest

from tfdist.study import results, runs

pytestmark = pytest.mark.thorough

FEW = ["--model", "mlp", "--dataset", "digits", "--steps", "20", "--epochs", "2", "--repeats", "1", "--out", "study"]


def compare(*options, cwd, **environment):
    command = [sys.executable, "-m", "tfdist", "compare", *options, *FEW]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_bytes_of_a_job_are_those_of_its_gradients_and_a_little_more(tmp_path):
    done = compare("--strategies", "single,multiworker", "--workers", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (comparison,) = results.of_runs(runs.load([tmp_path / "study"]))
    single, job = comparison.rows
    parameters = job.runs[0].record.model.parameters
    assert single.network_bytes_per_step is None
    # Each of two processes sends half of the sum, and half of the result: together twice four bytes a parameter.
    assert 8 * parameters < job.network_bytes_per_step < 3 * 8 * parameters
    assert job.marks == []


def test_a_strategy_that_cannot_run_here_is_marked_with_the_doctors_reason(tmp_path):
    (tmp_path / "stubs" / "mpi4py").mkdir(parents=True)
    (tmp_path / "stubs" / "mpi4py" / "__init__.py").write_text("raise ImportError('planted')\n")
    path = os.pathsep.join([str(tmp_path / "stubs"), os.environ.get("PYTHONPATH", "")])
    done = compare("--strategies", "single,mpi_split", "--workers", "2", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    (comparison,) = results.of_runs(runs.load([tmp_path / "study"]))
    assert [len(row.good) for row in comparison.rows] == [1, 0]
    assert "mpi4py" in comparison.rows[1].runs[0].cause
    report = (tmp_path / "study" / "report.md").read_text()
    assert "`mpi_split on 2` failed in 1 of 1 runs: error: " in report and "planted" in report


@pytest.mark.exhaustive
def test_each_rank_of_mpi_split_has_its_share_of_input_that_costs_nothing(tmp_path):
    if shutil.which("mpirun") is None:
        pytest.skip("there is no `mpirun`: run `make horovod`")
    done = compare("--strategies", "mpi_split", "--workers", "2", "--input", "synthetic", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
