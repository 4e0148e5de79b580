"""Processes of one host add up in memory that they share; one process of each host exchanges sums with other hosts.

An array is added up in rounds, so that the memory need not hold it at once. The memory has two halves, which take
turns, each with a slot for every process of the host and one for the sums:

    put       each process writes what it brings into its slot, but for the share that it adds up itself
    meet      no process goes on before all of the host are here
    add       each process adds up its share of the round, from its own array and the slots of the others
    put, meet of the next round
    exchange  the first process of the host adds up the sums of the hosts around a ring, and all of the host meet again
    take      each process reads the sums

With one meeting between two of its steps, a process that writes into a half is at most one round ahead of one that
still reads, which is in the other half. All wait on sockets: a process that has gone hangs up, and one that is silent
is found as in the ring. Every element is added in the order of the ranks of a host, and around one ring by all hosts,
so that the bits are the same everywhere, and do not depend on the rounds.

The shared memory consists of pages without a file, which the kernel frees with the last process. One process creates
it, and tells the others where they find it. What they find has the name of a token that only the members of the job
know: two containers may have the same host name, and number their processes alike, but the memory of another container
is not found, and what is found in its place has another name.

Synopsis:

    >>> segment, offer = create(8)
    >>> segment[:4] = b"abcd"
    >>> attach(offer.message, 8)[:4]
    b'abcd'
    >>> offer.close()
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import secrets
import struct
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from tfdist.groups.sockets.connections import HOST, HOSTS, Connections, Origin, open_and_accept
from tfdist.groups.sockets.operations import (
    EXCHANGE,
    MEETING,
    Body,
    Operation,
    Round,
    add_into,
    even_cuts,
    rounds,
    slices,
)
from tfdist.groups.sockets.ring import Ring
from tfdist.groups.sockets.session import Link, Session
from tfdist.groups.sockets.tree import Tree, children, depth, parents

TOKEN_BYTES = 16
PLACE = struct.Struct(f"!II{TOKEN_BYTES}s")  # the process, its descriptor of the memory, the token


class Offer:
    """Says where the memory of a process is found, for as long as it is not closed.

    Attributes:
        message: for `attach` in other processes.
    """

    def __init__(self, descriptor: int, token: bytes):
        self.message = PLACE.pack(os.getpid(), descriptor, token)
        self._descriptor = descriptor

    def close(self) -> None:
        """The memory remains to those that have attached it."""
        os.close(self._descriptor)


def create(size_bytes: int) -> tuple[mmap.mmap, Offer]:
    """Memory of zeros, which takes up a page once it is written to.

    Raises:
        OSError: this system has none.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory without a file")
    token = secrets.token_bytes(TOKEN_BYTES)
    descriptor = os.memfd_create(_name(token))
    try:
        os.ftruncate(descriptor, size_bytes)
        return mmap.mmap(descriptor, size_bytes), Offer(descriptor, token)
    except BaseException:
        os.close(descriptor)
        raise


def attach(message: bytes, size_bytes: int) -> mmap.mmap:
    """The memory that a process of this host has created, by the `message` of its offer.

    Raises:
        OSError: it is not found; the other process is on another host, or in another container.
    """
    process, descriptor, token = PLACE.unpack(message)
    path = f"/proc/{process}/fd/{descriptor}"
    if os.readlink(path) != f"/memfd:{_name(token)} (deleted)":  # by its name alone: to open it could block
        raise OSError("this host has no such memory")
    own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(own, size_bytes)
    finally:
        os.close(own)


def _name(token: bytes) -> str:
    return f"tfdist-{token.hex()}"


ROUND_BYTES = 1 << 21  # small enough for a round to stay in the processor's cache
SMALLEST_ROUND_BYTES = 1 << 17
LARGEST_MEMORY_BYTES = 1 << 26  # of a host with so many processes that they take turns more often
LARGEST_ELEMENT_BYTES = 16
MOST_OF_ONE_HOST = 256


