"""TF_CONFIG for clusters of any size: in the variable itself, or in a file if the variable would be too long.

The operating system limits a variable to 128 KiB, which the addresses of 2,300 processes exceed if each has 57 bytes.
The launcher then writes the addresses to one file per host, in place of TF_CONFIG.

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
# Of `name=value` with the byte that ends it: Linux' MAX_ARG_STRLEN, see execve(2).
LONGEST_VARIABLE_BYTES = 128 * 1024


def variables(cluster: str, role: str, index: int, write: Callable[[], str]) -> dict[str, str]:
    """The variables that tell a process who it is.

    Args:
        cluster: the addresses by role, as JSON.
        role: of the process.
        index: its number in that role.
        write: writes `cluster` to a file, and returns its path; called if TF_CONFIG would be too long.
    """
    config = _config(cluster, f'{{"type": "{role}", "index": {index}}}')
    if len(f"{TF_CONFIG}={config}".encode()) < LONGEST_VARIABLE_BYTES:
        return {TF_CONFIG: config}
    return {CLUSTER: write(), TASK: f'{{"type": "{role}", "index": {index}}}'}


def find(environment: Mapping[str, str]) -> str:
    """The value of TF_CONFIG, or what it would be; empty if `environment` has neither.

    Raises:
        UsageError: the file cannot be read.
    """
    given = environment.get(TF_CONFIG, "").strip()
    if given or CLUSTER not in environment:
        return given
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
