"""The part of the cores and GPUs of a host that each of its processes gets."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import TypeVar

Part = TypeVar("Part")


def part_for(parts: Sequence[Part], index: int, count: int) -> Sequence[Part]:
    """The part of `parts` (cores or GPUs) for process `index` of `count`; empty if there are too few to divide."""
    each = len(parts) // count
    return parts[index * each : (index + 1) * each]


def gpus() -> list[str]:
    """The GPUs of this host that may be used, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False).stdout
    return [str(index) for index, line in enumerate(listed.splitlines()) if line.startswith("GPU ")]