def by_host(hosts: Sequence[str]) -> list[range]:
    """The ranks of each host; if those of one do not follow each other, each process is on a host of its own."""
    cuts = [0, *itertools.accumulate(len(list(group)) for _, group in itertools.groupby(hosts))]
    found = [range(begin, end) for begin, end in itertools.pairwise(cuts)]
    if len(set(hosts)) < len(found) or max(map(len, found)) > MOST_OF_ONE_HOST:
        return [range(rank, rank + 1) for rank in range(len(hosts))]
    return found


def connect(session: Session, tree: Tree, connections: Connections, seconds: float) -> Hosts | None:
    """What the processes of this job share on their hosts; all of them call it.

    `None`, in all of them, if no host has two processes, or if those of one host find no common memory.
    """
    world = session.world
    parts = by_host([task.host for task in world.tasks])
    if len(parts) == world.world_size:
        return None
    place = Place(parts, world.rank)

    memory, found = _common_memory(tree, place), None
    if memory is None:
        return None
    with contextlib.suppress(OSError):
        found = _linked(session, tree, connections, place, memory, seconds)
    if _all_say(tree, found is not None):
        return found
    for link in () if found is None else found.links:
        link.connection.close()
    return None


def _all_say(tree: Tree, is_so: bool) -> bool:
    return all(_exchanged(tree, b"yes" if is_so else b""))


def _exchanged(tree: Tree, message: bytes) -> list[bytes]:
    """The messages of all processes before their first operation."""
    found = tree.exchange(Operation(0, EXCHANGE, 0), message, sys.maxsize)
    assert found is not None
    return found


def _common_memory(tree: Tree, place: Place) -> np.ndarray | None:
    """The memory of this host, `place.memory_shape` uint8; `None` if a process of the job does not find its own."""
    size, memory = math.prod(place.memory_shape), None
    with contextlib.ExitStack() as stack:
        offer = b""
        if place.leads:
            with contextlib.suppress(OSError):
                memory, offered = create(size)
                stack.callback(offered.close)
                offer = offered.message
        offers = _exchanged(tree, offer)
        if not place.leads and offers[place.own.start]:
            with contextlib.suppress(OSError):
                memory = attach(offers[place.own.start], size)
        everywhere = _all_say(tree, memory is not None)
    if memory is None or not everywhere:
        return None
    return np.frombuffer(memory, np.uint8).reshape(place.memory_shape)


def _linked(
    session: Session, tree: Tree, connections: Connections, place: Place, memory: np.ndarray, seconds: float
) -> Hosts:
    """Makes the connections on a host, and those between the leaders."""
    first, size = place.own.start, len(place.own)
    above = [Origin(HOST, first + each) for each in parents(place.index, size)]
    below = [Origin(HOST, first + each) for each in children(place.index, size)]
    following = previous = None
    if place.leads and len(place.parts) > 1:
        following = Origin(HOSTS, place.parts[(place.number + 1) % len(place.parts)].start)
        previous = Origin(HOSTS, place.parts[place.number - 1].start)
    opened, accepted = open_and_accept(
        connections.addresses,
        connections.listener,
        [*above, *([] if following is None else [following])],
        {*below, *([] if previous is None else [previous])},
        seconds,
    )
    ring = None
    if following is not None and previous is not None:
        ends = Link(following.rank, opened[following]), Link(previous.rank, accepted[previous])
        ring = Ring(session, tree, *ends, (place.number, len(place.parts)), later=2 * place.levels)
    return Hosts(
        session,
        tree,
        place,
        memory,
        [Link(origin.rank, opened[origin]) for origin in above],
        [Link(origin.rank, accepted[origin]) for origin in below],
        ring,
    )


