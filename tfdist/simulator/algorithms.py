"""Training algorithms in simulated time: who exchanges what with whom, and who waits.

    Gossip             the state machines of `tfdist.relaxed.gossip_rules`, as the strategy `gossip` drives them
    LocalSgd           an outer rule of `tfdist.relaxed.outer_rules`, as the strategy `local_sgd` applies it
    ParameterServer    workers fetch weights from a server and push gradients, asynchronously, with bounded staleness,
                       or synchronously; or an all-reduce adds their gradients
    CentreServer       workers keep their own weights and exchange with a centre on a server, by a rule of
                       `tfdist.relaxed.centre_rules`

Worker i takes `seconds / speed_i` per step. A message takes the latency of the link plus its size over the bandwidth.
The link of a server carries one message at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfdist.advisor.costs import Link
from tfdist.relaxed import centre_rules, outer_rules
from tfdist.relaxed.gossip_rules import Machine, Messages
from tfdist.simulator.clock import Clock
from tfdist.simulator.replicas import Replicas, State


@dataclass
class Cluster:
    """The simulated machines.

    Attributes:
        step_seconds: seconds per step of each worker.
        link: the link between any two machines.
        clock: the simulated time.
    """

    step_seconds: Sequence[float]
    link: Link
    clock: Clock = field(default_factory=Clock)

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.step_seconds)

    def send_seconds(self, bytes_: float) -> float:
        """Returns the seconds that a message of this size takes."""
        return self.link.latency_seconds + bytes_ / self.link.bytes_per_second


class Algorithm:
    """Trains all workers for a number of steps each.

    Args:
        cluster: the machines; a server is an additional machine.
        replicas: the training steps of the workers.

    Attributes:
        weights: the weights of each worker.
        states: the state of each worker, see `tfdist.simulator.replicas`.
        done: the number of steps that each worker has taken.
        sent_bytes: the size of all messages so far.
        staleness: of each update by a server, the number of other updates since its weights were read.
    """

    def __init__(self, cluster: Cluster, replicas: Replicas):
        self.cluster, self.replicas, self.clock = cluster, replicas, cluster.clock
        self.weights = [replicas.initial_weights for _ in range(cluster.size)]
        self.states: list[State] = [list(replicas.initial_state) for _ in range(cluster.size)]
        self.done = [0] * cluster.size
        self.sent_bytes = 0
        self.staleness: list[int] = []
        self._last_step = 0

    def run(self, steps: int) -> None:
        """Lets every worker take `steps` further steps, and returns when all messages are delivered."""
        self._last_step += steps
        for rank in range(self.cluster.size):
            self._begin(rank)
        self.clock.run()
        stuck = [rank for rank, done in enumerate(self.done) if done != self._last_step]
        assert not stuck, f"workers {stuck} wait for ever"

    def global_model(self) -> tuple[np.ndarray, State]:
        """Returns the weights and the state of the model that is evaluated."""
        raise NotImplementedError

    def disagreement(self) -> float:
        """Returns the root mean square distance of the workers' weights from those of the global model."""
        global_weights, _ = self.global_model()
        return float(np.sqrt(np.mean([np.sum(np.square(weights - global_weights)) for weights in self.weights])))

    def _begin(self, rank: int) -> None:
        """Lets worker `rank` begin its next step, if any is left."""
        raise NotImplementedError

    def _after_step(self, rank: int, event: Callable[[], None]) -> None:
        self.clock.after(self.cluster.step_seconds[rank], event)

    def _train(self, rank: int) -> None:
        self.weights[rank], self.states[rank] = self.replicas.train(
            rank, self.done[rank], self.weights[rank], self.states[rank]
        )
        self.done[rank] += 1


