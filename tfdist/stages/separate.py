"""What a model must be for its stages to be in different processes, which have nothing in common."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.errors import UsageError
from tfdist.internals import keras_stages
from tfdist.stages.plan import Plan

ONE_PROCESS = "train it in one process, whose stages are on devices"


def layers_of(plan: Plan, stage: int) -> list[Any]:
    """The layers of a stage."""
    return [call.operation for call in plan.calls_of(stage) if isinstance(call.operation, keras.Layer)]


def require_separate(model: Any, plan: Plan) -> None:
    """Raises `UsageError` if two stages share a layer, a stage trains nothing, or an early layer has metrics."""
    count = len(plan.begins)
    seen: dict[int, int] = {}
    for number in range(count):
        for layer in layers_of(plan, number):
            for variable in layer.variables:
                if seen.setdefault(id(variable), number) != number:
                    raise UsageError(
                        f"The layer `{layer.name}` is in stage {seen[id(variable)]} and in stage {number}, and they "
                        "are in different processes",
                        f"name other cuts with `stages`, so that one stage has all its calls, or {ONE_PROCESS}",
                    )
            if number < count - 1 and layer.metrics:
                raise UsageError(
                    f"The layer `{layer.name}` of stage {number} has metrics of its own, and only the last stage of a "
                    "pipeline of several processes may have them",
                    f"name other cuts with `stages`, or {ONE_PROCESS}",
                )
        trains = any(layer.trainable_variables for layer in layers_of(plan, number))
        if not trains and model.trainable_variables:
            raise UsageError(
                f"Stage {number} ({', '.join(plan.layers_of(number))}) has nothing to train",
                "name other cuts with `stages`, or start fewer processes",
            )


def adds_losses(model: Any, plan: Plan) -> tuple[bool, ...]:
    """For each stage, whether its layers may add to the loss.

    Raises:
        UsageError: an early stage may, and the loss is computed in a way that may leave that out.
    """
    found = tuple(any(map(keras_stages.adds_losses, layers_of(plan, number))) for number in range(len(plan.begins)))
    if any(found[:-1]) and keras_stages.has_own_loss(model):
        raise UsageError(
            f"The model `{model.name}` has a `compute_loss` of its own, and layers of stage {found.index(True)} may "
            "add losses, of which nobody knows whether it uses them",
            f"leave out regularizers, `add_loss` and layers of your own, or {ONE_PROCESS}",
        )
    return found
