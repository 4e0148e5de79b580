"""The tensors that cross the cuts of a plan: from the stage that makes one straight to each stage that uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_stages
from tfdist.stages.plan import Plan


@dataclass(frozen=True)
class Crossing:
    """A tensor on its way from one stage to another.

    Attributes:
        number: tells it from the others of the plan.
        tensor: symbolic.
        name: of the operation that makes it.
        source: the stage that makes it.
        target: a later stage, which uses it.
        has_gradient: whether `target` sends a gradient back.
        mask: the symbolic mask that goes with it; `None` without one.
    """

    number: int
    tensor: Any
    name: str
    source: int
    target: int
    has_gradient: bool
    mask: Any

    @property
    def spec(self) -> tf.TensorSpec:
        """The spec of the tensor, of a micro-batch of any size."""
        return _spec(self.tensor)

    @property
    def mask_spec(self) -> tf.TensorSpec:
        """The spec of the mask."""
        return _spec(self.mask)


def _spec(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec([None, *tensor.shape[1:]], tf.as_dtype(tensor.dtype))


def crossings(plan: Plan) -> list[Crossing]:
    """The tensors that cross the cuts of `plan`, in an order that is the same in all processes.

    Raises:
        UsageError: one of them has no axis of examples, or is sparse.
    """
    last = len(plan.begins) - 1
    source_of = {id(one): plan.stage_of(index) for index, call in enumerate(plan.calls) for one in call.outputs}
    trained = _trained(plan)
    targets: dict[int, set[int]] = {}
    for index, call in enumerate(plan.calls):
        for one in call.inputs:
            targets.setdefault(id(one), set()).add(plan.stage_of(index))
    for one in keras_stages.outputs(plan.functional):
        targets.setdefault(id(one), set()).add(last)
    found: list[Crossing] = []
    for call in plan.calls:
        for one in call.outputs:
            for target in sorted(targets.get(id(one), set()) - {source_of[id(one)]}):
                _require_sendable(one, call.path)
                mask = keras_internals.mask_of(one)
                found.append(
                    Crossing(len(found), one, "/".join(call.path), source_of[id(one)], target, id(one) in trained, mask)
                )
    return found


def _trained(plan: Plan) -> set[int]:
    """The `id`s of the tensors of floats that depend on a trained variable."""
    found: set[int] = set()
    for call in plan.calls:
        own = isinstance(call.operation, keras.Layer) and bool(call.operation.trainable_variables)
        if own or any(id(one) in found for one in call.inputs):
            found |= {id(one) for one in call.outputs if tf.as_dtype(one.dtype).is_floating}
    return found


def _require_sendable(tensor: Any, path: tuple[str, ...]) -> None:
    name = "/".join(path)
    if getattr(tensor, "sparse", False) or getattr(tensor, "ragged", False):
        raise UsageError(
            f"The output of `{name}` is sparse or ragged, and it would cross a cut between two processes",
            "cut the model elsewhere with `stages`",
        )
    if not tensor.shape or tensor.shape[0] is not None:
        raise UsageError(
            f"The output of `{name}`, of shape {tuple(tensor.shape)}, has no axis of examples, and it would cross a "
            "cut between two processes",
            "cut the model elsewhere with `stages`",
        )
