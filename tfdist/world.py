"""Who am I among whom: read once, frozen, with its source.

Pure parsing: this module never imports TensorFlow. A process that was started alone is a world of one.

Synopsis:

    >>> World.detect({})
    World(rank=0, world_size=1, local_rank=0, local_world_size=1, source='alone', tasks=())
    >>> environment = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]"}
    >>> World.detect(environment).named(1)
    'worker 1 (n2:20007)'
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictInt, StrictStr, ValidationError

from tfdist.errors import UsageError

# In the order of their ranks.
ROLES = ("chief", "worker", "ps")

SLURM_RANK = "SLURM_PROCID"
SLURM_SIZE = "SLURM_NTASKS"
SLURM_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
SLURM_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
SLURM_JOB = "SLURM_JOB_ID"
# Under Slurm no variable tells roles: the last so many tasks of a step are parameter servers, the first is the chief.
PARAMETER_SERVERS = "TFDIST_PS"
SLURM_FIRST_PORT, SLURM_PORTS = 20_000, 10_000


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
        source: where the numbers were read.
        tasks: all processes of the job by rank: chief, workers, parameter servers; empty when alone.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    source: str = "alone"
    tasks: tuple[Task, ...] = ()

    @classmethod
    def detect(cls, environment: Mapping[str, str] = os.environ) -> World:
        """The world that `environment` describes: by TF_CONFIG, else by Slurm's variables, else one process.

        Raises:
            UsageError: the description contradicts itself; the message says which field.
        """
        if environment.get("TF_CONFIG", "").strip():
            return _from_tf_config(environment["TF_CONFIG"])
        if SLURM_RANK in environment and int(environment.get(SLURM_SIZE, "1")) > 1:
            return _from_slurm(environment)
        return cls()

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files of the run."""
        return self.rank == 0

    @property
    def task(self) -> Task | None:
        """This process' own task; `None` when alone."""
        return self.tasks[self.rank] if self.tasks else None

    def tasks_of(self, role: str) -> list[Task]:
        """The tasks of a role, by their numbers."""
        return [task for task in self.tasks if task.role == role]

    def cluster(self) -> dict[str, list[str]]:
        """The addresses by role, as TF_CONFIG and `tf.train.ClusterSpec` have them."""
        return {role: [t.address for t in self.tasks_of(role)] for role in ROLES if self.tasks_of(role)}

    def tf_config(self) -> str:
        """This world as the TF_CONFIG of this process, which TensorFlow's resolver reads; `{}` when alone."""
        task = self.task
        if task is None:
            return "{}"
        return json.dumps({"cluster": self.cluster(), "task": {"type": task.role, "index": task.index}})

    def named(self, rank: int) -> str:
        """How messages name a rank, such as `worker 1 (10.0.0.2:2222)`."""
        return str(self.tasks[rank]) if self.tasks else f"rank {rank}"


class _TaskField(BaseModel):
    model_config = ConfigDict(extra="ignore")
    type: StrictStr
    index: StrictInt


class _TfConfig(BaseModel):
    # TensorFlow's own fields that say nothing about who is who, such as `rpc_layer`, are let through.
    model_config = ConfigDict(extra="ignore")
    cluster: dict[StrictStr, list[StrictStr]]
    task: _TaskField


