"""Two MPI libraries on one machine: MPICH's `mpiexec` starts programs that are linked with Open MPI.

Each process would be a job of its own, and train alone.
"""

import os
import subprocess
import sys

import pytest

from tests.processes.jobs import ROOT, clean_environment, require_horovod, require_mpi

require_mpi()

pytestmark = pytest.mark.exhaustive  # it fetches packages; test_mpi_split.py sets MPICH's variables instead

FACADE = "import tfdist.horovod as hvd; hvd.init()"
REFUSED = "PMI (PMI_RANK, PMI_SIZE) says that there are 2 processes, and"


@pytest.fixture(scope="module")
def mpich(tmp_path_factory):
    """The environment in which `mpirun.mpich` is there, and the library that it needs."""
    folder = tmp_path_factory.mktemp("mpich")
    done = subprocess.run([ROOT / "scripts" / "unpack_mpich.sh", folder], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"MPICH cannot be fetched: {done.stderr.strip()}")
    (libraries,) = (folder / "usr" / "lib").glob("*-linux-gnu")
    return {"PATH": f"{folder}/usr/bin:{os.environ['PATH']}", "LD_LIBRARY_PATH": str(libraries)}


def run(command, environment, cwd):
    return subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment() | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


@pytest.mark.parametrize("strategy", ["mpi_split", "horovod"])
def test_a_job_of_another_librarys_mpirun_is_refused(mpich, tmp_path, strategy):
    if strategy == "horovod":
        require_horovod()
    options = ("--strategy", strategy, "--model", "mlp", "--dataset", "digits", "--run-dir", "run")
    train = (sys.executable, "-m", "tfdist.train", *options)
    done = run(("mpirun.mpich", "-n", "2", *train), mpich, tmp_path)
    assert done.returncode == 2
    assert f"error: {REFUSED} MPI finds 1" in done.stderr and "hint: start them with the `mpirun` of" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_script_that_was_ported_is_refused_too(mpich, tmp_path):
    require_horovod()
    done = run(("mpirun.mpich", "-n", "2", sys.executable, "-c", FACADE), mpich, tmp_path)
    assert done.returncode == 1
    assert f"{REFUSED} Horovod's MPI finds 1" in done.stderr


def test_the_launcher_refuses_another_librarys_mpirun(mpich, tmp_path):
    (tmp_path / "mpirun").symlink_to(f"{mpich['PATH'].partition(':')[0]}/mpirun.mpich")
    environment = mpich | {"PATH": f"{tmp_path}:{mpich['PATH']}"}
    done = run((sys.executable, "-m", "tfdist.launch", "--mpi", "script.py"), environment, tmp_path)
    assert done.returncode == 2
    assert f"`{tmp_path}/mpirun` is `HYDRA build details:`, not Open MPI's" in done.stderr
