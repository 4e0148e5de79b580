"""Is a strategy ready here, and if not, why, and which one command makes it so?

Cheap: packages are looked up, and engines are loaded once, in child processes. No job is started.

Synopsis:

    from tfdist.doctor import readiness

    found = readiness.of("horovod")
    if not found.ready:
        print(found.reason, found.command)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tfdist import strategies
from tfdist.doctor import engines, job, links, machine, network, packages
from tfdist.doctor.finding import Finding

# Whose processes find each other by TensorFlow's servers, and so by gRPC.
OVER_GRPC = ("multiworker", "parameter_server")
# Trains in one process too, and needs nothing of others then.
ALONE_TOO = ("pipeline",)


@dataclass(frozen=True)
class Readiness:
    """Whether a strategy can run here.

    Attributes:
        strategy: its name.
        ready: whether it can.
        reason: why it cannot, as a sentence; empty if it can.
        command: what makes it ready; empty if it is.
    """

    strategy: str
    ready: bool
    reason: str = ""
    command: str = ""


def of(strategy: str, tried: Sequence[links.Tried] = ()) -> Readiness:
    """Whether a strategy is ready on this machine.

    Args:
        strategy: one of `tfdist.strategies.names()`, or the user's own `module:Class`.
        tried: measurements between two processes, if they were made; one that failed makes its strategy not ready.

    Raises:
        UnknownNameError: no strategy has that name.
    """
    obstacle = next(_obstacles(strategy, tried), None)
    if obstacle is None:
        return Readiness(strategy, True)
    return Readiness(strategy, False, obstacle.sentence, obstacle.hint)


def of_all(tried: Sequence[links.Tried] = ()) -> list[Readiness]:
    """The readiness of each strategy of tfdist's."""
    return [of(name, tried) for name in strategies.names()]


def _obstacles(strategy: str, tried: Sequence[links.Tried]) -> Iterator[Finding]:
    """What keeps a strategy from running: first what must be done first."""
    traits = strategies.traits(strategy)
    yield from (found for found in packages.findings() if found.is_problem)
    yield from _not_loaded("tensorflow")
    yield from job.malformed()
    if not traits.processes:
        yield from job.of_one_process(strategy)
        return
    if strategy in ALONE_TOO and not job.of_several():
        return
    if traits.package is not None:
        yield from _package(traits.package)
    if traits.mpi:
        yield from (found for found in engines.of_mpi(engines.loaded("mpi4py")) if found.is_problem)
    elif traits.package == "horovod":
        yield from (found for found in engines.of_horovod(engines.loaded("horovod")) if found.is_problem)
    yield from (found for found in (*network.loopback(), *machine.open_files()) if found.is_problem)
    if strategy in OVER_GRPC:
        yield from (found for found in network.proxies() if found.is_problem)
    yield from (found for found in job.described() if found.is_problem)
    yield from links.findings([one for one in tried if one.strategy == strategy and one.link is None])


def _package(name: str) -> Iterator[Finding]:
    if name in engines.ENGINES:
        yield from _not_loaded(name)
    elif packages.installed(name) is None:
        yield Finding(name, "problem", f"{name} is not installed", f"pip install {name}")


def _not_loaded(engine: str) -> Iterator[Finding]:
    found = engines.loaded(engine)
    if found.error:
        yield Finding(engine, "problem", found.error, found.hint)
