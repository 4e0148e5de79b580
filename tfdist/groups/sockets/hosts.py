"""Processes of one host add arrays in shared memory; one process of each host exchanges sums with other hosts.

An array is added in rounds, so that the memory need not hold it at once. The memory has two halves, which take turns,
each with a slot for every process of the host and one for the sums:

    put       each process writes its values into its slot, except for the share that it adds itself
    meet      no process continues before all of the host are here
    add       each process adds its share of the round, from its own array and the slots of the others
    put, meet of the next round
    exchange  the first process of the host sums over the hosts around a ring, and all of the host meet again
    take      each process reads the sums

With one meeting between two of its steps, a process that writes into a half is at most one round ahead of a process
that still reads, which is in the other half. All wait on sockets: a process that has gone hangs up, and a silent one is
noticed as in the ring. Every element is added in the order of the ranks of a host, and around one ring by all hosts, so
that the result is bitwise identical in all processes, and does not depend on the rounds.

The shared memory consists of pages without a file, which the kernel frees with the last process. One process creates
it, and sends the others the path and a token, which is part of the name of the memory and known only to the job. Two
containers may have the same host name and the same process numbers: a process of another container then finds nothing
at the path, or something with another name.

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

from tfdist.groups.sockets.connections import HOST, HOSTS, Connections, Origin
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
from tfdist.groups.sockets.tree import Tree
from tfdist.jobs.tree import ancestors, children, depth

TOKEN_BYTES = 16
PLACE = struct.Struct(f"!II{TOKEN_BYTES}s")  # the process ID, the file descriptor of the memory, the token


class Offer:
    """Lets other processes attach the memory of this process until it is closed.

    Attributes:
        message: for `attach` in other processes.
    """

    def __init__(self, descriptor: int, token: bytes):
        self.message = PLACE.pack(os.getpid(), descriptor, token)
        self._descriptor = descriptor

    def close(self) -> None:
        """Ends the offer; processes that have attached the memory keep it."""
        os.close(self._descriptor)


def create(size_bytes: int) -> tuple[mmap.mmap, Offer]:
    """Creates shared memory filled with zeros; a page takes up space once it is written to.

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
    """The memory that another process of this host has created, by the `message` of its offer.

    Raises:
        OSError: there is no such memory; the other process is on another host, or in another container.
    """
    process, descriptor, token = PLACE.unpack(message)
    path = f"/proc/{process}/fd/{descriptor}"
    if os.readlink(path) != f"/memfd:{_name(token)} (deleted)":  # check the name first: opening another file may block
        raise OSError("this host has no such memory")
    attached = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(attached, size_bytes)
    finally:
        os.close(attached)


def _name(token: bytes) -> str:
    return f"tfdist-{token.hex()}"


ROUND_BYTES = 1 << 21  # small enough for a round to stay in the processor's cache
SMALLEST_ROUND_BYTES = 1 << 17
LARGEST_MEMORY_BYTES = 1 << 26  # of a host with so many processes that its rounds must be smaller
LARGEST_ELEMENT_BYTES = 16
MOST_OF_ONE_HOST = 256


def by_host(hosts: Sequence[str]) -> list[range]:
    """The ranks of each host; if those of one host are not consecutive, each process counts as a host of its own."""
    cuts = [0, *itertools.accumulate(len(list(group)) for _, group in itertools.groupby(hosts))]
    parts = [range(begin, end) for begin, end in itertools.pairwise(cuts)]
    if len(set(hosts)) < len(parts) or max(map(len, parts)) > MOST_OF_ONE_HOST:
        return [range(rank, rank + 1) for rank in range(len(hosts))]
    return parts


def connect(session: Session, tree: Tree, connections: Connections, seconds: float) -> Hosts | None:
    """Connects the processes of each host, and the hosts with each other; all processes call it.

    Returns `None`, in all of them, if no host has two processes, or if those of one host find no shared memory.
    """
    world = session.world
    parts = by_host([task.host for task in world.tasks])
    if len(parts) == world.world_size:
        return None
    place = Place(parts, world.rank)
    memory, hosts = _shared_memory(tree, place), None
    if memory is None:
        return None
    with contextlib.suppress(OSError):
        hosts = _linked(session, tree, connections, place, memory, seconds)
    if _is_true_for_all(tree, hosts is not None):
        return hosts
    for link in () if hosts is None else hosts.links:
        link.connection.close()
    return None


def _is_true_for_all(tree: Tree, value: bool) -> bool:
    return all(_exchange(tree, b"yes" if value else b""))


