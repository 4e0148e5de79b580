"""`python -m tfdist.doctor`, or `tfdist doctor`: what works here and what does not, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import click

from tfdist import terminal
from tfdist.doctor import engines, folders, gpus, job, links, machine, network, packages, page, readiness
from tfdist.doctor.finding import Finding, problem
from tfdist.errors import EXIT_DIFFERENT

# Longer than the limits of the child processes of a subject together.
SECONDS_OF_A_SUBJECT = 300.0


@click.command(
    cls=terminal.Command,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": terminal.HELP_WIDTH},
)
@click.option("--data-dir", type=click.Path(path_type=Path), help="folder of datasets, as of tfdist train")
@click.option("--all-reduce/--no-all-reduce", default=True, help="start two processes, and time their all-reduce")
@click.option("--json", "as_json", is_flag=True, help="print JSON, for programs")
def command(data_dir: Path | None, all_reduce: bool, as_json: bool) -> int:
    """Show what works on this machine and what does not, why, and which strategies are ready.

    Exit code 0 if there is no problem, and the strategies that need no further package are ready; a package that is not
    installed and that few need, such as Horovod, is a note. Exit code 1 if there is a problem.
    """
    subjects = {
        "versions": packages.findings,
        "engines": engines.findings,
        "GPUs": gpus.findings,
        "machine": machine.findings,
        "network": network.findings,
        "job": job.findings,
        "folders": lambda: folders.findings(data_dir),
    }
    found = [one for subject, find in subjects.items() for one in asked(find, subject)]
    tried = links.measure() if all_reduce else []
    found += links.findings(tried)
    strategies = readiness.of_all(tried)
    with terminal.any_stdout(needed=True):
        if as_json:
            click.echo(page.as_json(found, tried, strategies))
        else:
            page.show(found, strategies)
    return EXIT_DIFFERENT if any(one.is_problem for one in found) else 0


def asked(find: Callable[[], Iterable[Finding]], subject: str, seconds: float = SECONDS_OF_A_SUBJECT) -> list[Finding]:
    """The findings of a subject; a problem if it does not answer, as a file system that has gone, or fails itself."""
    found: list[Finding] = []

    def ask() -> None:
        try:
            found.extend(find())
        except Exception as error:  # whatever is wrong with this subject, the others are still told
            sentence = f"It cannot be found out: {type(error).__name__}: {error}"
            found.append(problem(subject, sentence, "report this, with what `tfdist env` prints"))

    network.in_time([ask], seconds)
    sentence = f"Nothing was found out within {seconds:g} s"
    return found or [problem(subject, sentence, "see that the disks and the name servers of this machine answer")]


def main() -> None:
    """The command."""
    command(prog_name="python -m tfdist.doctor")


if __name__ == "__main__":
    main()
