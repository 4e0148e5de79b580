"""`tfdist env`: prints versions, machine, job and variables as text to paste into a bug report."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping

import click

from tfdist import terminal, world
from tfdist.doctor import engines, gpus, machine, packages
from tfdist.errors import UsageError
from tfdist.jobs.world import World
from tfdist.run.schema import Machine

# Prefixes of the variables that change the behaviour of tfdist and its packages.
RELEVANT = (
    *("TF_", "TFDIST_", "TFDS_", "KERAS_", "XLA_", "CUDA_", "NVIDIA_", "NCCL_", "HOROVOD_", "OMPI_", "PMI", "MPI"),
    *("SLURM_", "OMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "GRPC_", "PROTOCOL_BUFFERS_", "PYTHON"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX", "TMPDIR"),
    *("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"),
)
SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)


@click.command(cls=terminal.Command)
def command() -> None:
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
        yield "source", f"error: {error.sentence}"


def variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields names and values of the relevant variables, sorted, without secret values and passwords in URLs."""
    for name in sorted(environment):
        if name.startswith(RELEVANT):
            without_password = re.sub(r"//[^/@\s]+@", "//...@", environment[name])
            yield name, "(left out)" if SECRET.search(name) else without_password


if __name__ == "__main__":
    command(prog_name="tfdist env")
