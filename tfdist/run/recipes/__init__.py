"""Recipes by name: the options of a training run that is worth repeating.

Each `.toml` file beside this one is a recipe: the file is the registration. Its entries are options of
`python -m tfdist.train` without their dashes; what the command line says as well takes their place. The comment at its
head has the command, the time and the result, and what the literature reports.

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
    """The options of a recipe, by their names with underscores.

    Raises:
        UnknownNameError: no such recipe.
    """
    if name not in names():
        raise UnknownNameError("recipe", name, names())
    options = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    return {option.replace("-", "_"): value for option, value in options.items()}
