"""The processes of a job as Slurm's variables describe them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tfdist.errors import UsageError
from tfdist.jobs.job_environment import number, shortened
from tfdist.jobs.tf_config import Task

RANK = "SLURM_PROCID"
LOCAL_RANK = "SLURM_LOCALID"
JOB = "SLURM_JOB_ID"
# A step may be smaller than its job, so the variables of the step take precedence.
SIZE = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
# Slurm has no variable for roles. This variable is the number of parameter servers: they are the last tasks of the
# step, and the first task is the chief.
PARAMETER_SERVERS = "TFDIST_PS"
# Slurm assigns no ports either. Each job number has 16 of these 10,000, which are below Linux' ephemeral ports.
FIRST_PORT, PORTS, PORTS_PER_JOB = 20_000, 10_000, 16

# A limit that no real list of hosts exceeds: `n[0-9999999999]` must not fill the memory.
MOST_HOSTS = 100_000


def parse(environment: Mapping[str, str]) -> tuple[int, tuple[Task, ...], str]:
    """The rank of this process, all tasks, and the names of the variables; no tasks if there is one process.

    Raises:
        UsageError: the variables contradict each other, or do not have Slurm's format.
    """
    size_name = _set(environment, SIZE)
    size, rank = number(environment, size_name), number(environment, RANK)
    if size == 1:
        return 0, (), f"Slurm ({size_name})"
    nodes_name = _set(environment, NODES)
    nodes = expand_hosts(environment[nodes_name], nodes_name)
    counts_name = next((name for name in TASKS_PER_NODE if environment.get(name)), None)
    # By default, Slurm distributes tasks evenly.
    counts = [size // len(nodes)] * len(nodes) if counts_name is None else _expand_counts(counts_name, environment)
    if len(counts) != len(nodes) or sum(counts) != size or rank >= size:
        raise _refusal(
            f"`{RANK}` is {rank} of `{size_name}` {size}, and `{nodes_name}` has {len(nodes)} nodes with "
            f"{sum(counts)} tasks in {f'`{counts_name}`' if counts_name else 'equal parts'}"
        )
    hosts = [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]
    local_ranks = [local_rank for count in counts for local_rank in range(count)]
    if LOCAL_RANK in environment and number(environment, LOCAL_RANK) != local_ranks[rank]:
        raise UsageError(
            f"`{LOCAL_RANK}` is {environment[LOCAL_RANK]}, and rank {rank} would be number {local_ranks[rank]} "
            f"on its node if the ranks of `{nodes_name}` followed each other node by node",
            "start the tasks with `srun --distribution=block`",
        )
    job = number(environment, JOB) if JOB in environment else 0
    first_port = FIRST_PORT + job * PORTS_PER_JOB % PORTS
    roles = _roles(environment, size)
    tasks = tuple(
        Task(role, roles[:position].count(role), f"{host}:{first_port + local_rank}")
        for position, (role, host, local_rank) in enumerate(zip(roles, hosts, local_ranks, strict=True))
    )
    names = [RANK, size_name, nodes_name, counts_name or "", JOB, PARAMETER_SERVERS]
    return rank, tasks, f"Slurm ({', '.join(name for name in names if name in environment)})"


def _roles(environment: Mapping[str, str], size: int) -> list[str]:
    servers = number(environment, PARAMETER_SERVERS) if environment.get(PARAMETER_SERVERS) else 0
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
        raise _refusal(f"`{RANK}` is `{environment[RANK]}`, and neither {either} is set")
    return name


def expand_hosts(text: str, name: str = "the list of hosts") -> list[str]:
    """The hosts of a list in Slurm's notation; messages call the list `name`.

    >>> expand_hosts("gpu[01-03,7],login1")
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login1']

    Raises:
        UsageError: a bracket or a range is invalid.
    """
    try:
        hosts = [host for item in _split(text) for host in _expand_item(item)]
    except ValueError as error:
        raise _refusal(f"`{name}` is `{shortened(text)}`, {error}") from error
    if not all(hosts):
        raise _refusal(f"`{name}` is `{shortened(text)}`, which has an empty name")
    return hosts


def _split(text: str) -> list[str]:
    """Splits `text` at the commas outside of brackets."""
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
    head, bracket, tail = item.partition("[")
    if not bracket:
        return [item]
    depth, end = 1, 0
    while depth:
        depth += (tail[end] == "[") - (tail[end] == "]")
        end += 1
    middles = [middle for part in _split(tail[: end - 1]) for middle in _expand_range(part)]
    tails = _expand_item(tail[end:])
    if len(middles) * len(tails) > MOST_HOSTS:
        raise ValueError(f"which names more than {MOST_HOSTS} hosts")
    return [head + middle + tail for middle in middles for tail in tails]


def _expand_range(part: str) -> list[str]:
    """The numbers of one part between brackets, with at least as many digits as the first number."""
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
    """The number of tasks on each node, from a text such as `2(x3),1`."""
    counts: list[int] = []
    for item in environment[name].split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", item)
        if match is None:
            raise _refusal(f"`{name}` is `{shortened(environment[name])}`, and not of the form `2(x3),1`")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _refusal(sentence: str) -> UsageError:
    return UsageError(
        sentence, "start the processes with `srun`, all in one step, or unset Slurm's variables to train alone"
    )
