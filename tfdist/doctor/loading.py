"""`python -m tfdist.doctor.loading ENGINE`: loads TensorFlow, mpi4py, Horovod or NCCL, and prints facts as JSON.

Runs in a child process of the doctor. For an error of tfdist, its sentence and its hint are printed.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from tfdist import startup
from tfdist.errors import TfdistError

# For each package, the module whose version may differ from that of the installed package.
MODULES = {"tensorflow": "tensorflow", "keras": "keras", "numpy": "numpy", "protobuf": "google.protobuf"}


def tensorflow() -> dict[str, Any]:
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


def mpi4py() -> dict[str, Any]:
    """The MPI library that mpi4py is linked with."""
    from tfdist.groups import mpi

    return {"library": mpi.load().Get_library_version().partition(",")[0].partition("\n")[0].strip("\0 ")}


def horovod() -> dict[str, Any]:
    """The transports with which Horovod was built."""
    from tfdist.groups import horovod as engine

    hvd = engine.load()
    built = {"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built(), "NCCL": hvd.nccl_built()}
    return {"built_with": [name for name, included in built.items() if included]}


def nccl() -> dict[str, Any]:
    """The version of NCCL, from the package of TensorFlow's CUDA libraries if it is installed, else from the system."""
    try:
        folders = [Path(folder) for folder in importlib.import_module("nvidia.nccl").__path__]
    except ImportError:
        folders = []
    installed = [str(folder / "lib" / "libnccl.so.2") for folder in folders]
    library = next((path for path in installed if os.path.exists(path)), "libnccl.so.2")
    version = ctypes.c_int()
    ctypes.CDLL(library).ncclGetVersion(ctypes.byref(version))
    return {"version": f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"}


def _module(name: str) -> dict[str, str]:
    module = importlib.import_module(name)
    return {"version": str(getattr(module, "__version__", "")), "file": str(module.__file__ or "")}


def main(engine: str) -> None:
    """Prints the facts as one line of JSON, after whatever the libraries print."""
    try:
        facts = globals()[engine]()
    except TfdistError as error:
        facts = {"error": error.sentence, "hint": error.hint}
    print(f"\n{json.dumps(facts)}", flush=True)
    os._exit(0)  # an engine that has loaded may still crash or block at exit


if __name__ == "__main__":
    main(sys.argv[1])
