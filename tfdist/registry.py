"""Finds functions by name: a module in a folder of tfdist, or the user's own function as `module:function`.

A file in the folder is registered under its module name. Names are read from the folder without importing anything, so
that `--help` and the error for a misspelt name are fast.

Synopsis:

    >>> names("tfdist.models")[:3]
    ['bert', 'bilstm', 'cnn']
    >>> resolve("os.path:join", "model")("a", "b")
    'a/b'
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import UnknownNameError, UsageError
from tfdist.options import checked, initializers

# The command-line option that passes options to a function of each kind.
OPTIONS_OF = {"dataset": "data-option", "model": "model-option", "strategy": "strategy-option"}
# An example of a name of each kind, and the form of a user's own.
EXAMPLES_OF = {
    "dataset": ("digits", "module:function"),
    "model": ("mlp", "module:function"),
    "strategy": ("custom", "module:Class"),
}
# The first argument of a function of each kind: its name and its meaning.
FIRST_ARGUMENT_OF = {
    "dataset": ("data_dir", "the folder from `--data-dir`, or `None`"),
    "model": ("spec", "the facts about the dataset, such as `spec.input_shape` and `spec.classes`"),
}


def names(package: str) -> list[str]:
    """The names of the modules in `package` that do not start with an underscore, sorted; imports none of them."""
    path = importlib.import_module(package).__path__
    return sorted(module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_"))


def summary(package: str, name: str) -> str:
    """The first paragraph of the docstring of a module of `package`, without the name at its beginning."""
    paragraph = (ast.get_docstring(_tree(package, name)) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).removeprefix(f"`{name}`: ")


def constant(package: str, name: str, attribute: str) -> Any:
    """The literal that a module of `package` assigns to `attribute`, or `None`; the module is not imported."""
    for node in _tree(package, name).body:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == attribute for target in node.targets):
            return ast.literal_eval(node.value)
    return None


def _tree(package: str, name: str) -> ast.Module:
    (folder,) = importlib.import_module(package).__path__
    return ast.parse((Path(folder) / f"{name}.py").read_text(encoding="utf-8"))


def find(name: str, kind: str, package: str, attribute: str) -> Callable[..., Any]:
    """Returns the function with the name `name`.

    Args:
        name: a module of `package`, or the user's own function as `module:function`.
        kind: the kind of function, for messages: "model", "dataset".
        package: the dotted name of tfdist's folder for this kind.
        attribute: the function's name in a module of `package`.

    Raises:
        UnknownNameError: `package` has no such module.
        UsageError: `module:function` is not a callable.
    """
    require_text(name, kind)
    if ":" in name:
        return resolve(name, kind)
    require_known(name, kind, names(package))
    return getattr(importlib.import_module(f"{package}.{name}"), attribute)


def require_text(name: Any, kind: str) -> None:
    """Raises `UsageError` for a name that is not a text, such as an object of the kind itself."""
    if not isinstance(name, str):
        example, own = EXAMPLES_OF[kind]
        raise UsageError(f"The {kind} is `{name}`", f"pass a name, such as `{example}`, or your own as `{own}`")


def require_known(name: str, kind: str, known: Sequence[str]) -> None:
    """Raises `UnknownNameError` for a name not in `known`, with a correction if the name looks like a user's module."""
    if name in known:
        return
    module, _, attribute = name.removesuffix(".py").rpartition(".")
    hint = None
    if name.endswith(".py") or os.path.exists(f"{name}.py"):
        hint = f"write your own {kind} as `{_dotted(name)}:NAME`, with its name in the file"
    elif module and all(part.isidentifier() for part in name.split(".")):
        hint = f"write your own {kind} as `{module}:{attribute}`"
    raise UnknownNameError(kind, name, known, hint)


def _dotted(path: str) -> str:
    """The module name of a file below the working directory."""
    return os.path.relpath(path).removesuffix(".py").replace(os.sep, ".")


def resolve(reference: str, kind: str) -> Callable[..., Any]:
    """Returns the user's own function for `module:function`; `kind` names the function's result in messages.

    The working directory is importable, as with `python -m`. Errors in the user's module are not caught, including an
    `ImportError` for a module that it imports.

    Raises:
        UsageError: the reference is malformed, or the module or the function is missing or not callable.
    """
    module_name, _, attribute = reference.partition(":")
    if module_name.endswith(".py") and attribute.isidentifier():
        raise UsageError(
            f"The {kind} `{reference}` names a file, not a module", f"write `{_dotted(module_name)}:{attribute}`"
        )
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise UsageError(
            f"The {kind} `{reference}` is not of the form `module:function`",
            "write the module with dots and without `.py`, as in `package.module:function`",
        )
    function = getattr(_import(module_name, reference, kind), attribute, None)
    if function is None:
        raise UsageError(
            f"The module `{module_name}` has no `{attribute}`, which the {kind} `{reference}` refers to",
            f"define `{attribute}` in `{module_name}`, or correct the name after the colon",
        )
    if not callable(function):
        raise UsageError(
            f"The {kind} `{reference}` is not callable: its type is `{type(function).__name__}`",
            f"make it a function that returns the {kind}",
        )
    return function