def _exchange(tree: Tree, message: bytes) -> list[bytes]:
    """The messages of all processes before their first operation."""
    messages = tree.exchange(Operation(0, EXCHANGE, 0), message, sys.maxsize)
    assert messages is not None
    return messages


def _shared_memory(tree: Tree, place: Place) -> np.ndarray | None:
    """The memory of this host, `place.memory_shape` uint8; `None` if a process of the job does not find its memory."""
    size, memory = math.prod(place.memory_shape), None
    with contextlib.ExitStack() as stack:
        message = b""
        if place.is_leader:
            with contextlib.suppress(OSError):
                memory, offer = create(size)
                stack.callback(offer.close)
                message = offer.message
        messages = _exchange(tree, message)
        if not place.is_leader and messages[place.own.start]:
            with contextlib.suppress(OSError):
                memory = attach(messages[place.own.start], size)
        is_attached = _is_true_for_all(tree, memory is not None)
    if memory is None or not is_attached:
        return None
    return np.frombuffer(memory, np.uint8).reshape(place.memory_shape)


def _linked(
    session: Session, tree: Tree, connections: Connections, place: Place, memory: np.ndarray, seconds: float
) -> Hosts:
    """Makes the connections on a host, and those between the leaders."""
    first, size = place.own.start, len(place.own)
    above = [Origin(HOST, first + parent) for parent in ancestors(place.index, size)[:1]]
    below = [Origin(HOST, first + child) for child in children(place.index, size)]
    following = previous = None
    if place.is_leader and len(place.parts) > 1:
        following = Origin(HOSTS, place.parts[(place.number + 1) % len(place.parts)].start)
        previous = Origin(HOSTS, place.parts[place.number - 1].start)
    opened, accepted = connections.open_and_accept(
        [*above, *([] if following is None else [following])],
        {*below, *([] if previous is None else [previous])},
        seconds,
    )
    ring = None
    if following is not None and previous is not None:
        position = place.number, len(place.parts)
        ring = Ring(session, tree, opened[following], accepted[previous], position, later=2 * place.levels)
    return Hosts(
        session,
        tree,
        place,
        memory,
        [opened[origin] for origin in above],
        [accepted[origin] for origin in below],
        ring,
    )


