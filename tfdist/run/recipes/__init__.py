"""Recipes by name: the options of training runs with known results.

Each `.toml` file in this folder is a recipe; adding the file registers it. Its entries are options of
`python -m tfdist.train` without their dashes; options on the command line override them. The comment at the top has the
command, the measured time and result, and the result in the literature.

Synopsis:

    >>> "fashion_mnist-cnn" in names()
    True
    >>> load("fashion_mnist-cnn")["dataset"]
    'fashion_mnist'
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from tfdist.errors import UnknownNameError

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The names of the recipes, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load(name: str) -> dict[str, Any]:
    """Returns the options of a recipe, by their names with underscores.

    Raises:
        UnknownNameError: no such recipe.
    """
    if name not in names():
        raise UnknownNameError("recipe", name, names())
    options = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    return {option.replace("-", "_"): value for option, value in options.items()}
