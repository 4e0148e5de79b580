"""The stages of a pipeline in a trace: how long each one computes in a step, and the bubble.

The names of a stage's operations contain the numbers of the stage and of the micro-batch.

Synopsis:

    >>> scope(1, 0)
    'tfdist_stage_1_micro_batch_0'
    >>> stage_and_micro_batch("gradient_tape/cnn/tfdist_stage_1_micro_batch_0_2/dense/MatMul")
    (1, 0)
    >>> busy([("cnn/tfdist_stage_0_micro_batch_0/add:Add", 0.0, 1.0)], [(0.0, 4.0)]).seconds
    (1.0,)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

Span = tuple[float, float]  # begin and end, in seconds

_IN_SCOPE = re.compile(r"tfdist_stage_(\d+)_micro_batch_(\d+)")
# Transfers between devices and, in Python, between processes, which mostly wait.
_TRANSFERS = (":_Send", ":_Recv", ":PyFuncStateless")


@dataclass(frozen=True)
class Busy:
    """How long the stages of a pipeline compute in a step, as the mean over the steps.

    Attributes:
        seconds: the time that each stage computes.
        pass_seconds: the time from the first operation of any stage to the last one, which is the step without the
            update.
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
        """The bubble if all stages took the same time, (S - 1) / (M + S - 1)."""
        stages = len(self.seconds)
        return (stages - 1) / (self.micro_batches + stages - 1)


def scope(stage: int, micro_batch: int) -> str:
    """Returns the name scope of a micro-batch in a stage."""
    return f"tfdist_stage_{stage}_micro_batch_{micro_batch}"


def without(name: str) -> str:
    """Returns `name` without the numbers of stage and micro-batch, for an operation of no particular stage."""
    return _IN_SCOPE.sub("tfdist_shared", name)


def stage_and_micro_batch(name: str) -> tuple[int, int] | None:
    """Returns the stage and the micro-batch of an operation by its name; `None` for an operation of no stage."""
    match = _IN_SCOPE.search(name)  # the outermost scope is that of the micro-batch
    return (int(match[1]), int(match[2])) if match else None


def busy(events: Sequence[tuple[str, float, float]], steps: Sequence[Span]) -> Busy | None:
    """Returns how long the stages compute in `steps`; `None` if no operation of a stage ran in them.

    Args:
        events: the name, begin and end of each operation, in seconds.
        steps: the begin and end of each step, in seconds.
    """
    members: dict[int, list[Span]] = {}
    micro_batches = 0
    for name, begin, end in events:
        numbers = None if name.endswith(_TRANSFERS) else stage_and_micro_batch(name)
        if numbers is not None:
            members.setdefault(numbers[0], []).append((begin, end))
            micro_batches = max(micro_batches, numbers[1] + 1)
    passes = []
    for begin, end in steps:
        inside = [span for spans in members.values() for span in spans if begin <= span[0] and span[1] <= end]
        if inside:
            passes.append((min(first for first, _ in inside), max(last for _, last in inside)))
    if not passes:
        return None
    totals = [sum(covered(members.get(stage, ()), *span) for span in passes) for stage in range(max(members) + 1)]
    pass_total = sum(end - begin for begin, end in passes)
    return Busy(tuple(total / len(passes) for total in totals), pass_total / len(passes), micro_batches)


def of_all(processes: Sequence[Busy]) -> Busy:
    """Combines the stages of several processes; a stage that runs in several of them has the mean of their times."""
    count = max(len(process.seconds) for process in processes)
    by_stage = [[process.seconds[stage] for process in processes if process.seconds[stage:]] for stage in range(count)]
    seconds = [sum(times) / max(1, sum(time > 0 for time in times)) for times in by_stage]
    longest = max(process.pass_seconds for process in processes)
    return Busy(tuple(seconds), longest, max(process.micro_batches for process in processes))


def covered(spans: Sequence[Span], begin: float, end: float) -> float:
    """Returns how much of the time from `begin` to `end` is covered by any of `spans`, which may overlap."""
    total, reached = 0.0, begin
    for span_begin, span_end in sorted(spans):
        new_begin, new_end = max(span_begin, reached), min(span_end, end)
        if new_end > new_begin:
            total += new_end - new_begin
            reached = new_end
    return total


def as_text(busy: Busy) -> str:
    """Returns a line of text for each stage, and one for the bubble."""
    lines = [
        f"stage {stage} computes {seconds * 1e3:.2f} ms, {seconds / busy.pass_seconds:.0%} of the passes of a step"
        for stage, seconds in enumerate(busy.seconds)
    ]
    bubble = f"bubble {busy.bubble:.0%}; {busy.even_bubble:.0%} with {busy.micro_batches} micro-batches and even stages"
    return "\n".join([*lines, bubble])
