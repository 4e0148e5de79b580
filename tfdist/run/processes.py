"""Checks the options of a `train` command that starts several processes, and starts its job."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist import strategies
from tfdist.errors import UsageError
from tfdist.jobs.world import World
from tfdist.launcher import job
from tfdist.launcher.elastic import ElasticOptions
from tfdist.run.config import TrainConfig


@dataclass(frozen=True)
class Processes:
    """The processes that the command should start, according to its options.

    Attributes:
        workers: number of workers; `None` if not set.
        ps: number of parameter servers; `None` if not set.
        restarts: number of times that the job is restarted after a failure.
        expose: do not isolate the job's network.
        elastic_job: the options of an elastic job.
        hostfile: the hosts of an elastic job.
    """

    workers: int | None
    ps: int | None
    restarts: int
    expose: bool
    elastic_job: ElasticOptions
    hostfile: Path | None

    @property
    def several(self) -> bool:
        """Whether the command starts processes."""
        return self.elastic_job.elastic or self.workers is not None or self.ps is not None


def check(config: TrainConfig, world: World, wanted: Processes) -> None:
    """Raises `UsageError` if the requested processes do not fit the strategy or the job that `world` describes."""
    for option, role, trait, count in (
        ("--workers", "worker", "processes", wanted.workers),
        ("--ps", "ps", "servers", wanted.ps),
    ):
        if count is not None and not getattr(config.traits, trait):
            raise UsageError(
                f"`{option}` is {count}, but `{config.strategy}` does not take it",
                f"set `TRAITS = Traits({trait}=True)` in its module, as docs/strategies.md shows"
                if ":" in config.strategy
                else "use `--devices`, or one of the strategies " + ", ".join(strategies.having(trait)),
            )
        described = len(world.tasks_of(role)) if world.tasks else world.world_size
        if count is not None and world.world_size > 1 and count != described:
            raise UsageError(
                f"`{option}` is {count}, but {world.source} has {described}",
                f"leave `{option}` out, because {world.source} already describes the job",
            )
    if world.world_size > 1 and not config.traits.processes:
        raise UsageError(
            f"{world.source} describes {world.world_size} processes, but `{config.strategy}` trains in one",
            "unset it, or use one of the strategies " + ", ".join(strategies.having("processes")),
        )
    _check_elastic(config, wanted)


def _check_elastic(config: TrainConfig, wanted: Processes) -> None:
    if wanted.elastic_job.elastic and not config.traits.elastic:
        raise UsageError(
            f"`--elastic` is set, but the number of workers of `{config.strategy}` is fixed",
            "use one of the strategies " + ", ".join(strategies.having("elastic")),
        )
    if wanted.elastic_job.elastic and (wanted.workers is not None or wanted.ps is not None):
        option = "--ps" if wanted.workers is None else "--workers"
        raise UsageError(
            f"`{option}` and `--elastic` are both set", "use `--min-workers` and `--max-workers` with `--elastic`"
        )
    if wanted.hostfile and not wanted.elastic_job.elastic:
        raise UsageError("`--hostfile` is set, but the job is not elastic", "start it with `python -m tfdist.launch`")


def launch(config: TrainConfig, wanted: Processes, arguments: Sequence[str]) -> int:
    """Starts the command with the same `arguments` in several processes, and returns the exit code."""
    from tfdist.launcher import elastic
    from tfdist.launcher import run as launcher

    _require_package(config)
    members = wanted.elastic_job.members(wanted.hostfile) if wanted.elastic_job.elastic else None
    name = job.new_name()
    run_dir = config.run_dir or new_run_dir(config, name)
    started = job.Job(
        command=("-m", "tfdist.train", *arguments, *(() if config.run_dir else ("--run-dir", str(run_dir)))),
        workers=2 if wanted.workers is None else wanted.workers,
        ps=int(config.traits.servers) if wanted.ps is None else wanted.ps,
        mpi=config.traits.mpi,
        restarts=wanted.restarts,
        expose=wanted.expose,
        log_dir=run_dir / "output",
        verbose=config.verbose,
        name=name,
    )
    # The dataset is downloaded first, because the job's isolated network may have no access to the internet.
    options = [f"{name}={value!r}" for name, value in config.load_options.items()]
    fetch = [sys.executable, "-m", "tfdist.data.tools.fetch", config.dataset, str(config.data_dir or ""), *options]
    exit_code = subprocess.run(fetch, check=False).returncode
    if exit_code:
        return exit_code
    return launcher.run(started) if members is None else elastic.run(started, members)


def _require_package(config: TrainConfig) -> None:
    """Raises `UsageError` once if the strategy's package is missing, instead of one error per process."""
    package = config.traits.package
    if package is not None and importlib.util.find_spec(package) is None:
        raise UsageError(
            f"The strategy `{config.strategy}` needs the package `{package}`, which is not installed",
            "run `make horovod`, which installs MPI, mpi4py and Horovod",
        )


def new_run_dir(config: TrainConfig, job_name: str) -> Path:
    """The default folder of a run."""
    names = [re.sub(r"[:/\\]", ".", name) for name in (config.model, config.dataset, config.strategy)]
    return Path("runs") / "-".join([*names, job_name])
