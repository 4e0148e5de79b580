"""What a model must be for its stages to be in different processes."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.errors import UsageError
from tfdist.pipeline_parallel.plan import Plan
from tfdist.pipeline_parallel.regions import ONE_PROCESS


def require_separate(model: Any, plan: Plan) -> None:
    """Raises `UsageError` if two stages share a layer, or one has nothing to train."""
    seen: dict[int, int] = {}
    for number in range(len(plan.begins)):
        layers = [call.operation for call in plan.calls_of(number) if isinstance(call.operation, keras.Layer)]
        for layer in layers:
            for variable in layer.variables:
                if seen.setdefault(id(variable), number) != number:
                    raise UsageError(
                        f"The layer `{layer.name}` is in stage {seen[id(variable)]} and in stage {number}, and they "
                        "are in different processes",
                        f"name other cuts with `stages`, so that one stage has all its calls, or {ONE_PROCESS}",
                    )
        if model.trainable_variables and not any(layer.trainable_variables for layer in layers):
            raise UsageError(
                f"Stage {number} ({', '.join(plan.layers_of(number))}) has nothing to train",
                "name other cuts with `stages`, or start fewer processes",
            )
