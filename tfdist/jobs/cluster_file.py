"""TF_CONFIG for clusters of any size: in the variable itself, or in a file if the variable would be too long.

The operating system limits an environment variable to 128 KiB. The addresses of 2,300 processes exceed this if each
address has 57 bytes. The launcher then writes the addresses to one file per host instead of setting TF_CONFIG.

Synopsis:

    >>> variables('{"worker": ["a:1", "b:1"]}', "worker", 1, write=lambda: "/tmp/cluster.json")
    {'TF_CONFIG': '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tfdist.errors import UsageError
from tfdist.jobs.job_environment import CLUSTER, TASK

TF_CONFIG = "TF_CONFIG"
# The limit for `name=value` and the null byte behind it: Linux' MAX_ARG_STRLEN, see execve(2).
LONGEST_VARIABLE_BYTES = 128 * 1024


def variables(cluster: str, role: str, index: int, write: Callable[[], str]) -> dict[str, str]:
    """The environment variables that describe the cluster to a process.

    Args:
        cluster: the addresses by role, as JSON.
        role: the role of the process.
        index: the number of the process among those with its role.
        write: writes `cluster` to a file, and returns its path; called if TF_CONFIG would be too long.
    """
    task = f'{{"type": "{role}", "index": {index}}}'
    config = _config(cluster, task)
    if len(f"{TF_CONFIG}={config}".encode()) < LONGEST_VARIABLE_BYTES:
        return {TF_CONFIG: config}
    return {CLUSTER: write(), TASK: task}


def find(environment: Mapping[str, str]) -> str:
    """The value of TF_CONFIG, or the one that the file of a large cluster stands for; empty if there is neither.

    Raises:
        UsageError: the file cannot be read.
    """
    config = environment.get(TF_CONFIG, "").strip()
    if config or CLUSTER not in environment:
        return config
    path = environment[CLUSTER]
    try:
        cluster = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"`{CLUSTER}` is `{path}`, which cannot be read: {error.strerror}",
            f"the launcher removes this file when its job ends; unset `{CLUSTER}` to train alone",
        ) from error
    return _config(cluster, environment.get(TASK, "null"))


def _config(cluster: str, task: str) -> str:
    return f'{{"cluster": {cluster}, "task": {task}}}'
