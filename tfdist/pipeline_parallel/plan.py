"""The plan of a pipeline: which operations of a model are in which stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import keras
from pydantic import BeforeValidator

from tfdist import registry
from tfdist.errors import UsageError
from tfdist.internals import keras_stages
from tfdist.pipeline_parallel import costs as costs_of
from tfdist.pipeline_parallel import partition

Balance = Literal["time", "memory"]
# The first layer of each stage but the first; on a command line with commas between.
LayerNames = Annotated[
    Sequence[str] | None, BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given)
]


@dataclass(frozen=True)
class Plan:
    """The stages of a model.

    Attributes:
        functional: Keras' graph of the model's operations.
        calls: the calls of the operations, in the order in which they are made.
        begins: the index of the first call of each stage.
        costs: of each call, in milliseconds or bytes; empty if the cuts were given by name.
    """

    functional: Any
    calls: Sequence[keras_stages.Call]
    begins: Sequence[int]
    costs: Sequence[float] = ()

    def stage_of(self, call: int) -> int:
        """The stage of call number `call`."""
        return sum(begin <= call for begin in self.begins) - 1

    def calls_of(self, stage: int) -> Sequence[keras_stages.Call]:
        """The calls of a stage."""
        end = self.begins[stage + 1] if stage + 1 < len(self.begins) else len(self.calls)
        return self.calls[self.begins[stage] : end]

    def variables_of(self, stage: int) -> list[Any]:
        """The variables of a stage: those of its layers, unless an earlier stage has called the layer too."""
        earlier = {id(call.operation) for call in self.calls[: self.begins[stage]]}
        layers = {id(call.operation): call.operation for call in self.calls_of(stage)}
        found = [
            variable
            for key, layer in layers.items()
            if key not in earlier and isinstance(layer, keras.Layer)
            for variable in layer.variables
        ]
        return list({id(variable): variable for variable in found}.values())

    def parameters_of(self, stage: int) -> int:
        """The number of parameters of a stage."""
        return sum(math.prod(variable.shape) for variable in self.variables_of(stage))

    def layers_of(self, stage: int) -> list[str]:
        """The names of the layers of a stage, with those of the models around them."""
        return list(dict.fromkeys("/".join(call.path) for call in self.calls_of(stage)))

    def bytes_across(self, cut: int) -> int:
        """The bytes of an example that go from stages before stage number `cut` to it or to later ones, forward."""
        begin = self.begins[cut]
        used = {id(one) for call in self.calls[begin:] for one in call.inputs}
        used |= {id(one) for one in self.functional.outputs}
        made = {id(one): one for call in self.calls[:begin] for one in call.outputs if id(one) in used}
        return sum(costs_of.bytes_of(one, 1) for one in made.values())


def require_cuttable(model: Any, stages: int) -> None:
    """Raises `UsageError` for a model whose operations are not known one by one, or that has fewer than `stages`."""
    functional = keras_stages.functional_of(model)
    if functional is None:
        if isinstance(model, keras.Sequential) and not model.built:
            return
        raise UsageError(
            f"The model `{model.name}` cannot be cut into stages, because its `call` is its own",
            "build it from layers with `keras.Model(inputs, outputs)` or `keras.Sequential`, or use `devices=1`",
        )
    count = len(keras_stages.calls(model))
    if stages > count:
        raise UsageError(
            f"{stages} stages were asked for, and the model `{model.name}` has {count} layers",
            f"use at most `devices={count}`",
        )


def make(
    model: Any, stages: int, named: Sequence[str] | None, balance: str, batch_size: int, micro_batches: int
) -> Plan:
    """Cuts a model into stages.

    Args:
        model: functional or sequential, and built.
        stages: their number.
        named: the first layer of each stage but the first; `None` lets `balance` choose.
        balance: "time" makes the slowest stage as fast as can be, "memory" the fullest one as small as can be.
        batch_size: examples of a micro-batch.
        micro_batches: the number of micro-batches whose activations a stage holds.

    Raises:
        UsageError: the model cannot be cut, has fewer layers, or the named layers are not in order.
        UnknownNameError: the model has no layer of that name.
    """
    require_cuttable(model, stages)
    functional = keras_stages.functional_of(model)
    if functional is None:
        raise UsageError(
            f"The model `{model.name}` is not built before its first step runs eagerly, and is cut before that",
            "begin it with `keras.Input(shape)`, or compile it without `run_eagerly`",
        )
    calls = keras_stages.calls(model)
    if named is not None:
        return Plan(functional, calls, _begins(model, calls, named))
    if stages == 1:
        return Plan(functional, calls, [0])
    costs = costs_of.measured(calls, batch_size, micro_batches, balance, model)
    return Plan(functional, calls, partition.balanced(costs, stages), costs)


def _begins(model: Any, calls: Sequence[keras_stages.Call], named: Sequence[str]) -> list[int]:
    known = list(dict.fromkeys(name for call in calls for name in call.path))
    for name in named:
        registry.require_known(name, f"layer of the model `{model.name}`", known)
    begins = [next(i for i, call in enumerate(calls) if name in call.path) for name in named]
    if [0, *begins] != sorted({0, *begins}):
        raise UsageError(
            f"`stages` is {', '.join(named)}, and these layers do not follow each other in the model `{model.name}`",
            f"name later layers later, and not the first; the order is {', '.join(known)}",
        )
    return [0, *begins]
