"""Writes the tables of the strategies' options in `docs/`: `python scripts/option_tables.py`.

The names, defaults and descriptions are those of the strategies' constructors and their docstrings. A page has a table
between two comments, of which the first names its content:

    <!-- options of all strategies -->      those that every strategy has
    <!-- options of gossip -->              those of a strategy that not every strategy has, on its own page
    <!-- options of several strategies -->  the others: those of strategies without such a table, and shared ones
    <!-- end of options -->
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tfdist import strategies
from tfdist.interface.strategy_options import SET_BY_THE_COMMAND, described
from tfdist.jobs.world import World

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"(<!-- options of ([\w ]+) -->\n).*?(<!-- end of options -->)", re.S)
ALL, SEVERAL = "all strategies", "several strategies"
# An option that this many strategies share is not repeated on the page of each.
SHARED_BY = 3


class Option(NamedTuple):
    """An option, with its default and its description as Markdown."""

    name: str
    default: str
    description: str


def options_of(strategy: str) -> list[Option]:
    """Returns the options of a strategy, in a job of several processes too."""
    class_ = importlib.import_module(f"tfdist.strategies.{strategy}").STRATEGY
    bases = [*inspect.getmro(class_), *inspect.getmro(class_.of_job(World(world_size=2)))]
    names = [name for name in strategies.signature(strategy).options if name != SET_BY_THE_COMMAND]
    return [_option(name, bases) for name in names]


def _option(name: str, bases: Iterable[type]) -> Option:
    """The option as the first of `bases` that has it declares it, and as the first that describes it describes it."""
    parameters = [inspect.signature(base).parameters.get(name) for base in bases if "__init__" in vars(base)]
    default = next(parameter for parameter in parameters if parameter is not None).default
    description = next(text for base in bases if (text := described(inspect.getdoc(base) or "").get(name)))
    description = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", description)
    explained = re.search(r"[.;] [Dd]efault: (.*?)(\. .*|\.?)$", description)
    if default is None and explained:
        default_text, description = explained[1], description[: explained.start()] + explained[2]
    else:
        default_text = f'"{default}"' if isinstance(default, str) else repr(default)
    return Option(name, default_text if " " in default_text else _code(default_text), description.removesuffix("."))


def tables(titles: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the title and the Markdown of the tables `titles`; those of strategies show what is theirs."""
    by_strategy = {name: options_of(name) for name in strategies.names()}
    users: dict[Option, list[str]] = {}
    for strategy, options in by_strategy.items():
        for option in options:
            users.setdefault(option, []).append(strategy)
    common = [option for option, names in users.items() if len(names) == len(by_strategy)]
    listed = set(common)
    for title in titles:
        if title == ALL:
            yield title, _table(("option", "default", "meaning"), map(_row, common))
        elif title != SEVERAL:
            further = [option for option in by_strategy[title] if len(users[option]) < SHARED_BY]
            listed.update(further)
            yield title, _table(("option", "default", "meaning"), map(_row, further))
    others = {option: names for option, names in users.items() if option not in listed}
    rows = [(_row(option)[0], ", ".join(map(_code, names)), *_row(option)[1:]) for option, names in others.items()]
    yield SEVERAL, _table(("option", "strategies", "default", "meaning"), sorted(rows))


def _row(option: Option) -> tuple[str, str, str]:
    return _code(option.name), option.default, option.description


def _code(name: str) -> str:
    return f"`{name}`"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(headings)} |", "|" + "---|" * len(headings), *lines, ""])


def pages() -> dict[Path, str]:
    """Returns the pages that have such tables, with the tables as they should be."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    titles = [match[2] for text in texts.values() for match in BLOCK.finditer(text)]
    written = dict(tables(titles))
    return {
        path: BLOCK.sub(lambda match: match[1] + written[match[2]] + match[3], text)
        for path, text in texts.items()
        if BLOCK.search(text)
    }


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
