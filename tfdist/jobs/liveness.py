"""Probes whether the processes of a job with parameter servers still answer: TensorFlow waits for them without limit.

At intervals, a process connects with the TensorFlow server of each process that it needs. The threads of that server
send the first message, whatever the program does:

    stopped, or its network failed    does not answer           → lost after the timeout
    ended                             refuses the connection    → lost after `SECONDS_AFTER_END`, if that is shorter

The heartbeat (`tfdist.jobs.heartbeat`) connects the processes of the start. A worker of such a job may start again
later, and the others may continue without it, so this module needs nothing but the addresses.

Synopsis:

    probe = LivenessProbe(world, ranks, Limits(seconds=20.0, start_seconds=60.0), lost=print)
    ...                # `print` is called, in a thread, with those that are lost
    probe.close()
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tfdist.errors import ClusterError
from tfdist.jobs import rendezvous
from tfdist.jobs.connections import Loss
from tfdist.jobs.world import World

# How long a process whose server refuses connections may be missed.
SECONDS_AFTER_END = 6.0
PROBES_PER_TIMEOUT = 4
LONGEST_SECONDS_BETWEEN_PROBES = 2.0
# No probe takes longer: if this process was stopped during a probe, the others were not silent for all that time.
LONGEST_SECONDS_OF_PROBE = 2 * rendezvous.SECONDS_TO_FIRST_BYTE
# Processes that are lost together are named together if they have been missed for this part of their time.
PART_TO_BE_NAMED = 0.5


@dataclass(frozen=True)
class Limits:
    """How long a process may be missed.

    Attributes:
        seconds: once it has answered.
        start_seconds: until it answers for the first time.
    """

    seconds: float
    start_seconds: float


@dataclass
class State:
    """What the probes of a process have shown.

    Attributes:
        rank: of the process.
        has_answered: whether it has ever answered.
        loss: how it is missed; `None` while it answers.
        missed_seconds: for how long.
    """

    rank: int
    has_answered: bool = False
    loss: Loss | None = None
    missed_seconds: float = 0.0

    def note(self, loss: Loss | None, seconds: float) -> None:
        """Notes the result of a probe; `seconds` is the time since the previous one."""
        self.loss = loss
        self.has_answered |= loss is None
        self.missed_seconds = 0.0 if loss is None else self.missed_seconds + seconds

    def missed_part(self, limits: Limits) -> float:
        """The part of the time for which it may be missed; 1 or more if it is lost."""
        patience = limits.seconds if self.has_answered else limits.start_seconds
        if self.has_answered and self.loss is Loss.CLOSED:
            patience = min(patience, SECONDS_AFTER_END)
        return self.missed_seconds / patience


class LivenessProbe:
    """Probes some processes until it is closed, each in a thread.

    Args:
        world: the job.
        ranks: of the processes to probe.
        limits: how long a process may be missed.
        lost: called once for each loss, in a thread, with the states of those that are lost together. A process
            that answers again may be lost again.
    """

    def __init__(self, world: World, ranks: Collection[int], limits: Limits, lost: Callable[[list[State]], None]):
        self._world, self._limits, self._lost = world, limits, lost
        self._states = {rank: State(rank) for rank in ranks}
        self._reported: set[int] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._between_seconds = min(limits.seconds / PROBES_PER_TIMEOUT, LONGEST_SECONDS_BETWEEN_PROBES)
        for state in self._states.values():
            threading.Thread(target=self._keep_probing, args=(state,), name="tfdist-liveness", daemon=True).start()

    def close(self) -> None:
        """Stops."""
        self._closed.set()

    def missing(self) -> list[int]:
        """The ranks that did not answer the last probe."""
        return [rank for rank, state in self._states.items() if state.loss is not None]

    def _keep_probing(self, state: State) -> None:
        task, probed_at = self._world.tasks[state.rank], time.monotonic()
        while not self._closed.wait(self._between_seconds):
            loss = rendezvous.loss_of(task)
            now = time.monotonic()
            state.note(loss, min(now - probed_at, self._between_seconds + LONGEST_SECONDS_OF_PROBE))
            probed_at = now
            if losses := self._new_losses(state):
                self._lost(losses)

    def _new_losses(self, state: State) -> list[State]:
        """The process if it is lost, and those that are lost with it; none if that is reported already."""
        with self._lock:
            if state.missed_part(self._limits) < 1:
                if state.loss is None:
                    self._reported.discard(state.rank)
                return []
            if state.rank in self._reported or self._closed.is_set():
                return []
            parts = {other.rank: other.missed_part(self._limits) for other in self._states.values()}
            together = [rank for rank, part in parts.items() if part >= PART_TO_BE_NAMED]
            self._reported.update(together)
            return [self._states[rank] for rank in together]


def gone(world: World, losses: Collection[State], limits: Limits) -> ClusterError:
    """The error for processes that are lost."""
    names = world.named_all([state.rank for state in losses])
    if not all(state.has_answered for state in losses):
        return ClusterError(
            f"TensorFlow's servers of {names} did not answer within {limits.start_seconds:g} s",
            "see the output of these processes, and see that each can be reached from this machine",
        )
    return ClusterError.lost(f"Gone, or silent for {limits.seconds:g} s: {names}")
