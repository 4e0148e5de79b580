"""Prepares the import of TensorFlow and Keras, and checks that Keras uses TensorFlow."""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.machinery
import os
import platform
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from tfdist.errors import UsageError

# Packages that few programs use, and that took a third of the time of importing Keras and TensorFlow. Those of Keras
# 3.15 import scikit-learn, SciPy's statistics and Matplotlib; `keras.src` is private. Those of TensorFlow 2.21 are the
# API of TensorFlow 1 and its copies, hundreds of modules of names.
SELDOM_USED = {
    "keras.visualization",
    "keras._tf_keras.keras.visualization",
    "keras.wrappers",
    "keras._tf_keras.keras.wrappers",
    "keras.src.visualization",
    "tensorflow._api.v2.compat.v1",
    "tensorflow._api.v2.compat.v1.compat",
    "tensorflow._api.v2.compat.v2.compat",
}


def require_tensorflow_backend() -> None:
    """Imports Keras and checks that it runs on TensorFlow; a wrong `KERAS_BACKEND` is refused before the import.

    Raises:
        UsageError: `KERAS_BACKEND` names another backend, or Keras was imported with another one.
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


def prepare_imports() -> None:
    """Makes TensorFlow use oneDNN, and delays the import of the packages `SELDOM_USED` until they are used.

    For programs that import TensorFlow and Keras themselves; has no effect on modules that are imported already.
    """
    _prefer_onednn()
    if not any(isinstance(finder, _LazyFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LazyFinder())


def _prefer_onednn() -> None:
    """Makes TensorFlow use oneDNN's kernels on every x86 CPU, unless it is imported or the user has set this option.

    By default it uses them only on CPUs with instructions for neural networks. On other CPUs, steps of convolutions,
    attention or wide layers are also up to twice as fast with them (benchmarks/README.md); results agree to rounding.

    Source: the release notes of TensorFlow 2.9.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")


def _import_keras() -> None:
    """Imports Keras, and TensorFlow with it, without garbage collection: of a million new objects, none is garbage.

    Scanning them took a sixth of the time of the imports, and more in the first steps; later collections skip them too.
    """
    prepare_imports()
    enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("keras")
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


class _LazyFinder(importlib.abc.MetaPathFinder):
    """Finds the packages `SELDOM_USED`, whose code runs when one of their attributes is used."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a package in `SELDOM_USED`; `None` for all others."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in SELDOM_USED else None
        if spec is not None and spec.loader is not None:
            spec.loader = _LazyLoader(spec.loader)
        return spec


class _LazyLoader(importlib.abc.Loader):
    """Runs the code of a module when one of its attributes is used.

    `importlib.util.LazyLoader` would run it at once: the import system and `inspect` look at names of every module.
    """

    def __init__(self, loader: importlib.abc.Loader):
        self._loader = loader
        self._lock = threading.RLock()
        self._begun = False

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module empty until one of its attributes is used."""

        def get(name: str) -> Any:
            if not name.startswith("__") or name == "__all__":  # which `import *` asks for
                self._load(module)
            if name in module.__dict__:
                return module.__dict__[name]
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        def names() -> list[str]:
            self._load(module)
            return sorted(module.__dict__)

        module.__dict__.update(__getattr__=get, __dir__=names)

    def _load(self, module: ModuleType) -> None:
        with self._lock:
            if self._begun:
                return
            self._begun = True
            try:
                self._loader.exec_module(module)
            except BaseException:
                self._begun = False
                raise
