"""What the processes of a job must agree on while each of them runs the same loop.

All processes must call each function here together; it returns the same in each of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tfdist.errors import DisagreementError, by_value
from tfdist.jobs.world import World

if TYPE_CHECKING:
    import numpy as np


GIVE_ALIKE = (
    "seed what shuffles or generates the data, so that all processes have the same; or, if each process has its own "
    "part of the data, pass `tfdist.data.per_process(data)`"
)
DO_ALIKE = (
    "call `fit`, `evaluate` and `predict` in every process, in callbacks too; only the results may be used in one alone"
)


class Peers(Protocol):
    """The processes of a job, as one of them reaches the others; every strategy is one."""

    world: World

    @property
    def metrics_by_process(self) -> bool:
        """Whether each process has its own part of a metric's state, in an ordinary variable."""
        ...

    @property
    def servers(self) -> Mapping[str, str]:
        """The addresses, by name, of processes that compute for this one and do not run the loop themselves."""
        ...

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all processes, by rank; each process calls this with its own."""
        ...

    def broadcast(self, values: np.ndarray) -> np.ndarray:
        """The chief's `values`, `[n]` uint8, in all processes; each calls it with as many of its own."""
        ...

    def broadcast_variables(self, variables: Sequence[Any]) -> None:
        """Gives Keras `variables` the chief's values in every process."""
        ...


class Alone:
    """A job of one process."""

    world = World()
    metrics_by_process = False
    servers: Mapping[str, str] = {}

    def exchange(self, message: bytes) -> list[bytes]:
        """The message of this process."""
        return [message]

    def broadcast(self, values: np.ndarray) -> np.ndarray:
        """The values of this process."""
        return values

    def broadcast_variables(self, variables: Sequence[Any]) -> None:
        """Nothing: there is no other process."""


def all_gather_object(peers: Peers, value: Any, doing: str = "exchanges values") -> list[Any]:
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
    values, messages = _exchanged(peers, value, doing)
    return [values[message] for message in messages]


def _exchanged(peers: Peers, value: Any, doing: str) -> tuple[dict[bytes, Any], list[bytes]]:
    """The value in each different message, and the messages by rank; most often all processes say the same."""
    messages = peers.exchange(json.dumps([doing, value]).encode())
    same = messages.count(messages[0]) == len(messages)  # at once, where all messages are one object
    found = {message: _parsed(message) for message in (messages[:1] if same else dict.fromkeys(messages))}
    if len({what for what, _ in found.values()}) > 1:
        each = _by_process(peers, [found[message][0] for message in messages])
        raise DisagreementError(f"The processes of the job do different things at the same moment: {each}", DO_ALIKE)
    return {message: value for message, (_, value) in found.items()}, messages


def _by_process(peers: Peers, values: Iterable[Any]) -> str:
    """Which processes have which of `values`, which are by rank."""
    return by_value(dict(enumerate(values)), peers.world.named_briefly, "{ranks}: {value}")


def _parsed(message: bytes) -> tuple[str, Any]:
    try:
        doing, value = json.loads(message)
    except (ValueError, TypeError):
        return "does something else", None
    return str(doing), value


def broadcast_from_chief(peers: Peers, value: Any) -> Any:
    """The `value` of the chief, in all processes; it can be stored as JSON."""
    return all_gather_object(peers, value if peers.world.is_chief else None)[0]


def next_call(peers: Peers, steps: int, stop: bool, given: str) -> tuple[int, bool]:
    """The smallest requested number of steps for the next call, and whether any process wants to stop.

    Raises:
        DisagreementError: `given`, the fingerprint of the batches so far, differs between the processes.
    """
    if peers.world.world_size == 1:
        return steps, stop
    found, messages = _exchanged(peers, [steps, stop, given], "is about to run steps")
    if len({fingerprint for _, _, fingerprint in found.values()}) > 1:
        _require_equal_fingerprints(peers, "batches", [found[message][2] for message in messages])
    return min(wish for wish, _, _ in found.values()), any(stops for _, stops, _ in found.values())


def any_of(peers: Peers, wish: bool) -> bool:
    """Whether `wish` is true in any process."""
    return any(all_gather_object(peers, wish, "asks whether to stop"))


def require_equal(peers: Peers, facts: Mapping[str, Any]) -> None:
    """Compares `facts` by name over the processes.

    Raises:
        DisagreementError: they differ; raised in every process, with the values of all processes.
    """
    if peers.world.world_size == 1:
        return
    mine = {name: str(value) for name, value in facts.items()}
    found, messages = _exchanged(peers, mine, "compares what it begins with")
    if len(found) > 1:
        facts_by_rank = {rank: found[message] for rank, message in enumerate(messages)}
        error = DisagreementError.among(facts_by_rank, peers.world.named_briefly)
        if error is not None:
            raise error


def require_equal_variables(peers: Peers, described: Sequence[str], of: str = "the model") -> None:
    """Compares the dtypes and shapes of the variables of the processes, which are those `of` something.

    Raises:
        DisagreementError: they differ; raised in every process, with the first one that differs.
    """
    if len(set(all_gather_object(peers, fingerprint(list(described)), "shares its variables"))) == 1:
        return
    found = all_gather_object(peers, list(described), "shares its variables")
    at = next(index for index, these in enumerate(itertools.zip_longest(*found)) if len(set(these)) > 1)
    values = [these[at] if at < len(these) else "missing" for these in found]
    raise DisagreementError(
        f"The processes of the job disagree on {of}: variable {at + 1} is {_by_process(peers, values)}",
        "build the same model, with the same steps, on the same data, in all processes",
    )


def require_equal_fingerprints(peers: Peers, what: str, fingerprint: str) -> None:
    """Compares the fingerprint of this process' data with those of the other processes; `what` names the data.

    Raises:
        DisagreementError: they differ; raised in every process, with all fingerprints.
    """
    _require_equal_fingerprints(peers, what, all_gather_object(peers, fingerprint, "compares its data"))


def _require_equal_fingerprints(peers: Peers, what: str, fingerprints: list[str]) -> None:
    if len(set(fingerprints)) > 1:
        values = _by_process(peers, fingerprints)
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