def source_file(module_name: str) -> Path | None:
    """The source file of a user's module, or `None`; the working directory is importable afterwards."""
    make_importable(os.getcwd())
    return file_of(module_name)


def file_of(module_name: str) -> Path | None:
    """The source file of a module, or `None`; imports its parent packages, but not the module itself."""
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def call(function: Callable[..., Any], *arguments: Any, kind: str, name: str, options: Mapping[str, Any]) -> Any:
    """Calls `function(*arguments, **options)` after a check of the options.

    Raises:
        UsageError: the function does not take an option (the message lists the options that it takes), a required
            option is missing, or an annotation does not allow a value.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if arguments:
        _require_first(parameters, kind, name)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [parameter.name for parameter in parameters[len(arguments) :] if parameter.kind in named]
    unknown = [option for option in options if option not in known]
    if unknown and not takes_any:
        raise unknown_option(kind, name, unknown[0], known)
    missing = [
        parameter.name
        for parameter in parameters[len(arguments) :]
        if parameter.kind in named and parameter.default is parameter.empty and parameter.name not in options
    ]
    if missing:
        needs = ", ".join(f"`{option}`" for option in missing)
        raise UsageError(
            f"The {kind} `{name}` needs the option {needs}",
            "set it with `" + " ".join(f"--{OPTIONS_OF[kind]} {option}=VALUE" for option in missing) + "`",
        )
    try:
        return function(*arguments, **checked(function, options, kind=kind, name=name))
    except TypeError as error:
        rejected = [option for option in unknown if f"unexpected keyword argument '{option}'" in str(error)]
        if not rejected:
            raise
        # The class passed the option to its base class, which rejected it.
        raise unknown_option(kind, name, rejected[0], _named_in_bases(function)) from error


def _named_in_bases(function: Any) -> list[str]:
    """The keyword-only parameters of a class and of its bases."""
    parameters = [
        parameter for each in initializers(function) for parameter in inspect.signature(each).parameters.values()
    ]
    return list(dict.fromkeys(each.name for each in parameters if each.kind is each.KEYWORD_ONLY))


def unknown_option(kind: str, name: str, option: str, known: Sequence[str]) -> UsageError:
    """Returns the error for an option that the function `name` does not take; it lists the known options."""
    takes = ", ".join(f"`{known_option}`" for known_option in known) or "no options"
    return UsageError(
        f"The {kind} `{name}` does not know the option `{option}`: it takes {takes}",
        "use one of these, or leave it out" if known else f"leave `{option}` out",
    )


def _require_first(parameters: Sequence[inspect.Parameter], kind: str, name: str) -> None:
    """Raises `UsageError` for a function that does not take the first argument of its kind."""
    expected, meaning = FIRST_ARGUMENT_OF[kind]
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = parameters[0] if parameters else None
    if first is not None and first.kind is first.VAR_POSITIONAL:
        return
    if first is None or first.kind not in by_position or _is_option(first, expected):
        function = name.rpartition(":")[2]
        raise UsageError(
            f"The {kind} `{name}` does not take `{expected}` as its first argument",
            f"write `def {function}({expected}, ...)`; `{expected}` is {meaning}",
        )


def _is_option(parameter: inspect.Parameter, expected: str) -> bool:
    """Whether a function's first parameter is an option, since it has a default and another name than `expected`."""
    has_value = parameter.default is not parameter.empty and parameter.default is not None
    return has_value and parameter.name != expected


def parse_options(settings: Sequence[str], option: str) -> dict[str, Any]:
    """Parses `NAME=VALUE` settings; a value is a Python literal, such as a number, or else a string.

    Args:
        settings: the user's settings, one per use of the option.
        option: the name of the option, for messages.

    Raises:
        UsageError: a setting does not have this form, or a name is set twice.
    """
    options: dict[str, Any] = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        name = name.strip().replace("-", "_")
        if not (separator and name.isidentifier()):
            raise UsageError(
                f"`{option}` is `{setting}`, which is not NAME=VALUE", f"write for example `{option} classes=10`"
            )
        if name in options:
            raise UsageError(f"`{option}` sets `{name}` twice", "set it once")
        options[name] = _value(value)
    return options


def _value(text: str) -> Any:
    truths = {"true": True, "false": False, "none": None}
    if text.lower() in truths:
        return truths[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def make_importable(directory: str) -> None:
    """Lets modules in `directory` be imported, as with `python -m`."""
    if directory not in sys.path and "" not in sys.path:
        sys.path.insert(0, directory)
    # Also finds files that were written after the interpreter last listed their folder.
    importlib.invalidate_caches()


def _import(module_name: str, reference: str, kind: str) -> Any:
    directory = os.getcwd()
    make_importable(directory)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only the user's module itself or one of its parent packages counts as missing, not a module that it imports.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"No module `{error.name}` for the {kind} `{reference}` in `{directory}` or the installed packages",
            "start in the folder that contains the module, or install it",
        ) from error
