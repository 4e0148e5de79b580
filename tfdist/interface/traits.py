"""Traits: the properties of a strategy that commands need before they start processes or import TensorFlow.

The file of a strategy assigns its traits once, as constants, which are read from the source:

    TRAITS = Traits(processes=True, elastic=True)

A strategy without `TRAITS` trains in one process and needs no additional package.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Traits:
    """The traits of a strategy.

    Attributes:
        processes: whether its replicas run in several processes.
        servers: whether some of its processes are parameter servers.
        elastic: whether workers may join and leave a running job.
        mpi: whether `mpirun` starts its processes.
        asynchronous: whether its steps differ from those of one device by design.
        package: an optional Python package that it needs.
    """

    processes: bool = False
    servers: bool = False
    elastic: bool = False
    mpi: bool = False
    asynchronous: bool = False
    package: str | None = None


def read(path: Path) -> Traits:
    """Returns the traits that the source file of a strategy assigns to `TRAITS`, without running the file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and any(isinstance(target, ast.Name) and target.id == "TRAITS" for target in node.targets)
        ):
            return Traits(**{str(trait.arg): ast.literal_eval(trait.value) for trait in node.value.keywords})
    return Traits()
