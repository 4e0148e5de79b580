"""Tells whether a strategy can run here and, if not, why, and which command makes it ready.

This is cheap: packages are looked up, and engines are loaded once, in child processes. No job is started.

Synopsis:

    from tfdist.doctor import readiness

    horovod = readiness.of("horovod")
    if not horovod.ready:
        print(horovod.reason, horovod.command)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tfdist import extras, strategies
from tfdist.doctor import engines, job, links, machine, network, packages
from tfdist.doctor.finding import Finding, problem

# Strategies whose processes connect through TensorFlow's servers, which use gRPC.
OVER_GRPC = ("multiworker", "parameter_server")
# Strategies of several processes that can also train in one.
ONE_PROCESS_TOO = ("pipeline",)


@dataclass(frozen=True)
class Readiness:
    """Whether a strategy can run here.

    Attributes:
        strategy: its name.
        ready: whether it can run.
        reason: why it cannot run, as a sentence; empty if it can.
        command: the command that makes it ready; empty if it is.
    """

    strategy: str
    ready: bool
    reason: str = ""
    command: str = ""


def of(strategy: str, measurements: Sequence[links.Measurement] = ()) -> Readiness:
    """Returns whether a strategy is ready on this machine.

    Args:
        strategy: one of `tfdist.strategies.names()`, or the user's own `module:Class`.
        measurements: measurements between two processes; a failed measurement makes its strategy not ready.

    Raises:
        UnknownNameError: no strategy has that name.
    """
    obstacle = next(_obstacles(strategy, measurements), None)
    if obstacle is None:
        return Readiness(strategy, True)
    return Readiness(strategy, False, obstacle.sentence, obstacle.hint)


def of_all(measurements: Sequence[links.Measurement] = ()) -> list[Readiness]:
    """The readiness of each strategy in `tfdist.strategies.names()`."""
    return [of(name, measurements) for name in strategies.names()]


def _obstacles(strategy: str, measurements: Sequence[links.Measurement]) -> Iterator[Finding]:
    """The problems that keep a strategy from running, in the order in which they must be solved."""
    traits = strategies.traits(strategy)
    yield from _problems(packages.findings())
    yield from _not_loaded("tensorflow")
    yield from job.malformed()
    if not traits.processes:
        yield from job.single_process_findings(strategy)
        return
    if strategy in ONE_PROCESS_TOO and not job.has_several_processes():
        return
    if traits.package is not None:
        yield from _package(traits.package)
    if traits.mpi:
        yield from _problems(engines.mpi_findings(engines.load("mpi4py")))
    elif traits.package == "horovod":
        yield from _problems(engines.horovod_findings(engines.load("horovod")))
    yield from _problems([*network.loopback(), *machine.open_files()])
    if strategy in OVER_GRPC:
        yield from _problems(network.proxies())
    yield from _problems(job.job_findings())
    yield from links.findings([each for each in measurements if each.strategy == strategy and each.link is None])


def _problems(findings: Iterable[Finding]) -> Iterator[Finding]:
    return (finding for finding in findings if finding.is_problem)


def _package(name: str) -> Iterator[Finding]:
    if name in engines.ENGINES:
        yield from _not_loaded(name)
    elif packages.installed(name) is None:
        yield problem(name, f"{name} is not installed", extras.command_of_engine(name))


def _not_loaded(engine: str) -> Iterator[Finding]:
    result = engines.load(engine)
    if result.error:
        yield problem(engine, result.error, result.hint)
