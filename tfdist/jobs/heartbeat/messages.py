"""What processes tell their neighbours in the tree of heartbeats: a summary, of bounded length, of many processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from pydantic import BaseModel, StrictInt

LONGEST_LINE_BYTES = 1 << 16
MOST_BUSY = 8
MOST_RANKS = 1024  # in each list of ranks


class Activity(NamedTuple):
    """What a process says of its work, where its engine knows more than that it waits.

    Attributes:
        text: what follows "is" in a message, such as "waiting for the gradients".
        operations: the names of the exchanges that it waits in; `SOME` is one in which not all processes take part.
        stage: how many stages that all processes pass together it has begun, and how many it has ended: 2n - 1 within
            the nth one, 2n after it.
    """

    text: str = ""
    operations: tuple[str, ...] = ()
    stage: int = 0


SOME = ""


class State(NamedTuple):
    """What a process does, and for how many seconds it has done so."""

    waits: bool
    seconds: float
    activity: Activity = Activity()


class Hello(BaseModel):
    """The first line of a connection: the rank of the process that opened it, and its name, known to its job."""

    rank: StrictInt
    name: str

    def line(self) -> bytes:
        """The message as it travels."""
        return self.model_dump_json().encode() + b"\n"


class Loss(StrEnum):
    """How a process was lost."""

    ENDED = "ended"  # it said that its program has ended
    CLOSED = "closed"  # its connections have closed, and it cannot be reached
    SILENT = "silent"  # it has said nothing for too long


class Summary(BaseModel):
    """What some processes of the job do, and which processes were lost.

    Attributes:
        processes: how many processes this is about.
        waiting: how many of them wait in an exchange.
        least_seconds: the shortest time for which one of these has waited; 0 if none waits.
        longest_seconds: the longest such time.
        busy: those that have been busy for the longest time, with these times, the longest first.
        lost: the lost ranks, and how each was lost.
        adopted: the ranks that are connected with an ancestor that is not their parent, and with which one.
        ends: the program of the process that sends this has ended.
        operations: how many of the waiting processes wait in each operation that they name.
        texts: what processes say of their work, and some of those that say so.
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
        """What is passed on at once when it changes."""
        return self.lost, self.adopted

    def line(self) -> bytes:
        """The summary as it travels."""
        return self.model_dump_json(exclude_defaults=True).encode() + b"\n"


def of_process(rank: int, state: State) -> Summary:
    """The summary of one process."""
    text, operations, stage = state.activity
    said: dict[str, Any] = {"texts": {text: [rank]} if text else {}, "last_stage": stage}
    if state.waits:
        said["operations"] = dict.fromkeys(operations, 1)
        return Summary(processes=1, waiting=1, least_seconds=state.seconds, longest_seconds=state.seconds, **said)
    return Summary(processes=1, busy=[(rank, state.seconds)], **said)


def merged(parts: Collection[Summary], connected: Iterable[int] = (), adopted: Mapping[int, int] = {}) -> Summary:
    """The summary of all processes of `parts`.

    Args:
        parts: summaries of different processes.
        connected: ranks that are alive, whatever the parts say.
        adopted: those of them that the parts do not name as adopted, and by whom they are.
    """
    waiting = [part for part in parts if part.waiting]
    busy = sorted((entry for part in parts for entry in part.busy), key=lambda entry: -entry[1])
    adopted = {rank: by for part in parts for rank, by in part.adopted.items()} | dict(adopted)
    lost = {rank: loss for part in parts for rank, loss in part.lost.items()}
    # Who is no longer connected with its parent, and is lost for that one, may be connected with another ancestor.
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
        operations=_added(part.operations for part in parts),
        texts=_joined(part.texts for part in parts),
        last_stage=max((part.last_stage for part in parts), default=0),
    )


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    added: Counter[str] = Counter()
    for one in counts:
        added.update(one)
    return dict(added.most_common(MOST_BUSY))


def _joined(texts: Iterable[Mapping[str, list[int]]]) -> dict[str, list[int]]:
    joined: dict[str, list[int]] = {}
    for one in texts:
        for text, ranks in one.items():
            joined[text] = sorted([*joined.get(text, []), *ranks])[:MOST_BUSY]
    return {text: joined[text] for text in sorted(joined, key=lambda text: joined[text])[:MOST_BUSY]}
