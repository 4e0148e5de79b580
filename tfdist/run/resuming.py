"""The options of the run that `--resume` continues: those of its record, unless the command line sets others.

A run folder may come from another person or machine. Options that start a program, load code, write elsewhere or reach
other machines are therefore not taken from its record; the command line has to repeat them.

Synopsis:

    >>> recorded = {"model": "mlp", "dataset": "digits", "strategy": "custom", "epochs": "2"}
    >>> merged(recorded, {"epochs": "3"})
    {'model': 'mlp', 'dataset': 'digits', 'strategy': 'custom', 'epochs': '3'}
    >>> not_taken({"model": "mine:build", "dataset": "digits"}, {})
    {'model': 'mine:build'}
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from tfdist import strategies
from tfdist.errors import RunFolderError, printable
from tfdist.run.config import STRATEGY_FLAGS

# Starts a program; names machines that ssh connects to; opens ports to the network, twice; writes a file.
NOT_TAKEN = ("host_discovery_script", "hostfile", "elastic", "expose", "timeline")
MAY_LOAD_CODE = ("strategy", "model", "dataset")  # as `module:name`
_REFERENCE = re.compile(r"[^\W\d][\w.]*\s*:\s*[^\W\d]")  # not `CPU:0`, and not the steps `10:20`
_ELASTIC = ("elastic", "min_workers", "max_workers", "hostfile", "host_discovery_script")
_FIXED = ("workers", "ps")
_HOSTS = ("hostfile", "host_discovery_script")


def merged(recorded: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the resumed run: `typed`, and the `recorded` options that do not contradict them.

    Options that may be repeated, as NAME=VALUE, are merged by name.

    Args:
        recorded: the options in the record of the run, by name, as text.
        typed: those of the command line.
    """
    replaced = _replaced(recorded, typed)
    kept = {name: value for name, value in recorded.items() if name not in replaced}
    both = [name for name in typed if isinstance(kept.get(name), list)]
    return {**kept, **typed, **{name: _last_settings([*kept[name], *typed[name]]) for name in both}}


def _replaced(recorded: Mapping[str, Any], typed: Mapping[str, Any]) -> set[str]:
    """The recorded options that other options of the command line replace."""
    replaced: set[str] = set()
    for chosen, others in ((_FIXED, _ELASTIC), (_ELASTIC, _FIXED), (_HOSTS, _HOSTS)):
        if any(name in typed for name in chosen):
            replaced |= {name for name in others if name not in typed}
    strategy = typed.get("strategy")
    if strategy is not None and strategy != recorded.get("strategy"):
        traits = strategies.traits(strategy)
        replaced |= {"strategy_option", *STRATEGY_FLAGS} | (set() if traits.elastic else set(_ELASTIC))
        replaced |= (set() if traits.processes else {"workers"}) | (set() if traits.servers else {"ps"})
    return replaced


def _last_settings(settings: Iterable[str]) -> list[str]:
    """Keeps the last setting per name of NAME=VALUE settings."""
    return list({_name(setting): setting for setting in settings}.values())


def not_taken(options: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """The `options` of a resumed run that have to be on the command line and are not among `typed`."""
    missing: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, list):
            given = typed.get(name, ())
            if settings := [each for each in value if each not in given and _is_dangerous_setting(each)]:
                missing[name] = settings
        elif name not in typed and (_loads_code(name, value) or (name in NOT_TAKEN and value)):
            missing[name] = value
    return missing


def _is_dangerous_setting(setting: str) -> bool:
    name, _, value = setting.partition("=")
    return _name(setting) in NOT_TAKEN or _loads_code(name, value)


def _loads_code(name: str, value: Any) -> bool:
    """Whether an option is, or may be, the user's own function as `module:function`."""
    return ":" in str(value) and (name in MAY_LOAD_CODE or _REFERENCE.search(str(value)) is not None)


def _name(setting: str) -> str:
    """The name in a NAME=VALUE setting."""
    return setting.partition("=")[0].strip().replace("-", "_")


def require_typed(
    run_dir: Path, options: Mapping[str, Any], typed: Mapping[str, Any], parameters: Iterable[click.Parameter]
) -> None:
    """Raises `RunFolderError` if `options` contain what may not be taken from a run folder, see `not_taken`."""
    missing = as_arguments(not_taken(options, typed), parameters)
    if missing:
        written = printable(shlex.join(missing))
        again = shlex.join(["python", "-m", "tfdist.train", "--resume", "--run-dir", str(run_dir)])
        raise RunFolderError(
            f"The run in `{run_dir}` was started with `{written}`, and a run folder, which may come from elsewhere, is "
            "not allowed to choose what loads code, starts programs, writes to other folders or opens the network",
            f"if you know what it does, repeat it: `{again} {written}`; else set another value",
        )


def as_arguments(options: Mapping[str, Any], parameters: Iterable[click.Parameter]) -> list[str]:
    """The arguments of a command line with these options, in the order of the command's `parameters`."""
    arguments: list[str] = []
    for parameter in parameters:
        value = options.get(parameter.name or "")
        flag = parameter.opts[0]
        if isinstance(parameter, click.Option) and parameter.is_flag:
            arguments += [flag] * bool(value)
        elif value is not None:
            arguments += [
                part for each in (value if isinstance(value, list) else [value]) for part in (flag, str(each))
            ]
    return arguments
