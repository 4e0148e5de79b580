"""Do TensorFlow, MPI and Horovod load here? Each is tried once, in a child process, as the strategies load it."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tfdist.doctor import child
from tfdist.doctor.finding import Finding, note, ok, problem
from tfdist.doctor.packages import installed, requirement

SECONDS_TO_LOAD = 90.0
SECONDS_TO_ANSWER = 10.0
ENGINES = ("tensorflow", "mpi4py", "horovod")  # each is the name of its package
GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
INSTALL_MPI4PY = "pip install 'tfdist[mpi]'"
INSTALL_MPI = "apt-get install openmpi-bin"
INSTALL_HOROVOD = "make horovod"
# As `mpirun --version` and MPI itself name them.
LIBRARIES = ("Open MPI", "MPICH", "Intel(R) MPI", "MVAPICH")
MPICH_LAUNCHERS = ("HYDRA", "MPICH")


@dataclass(frozen=True)
class Loaded:
    """How loading an engine went.

    Attributes:
        facts: what `tfdist.doctor.loading` found; empty if it does not load.
        error: why it does not load, as a sentence; empty if it does.
        hint: what to do then.
        installed: whether its package is installed.
        said: what the libraries wrote.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    hint: str = ""
    installed: bool = True
    said: str = ""


@functools.cache
def loaded(engine: str, seconds: float = SECONDS_TO_LOAD) -> Loaded:
    """Loads "tensorflow", "mpi4py", "horovod" or "nccl" in a child process, within `seconds`; the answer is kept.

    Horovod and mpi4py are loaded beside TensorFlow, and are not tried where that does not load.
    """
    if engine in ENGINES and installed(engine) is None:
        return Loaded(error=f"{engine} is not installed", hint=_install(engine), installed=False)
    if engine in ("mpi4py", "horovod") and loaded("tensorflow").error:
        return Loaded(error="It was not tried, because TensorFlow does not load", hint=loaded("tensorflow").hint)
    # Other programs may use the GPUs, and TensorFlow would reserve all of their memory.
    ended = child.run([sys.executable, "-m", "tfdist.doctor.loading", engine], seconds, {GROWTH: "true"})
    if not ended.is_well:
        said = f": {ended.last_line()}" if ended.last_line() else ""
        return Loaded(error=f"The process that loads {engine} {ended.how()}{said}", hint=_install(engine))
    facts = json.loads(ended.out.strip().rpartition("\n")[2])
    if "error" in facts:
        return Loaded(error=facts["error"], hint=facts["hint"])
    return Loaded(facts, said=ended.err)


def _install(engine: str) -> str:
    if engine == "tensorflow":
        return f"pip install --force-reinstall '{requirement('tensorflow')}'"
    return {"mpi4py": INSTALL_MPI4PY, "horovod": INSTALL_HOROVOD}.get(engine, "")


def findings() -> list[Finding]:
    """What was found out about TensorFlow, MPI and Horovod."""
    loaded("tensorflow")
    with ThreadPoolExecutor() as pool:
        list(pool.map(loaded, ("mpi4py", "horovod")))
    return [*of_tensorflow(loaded("tensorflow")), *of_mpi(loaded("mpi4py")), *of_horovod(loaded("horovod"))]


def of_tensorflow(found: Loaded) -> list[Finding]:
    """What was found out about TensorFlow and the modules that it loads."""
    if found.error:
        return [problem("TensorFlow", found.error, found.hint)]
    others = [
        problem(
            "TensorFlow",
            f"`{package}` is imported from `{module['file']}` as version {module['version']}, and version "
            f"{installed(package)} is installed",
            "take the folder that holds it out of `PYTHONPATH`, and start in another folder",
        )
        for package, module in found.facts["modules"].items()
        if module["version"] and _public(module["version"]) != _public(installed(package))
    ]
    return others or [ok("TensorFlow", "TensorFlow and Keras load, and Keras runs on TensorFlow")]


def _public(version: str | None) -> str:
    """A version without the label of who built it."""
    return (version or "").partition("+")[0]


def of_mpi(found: Loaded) -> list[Finding]:
    """What was found out about mpi4py and `mpirun`."""
    if not found.installed:
        return [note("MPI", f"{found.error}: `mpi_split` is not there", found.hint)]
    if found.error:
        return [problem("MPI", found.error, found.hint)]
    linked = found.facts["library"]
    return [ok("MPI", f"mpi4py {installed('mpi4py')} loads {linked}"), *of_mpirun(library(linked))]


def of_mpirun(linked: str) -> list[Finding]:
    """Whether `mpirun` starts programs that are `linked` with this library, such as "Open MPI"."""
    there = mpirun()
    if there is None:
        return [
            problem("MPI", "There is no `mpirun` on the path, which starts the processes of `mpi_split`", INSTALL_MPI)
        ]
    path = shutil.which("mpirun")
    kind = library(there)
    if kind != linked:
        return [
            problem(
                "MPI",
                f"`{path}` is that of {kind or 'another MPI'} (`{there}`), and mpi4py is linked with {linked}: "
                "each process would train alone",
                f"update-alternatives --config mpirun; or put the `mpirun` of {linked} first on the path",
            )
        ]
    if kind != "Open MPI":
        return [
            note(
                "MPI",
                f"`{path}` is that of {kind} (`{there}`), and tfdist's launcher starts processes by Open MPI's alone",
                "start them yourself: `mpirun -n 2 python -m tfdist.train --strategy mpi_split ...`",
            )
        ]
    return [ok("MPI", f"`{path}` is that of {there}")]


def mpirun(seconds: float = SECONDS_TO_ANSWER) -> str | None:
    """The line in which `mpirun --version` names its library; `None` if there is no `mpirun`."""
    if shutil.which("mpirun") is None:
        return None
    ended = child.run(["mpirun", "--version"], seconds)
    lines = [line.strip() for line in ended.out.splitlines() if line.strip()]
    named = [line for line in lines if library(line)]
    return (named or lines or [f"`mpirun --version` {ended.how()}"])[0]


def library(text: str) -> str:
    """The MPI library that a text names; empty if it names none.

    >>> library("mpirun (Open MPI) 4.1.4"), library("HYDRA build details:"), library("Open MPI v4.1.4")
    ('Open MPI', 'MPICH', 'Open MPI')
    """
    if any(name in text for name in MPICH_LAUNCHERS):
        return "MPICH"
    return next((name for name in LIBRARIES if name in text), "")


def of_horovod(found: Loaded) -> list[Finding]:
    """What was found out about Horovod."""
    if not found.installed:
        return [note("Horovod", f"{found.error}: `horovod` is not there", found.hint)]
    if found.error:
        return [problem("Horovod", found.error, found.hint)]
    built = found.facts["built_with"]
    if not {"MPI", "Gloo"} & set(built):
        return [
            problem(
                "Horovod", "Horovod was built without MPI and without Gloo, and connects no processes", INSTALL_HOROVOD
            )
        ]
    missing = [name for name in ("MPI", "Gloo") if name not in built]
    sentence = f"Horovod {installed('horovod')} loads; it was built with {', '.join(built)}"
    if missing:
        return [note("Horovod", f"{sentence}, and without {missing[0]}", INSTALL_HOROVOD)]
    return [ok("Horovod", sentence)]