def _from_tf_config(text: str) -> World:
    try:
        found = _TfConfig.model_validate(json.loads(text))
    except json.JSONDecodeError as error:
        raise _refusal(f"is not JSON: {error.msg} at character {error.pos}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise _refusal(f"has a bad field `{field}`: {first['msg']}") from error
    unknown = sorted(set(found.cluster) - set(ROLES))
    if unknown:
        raise _refusal(f"has the role `{unknown[0]}` in `cluster`, and the roles are `chief`, `worker` and `ps`")
    tasks = tuple(
        Task(role, index, address) for role in ROLES for index, address in enumerate(found.cluster.get(role, []))
    )
    _check_addresses(tasks)
    ranks = [rank for rank, t in enumerate(tasks) if (t.role, t.index) == (found.task.type, found.task.index)]
    if not ranks:
        raise _refusal(f"says that this is `{found.task.type} {found.task.index}`, which `cluster` does not list")
    return _world(ranks[0], tasks, [task.host for task in tasks], "TF_CONFIG")


def _check_addresses(tasks: Sequence[Task]) -> None:
    seen: dict[str, Task] = {}
    for task in tasks:
        host, _, port = task.address.rpartition(":")
        what = f"the address `{task.address}` of {task.role} {task.index}"
        if not host or not port.isdigit():
            raise _refusal(f"has {what}, which is not `host:port`")
        if not 0 < int(port) < 65536:
            raise _refusal(f"has {what}, whose port is not from 1 to 65535")
        if task.address in seen:
            other = seen[task.address]
            raise _refusal(f"gives {what} to {other.role} {other.index} too")
        seen[task.address] = task
    local = [task for task in tasks if _is_loopback(task.host)]
    if local and len(local) < len(tasks):
        other = next(task for task in tasks if task not in local)
        raise _refusal(
            f"names the host `{local[0].host}` of {local[0].role} {local[0].index}, which on the host of "
            f"{other.role} {other.index}, `{other.host}`, is another machine"
        )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _from_slurm(environment: Mapping[str, str]) -> World:
    size, rank = int(environment[SLURM_SIZE]), int(environment[SLURM_RANK])
    nodes = expand_hosts(_first(environment, SLURM_NODES))
    counts = _expand_counts(_first(environment, SLURM_TASKS_PER_NODE, ""), len(nodes))
    hosts = [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]
    if len(hosts) != size or rank >= size:
        raise UsageError(
            f"Slurm's variables contradict each other: `{SLURM_SIZE}={size}` and `{SLURM_RANK}={rank}`, and the nodes "
            f"`{','.join(nodes)}` have {len(hosts)} tasks",
            "start the processes with `srun`, with one step for the whole job",
        )
    # Slurm gives no ports: two jobs on a node have different numbers, and so mostly different ports.
    first_port = SLURM_FIRST_PORT + int(environment.get(SLURM_JOB, "0")) % SLURM_PORTS
    places = [hosts[:position].count(host) for position, host in enumerate(hosts)]
    addresses = [f"{host}:{first_port + place}" for host, place in zip(hosts, places, strict=True)]
    servers = int(environment.get(PARAMETER_SERVERS, "0"))
    roles = ["worker"] * size if not servers else ["chief", *["worker"] * (size - servers - 1), *["ps"] * servers]
    tasks = tuple(
        Task(role, roles[:position].count(role), address)
        for position, (role, address) in enumerate(zip(roles, addresses, strict=True))
    )
    return _world(rank, tasks, hosts, "Slurm")


def _first(environment: Mapping[str, str], names: Sequence[str], default: str | None = None) -> str:
    found = next((environment[name] for name in names if environment.get(name)), default)
    if found is None:
        raise UsageError(f"Slurm has set `{SLURM_RANK}` and not `{names[0]}`", "start the processes with `srun`")
    return found


def expand_hosts(text: str) -> list[str]:
    """The hosts of a list as Slurm writes it.

    >>> expand_hosts("gpu[01-03,7],login1")
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login1']
    """
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        hosts += _expand_brackets(item)
    return hosts


def _expand_brackets(item: str) -> list[str]:
    found = re.fullmatch(r"([^\[\]]*)\[([^\]]*)\](.*)", item)
    if found is None:
        return [item]
    head, ranges, tail = found.groups()
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        width = len(first)
        numbers += [f"{number:0{width}d}" for number in range(int(first), int(last or first) + 1)]
    return [head + number + rest for number in numbers for rest in _expand_brackets(tail)]


def _expand_counts(text: str, nodes: int) -> list[int]:
    """Tasks on each node, from `2(x3),1`; one each where Slurm does not say."""
    counts: list[int] = []
    for item in filter(None, text.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if found is None:
            raise UsageError(f"`{SLURM_TASKS_PER_NODE[0]}` has `{item}`", "start the processes with `srun`")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts if len(counts) == nodes else [1] * nodes


def _world(rank: int, tasks: tuple[Task, ...], hosts: Sequence[str], source: str) -> World:
    here = [position for position, host in enumerate(hosts) if host == hosts[rank]]
    return World(rank, len(tasks), here.index(rank), len(here), source, tasks)


def _refusal(what: str) -> UsageError:
    return UsageError(
        f"`TF_CONFIG` {what}",
        'write it as {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}',
    )


def _main() -> int:
    from rich.console import Console
    from rich.table import Table

    try:
        world = World.detect()
    except UsageError as error:
        print(f"error: {error}")
        return error.exit_code
    rows: list[tuple[str, Any]] = [
        ("source", world.source),
        ("rank", f"{world.rank} of {world.world_size}"),
        ("local rank", f"{world.local_rank} of {world.local_world_size}"),
        *(
            (f"task {rank}", f"{task}{'  <- this process' if rank == world.rank else ''}")
            for rank, task in enumerate(world.tasks)
        ),
    ]
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows:
        table.add_row(name, str(value))
    Console(soft_wrap=True).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(_main())
