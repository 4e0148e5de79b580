"""Who am I among whom: read once, frozen, with its source.

Pure parsing: this module never imports TensorFlow. A process that was started alone is a world of one.

Synopsis:

    >>> World.detect({})
    World(rank=0, world_size=1, local_rank=0, local_world_size=1, source='alone', tasks=())
    >>> slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[01-02]"}
    >>> world = World.detect(slurm)
    >>> world.named(1)
    'worker 1 (gpu02:20112)'
    >>> world.tf_config()
    '{"cluster": {"worker": ["gpu01:20112", "gpu02:20112"]}, "task": {"type": "worker", "index": 1}}'
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictInt, StrictStr, ValidationError

from tfdist.errors import UsageError

# In the order of their ranks.
ROLES = ("chief", "worker", "ps")

TF_CONFIG = "TF_CONFIG"

SLURM_RANK = "SLURM_PROCID"
SLURM_LOCAL_RANK = "SLURM_LOCALID"
SLURM_JOB = "SLURM_JOB_ID"
# A step may be smaller than its job, so what is said of the step goes first.
SLURM_SIZE = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
SLURM_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
SLURM_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
# No variable of Slurm tells roles. With this one, the last so many tasks of a step are parameter servers and the
# first is the chief.
PARAMETER_SERVERS = "TFDIST_PS"
# Slurm gives no ports either. Each job number has 16 of these 10,000, which lie below those that Linux hands out.
SLURM_FIRST_PORT, SLURM_PORTS, SLURM_PORTS_A_JOB = 20_000, 10_000, 16

# What sets the places of processes, and no addresses: rank, world size, local rank, local world size.
PLACES = {
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "mpirun of Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
}
# Those of the process managers PMI and PMIx, such as MPICH's `mpirun`; under Slurm its own variables say more.
PMI = {
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "PMIx": ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
}

# More hosts than any list names in earnest: `n[0-9999999999]` must not fill the memory.
MOST_HOSTS = 100_000


@dataclass(frozen=True)
class Task:
    """One process of a job: its role, its number in that role and where it listens, `host:port`."""

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


@dataclass(frozen=True)
class World:
    """The place of this process in its job.

    Attributes:
        rank: this process' number, 0 to `world_size - 1`.
        world_size: the number of processes in the job.
        local_rank: this process' number on its machine.
        local_world_size: the number of those processes on this machine.
        source: the variables that say so, or "alone".
        tasks: all processes of the job by rank: chief, workers, parameter servers; empty when alone, and where the
            source knows no addresses, as MPI.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    source: str = "alone"
    tasks: tuple[Task, ...] = ()

    @classmethod
    def detect(cls, environment: Mapping[str, str] = os.environ) -> World:
        """The world that `environment` describes, or one process.

        By TF_CONFIG, else the variables of `horovodrun`, of Open MPI's `mpirun`, of Slurm, of PMI or PMIx.

        Raises:
            UsageError: the description cannot be; the message says which field or variable.
        """
        if environment.get(TF_CONFIG, "").strip():
            return _from_tf_config(environment[TF_CONFIG])
        for source, names in PLACES.items():
            if names[0] in environment:
                return _from_places(source, names, environment)
        if SLURM_RANK in environment:
            return _from_slurm(environment)
        for source, names in PMI.items():
            if names[0] in environment and names[1] in environment:
                return _from_places(source, names, environment)
        return cls()

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files of the run: the chief, or worker 0 where no task is called so."""
        return self.rank == 0

    @property
    def task(self) -> Task | None:
        """This process' own task; `None` when alone."""
        return self.tasks[self.rank] if self.tasks else None

    def tasks_of(self, role: str) -> tuple[Task, ...]:
        """The tasks of a role, by their numbers."""
        return tuple(task for task in self.tasks if task.role == role)

    def cluster(self) -> dict[str, list[str]]:
        """The addresses by role, as TF_CONFIG and `tf.train.ClusterSpec` have them."""
        return {role: [t.address for t in self.tasks_of(role)] for role in ROLES if self.tasks_of(role)}

    def tf_config(self) -> str:
        """This world as the TF_CONFIG of this process, which TensorFlow's resolver reads; `{}` when alone."""
        task = self.task
        if task is None:
            return "{}"
        return json.dumps({"cluster": self.cluster(), "task": {"type": task.role, "index": task.index}})

    def require_size(self, found: int, engine: str) -> None:
        """Refuses a job that an engine sees otherwise than whoever started it: each process would train alone.

        Raises:
            UsageError: `engine` finds another number of processes.
        """
        if found != self.world_size:
            raise UsageError(
                f"{self.source} says that there are {self.world_size} processes, and {engine} finds {found}",
                "start them with the `mpirun` of the MPI library that this program is linked with",
            )

    def named(self, rank: int) -> str:
        """How messages name a rank, such as `worker 1 (10.0.0.2:2222)`."""
        return str(self.tasks[rank]) if self.tasks else f"rank {rank}"


