"""What tfdist remembers of a user's object: one record, in one hidden attribute of the model, optimizer or variable.

Each value has a name and a type where it is used, and lives as long as the object does:

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
    """One value of the record, by its `name`."""

    def __init__(self, name: str):
        self.name = name

    def get(self, owner: Any) -> Value | None:
        """The value that `owner` has, or `None`."""
        value: Value | None = getattr(owner, "__dict__", {}).get(_RECORD, {}).get(self.name)
        return value

    def set(self, owner: Any, value: Value | None) -> None:
        """Sets the value for `owner`; `None` removes it."""
        record = {
            **getattr(owner, "__dict__", {}).get(_RECORD, {}),
            self.name: value,
        }  # a new one: copies of `owner` keep theirs
        # Past Keras' attribute tracking, so that nothing of it is saved with the model.
        object.__setattr__(owner, _RECORD, {name: kept for name, kept in record.items() if kept is not None})
