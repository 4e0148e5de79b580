"""The processes of a job as the variables of Amazon SageMaker's training containers describe them: one per host.

The variables, from ENVIRONMENT_VARIABLES.md of the repository aws/sagemaker-training-toolkit:

    SM_HOSTS          a JSON list of the names of all hosts, the same in each: ["algo-1", "algo-2"]
    SM_CURRENT_HOST   the name of this host
    SM_NUM_GPUS       the number of GPUs of this host, which all belong to its process

SageMaker promises no port; each host has a network interface of its own. SageMaker's TensorFlow container writes the
port 2222 into its TF_CONFIG, and so it is used here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from tfdist.errors import UsageError
from tfdist.jobs.job_environment import shortened
from tfdist.jobs.tf_config import Task

HOSTS = "SM_HOSTS"
CURRENT_HOST = "SM_CURRENT_HOST"
SOURCE = f"SageMaker ({HOSTS}, {CURRENT_HOST})"
PORT = 2222


def parse(environment: Mapping[str, str]) -> tuple[int, tuple[Task, ...], str]:
    """The rank of this process, all tasks, and the names of the variables; no tasks if there is one host.

    Raises:
        UsageError: the variables contradict each other, or do not have SageMaker's format.
    """
    text = environment[HOSTS]
    try:
        hosts = json.loads(text)
    except (ValueError, RecursionError):
        hosts = None
    if not (isinstance(hosts, list) and hosts and all(isinstance(host, str) and host for host in hosts)):
        raise _refusal(f"`{HOSTS}` is `{shortened(text)}`, which is not a JSON list of host names")
    twice = next((host for host in hosts if hosts.count(host) > 1), None)
    if twice is not None:
        raise _refusal(f"`{HOSTS}` is `{shortened(text)}`, which names `{twice}` twice")
    current = environment.get(CURRENT_HOST, "")
    if current not in hosts:
        raise _refusal(f"`{CURRENT_HOST}` is `{shortened(current)}`, which is not in `{HOSTS}` `{shortened(text)}`")
    tasks = tuple(Task("worker", index, f"{host}:{PORT}") for index, host in enumerate(hosts))
    return hosts.index(current), tasks if len(hosts) > 1 else (), SOURCE


def _refusal(sentence: str) -> UsageError:
    return UsageError(sentence, f"correct the variables, or unset `{HOSTS}` to train alone")
