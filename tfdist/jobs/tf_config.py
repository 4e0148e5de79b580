"""The processes of a job, and the variable TF_CONFIG, which describes them to TensorFlow's own strategies.

Besides TensorFlow's own form, the forms of the platforms that write it are read:

| written by | form |
|---|---|
| Kubeflow's TFJob, SageMaker's TensorFlow container | `master`, which means `chief` |
| Kubeflow's TFJob, Vertex AI | the task `evaluator`, with or without addresses of evaluators in `cluster` |
| `tf.train.ClusterSpec` | an object of addresses by index in place of a list, in `cluster` or `sparseCluster` |
| Vertex AI's CLUSTER_SPEC | worker pools in place of roles |
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, StrictInt, StrictStr, ValidationError

from tfdist.errors import UsageError
from tfdist.jobs.job_environment import TF_CONFIG, shortened

# In the order of the ranks.
ROLES = ("chief", "worker", "ps")
# A process that evaluates checkpoints: it has no rank, since it takes no part in the training.
EVALUATOR = "evaluator"

# Other names of the roles: `master` is what TensorFlow 1 called the chief, and Kubeflow and SageMaker still write it.
NAMES_OF_ROLES = {"master": "chief"}
# Vertex AI's, by the position of the worker pool: https://cloud.google.com/vertex-ai/docs/training/distributed-training
WORKER_POOLS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": EVALUATOR}
CLUSTER_SPEC = "CLUSTER_SPEC"


@dataclass(frozen=True)
class Task:
    """One process of a job: its role, its index among the processes with that role, and its address `host:port`."""

    role: str
    index: int
    address: str

    @property
    def host(self) -> str:
        """The host's name or address; an IPv6 address without its brackets."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port, 1 to 65535."""
        return int(self.address.rpartition(":")[2])

    def __str__(self) -> str:
        return f"{self.role} {self.index} ({self.address})"


def means_itself(host: str) -> bool:
    """Whether this name or address stands for the local host on every host, such as `localhost`."""
    return host.lower() in ("localhost", "::1", "0.0.0.0", "::") or bool(re.fullmatch(r"127(\.[0-9]+){3}", host))


class Place(NamedTuple):
    """What a process is in a job: a rank, or the number of an evaluator, which has no rank."""

    rank: int = 0
    evaluator: int | None = None


class _TaskField(BaseModel):
    model_config = ConfigDict(extra="ignore")
    type: StrictStr
    index: StrictInt


class _Config(BaseModel):
    # Fields that do not describe processes, such as `rpc_layer` and `environment`, are allowed.
    model_config = ConfigDict(extra="ignore")
    cluster: dict[StrictStr, list[StrictStr]]
    task: _TaskField


class _RefusedError(Exception):
    """A variable is invalid: the end of a sentence about it, and a hint."""

    def __init__(
        self,
        predicate: str,
        hint: str = 'write it as `{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}`',
    ):
        super().__init__(predicate, hint)
        self.predicate = predicate
        self.hint = hint


def parse(text: str, variable: str = TF_CONFIG) -> tuple[Place, tuple[Task, ...]]:
    """The place of this process and all tasks that train, by rank, from the value of TF_CONFIG or CLUSTER_SPEC.

    Raises:
        UsageError: the value is invalid; the message names the field.
    """
    try:
        return _parse(text)
    except _RefusedError as refused:
        raise UsageError(f"`{variable}` {refused.predicate}", refused.hint) from refused


def _parse(text: str) -> tuple[Place, tuple[Task, ...]]:
    try:
        config = _Config.model_validate(_with_lists(json.loads(text)))
    except ValidationError as error:
        raise _RefusedError(_described(error.errors()[0])) from error
    except (ValueError, RecursionError) as error:
        raise _RefusedError(f"is `{shortened(text)}`, which is not JSON: {error}") from error
    role, index = _role(config.task.type), config.task.index
    cluster = _by_role(config.cluster)
    _check_roles(cluster, role)
    tasks = tuple(Task(role, index, address) for role in ROLES for index, address in enumerate(cluster.get(role, [])))
    _check_addresses(tasks)
    if role == EVALUATOR and index >= 0:
        return Place(evaluator=index), tasks
    ranks = [rank for rank, task in enumerate(tasks) if (task.role, task.index) == (role, index)]
    if not ranks:
        listed = len(cluster.get(role, []))
        raise _RefusedError(
            f"says in `task` that this process is `{role} {index}`, and `cluster` has {listed} of the role `{role}`",
            "the first process of a role has `index` 0",
        )
    return Place(ranks[0]), tasks


def _role(name: str) -> str:
    return (NAMES_OF_ROLES | WORKER_POOLS).get(name, name)


