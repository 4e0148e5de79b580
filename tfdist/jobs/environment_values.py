"""Values of environment variables: numbers, and what a message can show of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfdist.errors import UsageError


def number(environment: Mapping[str, str], name: str) -> int:
    """The variable `name`, which is to be a whole number.

    Raises:
        UsageError: it is not.
    """
    text = environment[name]
    if not re.fullmatch("[0-9]{1,18}", text):
        raise UsageError(f"`{name}` is `{shortened(text)}`, which is not a number from 0", f"correct or unset `{name}`")
    return int(text)


def shortened(text: str) -> str:
    """What a message can show of a value."""
    return text if len(text) <= 80 else f"{text[:77]}..."
