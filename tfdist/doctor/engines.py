"""Checks that TensorFlow, MPI and Horovod load, once each, in a child process and as the strategies load them.

`python -m tfdist.doctor.engines ENGINE` is the child process: it loads TensorFlow, mpi4py, Horovod or NCCL, and prints
facts as JSON. For an error of tfdist, it prints the sentence and the hint.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist import extras, startup
from tfdist.doctor import child
from tfdist.doctor.finding import Finding, note, ok, problem
from tfdist.doctor.packages import installed, requirement
from tfdist.errors import TfdistError

SECONDS_TO_LOAD = 90.0
SECONDS_TO_ANSWER = 10.0
ENGINES = ("tensorflow", "mpi4py", "horovod")  # names of packages
GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
INSTALL_MPI = "apt-get install openmpi-bin"
# The names in the output of `mpirun --version` and of MPI itself.
LIBRARIES = ("Open MPI", "MPICH", "Intel(R) MPI", "MVAPICH")
MPICH_LAUNCHERS = ("HYDRA", "MPICH")
# For each package, the module whose version may differ from that of the installed package.
MODULES = {"tensorflow": "tensorflow", "keras": "keras", "numpy": "numpy", "protobuf": "google.protobuf"}


@dataclass(frozen=True)
class LoadResult:
    """The result of loading an engine.

    Attributes:
        facts: the facts that the child process reports; empty if the engine does not load.
        error: why the engine does not load, as a sentence; empty if it does.
        hint: what to do if it does not load.
        installed: whether its package is installed.
        stderr: the messages of the libraries.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    hint: str = ""
    installed: bool = True
    stderr: str = ""


@functools.cache
def load(engine: str, seconds: float = SECONDS_TO_LOAD) -> LoadResult:
    """Loads "tensorflow", "mpi4py", "horovod" or "nccl" in a child process within `seconds`, and caches the result.

    Horovod and mpi4py are loaded together with TensorFlow, and are skipped if TensorFlow does not load.
    """
    if engine in ENGINES and installed(engine) is None:
        return LoadResult(error=f"{engine} is not installed", hint=_install(engine), installed=False)
    if engine in ("mpi4py", "horovod") and load("tensorflow").error:
        return LoadResult(
            error=f"{engine} was not tried, because TensorFlow does not load", hint=load("tensorflow").hint
        )
    # Without this variable TensorFlow would reserve all GPU memory, which other programs may need.
    result = child.run([sys.executable, "-m", "tfdist.doctor.engines", engine], seconds, {GROWTH: "true"})
    if not result.succeeded:
        detail = f": {result.last_line()}" if result.last_line() else ""
        error = f"The process that loads {engine} {result.description()}{detail}"
        return LoadResult(error=error, hint=_install(engine))
    facts = json.loads(result.out.strip().rpartition("\n")[2])
    if "error" in facts:
        return LoadResult(error=facts["error"], hint=facts["hint"])
    return LoadResult(facts, stderr=result.err)


def _install(engine: str) -> str:
    if engine == "tensorflow":
        return f"pip install --force-reinstall '{requirement('tensorflow')}'"
    return extras.command_of_engine(engine) if engine in ENGINES else ""


def findings() -> list[Finding]:
    """The findings about TensorFlow, MPI and Horovod."""
    load("tensorflow")
    with ThreadPoolExecutor() as pool:
        list(pool.map(load, ("mpi4py", "horovod")))
    return [*tensorflow_findings(load("tensorflow")), *mpi_findings(load("mpi4py")), *horovod_findings(load("horovod"))]


def tensorflow_findings(result: LoadResult) -> list[Finding]:
    """The findings about TensorFlow and the modules that it loads."""
    if result.error:
        return [problem("TensorFlow", result.error, result.hint)]
    mismatches = [
        problem(
            "TensorFlow",
            f"`{package}` is imported from `{module['file']}` as version {module['version']}, and version "
            f"{installed(package)} is installed",
            "remove that folder from `PYTHONPATH`, and start in another folder",
        )
        for package, module in result.facts["modules"].items()
        if module["version"] and _without_label(module["version"]) != _without_label(installed(package))
    ]
    return mismatches or [ok("TensorFlow", "TensorFlow and Keras load, and Keras runs on TensorFlow")]


def _without_label(version: str | None) -> str:
    """A version without its local label, such as "+cpu"."""
    return (version or "").partition("+")[0]


def mpi_findings(result: LoadResult) -> list[Finding]:
    """The findings about mpi4py and `mpirun`."""
    if not result.installed:
        return [note("MPI", f"{result.error}: `mpi_split` is unavailable", result.hint)]
    if result.error:
        return [problem("MPI", result.error, result.hint)]
    linked = result.facts["library"]
    return [ok("MPI", f"mpi4py {installed('mpi4py')} loads {linked}"), *mpirun_findings(library(linked))]


