"""The processes of a job, and the variable TF_CONFIG, which describes them to TensorFlow's own strategies."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictInt, StrictStr, ValidationError

from tfdist.errors import UsageError
from tfdist.jobs.job_environment import TF_CONFIG, shortened

# In the order of the ranks.
ROLES = ("chief", "worker", "ps")


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


class _TaskField(BaseModel):
    model_config = ConfigDict(extra="ignore")
    type: StrictStr
    index: StrictInt


class _TfConfig(BaseModel):
    # Fields that do not describe processes, such as `rpc_layer` and `environment`, are allowed.
    model_config = ConfigDict(extra="ignore")
    cluster: dict[StrictStr, list[StrictStr]]
    task: _TaskField


def parse(text: str) -> tuple[int, tuple[Task, ...]]:
    """The rank of this process and all tasks, from the value of TF_CONFIG.

    Raises:
        UsageError: the value is invalid; the message names the field.
    """
    try:
        config = _TfConfig.model_validate(json.loads(text))
    except ValidationError as error:
        raise _refusal(_described(error.errors()[0])) from error
    except (ValueError, RecursionError) as error:
        raise _refusal(f"is `{shortened(text)}`, which is not JSON: {error}") from error
    _check_roles(config)
    tasks = tuple(
        Task(role, index, address) for role in ROLES for index, address in enumerate(config.cluster.get(role, []))
    )
    _check_addresses(tasks)
    role, index = config.task.type, config.task.index
    ranks = [rank for rank, task in enumerate(tasks) if (task.role, task.index) == (role, index)]
    if not ranks:
        listed = len(config.cluster.get(role, []))
        raise _refusal(
            f"says in `task` that this process is `{role} {index}`, and `cluster` has {listed} of the role `{role}`",
            "the first process of a role has `index` 0",
        )
    return ranks[0], tasks


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


def _check_roles(config: _TfConfig) -> None:
    roles = [*config.cluster, config.task.type]
    if "evaluator" in roles:
        raise _refusal(
            "names the role `evaluator`, and tfdist has none",
            "leave it out: the processes that train also evaluate",
        )
    unknown = next((role for role in roles if role not in ROLES), None)
    if unknown is not None:
        raise _refusal(f"names the role `{unknown}`", "the roles are `chief`, `worker` and `ps`")
    if len(config.cluster.get("chief", [])) > 1:
        raise _refusal(f"names {len(config.cluster['chief'])} addresses for `chief`", "a job has one chief")
    if not any(config.cluster.values()):
        raise _refusal("has no address in `cluster`", "name every process of the job, or unset it to train alone")
    if not config.cluster.get("chief") and not config.cluster.get("worker"):
        raise _refusal("has only parameter servers in `cluster`", "name the chief and the workers too")


def _check_addresses(tasks: Sequence[Task]) -> None:
    owners: dict[tuple[str, int], Task] = {}
    for task in tasks:
        match = re.fullmatch(r"([^\s:/\[\]]+|\[[0-9A-Fa-f:.%]+\]):([0-9]{1,9})", task.address)
        described = f"`{task.address}` for {task.role} {task.index}"
        if match is None:
            raise _refusal(
                f"names {described}, which is not `host:port`",
                "write a host name or an address, an IPv6 address in brackets, then a colon and the port",
            )
        if not 0 < int(match[2]) < 65536:
            raise _refusal(f"names {described}, and ports go from 1 to 65535", "give the task a free port of its host")
        owner = owners.setdefault((task.host.lower(), task.port), task)
        if owner is not task:
            raise _refusal(
                f"names `{task.address}` for {owner.role} {owner.index} and for {task.role} {task.index}",
                "give every process its own address; processes on one host differ by their ports",
            )
    local = [task for task in tasks if means_itself(task.host)]
    others = [task for task in tasks if not means_itself(task.host)]
    if local and others:
        raise _refusal(
            f"names `{local[0].address}` for {local[0].role} {local[0].index} beside `{others[0].address}` for "
            f"{others[0].role} {others[0].index}, and `{local[0].host}` is another machine on every host",
            "name each host by an address at which the others reach it",
        )


def _refusal(
    predicate: str,
    hint: str = 'write it as `{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}`',
) -> UsageError:
    return UsageError(f"`{TF_CONFIG}` {predicate}", hint)
