"""Mistakes on a command line, as a sentence and a hint in place of click's messages.

    error: `--dataset` and `--model` are not set

    hint: add `--dataset NAME --model NAME`; `tfdist datasets` and `tfdist models` list the names

Synopsis:

    >>> nearest("--lr", ["--limit", "--learning-rate"]), nearest("--epoch", ["--limit", "--epochs"])
    ('--learning-rate', '--epochs')
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from tfdist.command_line.options import limits
from tfdist.errors import UsageError, enumerated

# The commands that list the values of options.
LISTED_BY = {"dataset": "tfdist datasets", "model": "tfdist models", "strategy": "tfdist strategies"}


@contextlib.contextmanager
def as_sentences(ctx: click.Context, args: Sequence[str]) -> Iterator[None]:
    """Within this context, click's error about the arguments `args` becomes tfdist's `UsageError`."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        raise _in_a_sentence(error, ctx, args) from None


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The option in `known` that was probably meant by `name`: by its initials, its letters, or one of its words."""
    typed = name.strip("-")
    options = {option.strip("-"): option for option in known}
    by_initials = [option for option in options if "".join(word[0] for word in option.split("-")) == typed]
    by_word = [option for option in options if typed in option.split("-")]
    similar = [difflib.get_close_matches(typed, options, n=1, cutoff=cutoff) for cutoff in (0.8, 0.6)]
    meant = next(iter([*by_initials, *similar[0], *by_word, *similar[1]]), None)
    return None if meant is None else options[meant]


def listed(names: Sequence[str]) -> str:
    """Names in code type, as a sentence has them: `a`, `b` and `c`."""
    return enumerated([f"`{name}`" for name in names])


def _in_a_sentence(error: click.UsageError, ctx: click.Context, args: Sequence[str]) -> UsageError:
    help_ = f"`{ctx.command_path} --help` lists the options"
    if isinstance(error, click.NoSuchOption):
        meant = nearest(error.option_name, _names(ctx))
        return UsageError(
            f"`{ctx.command_path}` has no option `{error.option_name}`",
            f"did you mean `{meant}`? {help_}" if meant else help_,
        )
    if isinstance(error, click.MissingParameter):
        return _missing(ctx, args)
    if isinstance(error, click.BadParameter) and error.param is not None:
        return _of_value(error, error.param, ctx, args)
    if isinstance(error, click.BadOptionUsage):
        return _of_use(error.option_name, ctx)
    extra = re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", error.message, re.DOTALL)
    if extra is not None:
        return UsageError(f"`{ctx.command_path}` does not take the argument `{extra[1]}`", f"leave it out; {help_}")
    return UsageError(error.format_message().rstrip("."), help_)


def _missing(ctx: click.Context, args: Sequence[str]) -> UsageError:
    """The error that names all required options and arguments that are not set."""
    options = _parsed(ctx, args)
    missing = [
        parameter
        for parameter in ctx.command.get_params(ctx)
        if parameter.required and parameter.value_is_missing(parameter.consume_value(ctx, options)[0])
    ]
    usage = " ".join(f"{_name(parameter, ctx)} {_placeholder(parameter, ctx)}".strip() for parameter in missing)
    lists = [LISTED_BY[parameter.name] for parameter in missing if parameter.name in LISTED_BY]
    them = "it" if len(missing) == 1 else "them"
    return UsageError(
        f"{listed([_name(parameter, ctx) for parameter in missing])} {'is' if len(missing) == 1 else 'are'} not set",
        f"add `{usage}`; "
        + (
            f"{listed(lists)} list{'s' * (len(lists) == 1)} the names"
            if lists
            else f"`{ctx.command_path} --help` describes {them}"
        ),
    )


def _of_value(
    error: click.BadParameter, parameter: click.Parameter, ctx: click.Context, args: Sequence[str]
) -> UsageError:
    """The error for a value that the type of the option does not allow."""
    value = parameter.consume_value(ctx, _parsed(ctx, args))[0]
    sentence = f"`{_name(parameter, ctx)}` is `{value}`"
    kind = parameter.type
    if not isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        return UsageError(f"{sentence}: {error.message.rstrip('.')}", "correct it, or leave it out")
    number = "a whole number" if isinstance(kind, click.types.IntParamType) else "a number"
    return UsageError(sentence, ", ".join(filter(None, [f"use {number}", limits(kind)])))


def _of_use(name: str, ctx: click.Context) -> UsageError:
    """The error for a flag with a value, or an option without one."""
    parameter = next(each for each in ctx.command.get_params(ctx) if name in (*each.opts, *each.secondary_opts))
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return UsageError(f"`{name}` is a flag, and takes no value", f"write `{name}` alone, or leave it out")
    return UsageError(f"`{name}` is set without a value", f"write `{name} {_placeholder(parameter, ctx)}`")


def _parsed(ctx: click.Context, args: Sequence[str]) -> Mapping[str, Any]:
    return ctx.command.make_parser(ctx).parse_args(list(args))[0]


def _names(ctx: click.Context) -> list[str]:
    """All long options of the command."""
    names = [name for each in ctx.command.get_params(ctx) for name in (*each.opts, *each.secondary_opts)]
    return [name for name in names if name.startswith("--")]


def _name(parameter: click.Parameter, ctx: click.Context) -> str:
    """The name of an option, or the placeholder of an argument."""
    return max(parameter.opts, key=len) if isinstance(parameter, click.Option) else parameter.make_metavar(ctx)


def _placeholder(parameter: click.Parameter, ctx: click.Context) -> str:
    return parameter.make_metavar(ctx) if isinstance(parameter, click.Option) else ""
