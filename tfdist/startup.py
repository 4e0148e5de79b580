"""Prepares the import of TensorFlow and Keras, and checks that Keras uses TensorFlow."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import platform
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from tfdist.errors import UsageError

# Packages that few programs use, but that take a third of the time of importing Keras and TensorFlow. The packages of
# Keras 3.15 import scikit-learn, SciPy's statistics and Matplotlib; `keras.src` is private. The packages of TensorFlow
# 2.21 are the API of TensorFlow 1 and copies of it, with hundreds of modules.
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

# A hint: what TensorFlow has initialized can be changed only in a new process.
CREATE_EARLIER = "create the strategy before anything else uses TensorFlow; in a notebook, restart the kernel first"


def require_tensorflow_backend() -> None:
    """Imports Keras and checks that its backend is TensorFlow; `KERAS_BACKEND` is checked before the import.

    Raises:
        UsageError: `KERAS_BACKEND` is another backend, or Keras was imported with another backend.
    """
    hint = "unset `KERAS_BACKEND` or set it to `tensorflow` before Keras is imported"
    if "keras" not in sys.modules:
        backend = os.environ.get("KERAS_BACKEND", "tensorflow")
        if backend != "tensorflow":
            raise UsageError(f"`KERAS_BACKEND` is `{backend}`, but tfdist trains with TensorFlow", hint)
        _import_keras()
    _hide_notes_of_tensorflow()
    import keras

    if keras.backend.backend() != "tensorflow":
        raise UsageError(f"Keras was imported with the backend `{keras.backend.backend()}`, not TensorFlow", hint)


@functools.cache
def _hide_notes_of_tensorflow() -> None:
    """Hides what TensorFlow logs at the level INFO, once, so that a level that is set later is kept.

    In notebooks, and where the root logger has the level INFO, as in Ray's workers, `tf.distribute` logs its devices
    and collective operations.
    """
    logger = logging.getLogger("tensorflow")
    if logger.getEffectiveLevel() == logging.INFO:
        logger.setLevel(logging.WARNING)


def prepare_imports() -> None:
    """Makes TensorFlow use oneDNN, and delays the import of the packages in `SELDOM_USED` until they are used.

    For programs that import TensorFlow and Keras themselves. Has no effect on modules that are already imported.
    """
    _prefer_onednn()
    if not any(isinstance(finder, _LazyFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LazyFinder())


def _prefer_onednn() -> None:
    """Makes TensorFlow use oneDNN's kernels on every x86 CPU, unless TensorFlow is imported or the user set the option.

    By default, TensorFlow uses them only on CPUs with instructions for neural networks. On other CPUs they also make
    convolutions, attention and wide layers up to twice as fast (benchmarks/README.md); results agree up to rounding.

    Source: the release notes of TensorFlow 2.9.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")


def _import_keras() -> None:
    """Imports Keras and TensorFlow without garbage collection, because none of the million new objects is garbage.

    Scanning them takes a sixth of the import time, and more in the first steps, so later collections skip them too.
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
    """Finds the packages in `SELDOM_USED`, and makes their code run when one of their attributes is first used."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a package in `SELDOM_USED`; `None` for other modules."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in SELDOM_USED else None
        if spec is not None and spec.loader is not None:
            spec.loader = _LazyLoader(spec.loader)
        return spec


class _LazyLoader(importlib.abc.Loader):
    """Runs the code of a module when one of its attributes is first used.

    `importlib.util.LazyLoader` would run it immediately, since the import system and `inspect` read attributes of
    every module.
    """

    def __init__(self, loader: importlib.abc.Loader):
        self._loader = loader
        self._lock = threading.RLock()
        self._begun = False

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module empty until one of its attributes is used."""

        def get(name: str) -> Any:
            if not name.startswith("__") or name == "__all__":  # `import *` reads `__all__`
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
