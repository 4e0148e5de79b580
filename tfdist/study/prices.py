"""What machines cost an hour: one number, or a file with a line for each kind of machine.

    # Dollars an hour; from the provider's price list of 2026-11-01.
    3.06   H100
    0.095  EPYC

The first line whose text is in the name of a machine's GPU or processor has its price.

Synopsis:

    >>> Prices.parse("2.5").an_hour_of("any processor")
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
    """Prices an hour, each with a text that the name of a machine contains; "" is in any name."""

    lines: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, option: str) -> Prices:
        """The prices that a number, or the file with that name, says.

        Raises:
            UsageError: it is neither, or a line of the file is not as described above.
        """
        number = _price(option)
        if number is not None:
            return cls((("", number),))
        try:
            lines = Path(option).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"`--price` is `{option}`, which is neither a price an hour nor a file that can be read: {error}",
                "give a number such as 0.095, or a file with a line `PRICE NAME` for each kind of machine",
            ) from error
        return cls(tuple(_line(option, number, line) for number, line in enumerate(lines, 1) if _says_something(line)))

    def an_hour(self, machine: Machine) -> float | None:
        """What a machine costs an hour; `None` if no line names it."""
        return self.an_hour_of(" ".join([*machine.gpus, machine.cpu]))

    def an_hour_of(self, name: str) -> float | None:
        """The same for the names of its GPUs and its processor."""
        return next((price for text, price in self.lines if text.lower() in name.lower()), None)


NO_PRICES = Prices()


def _says_something(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _line(path: str, number: int, line: str) -> tuple[str, float]:
    first, _, name = line.strip().partition(" ")
    price = _price(first)
    if price is None or not name.strip():
        raise UsageError(
            f"Line {number} of the prices in `{path}` is `{line.strip()}`",
            "write a price an hour and a part of the machine's name, such as `0.095 EPYC`",
        )
    return name.strip(), price


def _price(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
