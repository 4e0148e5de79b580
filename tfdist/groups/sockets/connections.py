"""Connects the processes of a job by sockets: in a ring and in a tree at the start, and pairwise on demand.

Before, an exchange by other means tells all processes where each process listens, and its random key. A connection
begins with a proof of that key, for its rank and kind, and is accepted once. A challenge, as in `tfdist.jobs.secret`,
would need an answer at once, and a process that computes gives none.
"""

from __future__ import annotations

import secrets
import selectors
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tfdist.errors import ClusterError
from tfdist.groups.sockets.session import Link
from tfdist.jobs import connections, ports, secret
from tfdist.jobs.connections import Exchange, Hello, LineConnection, Member, Reception, as_line
from tfdist.jobs.tree import ancestors, children
from tfdist.jobs.world import World

RING, TREE, PAIR, HOST, HOSTS = range(5)


class Origin(NamedTuple):
    """The kind of a connection, and the rank of the process that opened it."""

    kind: int
    rank: int


class Neighbours(NamedTuple):
    """The links with which a process starts.

    Attributes:
        following: to the next process of the ring, for sending.
        previous: to the previous process, for receiving.
        above: to the parent in the tree; none in process 0.
        below: to the children in the tree, by rank.
    """

    following: Link
    previous: Link
    above: list[Link]
    below: list[Link]


class Connections:
    """Opens connections to the other processes, and accepts theirs.

    A connection begins with a proof of the accepting process's key; all others are closed.

    Args:
        world: the job with the addresses of all processes, and the rank of this process.
        exchange: returns the message of each process, by rank.
    """

    def __init__(self, world: World, exchange: Exchange):
        self._listener, host = ports.listen_for(world)
        self._key, self._rank = secrets.token_hex(16), world.rank
        member = Member(self._key, [host or world.tasks[world.rank].host], self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._reception = Reception(self._selector, self._listener, Hello, self._identify, key=None)
        self._wanted: Callable[[Origin], bool]
        self._accepted: dict[Origin, Link]
        self._members = exchange(member.message())

    def open(self, target: Origin, seconds: float) -> Link:
        """Opens a connection of a kind to a rank.

        Raises:
            OSError: it cannot be opened, or not within `seconds`.
        """
        member = Member.parse(self._members[target.rank])
        connection = connections.connect(member.hosts[0], member.port, seconds)
        try:
            proof = _proof(member.key, Origin(target.kind, self._rank))
            connection.sendall(as_line(Hello(rank=self._rank, kind=target.kind, proof=proof)))
        except OSError:
            connection.close()
            raise
        return Link(target.rank, connection)

    def accept(self, wanted: Callable[[Origin], bool], seconds: float = 0.0) -> dict[Origin, Link]:
        """The `wanted` connections whose hello is complete, after up to `seconds`."""
        self._wanted, self._accepted = wanted, {}
        for key, events in self._selector.select(seconds):
            key.data(events)
        self._reception.close_late()
        return self._accepted

    def open_and_accept(
        self, targets: Iterable[Origin], expected: set[Origin], seconds: float
    ) -> tuple[dict[Origin, Link], dict[Origin, Link]]:
        """Returns the links to `targets`, which this process opens, and the `expected` ones, which others open.

        Raises:
            OSError: one of them cannot be made, or not within `seconds`; the others are closed.
        """
        opened: dict[Origin, Link] = {}
        accepted: dict[Origin, Link] = {}
        deadline = time.monotonic() + seconds
        try:
            for target in targets:
                opened[target] = self.open(target, deadline - time.monotonic())
            while accepted.keys() != expected:
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError("timed out")
                accepted |= self.accept((expected - accepted.keys()).__contains__, left)
        except OSError:
            for link in (*opened.values(), *accepted.values()):
                link.connection.close()
            raise
        return opened, accepted

    def close_pending(self) -> None:
        """Closes the connections whose hello is incomplete."""
        self._reception.close_unidentified()

    def fileno(self) -> int:
        """The descriptor that becomes readable if there is something to accept."""
        return self._selector.fileno()

    def shutdown(self, how: int, /) -> None:
        """Accepts no more connections; called from any thread."""
        self._listener.shutdown(how)

    def close(self) -> None:
        """As `shutdown`, and closes the connections whose hello is incomplete; may be called again."""
        self._reception.close()
        self._listener.close()
        self._selector.close()

    def _identify(self, connection: LineConnection, hello: Hello) -> bool:
        origin = Origin(hello.kind, hello.rank)
        is_known = secrets.compare_digest(hello.proof.encode(), _proof(self._key, origin).encode())
        if not is_known or origin in self._accepted or not self._wanted(origin):
            return False
        self._accepted[origin] = Link(hello.rank, *connection.detach())
        return True


def _proof(key: str, origin: Origin) -> str:
    return secret.proof(key.encode(), *origin)


def connect(world: World, exchange: Exchange, seconds: float) -> tuple[Connections, Neighbours]:
    """Connects this process with the others; all of them call it.

    Args:
        world: the job with the addresses of all processes, and the rank of this process.
        exchange: returns the message of each process, by rank.
        seconds: how long connecting may take.

    Raises:
        ClusterError: the processes cannot be connected; raised in all of them.
    """
    rank, size = world.rank, world.world_size
    ours = Connections(world, exchange)
    following, previous = Origin(RING, (rank + 1) % size), Origin(RING, (rank - 1) % size)
    above = [Origin(TREE, parent) for parent in ancestors(rank, size)[:1]]
    below = [Origin(TREE, child) for child in children(rank, size)]
    opened: dict[Origin, Link] = {}
    accepted: dict[Origin, Link] = {}
    problem = ""
    try:
        opened, accepted = ours.open_and_accept([following, *above], {previous, *below}, seconds)
        ours.close_pending()
    except OSError as error:
        problem = f"{world.named(rank)}: {connections.described(error)}"
    problems = [answer.decode() for answer in exchange(problem.encode()) if answer]
    if problems:
        ours.close()
        for link in (*opened.values(), *accepted.values()):
            link.connection.close()
        raise ClusterError(
            f"The processes cannot be connected with each other: {'; '.join(problems)}",
            "let the machines of the job reach all ports of each other",
        )
    return ours, Neighbours(
        opened[following],
        accepted[previous],
        [opened[origin] for origin in above],
        [accepted[origin] for origin in below],
    )
