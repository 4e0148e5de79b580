"""What the processes of a job must agree on while they train, each of which runs the same loop.

Every function here is called by all processes at the same moment, and answers the same in each of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from tfdist.errors import DisagreementError
from tfdist.world import World

if TYPE_CHECKING:
    import numpy as np


class Peers(Protocol):
    """How a process reaches the others; a strategy is one."""

    world: World
    metrics_by_process: bool  # each process has its own part of a metric's state, in an ordinary variable

    @property
    def servers(self) -> Mapping[str, str]:
        """The addresses, by name, of processes that compute for this one and run no loop of their own."""
        ...

    def exchange(self, message: bytes) -> list[bytes]:
        """What each process says, by rank."""
        ...


class Alone:
    """A process without others."""

    world = World()
    metrics_by_process = False
    servers: Mapping[str, str] = {}

    def exchange(self, message: bytes) -> list[bytes]:
        """What this process says."""
        return [message]


def said(peers: Peers, value: Any) -> list[Any]:
    """What each process says, by rank; `value` is this one's, as JSON has it."""
    if peers.world.world_size == 1:
        return [value]
    return [json.loads(message) for message in peers.exchange(json.dumps(value).encode())]


def of_chief(peers: Peers, value: Any) -> Any:
    """The chief's `value`, as JSON has it."""
    return said(peers, value if peers.world.is_chief else None)[0]


def next_call(peers: Peers, steps: int, stop: bool) -> tuple[int, bool]:
    """How many steps the next call runs, the fewest that a process wishes, and whether one wishes to stop."""
    found = said(peers, [steps, stop])
    return min(wish for wish, _ in found), any(stops for _, stops in found)


def any_of(peers: Peers, wish: bool) -> bool:
    """Whether a process wishes it."""
    return any(said(peers, wish))


def require(peers: Peers, facts: Mapping[str, Any]) -> None:
    """Refuses processes that are about to train different things.

    Raises:
        DisagreementError: in every process, with each one's value of what differs.
    """
    found = said(peers, {name: str(value) for name, value in facts.items()})
    error = DisagreementError.among({peers.world.named(rank): values for rank, values in enumerate(found)})
    if error is not None:
        raise error


def fingerprint(description: Any) -> str:
    """A short name for what is too long to be shown."""
    return hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode()).hexdigest()[:12]


def fingerprint_of_arrays(arrays: Iterable[np.ndarray]) -> str:
    """A short name for the numbers in C-contiguous arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()[:12]
