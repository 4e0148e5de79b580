"""Loads a dataset for a model, and the options of commands that take both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tfdist import data, models


def load(model: str, dataset: str, data_dir: Path | None = None, **options: Any) -> data.Source:
    """Loads a dataset by name for a model by name; for an autoencoder, the inputs are the targets.

    Raises:
        TfdistError: see `tfdist.data.load`.
    """
    source = data.load(dataset, data_dir, **options)
    return source.for_autoencoding() if models.tasks(model) == ("autoencoding",) else source


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options `model`, `dataset`, `data_dir`, `data_option` and `model_option` to a command."""
    or_custom = "or your own module:function"
    added = (
        click.option("--model", required=True, metavar="NAME", help=f"{', '.join(models.names())}, {or_custom}"),
        click.option("--dataset", required=True, metavar="NAME", help=f"{', '.join(data.names())}, {or_custom}"),
        click.option("--data-dir", type=click.Path(path_type=Path), help="folder of the dataset's files"),
        click.option("--data-option", multiple=True, metavar="NAME=VALUE", help="option of the dataset; repeatable"),
        click.option("--model-option", multiple=True, metavar="NAME=VALUE", help="option of the model; repeatable"),
    )
    for option in reversed(added):
        command = option(command)
    return command
