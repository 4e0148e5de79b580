"""Where the variables of a model are, which is a part of each strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.groups import ProcessGroup
from tfdist.groups.packing import summed
from tfdist.internals.keras import tf_variable


class Variables:
    """Ordinary variables, one copy in each process.

    Args:
        device: where they are made; `None` leaves it to TensorFlow.
        in_parts: each process of a job has its part of a metric's state, and the state is the sum of the parts.
    """

    def __init__(self, device: str | None = None, *, in_parts: bool = False):
        self._device = device
        self.in_parts = in_parts

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which a model and its optimizer are made and compiled."""
        return contextlib.nullcontext() if self._device is None else tf.device(self._device)

    def tracing(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """The context in which a step of `model` is traced for one device."""
        del model
        return contextlib.nullcontext()

    def calling(self, strategy: Any, model: Any) -> contextlib.AbstractContextManager[Any]:
        """The context of `fit`, `evaluate` and `predict` of `strategy`."""
        del strategy, model
        return contextlib.nullcontext()

    def check(self, model: Any, is_divided: Any) -> None:
        """Raises `UsageError` for a model that was not made in the scope.

        Args:
            model: compiled.
            is_divided: whether the strategy has divided an optimizer, whose variables are plain then.
        """

    def sum_metrics(self, group: ProcessGroup, variables: Sequence[Any], name: str) -> list[tf.Tensor]:
        """The sums over all replicas of `variables`, the state of metrics; `name` identifies the exchange."""
        values = [tf.convert_to_tensor(tf_variable(variable)) for variable in variables]
        return summed(group, values, name) if self.in_parts and group.size > 1 else values
