"""The types of the options of commands, models, datasets and strategies; functions use them as annotations.

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

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError

from tfdist.errors import UsageError

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Factor = Annotated[float, Field(gt=0)]


def _of_square(size: Any) -> Any:
    is_one_number = isinstance(size, int) or (isinstance(size, str) and size.isdecimal())
    return (size, size) if is_one_number else size


# Eleven days; libraries count milliseconds in 32 bits, and no timeout needs to be longer.
LONGEST_SECONDS = 1_000_000
Seconds = Annotated[float, Field(gt=0, le=LONGEST_SECONDS)]
# Height and width in pixels; one number stands for both.
Size = Annotated[Sequence[Count], Field(min_length=2, max_length=2), BeforeValidator(_of_square)]


def checked_seconds(option: str, value: float | str) -> float:
    """A duration as a number of seconds, checked to be above 0 and at most `LONGEST_SECONDS`.

    Args:
        option: its name in messages.
        value: as the user wrote it.

    Raises:
        UsageError: it is no number, not above 0, infinite, or longer than `LONGEST_SECONDS`.
    """
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not 0 < found <= LONGEST_SECONDS:
        shown = value if isinstance(value, str) else f"{value:g}"
        raise UsageError(f"`{option}` is {shown}", f"use a number of seconds above 0, at most {LONGEST_SECONDS}")
    return found


def checked(function: Callable[..., Any], options: Mapping[str, Any], *, kind: str, name: str) -> dict[str, Any]:
    """The options, converted to the types of `function`'s annotations: a number written as text becomes a number.

    An option without an annotation, or with one that pydantic cannot check, such as a dataclass, stays as it is.

    Args:
        function: the function or class that takes the options.
        options: values by name.
        kind: the kind of its result, such as "model".
        name: its name in messages.

    Raises:
        UsageError: a value that its annotation does not allow.
    """
    known = _annotations(function)
    return {
        option: check_value(known[option], value, option, f"The {kind} `{name}`") if option in known else value
        for option, value in options.items()
    }


def require_owned(given: Iterable[str], owners: Mapping[str, Collection[str]], chosen: str, selector: str) -> None:
    """Raises `UsageError` for an option that belongs to another choice.

    Args:
        given: the options that are set, as messages name them.
        owners: the options of each choice.
        chosen: the choice that was made.
        selector: the option that makes the choice, as messages name it.
    """
    for option in given:
        if option not in owners.get(chosen, ()):
            names = " and ".join(f"`{name}`" for name, options in owners.items() if option in options)
            raise UsageError(
                f"`{option}` is an option of {names}, and `{selector}` is `{chosen}`", f"leave `{option}` out"
            )


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Those of a function; for a class, of its `__init__` and of those of its bases, to which it may pass options."""
    if not inspect.isclass(function):
        return _hints(function)
    initializers = [vars(one)["__init__"] for one in inspect.getmro(function)[:-1] if "__init__" in vars(one)]
    return {name: hint for one in reversed(initializers) for name, hint in _hints(one).items()}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except Exception:  # a user's annotations may be anything, or name what is not imported
        return {}


def check_value(annotation: Any, value: Any, option: str, owner: str) -> Any:
    """`value` converted to the type `annotation`; raises `UsageError` where it does not allow the value."""
    config = ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True)  # a folder may be called 2024
    try:
        return TypeAdapter(annotation, config=config).validate_python(value)
    except PydanticUserError:
        return value
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise UsageError(
            f"{owner} cannot have `{value}` as `{option}`: {message[0].lower()}{message[1:]}",
            "correct it, or leave it out",
        ) from None
