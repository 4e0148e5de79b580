"""Do the installed versions fit together? Read from the packages' metadata; nothing is imported."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from tfdist.doctor.finding import Finding, note, ok, problem

# Whose requirements are looked at, and who are named in any case.
PACKAGES = (
    *("tfdist", "tensorflow", "keras", "numpy", "protobuf", "tensorboard", "tensorboard-plugin-profile", "xprof"),
    *("tensorflow-datasets", "horovod", "mpi4py"),
)
OPTIONAL = ("horovod", "mpi4py")
# Packages that bring the same module `tensorflow`: the one that was installed last has overwritten the others.
SAME_MODULE = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly", "intel-tensorflow", "tensorflow-rocm")
SUBJECT = "versions"


def findings() -> list[Finding]:
    """What was found out about the installed versions."""
    wrong = [*_unfit(), *_several_tensorflows(), *_settings()]
    if any(found.is_problem for found in wrong):
        return wrong
    versions = [f"{name} {installed(name)}" for name in PACKAGES if installed(name)]
    return [ok(SUBJECT, f"Python {platform.python_version()}, {', '.join(versions)} fit together"), *wrong]


@functools.cache
def installed(package: str) -> str | None:
    """The installed version of a package; `None` if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirement(package: str) -> str:
    """What tfdist requires of a package, as `pip install` takes it."""
    return next((str(one) for one in _requirements("tfdist") if one.name == package), package)


def _unfit() -> Iterator[Finding]:
    """The requirements, of the packages and of Python, that the installed versions do not meet."""
    python = platform.python_version()
    for package in PACKAGES:
        named = f"{package} {installed(package) or ''}".rstrip()
        wanted = _python_of(package)
        if python not in SpecifierSet(wanted, prereleases=True):
            yield problem(SUBJECT, f"{named} needs Python {wanted}, and this is {python}", f"use a Python {wanted}")
        for one in _requirements(package):
            there = installed(one.name)
            if there is None and one.name not in OPTIONAL:
                sentence = f"{named} needs {one.name}, which is not installed"
            elif there is not None and not one.specifier.contains(there, prereleases=True):
                sentence = f"{named} needs {one.name} {one.specifier}, and version {there} is installed"
            else:
                continue
            yield problem(SUBJECT, sentence, f"pip install '{one.name}{one.specifier}'")


def _requirements(package: str) -> list[Requirement]:
    """What a package requires on this machine without extras; empty if it is not installed."""
    try:
        lines = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        lines = _of_clone()["dependencies"] if package == "tfdist" else []
    found = []
    for line in lines:
        try:
            one = Requirement(line)
        except InvalidRequirement:
            continue
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            one.marker = None
            found.append(one)
    return found


def _python_of(package: str) -> str:
    try:
        return importlib.metadata.metadata(package)["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        return _of_clone()["requires-python"] if package == "tfdist" else ""


@functools.cache
def _of_clone() -> dict[str, Any]:
    """What a clone that is not installed says of itself."""
    path = Path(__file__).resolve().parents[2] / "pyproject.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))["project"] if path.exists() else {"dependencies": []}


def _several_tensorflows() -> Iterator[Finding]:
    there = [name for name in SAME_MODULE if installed(name)]
    if len(there) > 1:
        yield problem(
            SUBJECT,
            f"{' and '.join(f'{name} {installed(name)}' for name in there)} are installed, which overwrite each other",
            f"pip uninstall --yes {' '.join(there)} && pip install '{requirement('tensorflow')}'",
        )


def _settings() -> Iterator[Finding]:
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        yield note(
            SUBJECT,
            "`TF_USE_LEGACY_KERAS` is set: `tf.keras` is Keras 2, whose models no strategy of tfdist trains",
            "unset it, or import `keras` itself",
        )
    if os.environ.get("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "").lower() == "python":
        yield note(
            SUBJECT,
            "`PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION` is `python`: protobuf reads and writes slowly",
            "unset it",
        )
