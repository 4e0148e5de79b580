"""The resources of a host: each process's share of its cores and GPUs, and the limit of open files."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Sequence
from typing import TypeVar

from tfdist.errors import UsageError

Resource = TypeVar("Resource")

RESERVED_FILES = 64  # for libraries, the terminal, and files that are open for a moment


def share_of(resources: Sequence[Resource], index: int, count: int) -> Sequence[Resource]:
    """Returns the cores or GPUs of process `index` of `count`; empty if there are fewer of them than processes."""
    size = len(resources) // count
    return resources[index * size : (index + 1) * size]


def gpus() -> list[str]:
    """Returns the usable GPUs of this host, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False).stdout
    return [str(index) for index, line in enumerate(listing.splitlines()) if line.startswith("GPU ")]


def raise_file_limit(count: int) -> int:
    """Raises the soft limit of open files, which children inherit, to fit `count` files, or to the hard limit.

    Returns:
        The new limit.
    """
    needed = count + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _allows(soft, needed):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if _allows(hard, needed) else hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def require_files(count: int, user: str) -> None:
    """Raises the soft limit so that `count` files can be open at the same time.

    Raises:
        UsageError: the hard limit is too low for `user`, which the message names.
    """
    limit, needed = raise_file_limit(count), count + RESERVED_FILES
    if not _allows(limit, needed):
        raise UsageError(
            f"{user} needs {needed} open files, and the limit is {limit}",
            f"raise it with `ulimit -n {needed}`, for which an administrator may first have to raise the hard limit "
            "(`ulimit -Hn`), or start fewer processes on a host",
        )


def _allows(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
