"""What a trace says of the stages of a pipeline: how long each computes in a step, and the bubble.

The names of a stage's operations carry the numbers of the stage and of the micro-batch.

Synopsis:

    >>> scope(1, 0)
    'tfdist_stage_1_micro_batch_0'
    >>> found_in("gradient_tape/cnn/tfdist_stage_1_micro_batch_0_2/dense/MatMul")
    (1, 0)
    >>> busy([("cnn/tfdist_stage_0_micro_batch_0/add:Add", 0.0, 1.0)], [(0.0, 4.0)]).seconds
    (1.0,)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

Span = tuple[float, float]  # begin and end, in seconds

_SCOPE = "tfdist_stage_{stage}_micro_batch_{micro_batch}"
_IN_SCOPE = re.compile(r"tfdist_stage_(\d+)_micro_batch_(\d+)")
# Between devices and, in Python, between processes: they wait.
_TRANSFERS = (":_Send", ":_Recv", ":PyFuncStateless")


@dataclass(frozen=True)
class Busy:
    """What the stages of a pipeline do in a step, as the mean over the steps.

    Attributes:
        seconds: in which each stage computes.
        pass_seconds: from the first operation of a stage to the last one: the step without the update.
        micro_batches: the number of micro-batches.
    """

    seconds: tuple[float, ...]
    pass_seconds: float
    micro_batches: int

    @property
    def bubble(self) -> float:
        """The measured fraction of the pass in which a stage waits, as the mean over the stages."""
        return 1 - sum(self.seconds) / (len(self.seconds) * self.pass_seconds)

    @property
    def even_bubble(self) -> float:
        """The bubble of stages that take the same time, (S - 1) / (M + S - 1)."""
        stages = len(self.seconds)
        return (stages - 1) / (self.micro_batches + stages - 1)


def scope(stage: int, micro_batch: int) -> str:
    """The name scope of a micro-batch in a stage."""
    return _SCOPE.format(stage=stage, micro_batch=micro_batch)


def without(name: str) -> str:
    """The name of an operation that is computed in no stage in particular."""
    return _IN_SCOPE.sub("tfdist_shared", name)


def found_in(name: str) -> tuple[int, int] | None:
    """The stage and the micro-batch to which an operation belongs by its name; `None` for an operation of no stage."""
    found = _IN_SCOPE.search(name)  # the outermost scope is that of the micro-batch
    return (int(found[1]), int(found[2])) if found else None


def busy(events: Sequence[tuple[str, float, float]], steps: Sequence[Span]) -> Busy | None:
    """What the stages do in `steps`; `None` where no operation of a stage ran in them.

    Args:
        events: name, begin and end in seconds of operations.
        steps: begin and end of each step.
    """
    members: dict[int, list[Span]] = {}
    micro_batches = 0
    for name, begin, end in events:
        place = None if name.endswith(_TRANSFERS) else found_in(name)
        if place is not None:
            members.setdefault(place[0], []).append((begin, end))
            micro_batches = max(micro_batches, place[1] + 1)
    passes = []
    for begin, end in steps:
        inside = [span for spans in members.values() for span in spans if begin <= span[0] and span[1] <= end]
        if inside:
            passes.append((min(first for first, _ in inside), max(last for _, last in inside)))
    if not passes:
        return None
    seconds = [sum(covered(members.get(stage, ()), *one) for one in passes) for stage in range(max(members) + 1)]
    total = sum(end - begin for begin, end in passes)
    return Busy(tuple(one / len(passes) for one in seconds), total / len(passes), micro_batches)


def of_all(found: Sequence[Busy]) -> Busy:
    """What the stages of several processes do: of a stage that is in several, the mean."""
    count = max(len(one.seconds) for one in found)
    by_stage = [[one.seconds[stage] for one in found if one.seconds[stage:]] for stage in range(count)]
    seconds = [sum(times) / max(1, sum(time > 0 for time in times)) for times in by_stage]
    longest = max(one.pass_seconds for one in found)
    return Busy(tuple(seconds), longest, max(one.micro_batches for one in found))


def covered(spans: Sequence[Span], begin: float, end: float) -> float:
    """How much of begin to end is covered by any of `spans`, which may overlap."""
    found, reached = 0.0, begin
    for span_begin, span_end in sorted(spans):
        fresh_begin, fresh_end = max(span_begin, reached), min(span_end, end)
        if fresh_end > fresh_begin:
            found += fresh_end - fresh_begin
            reached = fresh_end
    return found


def as_text(found: Busy) -> str:
    """A line for each stage, and one for the bubble."""
    lines = [
        f"stage {stage} computes {seconds * 1e3:.2f} ms, {seconds / found.pass_seconds:.0%} of the passes of a step"
        for stage, seconds in enumerate(found.seconds)
    ]
    bubble = (
        f"bubble {found.bubble:.0%}; {found.even_bubble:.0%} with {found.micro_batches} micro-batches and even stages"
    )
    return "\n".join([*lines, bubble])