class Gossip(Algorithm):
    """Workers that exchange weights as their state machines decide."""

    def __init__(self, cluster: Cluster, replicas: Replicas, machines: Sequence[Machine]):
        super().__init__(cluster, replicas)
        self._machines = machines
        self._waits = machines[0].waits
        self._inboxes: list[dict[int, deque[np.ndarray]]] = [{} for _ in machines]
        self._waiting = [False] * cluster.size

    def global_model(self) -> tuple[np.ndarray, State]:
        masses = np.array([machine.mass for machine in self._machines])
        mean = np.average(self.weights, axis=0, weights=masses).astype(np.float32)
        return mean, self.replicas.with_averages(self.states[0], self.states)

    def _begin(self, rank: int) -> None:
        if self.done[rank] < self._last_step:
            if not self._waits:
                self._send(rank, self._machines[rank].begin(self.weights[rank]))
            self._after_step(rank, lambda: self._finish_step(rank))

    def _finish_step(self, rank: int) -> None:
        machine, old_weights = self._machines[rank], self.weights[rank]
        self._train(rank)
        if self._waits:
            self._send(rank, machine.begin(old_weights))
        self._send(rank, machine.stepped(self.weights[rank]))
        self._waiting[rank] = True
        self._receive(rank)

    def _receive(self, rank: int) -> None:
        """Passes the messages in the inbox to the machine, if all that it waits for have arrived, and goes on."""
        inbox, machine = self._inboxes[rank], self._machines[rank]
        if self._waits and not all(inbox.get(peer) for peer in machine.expected):
            return
        peers = machine.expected if self._waits else [peer for peer, messages in inbox.items() if messages]
        for peer in peers:
            for _ in range(1 if self._waits else len(inbox[peer])):
                machine.receive(peer, inbox[peer].popleft())
        self.weights[rank], sends = machine.finish(self.weights[rank])
        self._send(rank, sends)
        if self._waiting[rank]:
            self._waiting[rank] = False
            self._begin(rank)

    def _send(self, rank: int, messages: Messages) -> None:
        for receiver, message in messages:
            self.sent_bytes += message.nbytes
            self.clock.after(self.cluster.send_seconds(message.nbytes), self._arrival(receiver, rank, message))

    def _arrival(self, receiver: int, sender: int, message: np.ndarray) -> Callable[[], None]:
        def arrive() -> None:
            self._inboxes[receiver].setdefault(sender, deque()).append(message)
            # A worker reads messages between its steps, or at once if it waits or has no more steps to take.
            if self._waiting[receiver] or (not self._waits and self.done[receiver] >= self._last_step):
                self._receive(receiver)

        return arrive


