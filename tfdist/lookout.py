"""Which processes of a job still answer: engines such as MPI wait for a silent one for ever, and do not say for whom.

Every process has a thread that answers whoever connects with how long ago it has left the work that all do together,
and one that asks the others while its own process is at that work:

    stopped     connects, and says nothing        → silent
    ended       refuses                           → silent
    at work     "0"                               → fine, however long its step takes
    elsewhere   "42.5", the seconds since         → silent, once that is longer than others wait

Synopsis:

    lookout = Lookout(world, communicator.exchange, seconds=20.0, give_up=print)
    with lookout.work():
        ...                # what all processes do together
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

from tfdist.world import World

SECONDS_TO_ANSWER = 2.0
ASKED = 4  # so often, at least, before a process counts as silent


class Lookout:
    """Answers the other processes, and asks them while this one is at work.

    Args:
        world: this process among the others.
        exchange: what each process says, by rank; every process calls it.
        seconds: how long a process may be silent.
        give_up: called once, in a thread, with the ranks that have been silent for so long.
    """

    def __init__(
        self,
        world: World,
        exchange: Callable[[bytes], list[bytes]],
        seconds: float,
        give_up: Callable[[list[int]], None],
    ):
        self._world = world
        self._seconds = seconds
        self._give_up = give_up
        self._depth = 0
        self._left = time.monotonic()
        here = world.local_world_size == world.world_size
        # What it says is a number, and it reads nothing: it can be open to whoever reaches the job's network.
        self._listener = socket.create_server(("localhost" if here else "", 0))
        host = "localhost" if here else world.tasks[world.rank].host if world.tasks else socket.gethostname()
        address = json.dumps([host, self._listener.getsockname()[1]]).encode()
        self._addresses = [tuple(json.loads(said)) for said in exchange(address)]
        for target in (self._answer, self._look):
            threading.Thread(target=target, name="tfdist-lookout", daemon=True).start()

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """The context of what all processes do together."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._left = time.monotonic()

    def silent(self) -> list[int]:
        """The ranks that do not answer now, or have been elsewhere for too long."""
        return [rank for rank in range(self._world.world_size) if rank != self._world.rank and self._is_silent(rank)]

    def _is_silent(self, rank: int) -> bool:
        try:
            with socket.create_connection(self._addresses[rank], timeout=SECONDS_TO_ANSWER) as connection:
                said = connection.recv(64)
        except OSError:
            return True
        try:
            return float(said) > self._seconds
        except ValueError:
            return True

    def _answer(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                with connection:
                    away = 0.0 if self._depth else time.monotonic() - self._left
                    connection.sendall(f"{away:.1f}".encode())

    def _look(self) -> None:
        between = self._seconds / ASKED
        times = dict.fromkeys(range(self._world.world_size), 0)
        while True:
            time.sleep(between)
            silent = self.silent() if self._depth else []
            times = {rank: times[rank] + 1 if rank in silent else 0 for rank in times}
            lost = [rank for rank, count in times.items() if count >= ASKED]
            if lost:
                self._give_up(lost)
                return
