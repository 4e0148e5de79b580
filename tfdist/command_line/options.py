"""The options of commands: each has a heading in the help, and a placeholder and limits in words.

Synopsis:

    >>> limits(click.IntRange(min=1)), limits(click.FloatRange(0, 1)), limits(click.FloatRange(min=0, min_open=True))
    ('1 or more', 'from 0 to 1', 'above 0')
    >>> grouped_by("Optimisation")("--epochs", type=click.IntRange(min=1))  # doctest: +ELLIPSIS
    <function ...>
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

# What the help shows for the value of an option without a `metavar`, by the type of the value.
PLACEHOLDERS: dict[type[click.ParamType[Any]], str] = {
    click.types.IntParamType: "N",
    click.types.FloatParamType: "NUMBER",
    click.Path: "PATH",
    click.types.StringParamType: "TEXT",
}


class GroupedOption(click.Option):
    """An option that the help lists under the heading `group`."""

    def __init__(self, *args: Any, group: str, **named: Any):
        super().__init__(*args, **named)
        self.group = group

    def make_metavar(self, ctx: click.Context) -> str:
        """The placeholder of the value: `N`, and not click's `INTEGER RANGE`."""
        if self.metavar is None and not self.is_flag:
            for kind, placeholder in PLACEHOLDERS.items():
                if isinstance(self.type, kind):
                    return placeholder
        return super().make_metavar(ctx)

    def get_help_extra(self, ctx: click.Context) -> click.types.OptionHelpExtra:
        """What the help shows in brackets: `1 or more`, and not click's `x>=1`."""
        extra = super().get_help_extra(ctx)
        if "range" in extra:
            extra["range"] = limits(self.type)
        return extra


def grouped_by(heading: str) -> Callable[..., Any]:
    """`click.option` for options that the help lists under `heading`."""

    def option(*names: str, **named: Any) -> Callable[..., Any]:
        return click.option(*names, cls=GroupedOption, group=heading, **named)

    return option


def limits(kind: click.ParamType[Any]) -> str:
    """The range of a number in words; empty if it has no limits."""
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return ""
    low, high = kind.min, kind.max
    if low is not None and high is not None and not kind.min_open and not kind.max_open:
        return f"from {low:g} to {high:g}"
    phrases = []
    if low is not None:
        phrases.append(f"above {low:g}" if kind.min_open else f"{low:g} or more")
    if high is not None:
        phrases.append(f"below {high:g}" if kind.max_open else f"at most {high:g}")
    return ", ".join(phrases)