class Place:
    """Where a process is among the hosts.

    Args:
        parts: the ranks of each host.
        rank: of the process.

    Attributes:
        number: of the host.
        own: the ranks of the host.
        index: of the process on its host.
        leads: whether it is the first of its host.
        levels: the depth of the tree of the largest host.
        share: the ranks whose parts this process adds up.
        round_bytes: what is added up at once, but for one element more of each part.
    """

    def __init__(self, parts: Sequence[range], rank: int):
        self.parts, self.rank = parts, rank
        self.number = next(number for number, part in enumerate(parts) if rank in part)
        self.own = parts[self.number]
        self.index = rank - self.own.start
        self.leads = self.index == 0
        self.levels = depth(max(map(len, parts)))
        begin, end = even_cuts(parts[-1].stop, len(self.own))[self.index : self.index + 2]
        self.share = range(begin, end)
        of_each = LARGEST_MEMORY_BYTES // (2 * (max(map(len, parts)) + 1))  # the same rounds on all hosts
        self.round_bytes = max(SMALLEST_ROUND_BYTES, min(ROUND_BYTES, of_each))

    @property
    def memory_shape(self) -> tuple[int, int, int]:
        """Of the memory of the host in bytes: two halves, a slot for each process and one for the sums."""
        largest = self.round_bytes + LARGEST_ELEMENT_BYTES * self.parts[-1].stop
        return 2, len(self.own) + 1, -(-largest // mmap.PAGESIZE) * mmap.PAGESIZE


class Hosts:
    """What a process shares with those of its host, and its connections with them and with those of other hosts.

    Args:
        session: of the process.
        tree: of the job.
        place: of the process.
        memory: of the host, `place.memory_shape` uint8.
        above: the connection with its parent in a tree of the host's processes; none in its leader.
        below: the connections with its children.
        ring: of the leaders, in a leader of several hosts.

    Attributes:
        neighbours: the links with its parent and its children.
        links: these, and those of the ring.
        count: of the hosts.
    """

    def __init__(
        self,
        session: Session,
        tree: Tree,
        place: Place,
        memory: np.ndarray,
        above: Sequence[Link],
        below: Sequence[Link],
        ring: Ring | None,
    ):
        self._session, self._tree, self._place, self._ring = session, tree, place, ring
        self._above, self._below = above, below
        self.neighbours = [*above, *below]
        self.links = [*self.neighbours, *([] if ring is None else ring.links)]
        self.count = len(place.parts)
        self._slots = memory
        self._turn = 0
        # Those next to a silent process give up first, so that the error that goes through the tree names it.
        level = len(_levels(place))
        self._later_below, self._later_above = place.levels - level - 1, place.levels + level
        if self.count > 1:
            self._later_above += 2 * place.levels

    def sum(self, operation: Operation, values: np.ndarray) -> np.ndarray:
        """The sum of an array over the processes; bit by bit the same in all of them."""
        flat = np.asarray(values, order="C").reshape(-1)
        total = np.empty_like(flat)
        cuts = even_cuts(flat.size, self._session.world.world_size)
        for one, sums in self._added(operation, flat, cuts, scattered=False):
            for source, place in zip(*one, strict=True):
                total[source] = sums[place]
        return total.reshape(values.shape)

    def sum_part(self, operation: Operation, values: np.ndarray) -> np.ndarray:
        """Part `rank` of the sum of an array `[size * n, ...]` over the processes: `[n, ...]`, with the bits of `sum`.

        If the number of rows is not a multiple of `size`, the last ones belong to no part.
        """
        flat = np.asarray(values, order="C").reshape(-1)
        size, rank = self._session.world.world_size, self._place.rank
        shape = (len(values) // size, *values.shape[1:])
        total, cuts = np.empty(math.prod(shape), flat.dtype), even_cuts(math.prod(shape) * size, size)
        for one, sums in self._added(operation, flat, cuts, scattered=True):
            source = one.sources[rank]
            total[source.start - cuts[rank] : source.stop - cuts[rank]] = sums[one.places[rank]]
        return total.reshape(shape)

    def gather(self, lengths: Sequence[int], message: Body) -> np.ndarray:
        """The messages of all processes, whose lengths are known, one after the other: `[sum(lengths)]` uint8."""
        cuts = [0, *itertools.accumulate(lengths)]
        whole, mine = np.empty(cuts[-1], np.uint8), np.frombuffer(message, np.uint8)
        rank = self._place.rank
        for one in rounds(cuts, self._place.round_bytes):
            self._turn += 1
            joined, source = self._sums(np.dtype(np.uint8)), one.sources[rank]
            joined[one.places[rank]] = mine[source.start - cuts[rank] : source.stop - cuts[rank]]
            self._meet()
            self._between_hosts(joined, one, add=False, share=True)
            for source, place in zip(*one, strict=True):
                whole[source] = joined[place]
        return whole

    def _added(
        self, operation: Operation, flat: np.ndarray, cuts: Sequence[int], scattered: bool
    ) -> Iterator[tuple[Round, np.ndarray]]:
        """Each round, with the sums of all parts; of this process' part alone if they are to be `scattered`."""
        of_all = rounds(cuts, self._place.round_bytes // flat.itemsize)
        several = self.count > 1
        self._put(flat, of_all[0], self._turn + 1)
        self._tree.agree(operation)
        for number, one in enumerate(of_all, 1):
            self._turn += 1
            sums = self._sums(flat.dtype)
            self._add(flat, one, sums)
            if number < len(of_all):
                self._put(flat, of_all[number], self._turn + 1)
            if several or not scattered or number < len(of_all):  # else this process takes only what it has added
                self._meet()
            self._between_hosts(sums, one, add=True, share=not scattered)
            yield one, sums

    def _put(self, flat: np.ndarray, one: Round, turn: int) -> None:
        """Writes what the others of the host add up."""
        slot = self._slots[turn % 2, self._place.index].view(flat.dtype)
        for rank, (source, place) in enumerate(zip(*one, strict=True)):
            if rank not in self._place.share:
                slot[place] = flat[source]

    def _add(self, flat: np.ndarray, one: Round, sums: np.ndarray) -> None:
        """Adds up the share of this process, in the order of the ranks."""
        slots = self._slots[self._turn % 2].view(flat.dtype)
        for rank in self._place.share:
            source, place = one.sources[rank], one.places[rank]
            brought = [slots[index][place] for index in range(len(self._place.own))]
            brought[self._place.index] = flat[source]
            total = sums[place]
            if len(brought) == 1:
                total[...] = brought[0]
            for index, other in enumerate(brought[1:]):
                add_into(total, total if index else brought[0], other)

    def _sums(self, dtype: np.dtype) -> np.ndarray:
        return self._slots[self._turn % 2, -1].view(dtype)

    def _between_hosts(self, sums: np.ndarray, one: Round, add: bool, share: bool) -> None:
        """Exchanges the sums, or what the processes of each host have joined, with the other hosts."""
        if self.count == 1:
            return
        if self._ring is not None:
            parts = slices([*(one.places[host.start].start for host in self._place.parts), one.places[-1].stop])
            if add:
                self._ring.add_parts(sums, sums, parts)
            if share:
                self._ring.share_parts(sums, parts)
        self._meet()

    def _meet(self) -> None:
        """Returns when all processes of the host have called it."""
        operation = Operation(self._turn, MEETING, 0)
        if len(self._place.own) == 2:  # both at the same time
            return self._tree.signal(operation, self.neighbours, self.neighbours, 0)
        self._tree.signal(operation, [], self._below, self._later_below)
        self._tree.signal(operation, self._above, self._above, self._later_above)
        return self._tree.signal(operation, self._below, [], 0)


def _levels(place: Place) -> list[int]:
    """The processes above one in the tree of its host."""
    found: list[int] = []
    index = place.index
    while above := parents(index, len(place.own)):
        found += above
        index = above[0]
    return found
