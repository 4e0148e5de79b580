"""`python -m tfdist.doctor.loading ENGINE`: loads TensorFlow, mpi4py or Horovod, and prints what was found as JSON.

Runs in a child process of the doctor; an error of tfdist is printed as its sentence and its hint.
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

# Imported names whose version may be another one than that of the installed package, by the package.
MODULES = {"tensorflow": "tensorflow", "keras": "keras", "numpy": "numpy", "protobuf": "google.protobuf"}


def tensorflow() -> dict[str, Any]:
    """Versions and places of the modules, and the devices that TensorFlow sees."""
    startup.require_tensorflow_backend()
    import tensorflow as tf

    tf.constant(1.0).numpy()  # starts the runtime, which finds the devices
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
    """What Horovod was built with."""
    from tfdist.groups import horovod as engine

    hvd = engine.load()
    built = {"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built(), "NCCL": hvd.nccl_built()}
    return {"built_with": [name for name, there in built.items() if there]}


def nccl() -> dict[str, Any]:
    """The version of NCCL, of the package that TensorFlow's CUDA libraries come in or of the system."""
    try:
        places = [Path(place) for place in importlib.import_module("nvidia.nccl").__path__]
    except ImportError:
        places = []
    installed = [str(place / "lib" / "libnccl.so.2") for place in places]
    library = next((path for path in installed if os.path.exists(path)), "libnccl.so.2")
    number = ctypes.c_int()
    ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number))
    return {
        "version": ".".join(
            str(part) for part in (number.value // 10000, number.value // 100 % 100, number.value % 100)
        )
    }


def _module(name: str) -> dict[str, str]:
    module = importlib.import_module(name)
    return {"version": str(getattr(module, "__version__", "")), "file": str(module.__file__ or "")}


def main(engine: str) -> None:
    """Prints one line of JSON, whatever else the libraries print."""
    try:
        found = globals()[engine]()
    except TfdistError as error:
        found = {"error": error.sentence, "hint": error.hint}
    print(f"\n{json.dumps(found)}", flush=True)
    os._exit(0)  # an engine that has loaded may still fail, or wait, where it ends


if __name__ == "__main__":
    main(sys.argv[1])
