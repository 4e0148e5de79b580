"""The options of a strategy, from the source of its constructor: known without importing TensorFlow.

Synopsis:

    >>> options = of_class("tfdist.strategies.local_sgd", "LocalSgdStrategy").options
    >>> options["sync_every"].annotation
    "Count | Literal['epoch'] | None"
    >>> options["timeout_seconds"].help
    'how long a process may be silent'

A class that passes `**options` on takes those of its base classes too, which are found by the imports of its module,
except those that its constructor sets itself. In a job it may be replaced by another class, by its `of_job`, whose
options are among those of the strategy.
"""

from __future__ import annotations

import ast
import collections.abc
import contextlib
import dataclasses
import functools
import itertools
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfdist import options, registry
from tfdist.options import check_value


@dataclass(frozen=True)
class Option:
    """An option of a strategy.

    Attributes:
        name: of the argument.
        annotation: its type, as the source has it.
        help: what the docstring says of it, up to the first stop; "" if it says nothing.
    """

    name: str
    annotation: str
    help: str


@dataclass(frozen=True)
class Signature:
    """The options of a class.

    Attributes:
        options: by name.
        complete: whether these are all; false where a base class, or a class that `of_job` returns, has no source.
    """

    options: Mapping[str, Option]
    complete: bool = True

    def check(self, strategy: str, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` for an option of `strategy` that is unknown, or a value that its type does not allow."""
        unknown = [name for name in values if name not in self.options]
        if unknown and self.complete:
            known = [name for name in self.options if name != SET_BY_THE_COMMAND]
            raise registry.unknown_option("strategy", strategy, unknown[0], known)
        for name in [name for name in values if name in self.options]:
            try:
                annotation = eval(self.options[name].annotation, _TYPES)
            except Exception:  # a type of the class's own module, or no type at all: the class checks it later
                continue
            with contextlib.suppress(NameError):  # the same in quotes
                check_value(annotation, values[name], name, f"The strategy `{strategy}`")


# What annotations of options name, besides types of a module's own.
_TYPES = {**vars(options), **vars(typing), **vars(collections.abc), "os": os}
UNKNOWN = Signature({}, complete=False)
SET_BY_THE_COMMAND = "job_settings"


@functools.cache
def of_class(module: str, name: str, in_job: bool = True) -> Signature:
    """The options of the class `name` of a module; imports the packages above the module, but not the module.

    With `in_job` they include the options of the classes that its `of_job` returns.
    """
    path = registry.file_of(module)
    if path is None:
        return UNKNOWN
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _of_node(node, _imports(tree, module), in_job)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and _is_assigned(node, name):
            return of_class(module, node.value.id, in_job)
    return _of_dotted(_imports(tree, module).get(name, ""), in_job)


def _is_assigned(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _imports(tree: ast.Module, module: str) -> dict[str, str]:
    """The dotted name of what each imported name of a module stands for, and of its own classes."""
    names = {node.name: f"{module}.{node.name}" for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            parent = ".".join([*package, *([node.module] if node.module else [])])
            names |= {alias.asname or alias.name: f"{parent}.{alias.name}" for alias in node.names}
    return names


def _of_dotted(dotted: str, in_job: bool) -> Signature:
    module, _, name = dotted.rpartition(".")
    return of_class(module, name, in_job) if module else UNKNOWN


def _of_node(node: ast.ClassDef, imports: Mapping[str, str], in_job: bool) -> Signature:
    constructors = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
    own: dict[str, Option] = {}
    if constructors:
        texts = described(ast.get_docstring(node) or "")
        arguments = constructors[0].args
        for argument in [*arguments.args[1:], *arguments.kwonlyargs]:
            annotation = "Any" if argument.annotation is None else ast.unparse(argument.annotation)
            first_clause = re.split(r"[.;:](?:\s|$)", texts.get(argument.arg, ""))[0]
            own[argument.arg] = Option(argument.arg, annotation, first_clause)
        if arguments.kwarg is None:
            return Signature(own)
    others = [_of_expression(base, imports, in_job) for base in node.bases]
    if in_job:  # their `of_job` is not asked again, which may return this class or one of its bases
        others += [_of_expression(chosen, imports, in_job=False) for chosen in _chosen_in_job(node)]
    inherited = {name: option for other in reversed(others) for name, option in other.options.items()}
    for name in _set_for_base(constructors) - own.keys():
        inherited.pop(name, None)
    for name in own.keys() & inherited.keys():  # what it passes on may be described there
        own[name] = dataclasses.replace(own[name], help=own[name].help or inherited[name].help)
    return Signature(
        own | {name: option for name, option in inherited.items() if name not in own},
        complete=all(other.complete for other in others),
    )


def _set_for_base(constructors: list[ast.FunctionDef]) -> set[str]:
    """The arguments that a constructor itself passes to that of its base class, beside `**options`."""
    calls = [part for constructor in constructors for part in ast.walk(constructor) if isinstance(part, ast.Call)]
    keywords = [call.keywords for call in calls if ast.unparse(call.func) == "super().__init__"]
    return {keyword.arg for keyword in itertools.chain(*keywords) if keyword.arg}


def _chosen_in_job(node: ast.ClassDef) -> list[ast.expr]:
    """The classes that `of_job` of a class may return besides the class itself."""
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "of_job"]
    returned = [part.value for method in methods for part in ast.walk(method) if isinstance(part, ast.Return)]
    choices = [(value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,) for value in returned if value]
    return [choice for choice in itertools.chain(*choices) if ast.unparse(choice) != "cls"]


def _of_expression(expression: ast.expr, imports: Mapping[str, str], in_job: bool) -> Signature:
    """The options of the class that an expression in a module with these `imports` names."""
    first, _, rest = ast.unparse(expression).partition(".")
    dotted = imports.get(first)
    return UNKNOWN if dotted is None else _of_dotted(f"{dotted}.{rest}" if rest else dotted, in_job)


def described(docstring: str) -> dict[str, str]:
    """What the section `Args:` of a docstring says of each argument."""
    section = re.search(r"^Args:\n(.*?)(?:\n\n|\Z)", docstring, re.S | re.M)
    entries = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", section[1], re.M) if section else []
    return {name: " ".join(text.split()) for name, text in entries}
