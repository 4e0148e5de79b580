"""The option `recompute` of a strategy: which outputs of layers are kept, and what between them is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.errors import UsageError

BLOCKS = "blocks"


def parsed(given: Any) -> str | tuple[str, ...] | None:
    """The option `recompute` of a strategy: `None`, "blocks", or the names of layers, also with commas between.

    Raises:
        UsageError: it is something else.
    """
    if given is None or given == BLOCKS:
        return given
    names = given.split(",") if isinstance(given, str) else given
    if isinstance(names, Sequence) and names and all(isinstance(name, str) and name.strip() for name in names):
        return tuple(name.strip() for name in names)
    raise UsageError(
        f"`recompute` is `{given}`",
        f'use "{BLOCKS}", or the names of the layers whose outputs are held, or leave it out',
    )
