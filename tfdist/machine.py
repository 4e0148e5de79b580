"""Figures of this machine that take seconds to measure, or of which the highest counts.

They are kept in the user's cache folder, a file per figure. A figure is a new one for another host, processor,
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
    path, facts = _file(name, facts)
    known = _read(path)
    return _kept(path, measure(), facts) if known is None else known


def highest(name: str, measure: Callable[[], float], **facts: Any) -> float:
    """Returns the highest positive figure that was ever measured on this machine; it is measured again each time.

    For a peak, of which other programs on the machine hide a part. The arguments are those of `figure`.
    """
    path, facts = _file(name, facts)
    known, value = _read(path) or 0.0, measure()
    return _kept(path, value, facts) if value > known else known


def _file(name: str, facts: dict[str, Any]) -> tuple[Path | None, dict[str, Any]]:
    """The file of a figure, and all facts that the figure depends on; no file if the user has no home folder."""
    defaults = {
        "host": platform.node(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "tensorflow": importlib.metadata.version("tensorflow"),
    }
    facts = defaults | facts
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    try:
        return cache_folder() / "machine" / f"{name}-{digest}.json", facts
    except RuntimeError:
        return None, facts


def _kept(path: Path | None, value: float, facts: dict[str, Any]) -> float:
    if path is not None:
        with contextlib.suppress(OSError):  # it is measured again the next time
            files.write_text(path, json.dumps({"value": value, "of": facts}, indent=2) + "\n")
    return value


def _read(path: Path | None) -> float | None:
    """The figure in a file; `None` if there is none that can be used."""
    if path is None:
        return None
    try:
        value = float(json.loads(files.read_text(path, _MOST_BYTES))["value"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return value if math.isfinite(value) and value > 0 else None
