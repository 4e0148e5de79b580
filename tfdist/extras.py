"""Packages that only some uses of tfdist need: the extras in `pyproject.toml`, and the commands that install them.

tfdist is in no package index, where a stranger's package could have its name. The commands therefore name the packages
of an extra, and never `tfdist[EXTRA]`.

Synopsis:

    >>> with importing("report", "The picture"):
    ...     import no_such_package
    Traceback (most recent call last):
    tfdist.errors.MissingPackageError: The picture needs the package `no_such_package`, which is not installed
    <BLANKLINE>
    hint: run `pip install 'altair>=6' 'jinja2>=3.1' 'markupsafe>=3' 'scipy>=1.17' 'vl-convert-python>=1.9'`
"""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tfdist.errors import MissingPackageError

# What needs the extras that `tfdist doctor` mentions if they are missing.
USES = {
    "train": "Datasets by name and the pictures of runs",
    "report": "Reports and their pictures",
    "profile": "Summaries of traces and TensorBoard",
}
PACKAGE = Path(__file__).resolve().parent
HOROVOD_SCRIPT = PACKAGE / "groups" / "install_horovod.sh"


@contextmanager
def importing(extra: str, purpose: str) -> Iterator[None]:
    """Within this context, a package that is not installed is an error with the command that installs it.

    Args:
        extra: the extra in `pyproject.toml` that has the package.
        purpose: what needs the package, as the subject of a sentence.

    Raises:
        MissingPackageError: a module of another package than tfdist was not found.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or str(error)).partition(".")[0]
        if package == "tfdist":
            raise
        raise MissingPackageError(purpose, package, f"run `{command(extra)}`") from error


def require(extra: str, purpose: str) -> None:
    """Raises `MissingPackageError` if a package of an extra is not installed; imports nothing.

    For the start of a command that needs the extra only at its end.
    """
    package = missing(extra)
    if package is not None:
        raise MissingPackageError(purpose, package, f"run `{command(extra)}`")


def missing(extra: str) -> str | None:
    """The first package of an extra that is not installed; `None` if there is none."""
    import importlib.metadata

    for requirement in _requirements(extra):
        try:
            importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            return str(requirement.name)
    return None


def command(extra: str) -> str:
    """The command that installs the packages of an extra into an environment that has tfdist."""
    return "pip install " + " ".join(shlex.quote(str(requirement)) for requirement in _requirements(extra))


def command_of_engine(package: str) -> str:
    """The command that installs the package of a strategy: `horovod`, `mpi4py`, or that of a user's own strategy."""
    if package == "horovod":
        return horovod_command()
    return command("mpi") if package == "mpi4py" else f"pip install {package}"


def horovod_command() -> str:
    """The command that builds Horovod for the TensorFlow of this environment.

    `make horovod` builds it for the environment of a checkout's Makefile. Elsewhere, the script that it runs is used.
    """
    checkout = PACKAGE.parent
    if (checkout / "Makefile").exists() and (checkout / ".venv").resolve() == Path(sys.prefix).resolve():
        return "make horovod"
    return shlex.join(["bash", str(HOROVOD_SCRIPT), sys.prefix])


@functools.cache
def project_table() -> dict[str, Any] | None:
    """The `project` table of `pyproject.toml`, if tfdist is imported from a checkout."""
    import tomllib

    path = PACKAGE.parent / "pyproject.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))["project"] if path.exists() else None


@functools.cache
def _requirements(extra: str) -> list[Any]:
    """The requirements of an extra; of the checkout if there is one, because the installed metadata may be older."""
    import importlib.metadata

    from packaging.requirements import Requirement

    table = project_table()
    if table is not None:
        return [Requirement(line) for line in table["optional-dependencies"][extra]]
    requirements = []
    for requirement in map(Requirement, importlib.metadata.requires("tfdist") or []):
        marker = requirement.marker
        if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            requirement.marker = None
            requirements.append(requirement)
    return requirements