def mpirun_findings(linked: str) -> list[Finding]:
    """Checks that `mpirun` can start programs that are linked with the library `linked`, such as "Open MPI"."""
    version = mpirun()
    if version is None:
        return [
            problem("MPI", "There is no `mpirun` on the path, which starts the processes of `mpi_split`", INSTALL_MPI)
        ]
    path = shutil.which("mpirun")
    kind = library(version)
    if kind != linked:
        return [
            problem(
                "MPI",
                f"`{path}` belongs to {kind or 'another MPI'} (`{version}`), but mpi4py is linked with {linked}: "
                "each process would train alone",
                f"update-alternatives --config mpirun; or put the `mpirun` of {linked} first on the path",
            )
        ]
    if kind != "Open MPI":
        return [
            note(
                "MPI",
                f"`{path}` belongs to {kind} (`{version}`), and tfdist's launcher supports only Open MPI",
                "start the processes yourself: `mpirun -n 2 python -m tfdist.train --strategy mpi_split ...`",
            )
        ]
    return [ok("MPI", f"`{path}` belongs to {version}")]


def mpirun(seconds: float = SECONDS_TO_ANSWER) -> str | None:
    """The line of `mpirun --version` that names the MPI library; `None` if there is no `mpirun`."""
    if shutil.which("mpirun") is None:
        return None
    result = child.run(["mpirun", "--version"], seconds)
    lines = [line.strip() for line in result.out.splitlines() if line.strip()]
    named = [line for line in lines if library(line)]
    return (named or lines or [f"`mpirun --version` {result.description()}"])[0]


def library(text: str) -> str:
    """The name of the MPI library in a text; empty if there is none.

    >>> library("mpirun (Open MPI) 4.1.4"), library("HYDRA build details:"), library("Open MPI v4.1.4")
    ('Open MPI', 'MPICH', 'Open MPI')
    """
    if any(name in text for name in MPICH_LAUNCHERS):
        return "MPICH"
    return next((name for name in LIBRARIES if name in text), "")


def horovod_findings(result: LoadResult) -> list[Finding]:
    """The findings about Horovod."""
    if not result.installed:
        return [note("Horovod", f"{result.error}: `horovod` is unavailable", result.hint)]
    if result.error:
        return [problem("Horovod", result.error, result.hint)]
    built = result.facts["built_with"]
    missing = [name for name in ("MPI", "Gloo") if name not in built]
    if len(missing) == 2:
        sentence = "Horovod was built with neither MPI nor Gloo, and cannot connect processes"
        return [problem("Horovod", sentence, extras.horovod_command())]
    sentence = f"Horovod {installed('horovod')} loads; it was built with {', '.join(built)}"
    if missing:
        return [note("Horovod", f"{sentence}, but without {missing[0]}", extras.horovod_command())]
    return [ok("Horovod", sentence)]


def _tensorflow_facts() -> dict[str, Any]:
    """Versions and files of the modules, and the devices that TensorFlow sees."""
    startup.require_tensorflow_backend()
    import tensorflow as tf

    tf.constant(1.0).numpy()  # starts the runtime, which detects the devices
    gpus = tf.config.list_physical_devices("GPU")
    return {
        "modules": {package: _module(name) for package, name in MODULES.items()},
        "built_with_cuda": tf.test.is_built_with_cuda(),
        "cuda": tf.sysconfig.get_build_info().get("cuda_version", ""),
        "gpus": [tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name) for gpu in gpus],
    }


def _mpi4py_facts() -> dict[str, Any]:
    """The MPI library that mpi4py is linked with."""
    from tfdist.groups import mpi

    return {"library": mpi.load().Get_library_version().partition(",")[0].partition("\n")[0].strip("\0 ")}


def _horovod_facts() -> dict[str, Any]:
    """The transports with which Horovod was built."""
    from tfdist.groups import horovod as engine

    hvd = engine.load()
    built = {"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built(), "NCCL": hvd.nccl_built()}
    return {"built_with": [name for name, included in built.items() if included]}


def _nccl_facts() -> dict[str, Any]:
    """The version of NCCL, from the package of TensorFlow's CUDA libraries if it is installed, else from the system."""
    try:
        folders = [Path(folder) for folder in importlib.import_module("nvidia.nccl").__path__]
    except ImportError:
        folders = []
    candidates = [str(folder / "lib" / "libnccl.so.2") for folder in folders]
    library = next((path for path in candidates if os.path.exists(path)), "libnccl.so.2")
    version = ctypes.c_int()
    ctypes.CDLL(library).ncclGetVersion(ctypes.byref(version))
    return {"version": f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"}


def _module(name: str) -> dict[str, str]:
    module = importlib.import_module(name)
    return {"version": str(getattr(module, "__version__", "")), "file": str(module.__file__ or "")}


LOADERS = {"tensorflow": _tensorflow_facts, "mpi4py": _mpi4py_facts, "horovod": _horovod_facts, "nccl": _nccl_facts}


def main(engine: str) -> None:
    """Prints the facts as one line of JSON, after whatever the libraries print."""
    try:
        facts = LOADERS[engine]()
    except TfdistError as error:
        facts = {"error": error.sentence, "hint": error.hint}
    print(f"\n{json.dumps(facts)}", flush=True)
    os._exit(0)  # an engine that has loaded may still crash or block at exit


if __name__ == "__main__":
    main(sys.argv[1])
