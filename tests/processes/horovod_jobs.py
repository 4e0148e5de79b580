"""Scripts in processes that Horovod's users start: by `horovodrun` over Gloo, by `mpirun` over MPI."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes.jobs import ROOT, clean_environment

ENGINES = {
    "gloo": ["horovodrun", "--gloo", "-np", "{}", "--network-interfaces", "lo"],
    "mpi": ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "{}"],
}
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed (`make horovod`)"
)


def run(engine, *arguments, processes=2, cwd=ROOT, seconds=240):
    """Runs `python ARGUMENTS` in several processes, and returns what they printed; nothing of them is left."""
    if engine == "mpi" and shutil.which("mpirun") is None:
        pytest.skip("there is no `mpirun` on the path")
    binaries = Path(sys.executable).parent
    environment = clean_environment() | {"OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{binaries}:{environment['PATH']}"
    command = [part.format(processes) for part in ENGINES[engine]] + [sys.executable, *map(str, arguments)]
    started = subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(started)
        raise AssertionError(f"not within {seconds} s: {started.communicate()[0][-3000:]}") from None
    assert started.returncode == 0, output[-5000:]
    return output


def _end(started):
    for process in [*psutil.Process(started.pid).children(recursive=True), psutil.Process(started.pid)]:
        process.kill()