class _TaskField(BaseModel):
    model_config = ConfigDict(extra="ignore")
    type: StrictStr
    index: StrictInt


class _TfConfig(BaseModel):
    # What says nothing of who is who, such as `rpc_layer` and `environment`, is let through.
    model_config = ConfigDict(extra="ignore")
    cluster: dict[StrictStr, list[StrictStr]]
    task: _TaskField


def _from_tf_config(text: str) -> World:
    try:
        config = _TfConfig.model_validate(json.loads(text))
    except ValidationError as error:
        raise _refusal(_described(error.errors()[0])) from error
    except (ValueError, RecursionError) as error:
        raise _refusal(f"is `{_shortened(text)}`, which is not JSON: {error}") from error
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
            "the first of a role has `index` 0",
        )
    return _world(ranks[0], tasks, TF_CONFIG)


def _described(error: Any) -> str:
    """One of pydantic's errors as the end of a sentence about TF_CONFIG."""
    field = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"lacks `{field}`"
    kind = {
        "int_type": "a whole number",
        "string_type": "a text",
        "list_type": "a list of addresses",
        "dict_type": "an object of lists of addresses by role",
    }.get(error["type"], "an object")
    found = _shortened(json.dumps(error["input"], ensure_ascii=False))
    return f"has `{found}` as `{field}`, which is not {kind}" if field else f"is `{found}`, which is not {kind}"


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
        raise _refusal("has parameter servers alone in `cluster`", "name the chief and the workers too")


def _check_addresses(tasks: Sequence[Task]) -> None:
    owners: dict[tuple[str, int], Task] = {}
    for task in tasks:
        found = re.fullmatch(r"([^\s:/\[\]]+|\[[0-9A-Fa-f:.%]+\]):([0-9]{1,9})", task.address)
        who = f"`{task.address}` for {task.role} {task.index}"
        if found is None:
            raise _refusal(
                f"names {who}, which is not `host:port`",
                "write a host name or an address, an IPv6 address in brackets, then a colon and the port",
            )
        if not 0 < int(found[2]) < 65536:
            raise _refusal(f"names {who}, and ports go from 1 to 65535", "give the task a port that its host has free")
        owner = owners.setdefault((task.host.lower(), task.port), task)
        if owner is not task:
            raise _refusal(
                f"names `{task.address}` for {owner.role} {owner.index} and for {task.role} {task.index}",
                "give every process an address of its own; processes on one host differ by their ports",
            )
    local = [task for task in tasks if means_itself(task.host)]
    others = [task for task in tasks if not means_itself(task.host)]
    if local and others:
        raise _refusal(
            f"names `{local[0].address}` for {local[0].role} {local[0].index} beside `{others[0].address}` for "
            f"{others[0].role} {others[0].index}, and every host takes `{local[0].host}` for itself",
            "name each host as the others reach it",
        )


