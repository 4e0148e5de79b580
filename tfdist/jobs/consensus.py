"""Agreement between the processes of a job while each of them runs the same loop.

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


SAME_DATA = (
    "seed what shuffles or generates the data, so that all processes have the same data; or, if each process has its "
    "own part of the data, pass `tfdist.data.per_process(data)`"
)
SAME_CALLS = (
    "run the same script in every process, which makes the same model, and calls `fit`, `evaluate` and `predict` "
    "equally, also in callbacks; a single process may use the results"
)


class Peers(Protocol):
    """The processes of a job, as one of them reaches the others; every strategy implements this."""

    world: World

    @property
    def metrics_by_process(self) -> bool:
        """Whether each process has its own part of a metric's state, in an ordinary variable."""
        ...

    @property
    def servers(self) -> Mapping[str, str]:
        """The addresses, by name, of processes that compute for this process and do not run the loop themselves."""
        ...

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all processes, by rank; each process calls this with its own message."""
        ...

    def broadcast(self, values: np.ndarray) -> np.ndarray:
        """The chief's `values`, `[n]` uint8, in all processes; each process passes an array of the same length."""
        ...

    def broadcast_variables(self, variables: Sequence[Any]) -> None:
        """Assigns the chief's values to Keras `variables` in every process."""
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
        """Does nothing: there is no other process."""


def all_gather_object(peers: Peers, value: Any, doing: str = "exchanges values") -> list[Any]:
    """The values of all processes, by rank.

    Args:
        peers: the processes, which all call this function.
        value: the value of this process, which must be convertible to JSON.
        doing: what a process does when it calls this function, as a verb, for messages.

    Raises:
        DisagreementError: other processes are doing something else.
    """
    if peers.world.world_size == 1:
        return [value]
    values, messages = _exchange_values(peers, value, doing)
    return [values[message] for message in messages]


def _exchange_values(peers: Peers, value: Any, doing: str) -> tuple[dict[bytes, Any], list[bytes]]:
    """The value in each different message, and the messages by rank; usually all messages are equal."""
    messages = peers.exchange(json.dumps([doing, value]).encode())
    are_equal = messages.count(messages[0]) == len(messages)  # fast if all messages are the same object
    parsed = {message: _parsed(message) for message in (messages[:1] if are_equal else dict.fromkeys(messages))}
    if len({action for action, _ in parsed.values()}) > 1:
        actions = _by_process(peers, [parsed[message][0] for message in messages])
        raise DisagreementError(
            f"The processes of the job do different things at the same moment: {actions}", SAME_CALLS
        )
    return {message: value for message, (_, value) in parsed.items()}, messages


def _by_process(peers: Peers, values: Iterable[Any]) -> str:
    """Describes which processes have which of `values`, which are in the order of the ranks."""
    return by_value(dict(enumerate(values)), peers.world.named_briefly, "{ranks}: {value}")


def _parsed(message: bytes) -> tuple[str, Any]:
    try:
        doing, value = json.loads(message)
    except (ValueError, TypeError):
        return "does something else", None
    return str(doing), value


def broadcast_from_chief(peers: Peers, value: Any) -> Any:
    """The `value` of the chief, in all processes; it must be convertible to JSON."""
    return all_gather_object(peers, value if peers.world.is_chief else None)[0]


def next_call(peers: Peers, steps: int, stop: bool, data_fingerprint: str) -> tuple[int, bool]:
    """The smallest requested number of steps for the next call, and whether any process wants to stop.

    Raises:
        DisagreementError: `data_fingerprint`, the fingerprint of the batches so far, differs between the processes.
    """
    if peers.world.world_size == 1:
        return steps, stop
    values, messages = _exchange_values(peers, [steps, stop, data_fingerprint], "is about to run steps")
    if len({fingerprint for _, _, fingerprint in values.values()}) > 1:
        _require_equal_fingerprints(peers, "batches", [values[message][2] for message in messages])
    return min(steps for steps, _, _ in values.values()), any(stop for _, stop, _ in values.values())


def any_of(peers: Peers, wish: bool) -> bool:
    """Whether `wish` is true in any process."""
    return any(all_gather_object(peers, wish, "asks whether to stop"))


def require_equal(peers: Peers, facts: Mapping[str, Any]) -> None:
    """Requires that `facts`, by name, are the same in all processes.

    Raises:
        DisagreementError: they differ; raised in every process, with the values of all processes.
    """
    if peers.world.world_size == 1:
        return
    own_facts = {name: str(value) for name, value in facts.items()}
    values, messages = _exchange_values(peers, own_facts, "compares what it begins with")
    if len(values) > 1:
        facts_by_rank = {rank: values[message] for rank, message in enumerate(messages)}
        error = DisagreementError.among(facts_by_rank, peers.world.named_briefly)
        if error is not None:
            raise error


def require_equal_variables(peers: Peers, described: Sequence[str], of: str = "the model") -> None:
    """Requires that the variables of all processes have the same dtypes and shapes.

    Args:
        peers: the processes.
        described: the dtype and shape of each variable.
        of: what the variables belong to, for messages.

    Raises:
        DisagreementError: they differ; raised in every process, with the first variable that differs.
    """
    if len(set(all_gather_object(peers, fingerprint(list(described)), "shares its variables"))) == 1:
        return
    by_rank = all_gather_object(peers, list(described), "shares its variables")
    position = next(index for index, values in enumerate(itertools.zip_longest(*by_rank)) if len(set(values)) > 1)
    values = [variables[position] if position < len(variables) else "missing" for variables in by_rank]
    raise _different_variables(peers, of, position + 1, values)


def require_equal_variable(peers: Peers, number: int, described: str) -> None:
    """Requires that all processes make the same variable now.

    Args:
        peers: the processes.
        number: which variable of this process it is, from 1.
        described: the dtype and shape of the variable, and its initial value where that has to be equal.

    Raises:
        DisagreementError: they make different variables, or do something else; raised in every process.
    """
    values = all_gather_object(peers, described, "makes a variable")
    if len(set(values)) > 1:
        raise _different_variables(peers, "the model", number, values)


def _different_variables(peers: Peers, of: str, number: int, values: Sequence[str]) -> DisagreementError:
    return DisagreementError(
        f"The processes of the job disagree on {of}: variable {number} is {_by_process(peers, values)}",
        "build the same model, with the same steps, on the same data, in all processes",
    )


def require_equal_fingerprints(peers: Peers, data: str, fingerprint: str) -> None:
    """Requires that the fingerprint of the data is the same in all processes; messages call the data `data`.

    Raises:
        DisagreementError: they differ; raised in every process, with all fingerprints.
    """
    _require_equal_fingerprints(peers, data, all_gather_object(peers, fingerprint, "compares its data"))


def _require_equal_fingerprints(peers: Peers, data: str, fingerprints: list[str]) -> None:
    if len(set(fingerprints)) > 1:
        values = _by_process(peers, fingerprints)
        raise DisagreementError(f"The processes of the job were given different {data} ({values})", SAME_DATA)


def fingerprint(description: Any) -> str:
    """A hash of 12 digits, for a description that is too long to show."""
    return hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode()).hexdigest()[:12]


def fingerprint_of_arrays(arrays: Iterable[np.ndarray]) -> str:
    """A hash of 12 digits of the contents of C-contiguous arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()[:12]