class LocalSgd(Algorithm):
    """Workers that train independently and synchronize periodically, when a rule computes new weights from the mean.

    Args:
        cluster: the machines.
        replicas: the training steps of the workers.
        rule: see `tfdist.relaxed.outer_rules`; `None` is elastic averaging.
        sync_every: steps between synchronizations, counted from the beginning of each epoch, which ends with one.
        averages_slots: whether the optimizers' slots are averaged with the weights.
        moving_rate: the moving rate of elastic averaging.
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
        self._rule, self._sync_every, self._moving_rate = rule, sync_every, moving_rate
        self._averages_slots = averages_slots
        self._global_weights = replicas.initial_weights
        self._memory = np.zeros_like(replicas.initial_weights)
        self._examples = [0] * cluster.size
        self._arrived: set[int] = set()

    def global_model(self) -> tuple[np.ndarray, State]:
        return self._global_weights, self.replicas.with_averages(self.states[0], self.states)

    def _begin(self, rank: int) -> None:
        if self.done[rank] < self._last_step:
            self._after_step(rank, lambda: self._finish_step(rank))

    def _finish_step(self, rank: int) -> None:
        self._examples[rank] += self.replicas.examples(rank, self.done[rank])
        self._train(rank)
        step_of_epoch = self.done[rank] % self.replicas.steps_per_epoch
        if step_of_epoch and step_of_epoch % self._sync_every:
            self._begin(rank)
            return
        self._arrived.add(rank)
        if len(self._arrived) == self.cluster.size:
            slots = sum(self.states[0][index].shape.num_elements() for index in self.replicas.slots)
            numbers = self.replicas.parameters + (slots if self._averages_slots else 0)
            bytes_, size = 4 * numbers, self.cluster.size
            self.sent_bytes += 2 * (size - 1) * bytes_  # by all processes of a ring together
            self.clock.after(self.cluster.link.all_reduce_seconds(bytes_, size), self._synchronize)

    def _synchronize(self) -> None:
        self._arrived = set()
        shares = np.array(self._examples, np.float64) / sum(self._examples)
        self._examples = [0] * self.cluster.size
        if self._rule is None:
            mean, size = np.mean(self.weights, axis=0), self.cluster.size
            moved = [
                outer_rules.elastic(weights, self._global_weights, mean, self._moving_rate, size)
                for weights in self.weights
            ]
            self.weights = [np.asarray(weights, np.float32) for weights, _ in moved]
            self._global_weights = np.asarray(moved[0][1], np.float32)
        else:
            mean = np.average(self.weights, axis=0, weights=shares)
            rate = self.replicas.learning_rate(self.states[0])
            new_weights, self._memory = self._rule(self._global_weights, mean, self._memory, rate)
            self._global_weights = np.asarray(new_weights, np.float32)
            self.weights = [self._global_weights for _ in self.weights]
            if self._averages_slots:
                self._average_slots(shares)
        for rank in range(self.cluster.size):
            self._begin(rank)

    def _average_slots(self, shares: np.ndarray) -> None:
        for index in self.replicas.slots:
            values = [state[index].numpy() for state in self.states]
            mean = np.average(values, axis=0, weights=shares).astype(values[0].dtype)
            for state in self.states:
                state[index] = tf.constant(mean)


class ServerLink:
    """The link of a server, which carries one message at a time.

    Args:
        cluster: the machines.
        message_bytes: the size of each message.
    """

    def __init__(self, cluster: Cluster, message_bytes: int):
        self._cluster, self._message_bytes, self._free_at = cluster, message_bytes, 0.0

    def carry(self, messages: int, event: Callable[[], None]) -> None:
        """Schedules `event` for when this number of messages has arrived, one after the other."""
        link, clock = self._cluster.link, self._cluster.clock
        self._free_at = max(clock.now, self._free_at) + messages * self._message_bytes / link.bytes_per_second
        clock.at(self._free_at + messages * link.latency_seconds, event)


class ParameterServer(Algorithm):
    """Workers that fetch weights from a server, and push gradients, which the server's optimizer applies.

    Args:
        cluster: the machines.
        replicas: the training steps of the workers.
        slack: how many steps a worker may be ahead of the slowest (Ho et al., NIPS 2013); `None` sets no bound.
        synchronous: the gradients of all workers make up an update.
        ring: the same, but an all-reduce over a ring adds the gradients instead of a server.
    """

    def __init__(
        self,
        cluster: Cluster,
        replicas: Replicas,
        slack: int | None = None,
        *,
        synchronous: bool = False,
        ring: bool = False,
    ):
        super().__init__(cluster, replicas)
        self._slack, self._synchronous, self._ring = slack, synchronous or ring, ring
        self._server_weights, self._server_state = replicas.initial_weights, replicas.initial_state
        self._version = 0
        self._link = ServerLink(cluster, replicas.initial_weights.nbytes)
        self._blocked: set[int] = set()
        self._gradients: list[tuple[np.ndarray, int, State]] = []

    def global_model(self) -> tuple[np.ndarray, State]:
        return self._server_weights, self._server_state

    def disagreement(self) -> float:
        return 0.0

    def _begin(self, rank: int) -> None:
        if self.done[rank] >= self._last_step:
            return
        if self._slack is not None and self.done[rank] - min(self.done) > self._slack:
            self._blocked.add(rank)
            return
        self._transfer(lambda: self._compute(rank))

    def _transfer(self, event: Callable[[], None]) -> None:
        """Schedules `event` for when weights or gradients have arrived over the server's link, if there is a server."""
        if self._ring:
            event()
            return
        self.sent_bytes += self.replicas.initial_weights.nbytes
        self._link.carry(1, event)

    def _compute(self, rank: int) -> None:
        weights, version = self._server_weights, self._version
        self._after_step(rank, lambda: self._finish_step(rank, weights, version))

    def _finish_step(self, rank: int, weights: np.ndarray, version: int) -> None:
        gradient, state, examples = self.replicas.gradient(rank, self.done[rank], weights, self._server_state)
        self._transfer(lambda: self._receive(rank, gradient, examples, state, version))

    def _receive(self, rank: int, gradient: np.ndarray, examples: int, state: State, version: int) -> None:
        self.done[rank] += 1
        if self._synchronous:
            self._gradients.append((gradient, examples, state))
            if len(self._gradients) == self.cluster.size:
                self._apply_mean()
            return
        if examples:
            self._update(gradient, version, [state])
        self._begin(rank)
        slowest = min(self.done)
        for peer in [peer for peer in self._blocked if self.done[peer] - slowest <= (self._slack or 0)]:
            self._blocked.remove(peer)
            self._begin(peer)

    def _apply_mean(self) -> None:
        gradients, counts, states = zip(*self._gradients, strict=True)
        self._gradients = []
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
        state = self.replicas.with_averages(self._server_state, states)
        self._server_weights, self._server_state = self.replicas.apply(self._server_weights, state, gradient)
        self._version += 1


