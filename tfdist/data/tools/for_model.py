"""Loads a dataset for a model, and the options of commands that take both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tfdist import data, models, terminal
from tfdist.data.spec import DERIVED

_data = terminal.options_of("Data")
_model = terminal.options_of("Model")


def load(model: str, dataset: str, data_dir: Path | None = None, **options: Any) -> data.Source:
    """Loads a dataset by name for a model by name.

    For a model that reconstructs or generates pictures the inputs are the targets, and for a masked language model
    words of the input.

    Raises:
        TfdistError: see `tfdist.data.load`.
    """
    source = data.load(dataset, data_dir, **options)
    task = models.tasks(model)
    return source.for_task(task[0]) if task and set(task) <= set(DERIVED) else source


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options `model`, `dataset`, `data_dir`, `data_option` and `model_option` to a command."""
    or_custom = "or your own module:function"
    added = (
        _model("--model", required=True, metavar="NAME", help=f"{', '.join(models.names())}, {or_custom}"),
        _model("--model-option", multiple=True, metavar="NAME=VALUE", help="an option of the model; may be repeated"),
        _data("--dataset", required=True, metavar="NAME", help=f"{', '.join(data.names())}, {or_custom}"),
        _data("--data-option", multiple=True, metavar="NAME=VALUE", help="an option of the dataset; may be repeated"),
        _data("--data-dir", type=click.Path(path_type=Path), metavar="FOLDER", help="folder of the dataset's files"),
    )
    for option in reversed(added):
        command = option(command)
    return command
