"""What processes send their neighbours in the heartbeat tree: a summary of many processes, of bounded length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from pydantic import BaseModel, StrictInt

MOST_BUSY = 8
MOST_RANKS = 1024  # in each list of ranks


class Activity(NamedTuple):
    """What a process reports of its work, if its engine knows more than that it waits.

    Attributes:
        text: what follows "is" in a message, such as "waiting for the gradients".
        operations: the names of the exchanges in which it waits; `SOME` is an exchange in which not all processes take
            part.
        stage: how many stages that all processes pass together have begun and ended: 2n - 1 within the nth stage, 2n
            after it.
    """

    text: str = ""
    operations: tuple[str, ...] = ()
    stage: int = 0


SOME = ""


class State(NamedTuple):
    """Whether a process waits or is busy, and for how many seconds it has done so."""

    waits: bool
    seconds: float
    activity: Activity = Activity()


class Hello(BaseModel):
    """The first line of a connection: the rank of the process that opened it, and its name, which its job knows."""

    rank: StrictInt
    name: str

    def line(self) -> bytes:
        """The message as it is sent."""
        return self.model_dump_json().encode() + b"\n"


class Loss(StrEnum):
    """How a process was lost."""

    ENDED = "ended"  # it announced that its program has ended
    CLOSED = "closed"  # its connections have closed, and it cannot be reached
    SILENT = "silent"  # it has sent nothing for too long


class Summary(BaseModel):
    """What some processes of the job do, and which processes were lost.

    Attributes:
        processes: the number of these processes.
        waiting: how many of them wait in an exchange.
        least_seconds: the shortest time for which a waiting process has waited; 0 if none waits.
        longest_seconds: the longest such time.
        busy: the processes that have been busy for the longest time, with these times, the longest first.
        lost: how each lost rank was lost.
        adopted: the ranks that are connected with an ancestor other than their parent, and the ancestor of each.
        ends: whether the program of the sender has ended.
        operations: how many waiting processes wait in each operation.
        texts: what processes report of their work, and some of the ranks that report it.
        last_stage: the stage of the process that is furthest, see `Activity`.
    """

    processes: StrictInt = 0
    waiting: StrictInt = 0
    least_seconds: float = 0.0
    longest_seconds: float = 0.0
    busy: list[tuple[int, float]] = []
    lost: dict[int, Loss] = {}
    adopted: dict[int, int] = {}
    ends: bool = False
    operations: dict[str, int] = {}
    texts: dict[str, list[int]] = {}
    last_stage: int = 0

    @property
    def news(self) -> object:
        """The part that is passed on at once when it changes."""
        return self.lost, self.adopted

    def line(self) -> bytes:
        """The summary as it is sent."""
        return self.model_dump_json(exclude_defaults=True).encode() + b"\n"


def of_process(rank: int, state: State) -> Summary:
    """The summary of one process."""
    text, operations, stage = state.activity
    report: dict[str, Any] = {"texts": {text: [rank]} if text else {}, "last_stage": stage}
    if state.waits:
        report["operations"] = dict.fromkeys(operations, 1)
        return Summary(processes=1, waiting=1, least_seconds=state.seconds, longest_seconds=state.seconds, **report)
    return Summary(processes=1, busy=[(rank, state.seconds)], **report)


def merged(parts: Collection[Summary], connected: Iterable[int] = (), adopted: Mapping[int, int] = {}) -> Summary:
    """The summary of all processes of `parts`.

    Args:
        parts: summaries of different processes.
        connected: ranks that are alive, whatever the parts report.
        adopted: those of them that are newly connected with an ancestor other than their parent, and the ancestors.
    """
    waiting = [part for part in parts if part.waiting]
    busy = sorted((entry for part in parts for entry in part.busy), key=lambda entry: -entry[1])
    adopted = {rank: ancestor for part in parts for rank, ancestor in part.adopted.items()} | dict(adopted)
    lost = {rank: loss for part in parts for rank, loss in part.lost.items()}
    # A process that its parent reports as lost may be connected with another ancestor.
    for rank in (*connected, *adopted):
        lost.pop(rank, None)
    return Summary(
        processes=sum(part.processes for part in parts),
        waiting=sum(part.waiting for part in parts),
        least_seconds=min((part.least_seconds for part in waiting), default=0.0),
        longest_seconds=max((part.longest_seconds for part in waiting), default=0.0),
        busy=busy[:MOST_BUSY],
        lost={rank: lost[rank] for rank in sorted(lost)[:MOST_RANKS]},
        adopted={rank: adopted[rank] for rank in sorted(adopted)[:MOST_RANKS]},
        operations=_summed_counts(part.operations for part in parts),
        texts=_merged_texts(part.texts for part in parts),
        last_stage=max((part.last_stage for part in parts), default=0),
    )


def _summed_counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part)
    return dict(counts.most_common(MOST_BUSY))


def _merged_texts(parts: Iterable[Mapping[str, list[int]]]) -> dict[str, list[int]]:
    texts: dict[str, list[int]] = {}
    for part in parts:
        for text, ranks in part.items():
            texts[text] = sorted([*texts.get(text, []), *ranks])[:MOST_BUSY]
    return {text: texts[text] for text in sorted(texts, key=lambda text: texts[text])[:MOST_BUSY]}
