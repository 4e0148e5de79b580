"""`python -m tfdist.doctor`, or `tfdist doctor`: report what works on this machine, what does not, and why.

`tfdist env` prints versions, machine, job and variables as text to paste into a bug report.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from tfdist import __version__, redaction, terminal, world
from tfdist.doctor import engines, folders, gpus, job, links, machine, network, packages, readiness
from tfdist.doctor.finding import Finding, problem
from tfdist.doctor.links import Measurement
from tfdist.doctor.readiness import Readiness
from tfdist.errors import EXIT_DIFFERENT, UsageError
from tfdist.jobs.world import World
from tfdist.run.schema import Machine

# Longer than the time limits of one subject's child processes together.
SECONDS_PER_SUBJECT = 300.0
STYLES = {"ok": "green", "note": "yellow", "problem": "bold red", "ready": "green", "not ready": "bold red"}
_STATE_WIDTH = max(map(len, STYLES))
# Prefixes of the variables that change the behaviour of tfdist and its packages.
RELEVANT = (
    *("TF_", "TFDIST_", "TFDS_", "KERAS_", "XLA_", "CUDA_", "NVIDIA_", "NCCL_", "HOROVOD_", "OMPI_", "PMI", "MPI"),
    *("SLURM_", "OMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "GRPC_", "PROTOCOL_BUFFERS_", "PYTHON"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX", "TMPDIR"),
    *("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"),
)


_checks = terminal.options_of("Checks")
_output = terminal.options_of("Output")


@click.command(cls=terminal.Command)
@_checks(
    "--data-dir", type=click.Path(path_type=Path), metavar="FOLDER", help="folder of datasets, as for tfdist train"
)
@_checks("--all-reduce/--no-all-reduce", default=True, help="start two processes and time their all-reduce")
@_output("--json", "as_json", is_flag=True, help="print JSON, for programs")
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
            click.echo(report_as_json(findings, measurements, strategies))
        else:
            show_report(findings, strategies)
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


def show_report(findings: Sequence[Finding], strategies: Sequence[Readiness]) -> None:
    """Prints the report. Lines are wrapped only on a terminal; elsewhere each sentence and each hint is one line."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    sections = (
        [(finding.state, finding.subject, finding.sentence, finding.hint) for finding in findings],
        [("ready" if each.ready else "not ready", each.strategy, each.reason, each.command) for each in strategies],
    )
    for rows in sections:
        width = max(len(subject) for _, subject, _, _ in rows)
        for state, subject, sentence, hint in rows:
            console.print(_line(console, f"{state:{_STATE_WIDTH}}  {subject:{width}}  ", sentence, STYLES[state]))
            if hint:
                console.print(_line(console, " " * (_STATE_WIDTH + width + 4), f"hint: {hint}", ""))
        console.print()
    console.print(summary(findings, strategies))


def _line(console: Console, head: str, text: str, style: str) -> Text:
    """Returns `head` and `text`, which is wrapped and indented if it is wider than the terminal."""
    width = console.width - len(head) if console.is_terminal else 0
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) if width > 20 else [text]
    # A `Text`, because text from variables, files and programs must not be parsed as markup.
    line = Text(head + ("\n" + " " * len(head)).join(lines))
    line.stylize(style, 0, _STATE_WIDTH)
    line.rstrip()
    return line


def summary(findings: Sequence[Finding], strategies: Sequence[Readiness]) -> str:
    """The report in one line."""
    problems = [finding.subject for finding in findings if finding.state == "problem"]
    subjects = f" ({', '.join(dict.fromkeys(problems))})" if problems else ""
    notes = terminal.counted(sum(finding.state == "note" for finding in findings), "note")
    ready = sum(each.ready for each in strategies)
    return (
        f"{terminal.counted(len(problems), 'problem')}{subjects}, {notes}; "
        f"{ready} of {len(strategies)} strategies are ready"
    )


def report_as_json(
    findings: Sequence[Finding], measurements: Sequence[Measurement], strategies: Sequence[Readiness]
) -> str:
    """The report as JSON: the findings, the measurements and the strategies."""
    report = {
        "tfdist": __version__,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "all_reduce": [dataclasses.asdict(each.link) for each in measurements if each.link is not None],
        "strategies": [dataclasses.asdict(each) for each in strategies],
    }
    return json.dumps(report, indent=2)


@click.command("env", cls=terminal.Command)
def environment_command() -> None:
    """Print what a bug report needs: versions, machine, job and variables, without secrets."""
    rows = [*_versions(), *_machine(), *_job(), *variables(os.environ)]
    width = max(len(name) for name, _ in rows)
    with terminal.guarded_stdout(needed=True):
        for name, value in rows:
            click.echo(f"{name:{width}}  {value}")


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for package in packages.PACKAGES:
        yield package, packages.installed(package) or "not installed"
    yield "mpirun", engines.mpirun() or "not on the path"


def _machine() -> Iterator[tuple[str, str]]:
    detected, limits = Machine.detect(), machine.limits_of_cgroup()
    yield "platform", detected.platform
    quota = "" if limits.cpus is None else f", {limits.cpus:g} in this container"
    yield "cores", f"{detected.cores} of {os.cpu_count()}{quota}, {detected.cpu}"
    limit = "" if limits.memory_bytes is None else f", {limits.memory_bytes / machine.GIB:.1f} GiB in this container"
    yield "memory", f"{detected.memory_bytes / machine.GIB:.1f} GiB{limit}"
    yield "gpus", ", ".join(gpus.by_driver()[0]) or "none"


def _job() -> Iterator[tuple[str, str]]:
    try:
        yield from world.rows(World.detect())
    except UsageError as error:
        yield "source", f"error: {redaction.hide_in_sentence(error.sentence)}"


def variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields names and values of the relevant variables, sorted, without secret values."""
    for name in sorted(environment):
        if name.startswith(RELEVANT):
            value = environment[name]
            yield name, redaction.HIDDEN if redaction.is_secret(name, value) else redaction.hide(value)


if __name__ == "__main__":
    command(prog_name="python -m tfdist.doctor")
