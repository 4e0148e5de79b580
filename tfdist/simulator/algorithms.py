"""Who exchanges what with whom, and who waits, in simulated time.

    Gossiping      the machines of `tfdist.relaxed.gossip_rules`, as the strategy `gossip` drives them
    Meeting        an outer rule of `tfdist.relaxed.outer_rules`, as `local_sgd` does
    Serving        workers pull weights from a server and push gradients: asynchronous, bounded by clocks, or in rounds;
                   or they add the gradients of a round by an all-reduce

Those with copies of the weights around a centre are in `tfdist.simulator.study`.

A step of worker i takes `seconds / speed_i`. A message takes the link's latency and its bytes over the link's rate; the
servers' link carries one at a time.

Synopsis, of events in the order of simulated time:

    >>> clock, seen = Clock(), []
    >>> clock.after(2.0, lambda: seen.append("late"))
    >>> clock.after(1.0, lambda: clock.after(0.5, lambda: seen.append("early")))
    >>> clock.run()
    >>> seen, clock.now
    (['early', 'late'], 2.0)
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfdist.advisor.costs import Link
from tfdist.relaxed import outer_rules
from tfdist.relaxed.gossip_rules import Machine, Messages
from tfdist.simulator.replicas import Replicas, State


class Clock:
    """Runs events; those of the same time in the order in which they were asked for.

    Attributes:
        now: simulated seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Has `event` called `seconds` from now."""
        self.at(self.now + seconds, event)

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Has `event` called at the time `when`, which has not passed."""
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def run(self) -> None:
        """Runs all events, and those that they ask for."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()


@dataclass
class Cluster:
    """The machines that are simulated.

    Attributes:
        step_seconds: of a step of each worker.
        link: between any two of them.
        clock: the time.
    """

    step_seconds: Sequence[float]
    link: Link
    clock: Clock = field(default_factory=Clock)

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.step_seconds)

    def send_seconds(self, bytes_: float) -> float:
        """Of one message."""
        return self.link.latency_seconds + bytes_ / self.link.bytes_per_second


class Algorithm:
    """Trains all workers for a number of steps each.

    Args:
        cluster: the machines.
        replicas: their steps.

    Attributes:
        weights: of each worker.
        rest: of each worker.
        done: the number of steps of each.
        sent_bytes: of all messages so far.
        staleness: of each update or gradient, in updates by others, where there is such a thing.
    """

    def __init__(self, cluster: Cluster, replicas: Replicas):
        self.cluster, self.replicas, self.clock = cluster, replicas, cluster.clock
        self.weights = [replicas.first for _ in range(cluster.size)]
        self.rest: list[State] = [list(replicas.rest) for _ in range(cluster.size)]
        self.done = [0] * cluster.size
        self.sent_bytes = 0
        self.staleness: list[int] = []
        self._until = 0

    def run(self, steps: int) -> None:
        """Has every worker take `steps` steps more, and returns when no message is on its way."""
        self._until += steps
        for rank in range(self.cluster.size):
            self._begin(rank)
        self.clock.run()
        late = [rank for rank, done in enumerate(self.done) if done != self._until]
        assert not late, f"workers {late} wait for ever"

    def shown(self) -> tuple[np.ndarray, State]:
        """The weights of the model that is evaluated, and the rest of its state."""
        raise NotImplementedError

    def disagreement(self) -> float:
        """The root of the mean squared distance of the workers' weights from what is shown."""
        mean, _ = self.shown()
        return float(np.sqrt(np.mean([np.sum(np.square(one - mean)) for one in self.weights])))

    def _begin(self, rank: int) -> None:
        """Worker `rank` goes on, if it has steps to take."""
        raise NotImplementedError

    def _after_step(self, rank: int, event: Callable[[], None]) -> None:
        self.clock.after(self.cluster.step_seconds[rank], event)

    def _train(self, rank: int) -> None:
        trained = self.replicas.train(rank, self.done[rank], self.weights[rank], self.rest[rank])
        self.weights[rank], self.rest[rank] = trained
        self.done[rank] += 1


