"""The environment variables by which the launcher describes a job to its processes, and how their values are read.

The operating system limits an environment variable to 128 KiB. The addresses of 2,300 processes exceed this if each
address has 57 bytes. The launcher then writes the addresses to one file per host instead of setting TF_CONFIG.

Synopsis:

    >>> variables_of_cluster('{"worker": ["a:1", "b:1"]}', "worker", 1, write=lambda: "/tmp/cluster.json")
    {'TF_CONFIG': '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'}
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tfdist.errors import UsageError

TF_CONFIG = "TF_CONFIG"
JOB = "TFDIST_JOB"  # the job's name: the same in all processes, and after a restart
OWN_GPUS = "TFDIST_OWN_GPUS"  # CUDA_VISIBLE_DEVICES lists GPUs that only this process uses
OWN_NETWORK = "TFDIST_OWN_NETWORK"  # only the processes of the job use their network namespace
SHARE_CORES = "TFDIST_SHARE_CORES"  # use this process's part of the cores, by its local rank
RESTART = "TFDIST_RESTART"  # how many times the job was restarted
ELASTIC = "TFDIST_ELASTIC"  # end at a checkpoint when the launcher asks for it
START_SECONDS = "TFDIST_START_SECONDS"  # how long processes wait for each other at the start
EVALUATOR_SECONDS = "TFDIST_EVALUATOR_SECONDS"  # how long an evaluator waits for the next checkpoint
END_SECONDS = "TFDIST_END_SECONDS"  # how long after SIGTERM the launcher sends SIGKILL
TYPED = "TFDIST_TYPED"  # the command that started the job, as the user typed it
CLUSTER = "TFDIST_CLUSTER"  # a file with the addresses of all processes, if TF_CONFIG would be too long
TASK = "TFDIST_TASK"  # set with CLUSTER: the role and the index of this process, as in TF_CONFIG
SECRET = "TFDIST_SECRET"  # what processes of the job know and other programs do not
SECRET_FILE = "TFDIST_SECRET_FILE"  # a file with the secret
PROCESS = "TFDIST_PROCESS"  # the agent that started a process, and its number there; descendants inherit it

# The limit for `name=value` and the null byte behind it: Linux' MAX_ARG_STRLEN, see execve(2).
LONGEST_VARIABLE_BYTES = 128 * 1024


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def crowding(count: int, things: str) -> str | None:
    """Says that `count` things, such as "workers", share fewer cores than that; `None` if each has its own."""
    if count <= cores():
        return None
    shared = "one core" if cores() == 1 else f"{cores()} cores"
    return f"{count} {things} share {shared}: they show that a program is right, not that it is fast"


def excess_load(load: float, machine_cores: int) -> str | None:
    """Says that programs wait for the cores of this machine; `None` if its load is at most half above their number.

    Args:
        load: the mean number of threads that compute or wait for a core.
        machine_cores: the number of cores of the machine.
    """
    if load <= 1.5 * machine_cores:
        return None
    has = "one core" if machine_cores == 1 else f"{machine_cores} cores"
    return (
        f"The load of this machine is {load:.1f}, and it has {has}: other programs slow every step down, and a process "
        "that does not get a core in time may be taken for lost"
    )


def number(environment: Mapping[str, str], name: str) -> int:
    """The value of the variable `name`, a number from 0.

    Raises:
        UsageError: the value is not a whole number.
    """
    text = environment[name]
    if not re.fullmatch("[0-9]{1,18}", text):
        raise UsageError(f"`{name}` is `{shortened(text)}`, which is not a number from 0", f"correct or unset `{name}`")
    return int(text)


def shortened(text: str) -> str:
    """The beginning of a value that may be too long for a message."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def variables_of_cluster(cluster: str, role: str, index: int, write: Callable[[], str]) -> dict[str, str]:
    """The environment variables that describe the cluster to a process.

    Args:
        cluster: the addresses by role, as JSON.
        role: the role of the process.
        index: the number of the process among those with its role.
        write: writes `cluster` to a file, and returns its path; called if TF_CONFIG would be too long.
    """
    task = f'{{"type": "{role}", "index": {index}}}'
    config = _tf_config(cluster, task)
    if len(f"{TF_CONFIG}={config}".encode()) < LONGEST_VARIABLE_BYTES:
        return {TF_CONFIG: config}
    return {CLUSTER: write(), TASK: task}


def find_tf_config(environment: Mapping[str, str]) -> str:
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
    return _tf_config(cluster, environment.get(TASK, "null"))


def _tf_config(cluster: str, task: str) -> str:
    return f'{{"cluster": {cluster}, "task": {task}}}'
