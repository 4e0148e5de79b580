"""What describes a job here: TF_CONFIG with its hosts and ports, Slurm, or the variables of an MPI launcher."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping

from tfdist import strategies
from tfdist.doctor import network
from tfdist.doctor.finding import Finding, note, of_error, ok, problem
from tfdist.errors import UsageError
from tfdist.jobs import cluster_file, ports, slurm
from tfdist.jobs.world import PMI, VARIABLES_OF_RANKS, World

SUBJECT = "job"
MOST_HOSTS = 256  # that are looked up
HEADED = 4  # so many names are written out


def findings(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """What was found out about the job that this process is in, or could be in."""
    return [*described(environment), *_slurm(environment)]


def malformed(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """The problem of variables that describe no job that can be; empty if there is none."""
    try:
        World.detect(environment)
    except UsageError as error:
        return [of_error(SUBJECT, error)]
    return []


def described(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Whether the job that variables describe can be, and whether this process can have its address in it."""
    wrong = malformed(environment)
    if wrong:
        return wrong
    world = World.detect(environment)
    if world.source == "alone":
        return [ok(SUBJECT, "No variable describes a job: a process that is started here trains alone")]
    found = [*_other_descriptions(world, environment), *_hosts(world), *_own_address(world)]
    place = f"By {world.source}, this process is rank {world.rank} of {world.world_size}"
    return found if any(one.is_problem for one in found) else [ok(SUBJECT, place), *found]


def of_several(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether variables describe a job of several processes, which can be."""
    return not malformed(environment) and World.detect(environment).world_size > 1


def of_one_process(strategy: str, environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """The problem of a strategy that trains in one process, in a job of several; empty outside of one."""
    if not of_several(environment):
        return []
    world = World.detect(environment)
    others = ", ".join(strategies.having("processes"))
    unset = f"unset {cluster_file.TF_CONFIG}" if world.source == cluster_file.TF_CONFIG else "start one process alone"
    return [
        problem(
            SUBJECT,
            f"{world.source} describes {world.world_size} processes, and `{strategy}` trains in one: `tfdist train` "
            "refuses it there, and a script would train a model of its own in each process",
            f"{unset} to train in this process alone, or use one of {others}",
        )
    ]


def _other_descriptions(world: World, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Says where several descriptions are there, of which one counts."""
    known = {
        cluster_file.TF_CONFIG: cluster_file.TF_CONFIG,
        **{names[0]: source for source, names in {**VARIABLES_OF_RANKS, **PMI}.items()},
        slurm.RANK: "Slurm",
    }
    others = [name for name, source in known.items() if environment.get(name) and not world.source.startswith(source)]
    if others:
        yield note(
            SUBJECT,
            f"The job is described by {world.source}, and also by {', '.join(f'`{name}`' for name in others)}, which "
            "do not count",
            "start the processes by one of these alone",
        )


def _hosts(world: World) -> Iterator[Finding]:
    """Hosts without an address."""
    found = network.look_up(list(dict.fromkeys(task.host for task in world.tasks))[:MOST_HOSTS])
    lost = [host for host, addresses in found.items() if addresses is None]
    if lost:
        names = ", ".join(f"`{host}`" for host in lost[:HEADED]) + (" and others" if len(lost) > HEADED else "")
        yield problem(
            SUBJECT,
            f"{world.source} names {names}, and this machine finds no address of that name",
            "correct the name, add it to /etc/hosts, or write an address in its place",
        )


def _own_address(world: World) -> Iterator[Finding]:
    """Whether the address of this process is this machine's, and its port is free."""
    task = world.task
    if task is None:
        return
    addresses = network.look_up([task.host])[task.host]
    if addresses is not None and not network.is_here(task.host, addresses):
        yield problem(
            SUBJECT,
            f"{world.source} says that this process is {task}, and `{task.host}` leads to {', '.join(addresses)}, "
            "which no network interface of this machine has",
            "start this process on that host, or correct the `task`, or the host's entry in /etc/hosts",
        )
    try:
        ports.listen(task.port).close()
    except OSError as error:
        yield problem(
            SUBJECT,
            f"Port {task.port} of this process, {task}, cannot be listened on: {error.strerror}",
            f"end the program that holds it (`ss -ltnp sport = :{task.port}`), or give the task another port",
        )


def _slurm(environment: Mapping[str, str]) -> Iterator[Finding]:
    if slurm.JOB in environment and slurm.RANK not in environment:
        yield note(
            "Slurm",
            f"This is in the allocation of job {environment[slurm.JOB]}, and not in one of its steps: a process that "
            "is started here trains alone",
            "start the processes with `srun`",
        )
    elif shutil.which("srun") is None:
        yield ok("Slurm", "There is no `srun` on the path: this machine is not in a cluster of Slurm's")
    else:
        yield ok("Slurm", f"`{shutil.which('srun')}` starts the processes of a job; see docs/slurm.md")
