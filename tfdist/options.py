"""Annotation types for the options of models, datasets and strategies, and checks of values against annotations.

Synopsis:

    >>> def build(spec, *, units: Count = 128, dropout: Fraction = 0.2): ...
    >>> checked(build, {"units": "64"}, kind="model", name="mlp")
    {'units': 64}
    >>> checked(build, {"dropout": 2}, kind="model", name="mlp")
    Traceback (most recent call last):
      ...
    tfdist.errors.UsageError: The model `mlp` cannot have `2` as `dropout`: input should be less than 1
    <BLANKLINE>
    hint: correct it, or leave it out
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, ParamSpec, TypeVar, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError

from tfdist.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Factor = Annotated[float, Field(gt=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def _pair(size: Any) -> Any:
    is_number = isinstance(size, int) or (isinstance(size, str) and size.isdecimal())
    return (size, size) if is_number else size


# Eleven days: libraries count milliseconds in 32 bits, and no timeout needs to be longer.
LONGEST_SECONDS = 1_000_000
Seconds = Annotated[float, Field(gt=0, le=LONGEST_SECONDS)]
# Height and width in pixels; one number stands for both.
Size = Annotated[Sequence[Count], Field(min_length=2, max_length=2), BeforeValidator(_pair)]


def checked_seconds(option: str, value: float | str) -> float:
    """Returns a duration in seconds, after a check that it is above 0 and at most `LONGEST_SECONDS`.

    Args:
        option: the name of the option in messages.
        value: the value as the user wrote it.

    Raises:
        UsageError: the value is not a number, not above 0, infinite, or longer than `LONGEST_SECONDS`.
    """
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_SECONDS:
        shown = value if isinstance(value, str) else f"{value:g}"
        raise UsageError(f"`{option}` is {shown}", f"use a number of seconds above 0, at most {LONGEST_SECONDS}")
    return seconds


def checked(function: Callable[..., Any], options: Mapping[str, Any], *, kind: str, name: str) -> dict[str, Any]:
    """Returns the options, converted to the types of `function`'s annotations, such as text to numbers.

    An option without an annotation, or with an annotation that pydantic cannot check, such as a dataclass, is returned
    unchanged.

    Args:
        function: the function or class that takes the options.
        options: values by name.
        kind: the kind of its result, such as "model".
        name: its name in messages.

    Raises:
        UsageError: an annotation does not allow a value.
    """
    annotations = _annotations(function)
    return {
        option: check_value(annotations[option], value, option, f"The {kind} `{name}`")
        if option in annotations
        else value
        for option, value in options.items()
    }


def require_owned(given: Iterable[str], owners: Mapping[str, Collection[str]], chosen: str, selector: str) -> None:
    """Raises `UsageError` for an option that belongs to a choice other than `chosen`.

    Args:
        given: the options that are set, by their names in messages.
        owners: the options of each choice.
        chosen: the choice that was made.
        selector: the name in messages of the option that makes the choice.
    """
    for option in given:
        if option not in owners.get(chosen, ()):
            names = " and ".join(f"`{name}`" for name, options in owners.items() if option in options)
            raise UsageError(
                f"`{option}` is an option of {names}, and `{selector}` is `{chosen}`", f"leave `{option}` out"
            )


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function; for a class, those of its `__init__` and of the `__init__` of its bases."""
    functions = initializers(function) if inspect.isclass(function) else [function]
    return {name: hint for each in reversed(functions) for name, hint in _hints(each).items()}


def initializers(kind: type) -> list[Callable[..., Any]]:
    """The `__init__` functions of a class and of its bases, to which it may pass options; the class comes first."""
    return [vars(base)["__init__"] for base in inspect.getmro(kind)[:-1] if "__init__" in vars(base)]


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except Exception:  # a user's annotations may be arbitrary objects, or use names that are not imported
        return {}


def checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """A function or constructor whose arguments are checked and converted by its annotations, as options are.

    A wrong number of arguments, an unknown name, or a value that its type does not allow raises `UsageError`. Its hint
    shows all arguments.
    """
    signature = inspect.signature(function)
    owner = function.__qualname__.removesuffix(".__init__")
    hint = f"its arguments are `{owner}{_without_annotations(signature)}`"

    @functools.wraps(function)
    def checked_call(*positional: P.args, **named: P.kwargs) -> R:
        try:
            bound = signature.bind(*positional, **named)
        except TypeError as error:
            raise UsageError(f"`{owner}` {error}", hint) from None
        hints = _hints(function)
        for name, value in bound.arguments.items():
            if name in hints and signature.parameters[name].kind not in _VARIADIC:
                bound.arguments[name] = check_value(hints[name], value, name, f"`{owner}`", hint)
        return function(*bound.args, **bound.kwargs)

    return checked_call


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _without_annotations(signature: inspect.Signature) -> inspect.Signature:
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    own = [parameter for parameter in parameters if parameter.name not in ("self", "cls")]
    return signature.replace(parameters=own, return_annotation=signature.empty)


# What the validator says of other types of errors is in its own terms.
_OWN_WORDS = {"sequence_str": "Input should be a sequence, such as a list, and is text"}


def check_value(annotation: Any, value: Any, option: str, owner: str, hint: str = "correct it, or leave it out") -> Any:
    """Returns `value` converted to the type `annotation`; raises `UsageError` if the type does not allow it."""
    config = ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True)  # a folder may have the name 2024
    try:
        return TypeAdapter(annotation, config=config).validate_python(value)
    except PydanticUserError:
        return value
    except ValidationError as error:
        first = error.errors()[0]
        message = _OWN_WORDS.get(first["type"], first["msg"])
        raise UsageError(
            f"{owner} cannot have `{value}` as `{option}`: {message[0].lower()}{message[1:]}", hint
        ) from None
