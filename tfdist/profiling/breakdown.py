"""What the time of a training step is spent on, from the events of a trace.

At each moment a step does the first of these that is true: it waits for its next batch; an operation computes; tensors
are exchanged with other processes or devices; nothing of these runs, and the step waits, for Python, for a thread or
for another process. Communication is thus what computation does not hide.

Synopsis:

    >>> steps = [(0.0, 10.0)]
    >>> operations = [Operation("conv:Conv2D", 1.0, 5.0), Operation("grads:HorovodAllreduce", 4.0, 8.0)]
    >>> found = of_process(operations, fetches=[(0.0, 1.0)], steps=steps)
    >>> found.input_seconds, found.compute_seconds, found.communication_seconds, found.waiting_seconds
    (1.0, 4.0, 3.0, 2.0)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from tfdist.profiling.stages import Span, covered

# The names that `tfdist.groups` gives to what exchanges tensors in Python.
EXCHANGE, MESSAGE = "tfdist_exchange", "tfdist_message"
# Those, and the types of the operations of TensorFlow and Horovod that do.
_COMMUNICATION = re.compile(f"{EXCHANGE}|{MESSAGE}|:(Horovod|Collective|Nccl|_Send|_Recv|_HostSend|_HostRecv)")
_BEGINS, _ENDS = "ExecutorState::ProcessAsync::Start", "ExecutorState::ProcessAsync::Done"


class Operation(NamedTuple):
    """An operation that ran: its name and its type, `name:Type`, and when, in seconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Breakdown:
    """Seconds of a step, as the mean over the steps."""

    compute_seconds: float
    communication_seconds: float
    input_seconds: float
    waiting_seconds: float

    @property
    def step_seconds(self) -> float:
        """The whole step."""
        return sum(astuple(self))

    def shares(self) -> dict[str, float]:
        """The part of a step of each kind, 0 to 1."""
        kinds = ("compute", "communication", "input", "waiting")
        return {kind: getattr(self, f"{kind}_seconds") / self.step_seconds for kind in kinds}


def is_communication(name: str) -> bool:
    """Whether an operation, `name:Type`, exchanges tensors with other processes or devices."""
    return _COMMUNICATION.search(name) is not None


def of_process(operations: Sequence[Operation], fetches: Sequence[Span], steps: Sequence[Span]) -> Breakdown | None:
    """What a process does in its `steps`; `None` if there is no step, or no operation in any.

    Args:
        operations: that ran, also those outside of steps.
        fetches: when it waited for a batch.
        steps: begin and end of each step, in seconds.
    """
    exchanges = [(one.begin, one.end) for one in operations if is_communication(one.name)]
    computing = [(one.begin, one.end) for one in operations if not is_communication(one.name)]
    total = [0.0, 0.0, 0.0, 0.0]
    for begin, end in steps:
        waits = covered(fetches, begin, end)
        busy = covered([*fetches, *computing], begin, end)
        all_told = covered([*fetches, *computing, *exchanges], begin, end)
        of_step = (busy - waits, all_told - busy, waits, end - begin - all_told)
        total = [sum(pair) for pair in zip(total, of_step, strict=True)]
    if not steps or not total[0]:
        return None
    return Breakdown(*(one / len(steps) for one in total))


def of_all(found: Sequence[Breakdown]) -> Breakdown | None:
    """The mean over processes; `None` without any."""
    if not found:
        return None
    return Breakdown(*(sum(column) / len(found) for column in zip(*map(astuple, found), strict=True)))


def operations_of(events: Sequence[Mapping[str, Any]]) -> list[Operation]:
    """The operations among the events of the trace viewer, asynchronous ones from their start to their end."""
    found = []
    begun: dict[tuple[str, str], list[float]] = {}
    for event in sorted(events, key=lambda event: float(event["ts"])):
        arguments, begin = event.get("args", {}), event["ts"] / 1e6
        if event["name"] in (_BEGINS, _ENDS):
            name = f"{arguments.get('name')}:{arguments.get('kernel_type')}"
            key = (name, str(arguments.get("step_id")))
            if event["name"] == _BEGINS:
                begun.setdefault(key, []).append(begin)
            elif begun.get(key):
                found.append(Operation(name, begun[key].pop(0), begin))
        # Operations of the input pipeline, which runs beside the steps, belong to no group.
        elif "group_id" in arguments and (name := arguments.get("long_name", "")).endswith(f":{event['name']}"):
            found.append(Operation(name, begin, begin + event.get("dur", 0) / 1e6))
    return found


def as_text(found: Breakdown) -> str:
    """A line."""
    parts = ", ".join(f"{share:.0%} {kind}" for kind, share in found.shares().items())
    return f"A step of {found.step_seconds * 1e3:.2f} ms: {parts}"
