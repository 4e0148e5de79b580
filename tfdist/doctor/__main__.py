"""`python -m tfdist.doctor`, or `tfdist doctor`: report what works on this machine, what does not, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import click

from tfdist import terminal
from tfdist.doctor import engines, folders, gpus, job, links, machine, network, packages, page, readiness
from tfdist.doctor.finding import Finding, problem
from tfdist.errors import EXIT_DIFFERENT

# Longer than the time limits of one subject's child processes together.
SECONDS_PER_SUBJECT = 300.0


@click.command(
    cls=terminal.Command,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": terminal.HELP_WIDTH},
)
@click.option("--data-dir", type=click.Path(path_type=Path), help="folder of datasets, as for tfdist train")
@click.option("--all-reduce/--no-all-reduce", default=True, help="start two processes and time their all-reduce")
@click.option("--json", "as_json", is_flag=True, help="print JSON, for programs")
def command(data_dir: Path | None, all_reduce: bool, as_json: bool) -> int:
    """Show what works on this machine, what does not and why, and which strategies are ready.

    The exit code is 0 if there is no problem, so that every strategy that needs no optional package is ready, and 1 if
    there is a problem. A missing optional package, such as Horovod, is only a note.
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
    findings = [finding for subject, check in subjects.items() for finding in collect(check, subject)]
    measurements = links.measure() if all_reduce else []
    findings += links.findings(measurements)
    strategies = readiness.of_all(measurements)
    with terminal.guarded_stdout(needed=True):
        if as_json:
            click.echo(page.as_json(findings, measurements, strategies))
        else:
            page.show(findings, strategies)
    return EXIT_DIFFERENT if any(finding.is_problem for finding in findings) else 0


def collect(
    check: Callable[[], Iterable[Finding]], subject: str, seconds: float = SECONDS_PER_SUBJECT
) -> list[Finding]:
    """Returns a subject's findings, or a problem if `check` raises an error or blocks, as on a lost file system."""
    findings: list[Finding] = []

    def run() -> None:
        try:
            findings.extend(check())
        except Exception as error:  # a check that fails must not hide the other subjects
            sentence = f"This check failed: {type(error).__name__}: {error}"
            findings.append(problem(subject, sentence, "report this, with the output of `tfdist env`"))

    network.call_within([run], seconds)
    hint = "check that the disks and the name servers of this machine respond"
    return findings or [problem(subject, f"This check did not finish within {seconds:g} s", hint)]


def main() -> None:
    """Runs the command."""
    command(prog_name="python -m tfdist.doctor")


if __name__ == "__main__":
    main()