class Gossiping(Algorithm):
    """Workers that exchange weights as machines say."""

    def __init__(self, cluster: Cluster, replicas: Replicas, machines: Sequence[Machine]):
        super().__init__(cluster, replicas)
        self._machines = machines
        self._waits = machines[0].waits
        self._inbox: list[dict[int, deque[np.ndarray]]] = [{} for _ in machines]
        self._waiting = [False] * cluster.size

    def shown(self) -> tuple[np.ndarray, State]:
        masses = np.array([machine.mass for machine in self._machines])
        mean = np.average(self.weights, axis=0, weights=masses).astype(np.float32)
        return mean, self.replicas.with_moving(self.rest[0], self.rest)

    def _begin(self, rank: int) -> None:
        if self.done[rank] < self._until:
            if not self._waits:
                self._send(rank, self._machines[rank].begin(self.weights[rank]))
            self._after_step(rank, lambda: self._stepped(rank))

    def _stepped(self, rank: int) -> None:
        machine, before = self._machines[rank], self.weights[rank]
        self._train(rank)
        if self._waits:
            self._send(rank, machine.begin(before))
        self._send(rank, machine.stepped(self.weights[rank]))
        self._waiting[rank] = True
        self._look(rank)

    def _look(self, rank: int) -> None:
        """Goes on with what has come, if that is enough."""
        inbox, machine = self._inbox[rank], self._machines[rank]
        if self._waits and not all(inbox.get(other) for other in machine.expected):
            return
        come = machine.expected if self._waits else [other for other, messages in inbox.items() if messages]
        for other in come:
            for _ in range(1 if self._waits else len(inbox[other])):
                machine.receive(other, inbox[other].popleft())
        self.weights[rank], sends = machine.finish(self.weights[rank])
        self._send(rank, sends)
        if self._waiting[rank]:
            self._waiting[rank] = False
            self._begin(rank)

    def _send(self, rank: int, messages: Messages) -> None:
        for to, message in messages:
            self.sent_bytes += message.nbytes
            self.clock.after(self.cluster.send_seconds(message.nbytes), self._arrival(to, rank, message))

    def _arrival(self, to: int, from_: int, message: np.ndarray) -> Callable[[], None]:
        def arrive() -> None:
            self._inbox[to].setdefault(from_, deque()).append(message)
            # A worker takes messages in between its steps; one that waits, or has no more steps, at once.
            if self._waiting[to] or (not self._waits and self.done[to] >= self._until):
                self._look(to)

        return arrive


class Meeting(Algorithm):
    """Workers that train apart and meet after a number of steps, when a rule makes new weights of their mean.

    Args:
        cluster: the machines.
        replicas: their steps.
        rule: see `tfdist.relaxed.outer_rules`; `None` is elastic averaging.
        sync_every: steps from meeting to meeting, counted from the beginning of an epoch, which ends with one.
        averages_slots: the optimizers' slots are averaged with the weights.
        moving_rate: of elastic averaging.
    """

    def __init__(
        self,
        cluster: Cluster,
        replicas: Replicas,
        rule: outer_rules.Rule | None,
        sync_every: int,
        *,
        averages_slots: bool = True,
        moving_rate: float = 0.0,
    ):
        super().__init__(cluster, replicas)
        self._rule, self._every, self._moving_rate = rule, sync_every, moving_rate
        self._averages_slots = averages_slots
        self._start = replicas.first
        self._memory = np.zeros_like(replicas.first)
        self._examples = [0] * cluster.size
        self._there: set[int] = set()

    def shown(self) -> tuple[np.ndarray, State]:
        return self._start, self.replicas.with_moving(self.rest[0], self.rest)

    def _begin(self, rank: int) -> None:
        if self.done[rank] < self._until:
            self._after_step(rank, lambda: self._stepped(rank))

    def _stepped(self, rank: int) -> None:
        self._examples[rank] += self.replicas.examples(rank, self.done[rank])
        self._train(rank)
        in_epoch = self.done[rank] % self.replicas.steps_per_epoch
        if in_epoch and in_epoch % self._every:
            self._begin(rank)
            return
        self._there.add(rank)
        if len(self._there) == self.cluster.size:
            slots = sum(self.rest[0][index].shape.num_elements() for index in self.replicas.slots)
            numbers = self.replicas.parameters + (slots if self._averages_slots else 0)
            bytes_, size = 4 * numbers, self.cluster.size
            self.sent_bytes += 2 * (size - 1) * bytes_  # of a ring, by all
            self.clock.after(self.cluster.link.all_reduce_seconds(bytes_, size), self._meet)

    def _meet(self) -> None:
        self._there = set()
        shares = np.array(self._examples, np.float64) / sum(self._examples)
        self._examples = [0] * self.cluster.size
        if self._rule is None:
            mean, size = np.mean(self.weights, axis=0), self.cluster.size
            met = [outer_rules.elastic(one, self._start, mean, self._moving_rate, size) for one in self.weights]
            self.weights = [np.asarray(own, np.float32) for own, _ in met]
            self._start = np.asarray(met[0][1], np.float32)
        else:
            mean = np.average(self.weights, axis=0, weights=shares)
            rate = self.replicas.learning_rate(self.rest[0])
            new, self._memory = self._rule(self._start, mean, self._memory, rate)
            self._start = np.asarray(new, np.float32)
            self.weights = [self._start for _ in self.weights]
            if self._averages_slots:
                self._average_slots(shares)
        for rank in range(self.cluster.size):
            self._begin(rank)

    def _average_slots(self, shares: np.ndarray) -> None:
        for index in self.replicas.slots:
            values = [state[index].numpy() for state in self.rest]
            mean = np.average(values, axis=0, weights=shares).astype(values[0].dtype)
            for state in self.rest:
                state[index] = tf.constant(mean)


