"""What a strategy remembers of the training of a model beside the model's own variables: for checkpoints.

    shared        the same in all processes, such as the momentum of an outer rule
    own           each process has its own values, such as the state of an optimizer that is not averaged; some are
                  variables of the model's optimizer, of which a checkpoint has those of the chief too

Both are lists of Keras variables that are kept with the model, and do not belong to it: `model.save` leaves them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist.internals.attached import Attached


@dataclass(frozen=True)
class StrategyState:
    """What a strategy remembers for one model.

    Attributes:
        shared: variables that are the same in all processes.
        own: variables of which each process has its own values.
        kept: what the strategy works with between steps, made for these variables.
        made_for: what `kept` was made for, by ids.
    """

    shared: Sequence[Any] = ()
    own: Sequence[Any] = ()
    kept: Any = None
    made_for: tuple[int, ...] = ()
    _own_ids: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_own_ids", frozenset(map(id, self.own)))

    def has_own(self, variable: Any) -> bool:
        """Whether each process has its own value of `variable`."""
        return id(variable) in self._own_ids


_NOTHING = StrategyState()
_state: Attached[StrategyState] = Attached("strategy_state")


def keep(model: Any, state: StrategyState) -> None:
    """Keeps `state` with `model`, in place of what was kept before."""
    _state.set(model, state)


def of(model: Any) -> StrategyState:
    """What a strategy keeps with `model`."""
    return _state.get(model) or _NOTHING
