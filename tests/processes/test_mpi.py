"""`mpi`: the contract in processes that `mpirun` starts, and a process that is killed."""

import signal

import pytest

from tests.processes.jobs import after_two_epochs, launched, require_mpi, train
from tests.processes.test_contract import (
    BY_HAND,
    CALLBACKS,
    EQUALITY,
    STEPS,
    equality_cases,
    own_optimizers,
    run_together,
)

OVER_MPI = ("--mpi",)
# Those that exchange something of their own; the steps are those of `horovod`.
QUICK = [
    "mixed float16, inf on one replica",
    "mask, loss sum",
    "synchronized batch norm",
    "sparse gradients, adam",
    "auc",
]


@pytest.fixture(autouse=True)
def _mpi():
    require_mpi()


@pytest.mark.exhaustive  # as those of `horovod` over MPI
def test_two_processes_compute_what_one_device_does(tmp_path):
    cases = [*equality_cases("mpi", 2, QUICK), own_optimizers("mpi", 2)]
    assert f"{len(cases)} passed" in run_together("mpi", 2, *cases, cwd=tmp_path, options=OVER_MPI)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["mpi_stages", "mpi_uneven"])
def test_with_stages_and_with_uneven_parts_too(tmp_path, name):
    cases = equality_cases(name, 2, ["plain", "remainder 1", "adam", "global clipnorm"])
    assert f"{len(cases)} passed" in run_together(name, 2, *cases, cwd=tmp_path, options=OVER_MPI)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("part", [EQUALITY, CALLBACKS, STEPS, BY_HAND])
def test_the_whole_contract(tmp_path, workers, part):
    assert "passed" in run_together("mpi", workers, part, cwd=tmp_path, options=OVER_MPI)


@pytest.mark.thorough
def test_a_process_that_is_killed_ends_the_job_by_name(tmp_path):
    run_dir = tmp_path / "run"
    with train("--epochs", "500", run_dir=run_dir, strategy="mpi") as job:
        code, out, err = after_two_epochs(job, run_dir, "worker", 1, signal.SIGKILL)
        assert job.left() == []
    assert code != 0
    assert "rank 1 with PID" in out + err


DIFFERING = """
import os
import tfdist
from tfdist.jobs.world import World

rank = World.detect(os.environ).rank
tfdist.strategy("mpi", compression="bf16" if rank else "none")
"""


@pytest.mark.thorough
def test_processes_that_would_send_different_types_are_refused_with_both_values(tmp_path):
    (tmp_path / "script.py").write_text(DIFFERING)
    done = launched(*OVER_MPI, "--workers", "2", "--verbose", "script.py", cwd=tmp_path, timeout=120)
    assert done.returncode != 0
    assert "disagree on `compression`: rank 0 has `none`, rank 1 has `bf16`" in " ".join(
        (done.stdout + done.stderr).split()
    )
