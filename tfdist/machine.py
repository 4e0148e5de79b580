"""Figures of this machine that take seconds to measure, and are measured once.

They are kept in the user's cache folder, a file per figure. A figure is measured again for another host, processor,
number of cores or version of TensorFlow.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfdist import files

_MOST_BYTES = 10_000


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of tfdist's cached files of this user, which may not exist yet.

    Raises:
        RuntimeError: the user has no home folder.
    """
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfdist"


def processor() -> str:
    """The name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def figure(name: str, measure: Callable[[], float], **facts: Any) -> float:
    """Returns a positive figure of this machine, and measures it if it was not measured before.

    Args:
        name: what is measured, which the name of the file begins with.
        measure: measures it.
        **facts: what else the figure depends on.
    """
    facts |= {
        "host": platform.node(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "tensorflow": importlib.metadata.version("tensorflow"),
    }
    text = json.dumps(facts, sort_keys=True)
    path = None
    with contextlib.suppress(RuntimeError):
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        path = cache_folder() / "machine" / f"{name}-{digest}.json"
        if (known := _read(path)) is not None:
            return known
    value = measure()
    if path is not None:
        with contextlib.suppress(OSError):  # it is measured again the next time
            files.write_text(path, json.dumps({"value": value, "of": facts}, indent=2) + "\n")
    return value


def _read(path: Path) -> float | None:
    """The figure in a file; `None` if there is none that can be used."""
    try:
        value = float(json.loads(files.read_text(path, _MOST_BYTES))["value"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return value if math.isfinite(value) and value > 0 else None
