"""What must be so before TensorFlow and Keras are imported, and the check that it was."""

from __future__ import annotations

import gc
import importlib
import os
import platform
import sys

from tfdist.errors import UsageError


def require_tensorflow_backend() -> None:
    """Makes sure that Keras runs on TensorFlow, without importing it where that can be told otherwise.

    Raises:
        UsageError: `KERAS_BACKEND` says another backend, or Keras was imported with another one.
    """
    hint = "unset `KERAS_BACKEND` or set it to `tensorflow` before Keras is imported"
    if "keras" not in sys.modules:
        backend = os.environ.get("KERAS_BACKEND", "tensorflow")
        if backend != "tensorflow":
            raise UsageError(f"`KERAS_BACKEND` is `{backend}`, and tfdist trains with TensorFlow", hint)
        _import_keras()
    import keras

    if keras.backend.backend() != "tensorflow":
        raise UsageError(f"Keras was imported with the backend `{keras.backend.backend()}`, not TensorFlow", hint)


def prefer_onednn() -> None:
    """Lets TensorFlow compute with oneDNN's kernels on every x86 CPU, where it is not imported and told nothing yet.

    By itself it does so only where the CPU has instructions for neural networks. On others too steps of convolutions,
    attention or wide layers are up to twice as fast with them (benchmarks/README.md); results agree to rounding.

    Source: the release notes of TensorFlow 2.9.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")


def _import_keras() -> None:
    """Imports Keras, and TensorFlow with it, without garbage collection: of a million new objects, none is garbage.

    To look through them was a sixth of the time that the imports took, and more in the first steps, so that they are
    never looked through later either.
    """
    prefer_onednn()
    enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("keras")
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