class Place:
    """The position of a process among the hosts.

    Args:
        parts: the ranks of each host.
        rank: the rank of the process.

    Attributes:
        number: the number of its host.
        own: the ranks of its host.
        index: the number of the process on its host.
        is_leader: whether it is the first process of its host.
        levels: the depth of the tree of the largest host.
        share: the ranks whose parts this process adds.
        round_bytes: the size of a round, without the one element that it may have more of each part.
    """

    def __init__(self, parts: Sequence[range], rank: int):
        self.parts, self.rank = parts, rank
        self.number = next(number for number, part in enumerate(parts) if rank in part)
        self.own = parts[self.number]
        self.index = rank - self.own.start
        self.is_leader = self.index == 0
        self.levels = depth(max(map(len, parts)))
        begin, end = even_cuts(parts[-1].stop, len(self.own))[self.index : self.index + 2]
        self.share = range(begin, end)
        slot_bytes = LARGEST_MEMORY_BYTES // (2 * (max(map(len, parts)) + 1))  # the same on all hosts
        self.round_bytes = max(SMALLEST_ROUND_BYTES, min(ROUND_BYTES, slot_bytes))

    @property
    def memory_shape(self) -> tuple[int, int, int]:
        """The shape of the host's memory in bytes: two halves, a slot for each process and one for the sums."""
        largest = self.round_bytes + LARGEST_ELEMENT_BYTES * self.parts[-1].stop
        return 2, len(self.own) + 1, -(-largest // mmap.PAGESIZE) * mmap.PAGESIZE


class Hosts:
    """The shared memory of a process's host, and its links to the processes of its host and to other hosts.

    Args:
        session: the session of the process.
        tree: the tree of the job.
        place: the position of the process.
        memory: the memory of the host, `place.memory_shape` uint8.
        above: the link to its parent in a tree of the host's processes; none in the leader.
        below: the links to its children.
        ring: the ring of the leaders, in the leader of one of several hosts.

    Attributes:
        neighbours: the links to its parent and its children.
        links: these, and the links of the ring.
        count: the number of hosts.
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
        # The neighbours of a silent process give up first, so that the error that goes through the tree names it.
        own_level = len(ancestors(place.index, len(place.own)))
        self._later_below, self._later_above = place.levels - own_level - 1, place.levels + own_level
        if self.count > 1:
            self._later_above += 2 * place.levels

    def sum(self, operation: Operation, values: np.ndarray) -> np.ndarray:
        """As `Sockets.sum`."""
        flat = np.asarray(values, order="C").reshape(-1)
        total = np.empty_like(flat)
        cuts = even_cuts(flat.size, self._session.world.world_size)
        for round_, sums in self._added(operation, flat, cuts, scattered=False):
            for source, place in zip(*round_, strict=True):
                total[source] = sums[place]
        return total.reshape(values.shape)

    def sum_part(self, operation: Operation, values: np.ndarray) -> np.ndarray:
        """As `Sockets.sum_part`."""
        flat = np.asarray(values, order="C").reshape(-1)
        size, rank = self._session.world.world_size, self._place.rank
        shape = (len(values) // size, *values.shape[1:])
        total, cuts = np.empty(math.prod(shape), flat.dtype), even_cuts(math.prod(shape) * size, size)
        for round_, sums in self._added(operation, flat, cuts, scattered=True):
            source = round_.sources[rank]
            total[source.start - cuts[rank] : source.stop - cuts[rank]] = sums[round_.places[rank]]
        return total.reshape(shape)

    def gather(self, lengths: Sequence[int], message: Body) -> np.ndarray:
        """The messages of all processes, whose lengths are known, concatenated: `[sum(lengths)]` uint8."""
        cuts = [0, *itertools.accumulate(lengths)]
        whole, own = np.empty(cuts[-1], np.uint8), np.frombuffer(message, np.uint8)
        rank = self._place.rank
        for round_ in rounds(cuts, self._place.round_bytes):
            self._turn += 1
            joined, source = self._sums(np.dtype(np.uint8)), round_.sources[rank]
            joined[round_.places[rank]] = own[source.start - cuts[rank] : source.stop - cuts[rank]]
            self._meet()
            self._between_hosts(joined, round_, add=False, share=True)
            for source, place in zip(*round_, strict=True):
                whole[source] = joined[place]
        return whole

    def _added(
        self, operation: Operation, flat: np.ndarray, cuts: Sequence[int], scattered: bool
    ) -> Iterator[tuple[Round, np.ndarray]]:
        """Each round, with the sums of all parts; only of this process's part if they are to be `scattered`."""
        all_rounds = rounds(cuts, self._place.round_bytes // flat.itemsize)
        self._put(flat, all_rounds[0], self._turn + 1)
        self._tree.agree(operation)
        for number, round_ in enumerate(all_rounds, 1):
            self._turn += 1
            sums = self._sums(flat.dtype)
            self._add(flat, round_, sums)
            if number < len(all_rounds):
                self._put(flat, all_rounds[number], self._turn + 1)
            # At the end of a scattered sum on one host, a process takes only what it has added itself.
            if self.count > 1 or not scattered or number < len(all_rounds):
                self._meet()
            self._between_hosts(sums, round_, add=True, share=not scattered)
            yield round_, sums

    def _put(self, flat: np.ndarray, round_: Round, turn: int) -> None:
        """Writes the values that the others of the host add."""
        slot = self._slots[turn % 2, self._place.index].view(flat.dtype)
        for rank, (source, place) in enumerate(zip(*round_, strict=True)):
            if rank not in self._place.share:
                slot[place] = flat[source]

    def _add(self, flat: np.ndarray, round_: Round, sums: np.ndarray) -> None:
        """Adds the share of this process, in the order of the ranks."""
        slots = self._slots[self._turn % 2].view(flat.dtype)
        for rank in self._place.share:
            source, place = round_.sources[rank], round_.places[rank]
            values = [slots[index][place] for index in range(len(self._place.own))]
            values[self._place.index] = flat[source]
            total = sums[place]
            if len(values) == 1:
                total[...] = values[0]
            for index, other in enumerate(values[1:]):
                add_into(total, total if index else values[0], other)

    def _sums(self, dtype: np.dtype) -> np.ndarray:
        return self._slots[self._turn % 2, -1].view(dtype)

    def _between_hosts(self, sums: np.ndarray, round_: Round, add: bool, share: bool) -> None:
        """Exchanges the sums, or the joined messages of the processes of each host, with the other hosts."""
        if self.count == 1:
            return
        if self._ring is not None:
            parts = slices([*(round_.places[host.start].start for host in self._place.parts), round_.places[-1].stop])
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
