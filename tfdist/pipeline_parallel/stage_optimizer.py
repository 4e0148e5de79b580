"""An optimizer of which the process of a stage has the slots of its own variables, and updates these alone.

A step is traced as if a process had all of them, and each computes its part of that (`tfdist.pipeline_parallel.cut`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.groups import ProcessGroup, parts
from tfdist.groups.parts import Part
from tfdist.internals import keras_optimizers, keras_stages, tensorflow_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.optimizers.divided import DividedOptimizer, divide, local
from tfdist.pipeline_parallel.own_variables import whole_part

OTHER_OPTIMIZER = "use an optimizer of Keras, or train in one process"


class StageOptimizer(DividedOptimizer):
    """The part of one optimizer that the process of a stage has.

    Args:
        optimizer: of Keras; built for `variables`, or not built.
        variables: all that it updates; `tfdist.groups.parts` says which are of this process.
        group: of the processes.
        meet: is called with what this process is about to do, and raises an error if another one does something else.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], group: ProcessGroup, meet: Callable[[str], None]):
        super().__init__(optimizer, group, meet)
        self._parts = {id(variable): _part(variable) for variable in variables}
        self.own = [variable for variable in variables if self._parts[id(variable)].size]
        self._stand_ins: dict[int, tf.Variable] = {}
        self._make_slots(list(variables))

    def _make_slots(self, variables: list[Any]) -> None:
        if not self.optimizer.built:
            # An optimizer that computes by elements has slots of the shapes of what it is built for.
            by_element = type(keras_optimizers.inner(self.optimizer)) in keras_optimizers.BY_ELEMENT
            plain = [
                local(variable)
                if self._parts[id(variable)].size or not by_element
                else tf.Variable(tf.zeros(self._parts[id(variable)].shape, local(variable).dtype), trainable=False)
                for variable in variables
            ]
            with keras_stages.known(variables):
                keras_optimizers.build(self.optimizer, variables, plain)
        for variable, slots in zip(variables, self._slots(), strict=True):
            part = self._parts[id(variable)]
            for slot in slots:
                divide(slot, part if tuple(slot.shape) in (part.shape, part.whole_shape) else _alike(part, slot))

    def _slots(self) -> list[list[Any]]:
        """The slots of each variable."""
        try:
            return keras_optimizers.slots_of(self.optimizer)
        except LookupError as error:
            raise UsageError(
                f"The variable `{error.args[0]}` of the optimizer `{self.optimizer.name}` belongs to none of the "
                "variables that it updates",
                OTHER_OPTIMIZER,
            ) from error

    @contextlib.contextmanager
    def as_if_whole(self) -> Iterator[None]:
        """The context in which an update of all variables is traced, with slots that other processes have."""
        elsewhere = [slot for slots in self._slots() for slot in slots if not _has(slot)]
        with keras_optimizers.standing_for(elsewhere, [self._stand_in(one) for one in elsewhere]):
            yield

    def _stand_in(self, slot: Any) -> tf.Variable:
        """A variable without a value, of the shape of a slot of another process."""
        if id(slot) not in self._stand_ins:
            held, part = local(slot), parts.part_of(slot)
            assert part is not None
            self._stand_ins[id(slot)] = tensorflow_variables.without_value(part.whole_shape, held.dtype, held.device)
        return self._stand_ins[id(slot)]

    def finalize(self) -> None:
        """What the optimizer does to the variables of this process at the end of a training."""
        values = [local(variable) for variable in self.own]
        updating = keras_optimizers.updating(self.optimizer, self.own, values)
        with tensorflow_internals.without_strategy(), updating:
            self.optimizer.finalize_variable_values(self.own)


def _has(slot: Any) -> bool:
    part = parts.part_of(slot)
    return part is None or bool(part.size)


def _part(variable: Any) -> Part:
    part = parts.part_of(variable)
    if part is None:
        raise UsageError(
            f"The optimizer updates `{variable.path}`, which belongs to no layer of a stage",
            "leave out layers that the model does not call, or train in one process",
        )
    return part


def _alike(part: Part, slot: Any) -> Part:
    """The part in a slot of another shape than the variable that `part` is of."""
    return whole_part(slot.shape, part.owner, part.rank, len(part.lengths))