def means_itself(host: str) -> bool:
    """Whether every host takes this name or address for itself, such as `localhost`."""
    return host.lower() in ("localhost", "::1", "0.0.0.0", "::") or bool(re.fullmatch(r"127(\.[0-9]+){3}", host))


def _from_places(source: str, names: Sequence[str], environment: Mapping[str, str]) -> World:
    rank_name, size_name, *local_names = names
    if size_name not in environment:
        raise UsageError(
            f"`{rank_name}` is `{environment[rank_name]}`, and `{size_name}` is not set",
            f"start the processes with {source.partition(' ')[0]}, or unset `{rank_name}` to train alone",
        )
    rank, size = _number(environment, rank_name), _number(environment, size_name)
    # Without the local ones, all processes are taken to be on this machine.
    known = all(name in environment for name in local_names)
    local_rank, local_size = (_number(environment, name) for name in local_names) if known else (rank, size)
    if not (rank < size and local_rank < local_size <= size):
        raise UsageError(
            f"`{rank_name}` is {rank} of `{size_name}` {size}, and this process is number {local_rank} of the "
            f"{local_size} on its machine",
            f"start the processes with {source.partition(' ')[0]}, or unset `{rank_name}` to train alone",
        )
    if size == 1:
        return World(source=f"{source} ({rank_name}, {size_name})")
    return World(rank, size, local_rank, local_size, f"{source} ({rank_name}, {size_name})")