class CentreServer(Algorithm):
    """Workers with their own weights, which exchange with a centre on a server.

    The server's link carries the weights once for each push, and once for each fetch.

    Args:
        cluster: the machines.
        replicas: the training steps of the workers.
        rule: what a worker exchanges with the centre, and when.
    """

    def __init__(self, cluster: Cluster, replicas: Replicas, rule: centre_rules.Rule):
        super().__init__(cluster, replicas)
        self._rule, self._centre = rule, replicas.initial_weights
        self._link = ServerLink(cluster, replicas.initial_weights.nbytes)
        started = [rule.begin(replicas.initial_weights) for _ in range(cluster.size)]
        self.weights, self._memories = [weights for weights, _ in started], [memory for _, memory in started]

    def run(self, steps: int) -> None:
        super().run(steps)
        if self._rule.pushes_at_end:
            for rank, weights in enumerate(self.weights):
                self._memories[rank], change = self._rule.final_push(weights, self._memories[rank])
                self._centre = self._centre + change
                self.sent_bytes += change.nbytes

    def global_model(self) -> tuple[np.ndarray, State]:
        return np.asarray(self._centre, np.float32), self.replicas.with_averages(self.states[0], self.states)

    def _begin(self, rank: int) -> None:
        if self.done[rank] >= self._last_step:
            return
        self.weights[rank], self._memories[rank] = self._rule.settle(self.weights[rank], self._memories[rank])
        due = [exchange for exchange in self._rule.exchanges if self.done[rank] % exchange.every == 0]
        messages = sum(exchange.reads + exchange.writes for exchange in due)
        if not messages:
            self._after_step(rank, lambda: self._finish_step(rank))
            return
        self.sent_bytes += messages * self.replicas.initial_weights.nbytes
        self._link.carry(messages, lambda: self._finish_exchange(rank))

    def _finish_exchange(self, rank: int) -> None:
        self.weights[rank], self._memories[rank], self._centre = self._rule.exchanged(
            self.done[rank], self.weights[rank], self._memories[rank], self._centre
        )
        self._after_step(rank, lambda: self._finish_step(rank))

    def _finish_step(self, rank: int) -> None:
        self.weights[rank] = np.asarray(self.weights[rank], np.float32)
        self._train(rank)
        self.weights[rank], self._memories[rank] = self._rule.stepped(self.weights[rank], self._memories[rank])
        self._begin(rank)
