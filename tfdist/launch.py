"""`python -m tfdist.launch --workers 2 script.py ARGS`: starts a program in several processes of one job.

Nothing slow is imported here; `tfdist.launcher` starts the processes.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import click

from tfdist import redaction, terminal
from tfdist.errors import UsageError
from tfdist.launcher import job
from tfdist.launcher.elastic import ElasticOptions, elastic_options

_processes = terminal.options_of("Processes")
_hosts = terminal.options_of("Hosts")
_output = terminal.options_of("Output and program")

EXAMPLES = """\b
Examples:
  python -m tfdist.launch --workers 2 script.py
  python -m tfdist.launch --workers 4 --hosts node1:2,node2:2 script.py
  python -m tfdist.launch --workers 4 --emit slurm script.py
"""


@click.command(
    cls=terminal.Command,
    epilog=EXAMPLES,
    context_settings={
        # Arguments after the program's name belong to the program.
        "allow_interspersed_args": False,
    },
)
@_processes("--workers", type=int, default=2, show_default=True, metavar="N", help="number of training processes")
@_processes(
    "--ps", type=int, default=0, show_default=True, metavar="N", help="number of parameter servers; adds a chief"
)
@elastic_options
@_processes(
    "--restarts", type=int, default=0, show_default=True, metavar="N", help="restarts of the job after a failure"
)
@_processes(
    "--start-seconds",
    type=float,
    default=60.0,
    show_default=True,
    metavar="S",
    help="deadline for all processes to start",
)
@_hosts("--hosts", default="", metavar="A:2,B:2", help="hosts and their slots, reached over ssh, in rank order")
@_hosts("--hostfile", type=click.Path(path_type=Path), metavar="FILE", help="hosts as lines `A slots=2`")
@_hosts("--ssh-options", default="", metavar="TEXT", help="additional options of ssh")
@_hosts("--on", default="", metavar="ray", help="start the processes on a Ray cluster")
@_hosts("--mpi", is_flag=True, help="start the processes with mpirun")
@_hosts("--expose", is_flag=True, help="do not isolate the job's network")
@_hosts(
    "--emit", metavar="slurm|kubernetes|trainjob|tfjob", help="print a batch script or manifests that run the same job"
)
@_output(
    "--log-dir", type=click.Path(path_type=Path), metavar="FOLDER", help="output of each process; in logs/ by default"
)
@_output("--verbose", is_flag=True, help="show the output of all processes, not only the chief's")
@_output("-m", "module", is_flag=True, help="PROGRAM is a module, as for python -m")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def command(
    hosts: str,
    hostfile: Path | None,
    ssh_options: str,
    log_dir: Path | None,
    emit: str | None,
    module: bool,
    program: tuple[str, ...],
    elastic: bool,
    min_workers: int | None,
    max_workers: int | None,
    host_discovery_script: Path | None,
    **options: object,
) -> int:
    """Start PROGRAM, a script or a module with its arguments, in several processes of one job."""
    name = job.new_name()
    wanted = job.Job(
        command=("-m", *program) if module and program else program,
        hosts=job.read_hostfile(hostfile) if hostfile else job.parse_hosts(hosts),
        ssh_options=_words(ssh_options),
        log_dir=log_dir or Path("logs") / name,
        name=name,
        **options,  # type: ignore[arg-type]
    )
    elastic_job = ElasticOptions(elastic, min_workers, max_workers, host_discovery_script)
    if emit:
        if elastic:
            raise UsageError(
                f"`--elastic` and `--emit {emit}` are both set, but a job of this scheduler has a fixed size",
                "use `--restarts`: after a failure or a preemption all processes restart from the last checkpoint",
            )
        given = {f"--on {wanted.on}": wanted.on, "--mpi": wanted.mpi, "--expose": wanted.expose}
        given |= {"--ssh-options": ssh_options, "--log-dir": log_dir, "--verbose": wanted.verbose}
        _refuse_without_effect(given, emit)
        return _emit(wanted, emit)
    if elastic:
        return _run_elastic(wanted, elastic_job, hostfile)
    from tfdist.launcher import run

    return run.run(wanted)


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"`--ssh-options` is `{text}`: {str(error).lower()}", "quote it as for a shell") from error


def _run_elastic(wanted: job.Job, elastic_job: ElasticOptions, hostfile: Path | None) -> int:
    from tfdist.launcher import elastic

    if wanted.ps or wanted.mpi or wanted.on:
        option = "--ps" if wanted.ps else "--mpi" if wanted.mpi else "--on"
        raise UsageError(f"`{option}` and `--elastic` are both set", "leave one of them out")
    return elastic.run(wanted, elastic_job.members(hostfile, wanted.hosts, wanted.workers))


def _refuse_without_effect(given: Mapping[str, object], kind: str) -> None:
    """Refuses options that say how the launcher starts processes, if a scheduler starts them."""
    for option, value in given.items():
        if value:
            raise UsageError(
                f"`{option}` and `--emit {kind}` are both set, and the scheduler starts the processes itself",
                "leave one of them out",
            )


def _emit(wanted: job.Job, kind: str) -> int:
    from tfdist.launcher import emit

    if kind not in emit.TARGETS:
        raise UsageError(f"`--emit` is `{kind}`", "use " + ", ".join(f"`{target}`" for target in emit.TARGETS))
    text = emit.TARGETS[kind](wanted)
    if redaction.hide_in_command(wanted.command) != list(wanted.command):
        click.echo(
            "warning: The command has a password, a token or a key, and so has this text: let the program read it from "
            "a file or a variable instead, or keep this text to yourself",
            err=True,
        )
    with terminal.guarded_stdout(needed=True):
        click.echo(text, nl=False)
    return 0


if __name__ == "__main__":
    command(prog_name="python -m tfdist.launch")
