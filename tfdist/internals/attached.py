"""Values that tfdist attaches to a user's model, optimizer or variable, in one record in one hidden attribute.

Each value has a name and a type, and lives as long as the object:

>>> import types
>>> from tfdist.internals.attached import Attached
>>> _next_pass: Attached[int] = Attached("next_pass")
>>> model = types.SimpleNamespace()
>>> _next_pass.get(model) is None
True
>>> _next_pass.set(model, 3)
>>> _next_pass.get(model)
3
"""

from typing import Any, Generic, TypeVar

_RECORD = "_tfdist"

Value = TypeVar("Value")


class Attached(Generic[Value]):
    """The value of the record with this `name`."""

    def __init__(self, name: str):
        self.name = name

    def get(self, owner: Any) -> Value | None:
        """The value of `owner`; `None` if it has none."""
        value: Value | None = getattr(owner, "__dict__", {}).get(_RECORD, {}).get(self.name)
        return value

    def set(self, owner: Any, value: Value | None) -> None:
        """Sets the value for `owner`; `None` removes it."""
        # A new dictionary, because copies of `owner` share the old one.
        record = {**getattr(owner, "__dict__", {}).get(_RECORD, {}), self.name: value}
        # Bypasses Keras' attribute tracking, so that the record is not saved with the model.
        object.__setattr__(owner, _RECORD, {name: kept for name, kept in record.items() if kept is not None})
