"""`tfdist strategies`, `tfdist models` and `tfdist datasets` list what there is, and what it is for.

The texts are those of the files that register a name: the first paragraph of the docstring, and the constants `TASKS`,
`FILES` and `TRAITS`. None of these files is imported, so that the lists are shown at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import click

from tfdist import data, models, registry, strategies, terminal
from tfdist.data.spec import TASKS

IN_ONE_PROCESS = "On the devices of one process (`--devices N`)"
IN_SEVERAL = "In several processes (`--workers N`)"
# Where the files of a dataset come from, by its constant `FILES`.
FILES = {
    "tfds": "Downloaded by TensorFlow Datasets.",
    "manual": "Prepared by TensorFlow Datasets from files that you download.",
    "local": "Reads your files: `--data-dir FOLDER`.",
}


@dataclass(frozen=True)
class Entry:
    """A strategy, model or dataset.

    Attributes:
        name: as `--strategy`, `--model` or `--dataset` takes it.
        group: the heading under which it is listed.
        description: what it is, and what it is for.
    """

    name: str
    group: str
    description: str


def of_strategies() -> list[Entry]:
    """The strategies, by where their replicas are."""
    entries = []
    for name in strategies.names():
        traits = strategies.traits(name)
        package = f" Needs the package `{traits.package}`." if traits.package else ""
        text = registry.summary("tfdist.strategies", name) + package
        entries.append(Entry(name, IN_SEVERAL if traits.processes else IN_ONE_PROCESS, text))
    return entries


def of_models() -> list[Entry]:
    """The models, by task."""
    return _by_task("tfdist.models", models.names())


def of_datasets() -> list[Entry]:
    """The datasets, by task, with where their files come from."""

    def with_files(entry: Entry) -> Entry:
        files = FILES.get(registry.constant(data.SOURCES, entry.name, "FILES"), "")
        return replace(entry, description=f"{entry.description} {files}".strip())

    return [with_files(entry) for entry in _by_task(data.SOURCES, data.names())]


def _by_task(package: str, names: Sequence[str]) -> list[Entry]:
    """The names with their tasks; a dataset without `TASKS` has examples of every task."""
    tasks = {name: tuple(registry.constant(package, name, "TASKS") or TASKS) for name in names}
    ordered = sorted(names, key=lambda name: [TASKS.index(task) for task in tasks[name]])
    return [Entry(name, _heading(tasks[name]), registry.summary(package, name)) for name in ordered]


def _heading(tasks: tuple[str, ...]) -> str:
    names = "Every task" if tasks == TASKS else " and ".join(task.replace("_", " ") for task in tasks)
    return names[0].upper() + names[1:]


def show(entries: Sequence[Entry], as_json: bool, ending: str) -> None:
    """Prints the entries by group, and `ending`; or, as JSON, the entries alone."""
    with terminal.guarded_stdout(needed=True):
        if as_json:
            click.echo(json.dumps([asdict(entry) for entry in entries], indent=2))
            return
        formatter = click.HelpFormatter(max_width=terminal.HELP_WIDTH)
        for group in dict.fromkeys(entry.group for entry in entries):
            with formatter.section(group):
                width = max(len(entry.name) for entry in entries)
                rows = [(f"{entry.name:{width}}", entry.description) for entry in entries if entry.group == group]
                formatter.write_dl(rows)
        click.echo(f"{formatter.getvalue()}\n{ending}")


_json = terminal.options_of("Output")("--json", "as_json", is_flag=True, help="print JSON, for programs")


@click.command("strategies", cls=terminal.Command)
@_json
def strategies_command(as_json: bool) -> None:
    """List the strategies, and what each is for."""
    show(
        of_strategies(),
        as_json,
        "`tfdist doctor` says which of them this machine is ready for; docs/strategies.md has their options. Your own: "
        "`--strategy module:Class`.",
    )


@click.command("models", cls=terminal.Command)
@_json
def models_command(as_json: bool) -> None:
    """List the models by task."""
    show(of_models(), as_json, "docs/models.md has their options and sizes. Your own: `--model module:function`.")


@click.command("datasets", cls=terminal.Command)
@_json
def datasets_command(as_json: bool) -> None:
    """List the datasets by task."""
    show(
        of_datasets(),
        as_json,
        "docs/datasets.md has their options, and where the files are. Your own: `--dataset module:function`.",
    )
