"""Checks from the packages' metadata that the installed versions are compatible; nothing is imported."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from tfdist import extras
from tfdist.doctor.finding import Finding, note, ok, problem

# The packages that are listed and whose requirements are checked.
PACKAGES = (
    *("tfdist", "tensorflow", "keras", "numpy", "protobuf", "tensorboard", "tensorboard-plugin-profile", "xprof"),
    *("tensorflow-datasets", "horovod", "mpi4py"),
)
OPTIONAL = ("horovod", "mpi4py")
# Packages that contain the same module `tensorflow`: the package that was installed last overwrites the others.
SAME_MODULE = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly", "intel-tensorflow", "tensorflow-rocm")
SUBJECT = "versions"


def findings() -> list[Finding]:
    """The findings about the installed versions."""
    findings = [*_unmet_requirements(), *_several_tensorflows(), *_settings(), *_missing_extras()]
    if any(finding.is_problem for finding in findings):
        return findings
    versions = [f"{name} {installed(name)}" for name in PACKAGES if installed(name)]
    return [ok(SUBJECT, f"Python {platform.python_version()}, {', '.join(versions)} fit together"), *findings]


@functools.cache
def installed(package: str) -> str | None:
    """The installed version of a package; `None` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirement(package: str) -> str:
    """tfdist's requirement for a package, as an argument of `pip install`."""
    return next((str(required) for required in _requirements("tfdist") if required.name == package), package)


def _unmet_requirements() -> Iterator[Finding]:
    """The problems of requirements, for packages and Python, that the installed versions do not meet."""
    python = platform.python_version()
    for package in PACKAGES:
        label = f"{package} {installed(package) or ''}".rstrip()
        required_python = _required_python(package)
        if python not in SpecifierSet(required_python, prereleases=True):
            sentence = f"{label} needs Python {required_python}, and this is {python}"
            yield problem(SUBJECT, sentence, f"use a Python {required_python}")
        for required in _requirements(package):
            version = installed(required.name)
            if version is None and required.name not in OPTIONAL:
                sentence = f"{label} needs {required.name}, which is not installed"
            elif version is not None and not required.specifier.contains(version, prereleases=True):
                sentence = f"{label} needs {required.name} {required.specifier}, and version {version} is installed"
            else:
                continue
            yield problem(SUBJECT, sentence, f"pip install '{required.name}{required.specifier}'")


def _requirements(package: str) -> list[Requirement]:
    """The requirements of a package on this machine, without extras; empty if it is not installed."""
    try:
        lines = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        lines = _project()["dependencies"] if package == "tfdist" else []
    requirements = []
    for line in lines:
        try:
            required = Requirement(line)
        except InvalidRequirement:
            continue
        if required.marker is None or required.marker.evaluate({"extra": ""}):
            required.marker = None
            requirements.append(required)
    return requirements


def _required_python(package: str) -> str:
    try:
        return importlib.metadata.metadata(package)["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        return _project()["requires-python"] if package == "tfdist" else ""


def _project() -> dict[str, Any]:
    """The `project` table of `pyproject.toml`, for a clone that is not installed."""
    return extras.project_table() or {"dependencies": [], "requires-python": ""}


def _several_tensorflows() -> Iterator[Finding]:
    names = [name for name in SAME_MODULE if installed(name)]
    if len(names) > 1:
        yield problem(
            SUBJECT,
            f"{' and '.join(f'{name} {installed(name)}' for name in names)} are installed, which overwrite each other",
            f"pip uninstall --yes {' '.join(names)} && pip install '{requirement('tensorflow')}'",
        )


def _missing_extras() -> Iterator[Finding]:
    for extra, uses in extras.USES.items():
        package = extras.missing(extra)
        if package is not None:
            yield note(SUBJECT, f"{uses} need {package}, which is not installed", extras.command(extra))


def _settings() -> Iterator[Finding]:
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        yield note(
            SUBJECT,
            "`TF_USE_LEGACY_KERAS` is set: `tf.keras` is Keras 2, whose models tfdist cannot train",
            "unset it, or import `keras` instead of `tf.keras`",
        )
    if os.environ.get("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "").lower() == "python":
        yield note(
            SUBJECT, "`PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION` is `python`, which makes protobuf slow", "unset it"
        )
