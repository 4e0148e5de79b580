"""`python -m tfdist.launch --workers 2 script.py ARGS`: starts a program in several processes that know each other.

Nothing slow is imported here; the processes are started by `tfdist.launcher`.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from tfdist import terminal
from tfdist.errors import TfdistError, UsageError
from tfdist.launcher import job
from tfdist.launcher.elastic_options import ElasticWishes, elastic_options


@click.command(
    context_settings={
        "help_option_names": ["-h", "--help"],
        # What comes after the program's name is the program's own.
        "allow_interspersed_args": False,
    }
)
@click.option("--workers", type=int, default=2, show_default=True, help="processes that train")
@click.option("--ps", type=int, default=0, show_default=True, help="parameter servers, and a chief beside them")
@click.option("--mpi", is_flag=True, help="have mpirun start them")
@click.option("--hosts", default="", metavar="A:2,B:2", help="start them there over ssh, in turn")
@click.option("--hostfile", type=click.Path(path_type=Path), help="the same from a file of lines `A slots=2`; watched")
@click.option("--ssh-options", default="", metavar="TEXT", help="what ssh is given besides the host")
@elastic_options
@click.option("--restarts", type=int, default=0, show_default=True, help="start again so often after a failure")
@click.option("--expose", is_flag=True, help="leave the job in this machine's network, open to others")
@click.option("--start-seconds", type=float, default=60.0, show_default=True, help="deadline for all to start")
@click.option("--log-dir", type=click.Path(path_type=Path), help="each process' output; below logs/ if not given")
@click.option("--verbose", is_flag=True, help="show the output of all processes, not the chief's alone")
@click.option("--emit", metavar="slurm|kubernetes", help="print a batch script, or manifests, that run the same job")
@click.option("-m", "module", is_flag=True, help="PROGRAM is a module, as for python -m")
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
) -> None:
    """Start PROGRAM, a script or a module with its arguments, in several processes of one job."""
    try:
        name = job.new_name()
        wanted = job.Job(
            command=("-m", *program) if module and program else program,
            hosts=job.read_hostfile(hostfile) if hostfile else job.parse_hosts(hosts),
            ssh_options=_words(ssh_options),
            log_dir=log_dir or Path("logs") / name,
            name=name,
            **options,  # type: ignore[arg-type]
        )
        wishes = ElasticWishes(elastic, min_workers, max_workers, host_discovery_script)
        code = _emit(wanted, emit) if emit else _run_elastic(wanted, wishes, hostfile) if elastic else _run(wanted)
    except TfdistError as error:
        click.echo(f"error: {error}", err=True)
        code = error.exit_code
    sys.exit(code)


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"`--ssh-options` is `{text}`: {str(error).lower()}", "write it as a shell takes it"
        ) from error


def _run(wanted: job.Job) -> int:
    from tfdist.launcher import run

    return run.run(wanted)


def _run_elastic(wanted: job.Job, wishes: ElasticWishes, hostfile: Path | None) -> int:
    from tfdist.launcher import elastic

    if wanted.ps or wanted.mpi:
        option = "--ps" if wanted.ps else "--mpi"
        raise UsageError(f"`{option}` is set beside `--elastic`", "leave out the one or the other")
    return elastic.run(wanted, wishes.members(hostfile, wanted.hosts, wanted.workers))


def _emit(wanted: job.Job, kind: str) -> int:
    from tfdist.launcher import emit

    printers = {"slurm": emit.slurm, "kubernetes": emit.kubernetes}
    if kind not in printers:
        raise UsageError(f"`--emit` is `{kind}`", "use `slurm` or `kubernetes`")
    with terminal.any_stdout(needed=True):
        click.echo(printers[kind](wanted), nl=False)
    return 0


def main() -> None:
    """The command."""
    command(prog_name="python -m tfdist.launch")


if __name__ == "__main__":
    main()
