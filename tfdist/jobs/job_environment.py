"""The environment variables, besides TF_CONFIG, by which the launcher describes a job to its processes.

Also how the values of such variables are read, and the number of cores that this process may use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from tfdist.errors import UsageError

JOB = "TFDIST_JOB"  # the job's name: the same in all processes, and after a restart
OWN_GPUS = "TFDIST_OWN_GPUS"  # CUDA_VISIBLE_DEVICES lists GPUs that only this process uses
OWN_NETWORK = "TFDIST_OWN_NETWORK"  # only the processes of the job use their network namespace
SHARE_CORES = "TFDIST_SHARE_CORES"  # use this process's part of the cores, by its local rank
RESTART = "TFDIST_RESTART"  # how many times the job was restarted
ELASTIC = "TFDIST_ELASTIC"  # end at a checkpoint when the launcher asks for it
START_SECONDS = "TFDIST_START_SECONDS"  # how long processes wait for each other at the start
END_SECONDS = "TFDIST_END_SECONDS"  # how long after SIGTERM the launcher sends SIGKILL
TYPED = "TFDIST_TYPED"  # the command that started the job, as the user typed it
CLUSTER = "TFDIST_CLUSTER"  # a file with the addresses of all processes, if TF_CONFIG would be too long
TASK = "TFDIST_TASK"  # set with CLUSTER: the role and the index of this process, as in TF_CONFIG
PROCESS = "TFDIST_PROCESS"  # the agent that started a process, and its number there; descendants inherit it


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