def _by_role(cluster: Mapping[str, list[str]]) -> dict[str, list[str]]:
    roles: dict[str, str] = {}
    for name in cluster:
        other = roles.setdefault(_role(name), name)
        if other != name:
            raise _RefusedError(f"names both `{other}` and `{name}` in `cluster`", "they mean the same role: use one")
    return {role: cluster[name] for role, name in roles.items()}


def _with_lists(config: Any) -> Any:
    """The value with `sparseCluster` as `cluster`, and with lists in place of addresses by index."""
    if not isinstance(config, dict):
        return config
    name = "sparseCluster" if "sparseCluster" in config and "cluster" not in config else "cluster"
    cluster = config.get(name)
    if not isinstance(cluster, dict):
        return config
    # A TFJob with `enableDynamicWorker` names to each worker only itself and the parameter servers.
    if name == "sparseCluster" and sum(len(tasks) for role, tasks in cluster.items() if role != "ps") < 2:
        raise _RefusedError(
            "has a `sparseCluster` that does not name the other workers, and the strategies of tfdist connect all",
            "remove `enableDynamicWorker` from the TFJob, so that it writes `cluster`",
        )
    return config | {"cluster": {role: _as_list(name, role, tasks) for role, tasks in cluster.items()}}


def _as_list(name: str, role: str, tasks: Any) -> Any:
    if not isinstance(tasks, dict):
        return tasks
    expected = [str(index) for index in range(len(tasks))]
    if sorted(tasks) != sorted(expected):
        raise _RefusedError(
            f"has the indices {', '.join(sorted(tasks))} as `{name}.{role}`, and some are missing",
            "name the processes of a role from index 0, without gaps",
        )
    return [tasks[index] for index in expected]


def _described(error: Any) -> str:
    """An error of pydantic as the end of a sentence about TF_CONFIG."""
    field = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"lacks `{field}`"
    kind = {
        "int_type": "a whole number",
        "string_type": "a text",
        "list_type": "a list of addresses",
        "dict_type": "an object of lists of addresses by role",
    }.get(error["type"], "an object")
    value = shortened(json.dumps(error["input"], ensure_ascii=False))
    return f"has `{value}` as `{field}`, which is not {kind}" if field else f"is `{value}`, which is not {kind}"


def _check_roles(cluster: Mapping[str, list[str]], role: str) -> None:
    unknown = next((name for name in (*cluster, role) if name not in (*ROLES, EVALUATOR)), None)
    if unknown is not None:
        raise _RefusedError(
            f"names the role `{unknown}`", "the roles are `chief` (or `master`), `worker`, `ps` and `evaluator`"
        )
    trained = {name: addresses for name, addresses in cluster.items() if name != EVALUATOR}
    if len(trained.get("chief", [])) > 1:
        raise _RefusedError(f"names {len(trained['chief'])} addresses for `chief`", "a job has one chief")
    if role == EVALUATOR and not any(trained.values()):
        return  # TensorFlow's own examples give an evaluator a cluster of itself alone
    if not any(trained.values()):
        raise _RefusedError("has no address in `cluster`", "name every process of the job, or unset it to train alone")
    if not trained.get("chief") and not trained.get("worker"):
        raise _RefusedError("has only parameter servers in `cluster`", "name the chief and the workers too")


def _check_addresses(tasks: Sequence[Task]) -> None:
    owners: dict[tuple[str, int], Task] = {}
    for task in tasks:
        match = re.fullmatch(r"([^\s:/\[\]]+|\[[0-9A-Fa-f:.%]+\]):([0-9]{1,9})", task.address)
        described = f"`{task.address}` for {task.role} {task.index}"
        if match is None:
            raise _RefusedError(
                f"names {described}, which is not `host:port`",
                "write a host name or an address, an IPv6 address in brackets, then a colon and the port",
            )
        if not 0 < int(match[2]) < 65536:
            raise _RefusedError(
                f"names {described}, and ports go from 1 to 65535", "give the task a free port of its host"
            )
        owner = owners.setdefault((task.host.lower(), task.port), task)
        if owner is not task:
            raise _RefusedError(
                f"names `{task.address}` for {owner.role} {owner.index} and for {task.role} {task.index}",
                "give every process its own address; processes on one host differ by their ports",
            )
    local = [task for task in tasks if means_itself(task.host)]
    others = [task for task in tasks if not means_itself(task.host)]
    if local and others:
        raise _RefusedError(
            f"names `{local[0].address}` for {local[0].role} {local[0].index} beside `{others[0].address}` for "
            f"{others[0].role} {others[0].index}, and `{local[0].host}` is another machine on every host",
            "name each host by an address at which the others reach it",
        )
