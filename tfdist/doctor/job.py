"""Checks the variables that describe a job: TF_CONFIG with its hosts and ports, Slurm, or those of an MPI launcher."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping

from tfdist import strategies
from tfdist.doctor import network
from tfdist.doctor.finding import Finding, note, of_error, ok, problem
from tfdist.errors import UsageError
from tfdist.jobs import ports, slurm
from tfdist.jobs.job_environment import TF_CONFIG
from tfdist.jobs.world import ALONE, PMI, VARIABLES_OF_RANKS, World

SUBJECT = "job"
MOST_HOSTS = 256  # hosts whose names are resolved
MOST_NAMED = 4  # unresolved hosts that are named in a finding


def findings(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """The findings about the job of this process, and about Slurm."""
    return [*job_findings(environment), *_slurm(environment)]


def malformed(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """The problem of variables that describe an impossible job; empty if there is none."""
    try:
        World.detect(environment)
    except UsageError as error:
        return [of_error(SUBJECT, error)]
    return []


def job_findings(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Checks that the described job is possible, and that this process can listen on its address in it."""
    problems = malformed(environment)
    if problems:
        return problems
    world = World.detect(environment)
    if world.source == ALONE:
        return [ok(SUBJECT, "No variable describes a job: a process that is started here trains alone")]
    if world.is_evaluator:
        return [ok(SUBJECT, f"{world.source} makes this process {world.place}, which takes no part in the training")]
    findings = [*_other_descriptions(world, environment), *_hosts(world), *_own_address(world)]
    sentence = f"{world.source} makes this process rank {world.rank} of {world.world_size}"
    return findings if any(finding.is_problem for finding in findings) else [ok(SUBJECT, sentence), *findings]


def has_several_processes(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the variables describe a valid job of several processes."""
    return not malformed(environment) and World.detect(environment).world_size > 1


def single_process_findings(strategy: str, environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """The problem of a strategy that trains in one process within a job of several processes; empty elsewhere."""
    if not has_several_processes(environment):
        return []
    world = World.detect(environment)
    others = ", ".join(strategies.having("processes"))
    unset = f"unset {TF_CONFIG}" if world.source == TF_CONFIG else "start a single process"
    return [
        problem(
            SUBJECT,
            f"{world.source} describes {world.world_size} processes, and `{strategy}` trains in one: `tfdist train` "
            "refuses this, and a script would train a separate model in each process",
            f"{unset} to train in this process alone, or use one of {others}",
        )
    ]


def _other_descriptions(world: World, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Reports descriptions of the job that are ignored in favour of another one."""
    known = {
        TF_CONFIG: TF_CONFIG,
        **{names[0]: source for source, names in {**VARIABLES_OF_RANKS, **PMI}.items()},
        slurm.RANK: "Slurm",
    }
    others = [name for name, source in known.items() if environment.get(name) and not world.source.startswith(source)]
    if others:
        yield note(
            SUBJECT,
            f"The job is described by {world.source}, and also by {', '.join(f'`{name}`' for name in others)}, which "
            "are ignored",
            "start the processes with only one of these",
        )


def _hosts(world: World) -> Iterator[Finding]:
    """Reports hosts whose names have no address."""
    addresses = network.look_up(list(dict.fromkeys(task.host for task in world.tasks))[:MOST_HOSTS])
    unresolved = [host for host in addresses if addresses[host] is None]
    if unresolved:
        names = ", ".join(f"`{host}`" for host in unresolved[:MOST_NAMED])
        more = " and others" if len(unresolved) > MOST_NAMED else ""
        yield problem(
            SUBJECT,
            f"{world.source} names {names}{more}, which this machine cannot resolve",
            "correct the name, add it to /etc/hosts, or use an address instead",
        )


def _own_address(world: World) -> Iterator[Finding]:
    """Checks that the address of this process belongs to this machine and that its port is free."""
    task = world.task
    if task is None:
        return
    addresses = network.look_up([task.host])[task.host]
    if addresses is not None and not network.is_here(task.host, addresses):
        yield problem(
            SUBJECT,
            f"{world.source} says that this process is {task}, but `{task.host}` resolves to {', '.join(addresses)}, "
            "which no network interface of this machine has",
            "start this process on that host, or correct the `task`, or the host's entry in /etc/hosts",
        )
    try:
        ports.listen(task.port).close()
    except OSError as error:
        yield problem(
            SUBJECT,
            f"Port {task.port} of this process, {task}, cannot be listened on: {error.strerror}",
            f"end the program that uses it (`ss -ltnp sport = :{task.port}`), or give the task another port",
        )


def _slurm(environment: Mapping[str, str]) -> Iterator[Finding]:
    if slurm.JOB in environment and slurm.RANK not in environment:
        yield note(
            "Slurm",
            f"This is in the allocation of job {environment[slurm.JOB]} but not in one of its steps: a process that "
            "is started here trains alone",
            "start the processes with `srun`",
        )
    elif shutil.which("srun") is None:
        yield ok("Slurm", "There is no `srun` on the path: this machine is not in a Slurm cluster")
    else:
        yield ok("Slurm", f"`{shutil.which('srun')}` starts the processes of a job; see docs/slurm.md")
