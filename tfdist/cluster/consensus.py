"""What the processes of a job must agree on while each of them runs the same loop.

All processes must call each function here together; it returns the same in each of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from tfdist.cluster.world import World
from tfdist.errors import DisagreementError, by_value

if TYPE_CHECKING:
    import numpy as np


GIVE_ALIKE = (
    "seed what shuffles or generates the data, so that all processes have the same; or, if each process has its own "
    "part of the data, pass `tfdist.data.per_process(data)`"
)
DO_ALIKE = (
    "call `fit`, `evaluate` and `predict` in every process, in callbacks too; only the results may be used in one alone"
)


class ProcessGroup(Protocol):
    """The processes of a job, as one of them reaches the others; every strategy is one."""

    world: World
    metrics_by_process: bool  # each process has its own part of a metric's state, in an ordinary variable

    @property
    def servers(self) -> Mapping[str, str]:
        """The addresses, by name, of processes that compute for this one and do not run the loop themselves."""
        ...

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all processes, by rank; each process calls this with its own."""
        ...


class Alone:
    """A job of one process."""

    world = World()
    metrics_by_process = False
    servers: Mapping[str, str] = {}

    def exchange(self, message: bytes) -> list[bytes]:
        """The message of this process."""
        return [message]


def all_gather_object(peers: ProcessGroup, value: Any, doing: str = "exchanges values") -> list[Any]:
    """The values of all processes, by rank.

    Args:
        peers: the processes, which all call it.
        value: this process' own; it can be stored as JSON.
        doing: what a process does when it calls it, as a verb, for messages.

    Raises:
        DisagreementError: other processes are doing something else.
    """
    if peers.world.world_size == 1:
        return [value]
    found = [_parsed(message) for message in peers.exchange(json.dumps([doing, value]).encode())]
    if len({what for what, _ in found}) > 1:
        doings = {rank: what for rank, (what, _) in enumerate(found)}
        each = by_value(doings, peers.world.named_briefly, "{ranks}: {value}")
        raise DisagreementError(f"The processes of the job do different things at the same moment: {each}", DO_ALIKE)
    return [value for _, value in found]


def _parsed(message: bytes) -> tuple[str, Any]:
    try:
        doing, value = json.loads(message)
    except (ValueError, TypeError):
        return "does something else", None
    return str(doing), value


def broadcast_from_chief(peers: ProcessGroup, value: Any) -> Any:
    """The `value` of the chief, in all processes; it can be stored as JSON."""
    return all_gather_object(peers, value if peers.world.is_chief else None)[0]


def next_call(peers: ProcessGroup, steps: int, stop: bool, given: str) -> tuple[int, bool]:
    """The smallest requested number of steps for the next call, and whether any process wants to stop.

    Raises:
        DisagreementError: `given`, the fingerprint of the batches so far, differs between the processes.
    """
    found = all_gather_object(peers, [steps, stop, given], "is about to run steps")
    _require_equal_fingerprints(peers, "batches", [fingerprint for _, _, fingerprint in found])
    return min(wish for wish, _, _ in found), any(stops for _, stops, _ in found)


def any_of(peers: ProcessGroup, wish: bool) -> bool:
    """Whether `wish` is true in any process."""
    return any(all_gather_object(peers, wish, "asks whether to stop"))


def require_equal(peers: ProcessGroup, facts: Mapping[str, Any]) -> None:
    """Compares `facts` by name over the processes.

    Raises:
        DisagreementError: they differ; raised in every process, with the values of all processes.
    """
    found = all_gather_object(
        peers, {name: str(value) for name, value in facts.items()}, "compares what it begins with"
    )
    error = DisagreementError.among(dict(enumerate(found)), peers.world.named_briefly)
    if error is not None:
        raise error


def require_equal_fingerprints(peers: ProcessGroup, what: str, fingerprint: str) -> None:
    """Compares the fingerprint of this process' data with those of the other processes; `what` names the data.

    Raises:
        DisagreementError: they differ; raised in every process, with all fingerprints.
    """
    _require_equal_fingerprints(peers, what, all_gather_object(peers, fingerprint, "compares its data"))


def _require_equal_fingerprints(peers: ProcessGroup, what: str, fingerprints: list[str]) -> None:
    if len(set(fingerprints)) > 1:
        values = by_value(dict(enumerate(fingerprints)), peers.world.named_briefly, "{ranks}: {value}")
        raise DisagreementError(f"The processes of the job were given different {what} ({values})", GIVE_ALIKE)


def fingerprint(description: Any) -> str:
    """A hash of 12 digits, in place of a description that is too long to show."""
    return hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode()).hexdigest()[:12]


def fingerprint_of_arrays(arrays: Iterable[np.ndarray]) -> str:
    """A hash of 12 digits of the contents of C-contiguous arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()[:12]
