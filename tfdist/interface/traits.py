"""Traits: what commands must know of a strategy before they start processes, and before TensorFlow is imported.

The file of a strategy states its traits in one assignment of constants, which is read from the source:

    TRAITS = Traits(processes=True, elastic=True)

A strategy without `TRAITS` trains in one process and needs no other package.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Traits:
    """The traits of a strategy.

    Attributes:
        processes: its replicas are in several processes.
        servers: some of its processes are parameter servers.
        elastic: its workers may come and go while a job runs.
        mpi: its processes are started by `mpirun`.
        asynchronous: its steps are not those of one device, by design.
        package: a Python package that it needs and that tfdist otherwise does without.
    """

    processes: bool = False
    servers: bool = False
    elastic: bool = False
    mpi: bool = False
    asynchronous: bool = False
    package: str | None = None


def read(path: Path) -> Traits:
    """The traits that the source file of a strategy assigns to `TRAITS`; the file is not run."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and any(isinstance(target, ast.Name) and target.id == "TRAITS" for target in node.targets)
        ):
            return Traits(**{str(one.arg): ast.literal_eval(one.value) for one in node.value.keywords})
    return Traits()