def _from_slurm(environment: Mapping[str, str]) -> World:
    size_name = _set(environment, SLURM_SIZE)
    size, rank = _number(environment, size_name), _number(environment, SLURM_RANK)
    if size == 1:
        return World(source=f"Slurm ({size_name})")
    nodes_name = _set(environment, SLURM_NODES)
    nodes = expand_hosts(environment[nodes_name], nodes_name)
    counts_name = next((name for name in SLURM_TASKS_PER_NODE if environment.get(name)), None)
    # Slurm itself spreads tasks evenly where it is told nothing else.
    counts = [size // len(nodes)] * len(nodes) if counts_name is None else _expand_counts(counts_name, environment)
    if len(counts) != len(nodes) or sum(counts) != size or rank >= size:
        raise _slurm_refusal(
            f"`{SLURM_RANK}` is {rank} of `{size_name}` {size}, and `{nodes_name}` has {len(nodes)} nodes with "
            f"{sum(counts)} tasks in {f'`{counts_name}`' if counts_name else 'equal parts'}"
        )
    hosts = [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]
    places = [place for count in counts for place in range(count)]
    if SLURM_LOCAL_RANK in environment and _number(environment, SLURM_LOCAL_RANK) != places[rank]:
        raise UsageError(
            f"`{SLURM_LOCAL_RANK}` is {environment[SLURM_LOCAL_RANK]}, and rank {rank} would be number {places[rank]} "
            f"on its node if the ranks of `{nodes_name}` followed each other node by node",
            "start the tasks with `srun --distribution=block`",
        )
    job = _number(environment, SLURM_JOB) if SLURM_JOB in environment else 0
    first_port = SLURM_FIRST_PORT + job * SLURM_PORTS_A_JOB % SLURM_PORTS
    roles = _slurm_roles(environment, size)
    tasks = tuple(
        Task(role, roles[:position].count(role), f"{host}:{first_port + place}")
        for position, (role, host, place) in enumerate(zip(roles, hosts, places, strict=True))
    )
    names = [SLURM_RANK, size_name, nodes_name, counts_name or "", SLURM_JOB, PARAMETER_SERVERS]
    return _world(rank, tasks, f"Slurm ({', '.join(name for name in names if name in environment)})")


def _slurm_roles(environment: Mapping[str, str], size: int) -> list[str]:
    servers = _number(environment, PARAMETER_SERVERS) if environment.get(PARAMETER_SERVERS) else 0
    if servers == 0:
        return ["worker"] * size
    if servers > size - 2:
        raise UsageError(
            f"`{PARAMETER_SERVERS}` is {servers} in a step of {size} tasks",
            "the first task is the chief, and at least one more must be a worker",
        )
    return ["chief", *["worker"] * (size - 1 - servers), *["ps"] * servers]


def _set(environment: Mapping[str, str], names: Sequence[str]) -> str:
    """The first of `names` that is set."""
    name = next((name for name in names if environment.get(name)), None)
    if name is None:
        either = " nor ".join(f"`{name}`" for name in names)
        raise _slurm_refusal(f"`{SLURM_RANK}` is `{environment[SLURM_RANK]}`, and neither {either} is set")
    return name


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not re.fullmatch("[0-9]{1,18}", text):
        raise UsageError(
            f"`{name}` is `{_shortened(text)}`, which is not a number from 0", f"correct or unset `{name}`"
        )
    return int(text)


def expand_hosts(text: str, name: str = "the list of hosts") -> list[str]:
    """The hosts of a list as Slurm writes it; `name` is what messages call it.

    >>> expand_hosts("gpu[01-03,7],login1")
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login1']

    Raises:
        UsageError: a bracket or a range that cannot be.
    """
    try:
        hosts = [host for item in _split(text) for host in _expand_item(item)]
    except ValueError as error:
        raise _slurm_refusal(f"`{name}` is `{_shortened(text)}`, {error}") from error
    if not all(hosts):
        raise _slurm_refusal(f"`{name}` is `{_shortened(text)}`, which has an empty name")
    return hosts


def _split(text: str) -> list[str]:
    """The parts of `text` between the commas that stand outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth < 0:
            break
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth != 0:
        raise ValueError("whose brackets do not match")
    return parts


def _expand_item(item: str) -> list[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    depth, end = 1, 0
    while depth:
        depth += (rest[end] == "[") - (rest[end] == "]")
        end += 1
    middles = [middle for part in _split(rest[: end - 1]) for middle in _expand_range(part)]
    tails = _expand_item(rest[end:])
    if len(middles) * len(tails) > MOST_HOSTS:
        raise ValueError(f"which names more than {MOST_HOSTS} hosts")
    return [head + middle + tail for middle in middles for tail in tails]


def _expand_range(part: str) -> list[str]:
    """What one part between brackets stands for; numbers keep the width that the first is written with."""
    if "[" in part:
        return _expand_item(part)
    first, dash, last = part.partition("-")
    if not (re.fullmatch("[0-9]{1,18}", first) and re.fullmatch("[0-9]{1,18}" if dash else "", last)):
        raise ValueError(f"whose `{part}` is neither a number nor a range")
    if not dash:
        return [first]
    if not 0 <= int(last) - int(first) < MOST_HOSTS:
        raise ValueError(f"whose range `{part}` goes down or names more than {MOST_HOSTS} hosts")
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def _expand_counts(name: str, environment: Mapping[str, str]) -> list[int]:
    """How many tasks each node has, from a text such as `2(x3),1`."""
    counts: list[int] = []
    for item in environment[name].split(","):
        found = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", item)
        if found is None:
            raise _slurm_refusal(f"`{name}` is `{_shortened(environment[name])}`, and not of the form `2(x3),1`")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _world(rank: int, tasks: tuple[Task, ...], source: str) -> World:
    # All names that a machine has for itself are the same machine.
    machines = ["localhost" if means_itself(task.host) else task.host.lower() for task in tasks]
    here = machines[rank]
    return World(rank, len(tasks), machines[:rank].count(here), Counter(machines)[here], source, tasks)


def _refusal(
    what: str,
    hint: str = 'write it as `{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}`',
) -> UsageError:
    return UsageError(f"`{TF_CONFIG}` {what}", hint)


def _slurm_refusal(what: str) -> UsageError:
    return UsageError(
        what, "start the processes with `srun`, all in one step, or unset Slurm's variables to train alone"
    )


def _shortened(text: str) -> str:
    """What a message can show of a value."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
