"""The variables of a model of which each process has those of its stage alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdist.groups import parts
from tfdist.groups.parts import Part
from tfdist.internals import keras_stages
from tfdist.jobs.world import World
from tfdist.pipeline_parallel.plan import Plan


def whole_part(shape: Sequence[int], owner: int, rank: int, ranks: int) -> Part:
    """The part of process `rank` in a variable of which process `owner` has all elements."""
    length = shape[0] if len(shape) else 1
    return Part(tuple(shape), tuple(length if one == owner else 0 for one in range(ranks)), rank)


def free_others(plan: Plan, world: World, shared: Sequence[Any]) -> None:
    """Marks whose the variables are, and frees those of other stages; stage number `rank` is in process `rank`.

    The `shared` ones, of metrics, stay in all processes.
    """
    kept = {id(variable) for variable in shared}
    for stage in range(world.world_size):
        place = f"in stage {stage} of the pipeline, which is in {world.named(stage)}"
        for variable in plan.variables_of(stage):
            if id(variable) in kept:
                continue
            parts.mark(variable, whole_part(variable.shape, stage, world.rank, world.world_size))
            if stage != world.rank:
                keras_stages.leave(variable, place)


def gather(model: Any, exchange: Callable[[bytes], list[bytes]], is_chief: bool) -> list[tuple[Any, str]]:
    """Gives the chief the variables of the other stages; returns these in the chief, with their places.

    All processes call it. They are freed again by `keras_stages.leave(variable, place)`.
    """
    found = []
    for variable in model.variables:
        part = parts.part_of(variable)
        if part is None:
            continue
        value = parts.gathered(variable, exchange)
        if is_chief and not part.size:
            found.append((variable, keras_stages.come_back(variable, value)))
    return found
