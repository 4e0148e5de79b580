"""The state that a strategy keeps for a model besides the model's own variables, for checkpoints.

    shared        variables with the same value in all processes, such as the momentum of an outer optimizer
    own           variables with a different value in each process, such as optimizer state that is not averaged; some
                  belong to the model's optimizer, so that a checkpoint also has the chief's values in that place

These Keras variables are attached to the model but are not part of it: `model.save` leaves them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist.internals.patching import Attached


@dataclass(frozen=True)
class StrategyState:
    """The state that a strategy keeps for one model.

    Attributes:
        shared: variables with the same value in all processes.
        own: variables with a different value in each process.
        kept: the object that the strategy works with between steps, created for these variables.
        made_for: the ids of the objects for which `kept` was created.
    """

    shared: Sequence[Any] = ()
    own: Sequence[Any] = ()
    kept: Any = None
    made_for: tuple[int, ...] = ()
    _own_ids: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_own_ids", frozenset(map(id, self.own)))

    def has_own(self, variable: Any) -> bool:
        """Whether the value of `variable` differs between processes."""
        return id(variable) in self._own_ids


_NOTHING = StrategyState()
_state: Attached[StrategyState] = Attached("strategy_state")


def keep(model: Any, state: StrategyState) -> None:
    """Attaches `state` to `model`, replacing any earlier state."""
    _state.set(model, state)


def of(model: Any) -> StrategyState:
    """Returns the strategy state that is attached to `model`, empty if there is none."""
    return _state.get(model) or _NOTHING
