"""Prices of machines per hour: a number, or a file with a line for each kind of machine.

    # Dollars per hour; from the provider's price list of 2026-11-01.
    3.06   H100
    0.095  EPYC

A machine has the price of the first line whose text occurs in the name of its GPU or processor.

Synopsis:

    >>> Prices.parse("2.5").per_hour_of("any processor")
    2.5
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from tfdist.errors import UsageError
from tfdist.run.schema import Machine


@dataclass(frozen=True)
class Prices:
    """Prices per hour, each after a text to find in the name of a machine; "" matches any name."""

    lines: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, option: str) -> Prices:
        """Parses a number, or the file with that name.

        Raises:
            UsageError: `option` is neither, or a line of the file is not valid.
        """
        number = _price(option)
        if number is not None:
            return cls((("", number),))
        try:
            lines = Path(option).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"`--price` is `{option}`, which is neither a price per hour nor a file that can be read: {error}",
                "use a number such as 0.095, or a file with a line `PRICE NAME` for each kind of machine",
            ) from error
        numbered = [(number, line.strip()) for number, line in enumerate(lines, 1)]
        return cls(tuple(_parse_line(option, *line) for line in numbered if line[1] and not line[1].startswith("#")))

    def per_hour(self, machine: Machine) -> float | None:
        """Returns the price of a machine per hour; `None` if no line matches it."""
        return self.per_hour_of(" ".join([*machine.gpus, machine.cpu]))

    def per_hour_of(self, name: str) -> float | None:
        """Returns the price for the names of a machine's GPUs and processor; `None` if no line matches."""
        return next((price for text, price in self.lines if text.lower() in name.lower()), None)


NO_PRICES = Prices()


def _parse_line(path: str, number: int, line: str) -> tuple[str, float]:
    first, _, name = line.partition(" ")
    price = _price(first)
    if price is None or not name.strip():
        raise UsageError(
            f"Line {number} of the prices in `{path}` is `{line}`",
            "write a price per hour and a part of the machine's name, such as `0.095 EPYC`",
        )
    return name.strip(), price


def _price(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