class ServerLink:
    """The link of a server, which carries one message at a time.

    Args:
        cluster: the machines.
        message_bytes: of each message.
    """

    def __init__(self, cluster: Cluster, message_bytes: int):
        self._cluster, self._bytes, self._free = cluster, message_bytes, 0.0

    def carry(self, messages: int, event: Callable[[], None]) -> None:
        """Has `event` called when so many messages, one after the other, have come."""
        link, clock = self._cluster.link, self._cluster.clock
        self._free = max(clock.now, self._free) + messages * self._bytes / link.bytes_per_second
        clock.at(self._free + messages * link.latency_seconds, event)


class Serving(Algorithm):
    """Workers that pull weights from a server, and push gradients, which the server's optimizer applies.

    Args:
        cluster: the machines; the server is one more.
        replicas: their steps.
        slack: the number of steps that a worker may be ahead of the slowest (Ho et al., NIPS 2013); `None` is without
            bound.
        rounds: the gradients of all workers make one update.
        ring: there is no server: an all-reduce over a ring adds the gradients of a round.
    """

    def __init__(
        self,
        cluster: Cluster,
        replicas: Replicas,
        slack: int | None = None,
        *,
        rounds: bool = False,
        ring: bool = False,
    ):
        super().__init__(cluster, replicas)
        self._slack, self._rounds, self._ring = slack, rounds or ring, ring
        self._of_server, self._rest_of_server = replicas.first, replicas.rest
        self._version = 0
        self._link = ServerLink(cluster, replicas.first.nbytes)
        self._blocked: set[int] = set()
        self._round: list[tuple[np.ndarray, int, State]] = []

    def shown(self) -> tuple[np.ndarray, State]:
        return self._of_server, self._rest_of_server

    def disagreement(self) -> float:
        return 0.0

    def _begin(self, rank: int) -> None:
        if self.done[rank] >= self._until:
            return
        if self._slack is not None and self.done[rank] - min(self.done) > self._slack:
            self._blocked.add(rank)
            return
        self._over_link(lambda: self._pulled(rank))

    def _over_link(self, event: Callable[[], None]) -> None:
        """Has `event` called when weights or gradients have come over the link of the server, which carries one."""
        if self._ring:
            event()
            return
        self.sent_bytes += self.replicas.first.nbytes
        self._link.carry(1, event)

    def _pulled(self, rank: int) -> None:
        weights, version = self._of_server, self._version
        self._after_step(rank, lambda: self._computed(rank, weights, version))

    def _computed(self, rank: int, weights: np.ndarray, version: int) -> None:
        gradient, state, examples = self.replicas.gradient(rank, self.done[rank], weights, self._rest_of_server)
        self._over_link(lambda: self._pushed(rank, gradient, examples, state, version))

    def _pushed(self, rank: int, gradient: np.ndarray, examples: int, state: State, version: int) -> None:
        self.done[rank] += 1
        if self._rounds:
            self._round.append((gradient, examples, state))
            if len(self._round) == self.cluster.size:
                self._end_round()
            return
        if examples:
            self._update(gradient, version, [state])
        self._begin(rank)
        for other in [one for one in self._blocked if self.done[one] - min(self.done) <= (self._slack or 0)]:
            self._blocked.remove(other)
            self._begin(other)

    def _end_round(self) -> None:
        gradients, counts, states = zip(*self._round, strict=True)
        self._round = []
        mean = np.average(gradients, axis=0, weights=counts).astype(np.float32)

        def update() -> None:
            self._update(mean, self._version, list(states))
            for rank in range(self.cluster.size):
                self._begin(rank)

        bytes_, size = mean.nbytes, self.cluster.size
        self.sent_bytes += 2 * (size - 1) * bytes_ if self._ring else 0
        self.clock.after(self.cluster.link.all_reduce_seconds(bytes_, size) if self._ring else 0.0, update)

    def _update(self, gradient: np.ndarray, version: int, states: list[State]) -> None:
        self.staleness.append(self._version - version)
        rest = self.replicas.with_moving(self._rest_of_server, states)
        self._of_server, self._rest_of_server = self.replicas.apply(self._of_server, rest, gradient)
        self._version += 1
