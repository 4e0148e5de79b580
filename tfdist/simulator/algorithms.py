"""Training algorithms in simulated time: who exchanges what with whom, and who waits.

    Synchronous        each update has the gradients of all workers, added by a centre or by an all-reduce
    LocalSgd           an outer rule of `tfdist.relaxed.outer_rules`, as the strategy `local_sgd` applies it
    Gossip             the state machines of `tfdist.relaxed.gossip_rules`, as the strategy `gossip` drives them
    ParameterServer    workers fetch weights from a centre, and push gradients, which the centre applies one by one
    CentreServer       workers keep their own weights and exchange with a centre, by a rule of
                       `tfdist.relaxed.centre_rules`

Worker i takes `seconds / speed_i` per step. In the first three, a worker computes the same part of each global batch;
the workers of the last two take the next part when they are free, as those of the strategy `parameter_server` do.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tfdist.parameter_server import modes
from tfdist.relaxed import centre_rules, outer_rules
from tfdist.relaxed.gossip_rules import Machine, Messages
from tfdist.simulator.clock import Clock
from tfdist.simulator.links import CENTRE, Links
from tfdist.simulator.network import Network
from tfdist.simulator.replicas import Replicas
from tfdist.simulator.state import State, mean, with_mean_averages, with_mean_slots


@dataclass
class Cluster:
    """The simulated machines.

    Attributes:
        step_seconds: seconds per step of each worker.
        links: the links of the workers and of a centre.
        clock: the simulated time.
        network: carries the messages.
    """

    step_seconds: Sequence[float]
    links: Links
    clock: Clock = field(default_factory=Clock)
    network: Network = field(init=False)

    def __post_init__(self) -> None:
        self.network = Network(self.clock, self.links)

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.step_seconds)


class Algorithm:
    """Trains all workers for a number of global batches.

    Args:
        cluster: the machines.
        replicas: the training steps of the workers.

    Attributes:
        weights: the weights of each worker.
        states: the state of each worker.
        done: the number of steps that each worker has taken.
        staleness: of each update by a centre, the number of other updates since its weights were read.
    """

    def __init__(self, cluster: Cluster, replicas: Replicas):
        self.cluster, self.replicas = cluster, replicas
        self.clock, self.network = cluster.clock, cluster.network
        self.weights = [replicas.initial_weights for _ in range(cluster.size)]
        self.states: list[State] = [replicas.initial_state for _ in range(cluster.size)]
        self.done = [0] * cluster.size
        self.staleness: list[int] = []
        self._last_step = 0

    @property
    def sent_bytes(self) -> int:
        """The size of all messages so far."""
        return self.network.sent_bytes

    def run(self, steps: int) -> None:
        """Trains on `steps` further global batches, and returns when all messages have arrived."""
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

    def _train(self, rank: int, after: Callable[[np.ndarray], None]) -> None:
        """Lets a worker take the next step on its own part of the data; passes the new weights to `after`."""
        step = self.replicas.begin("train", rank, self.done[rank], self.weights[rank], self.states[rank])

        def finish() -> None:
            weights, self.states[rank] = self.replicas.result(step)
            self.done[rank] += 1
            after(weights)

        self._after_step(rank, finish)

    def _after_step(self, rank: int, event: Callable[[], None]) -> None:
        self.clock.after(self.cluster.step_seconds[rank], event)


class Synchronous(Algorithm):
    """Workers whose gradients are added at each step, and who all have the same weights.

    Args:
        cluster: the machines.
        replicas: the training steps of the workers.
        ring: an all-reduce over a ring adds the gradients; otherwise a centre does, from which the workers fetch the
            weights.
    """

    def __init__(self, cluster: Cluster, replicas: Replicas, *, ring: bool = False):
        super().__init__(cluster, replicas)
        self._ring = ring
        self._gradients: dict[int, tuple[np.ndarray, State]] = {}

    def global_model(self) -> tuple[np.ndarray, State]:
        return self.weights[0], self.states[0]

    def _begin(self, rank: int) -> None:
        if self.done[rank] >= self._last_step:
            return
        if self._ring:
            self._compute(rank)
        else:
            self.network.send(CENTRE, rank, self.weights[rank].nbytes, lambda: self._compute(rank))

    def _compute(self, rank: int) -> None:
        step = self.replicas.begin("gradient", rank, self.done[rank], self.weights[rank], self.states[rank])

        def push() -> None:
            gradient, state = self.replicas.result(step)
            if self._ring:
                self._receive(rank, gradient, state)
            else:
                self.network.send(rank, CENTRE, gradient.nbytes, lambda: self._receive(rank, gradient, state))

        self._after_step(rank, push)

    def _receive(self, rank: int, gradient: np.ndarray, state: State) -> None:
        self._gradients[rank] = gradient, state
        if len(self._gradients) < self.cluster.size:
            return
        if self._ring:
            self.network.all_reduce(gradient.nbytes, self._update)
        else:
            self._update()

    def _update(self) -> None:
        ranks = range(self.cluster.size)
        counts = [self.replicas.examples(rank, self.done[rank]) for rank in ranks]
        gradients, states = zip(*(self._gradients.pop(rank) for rank in ranks), strict=True)
        gradient = mean(gradients, [count / sum(counts) for count in counts])
        state = with_mean_averages(self.states[0], states)
        weights, state = self.replicas.apply(self.weights[0], state, gradient)
        self.staleness.append(0)
        self.weights, self.states = [weights for _ in ranks], [state for _ in ranks]
        self.done = [done + 1 for done in self.done]
        for rank in ranks:
            self._begin(rank)


class Gossip(Algorithm):
    """Workers that exchange weights as their state machines decide.

    Args:
        cluster: the machines.
        replicas: the training steps of the workers.
        machines: the state machine of each worker.
        during_steps: a worker receives messages and replies to them while it computes a step, whose change it adds
            afterwards, and it ends a step when the replies to it have arrived; otherwise it reads messages between its
            steps.
    """

    def __init__(
        self, cluster: Cluster, replicas: Replicas, machines: Sequence[Machine], *, during_steps: bool = False
    ):
        super().__init__(cluster, replicas)
        self._machines, self._during_steps = machines, during_steps
        self._waits = machines[0].waits
        self._inboxes: list[dict[int, deque[np.ndarray]]] = [{} for _ in machines]
        self._waiting = [False] * cluster.size

    def global_model(self) -> tuple[np.ndarray, State]:
        masses = [machine.mass for machine in self._machines]
        weights = mean(self.weights, [mass / sum(masses) for mass in masses])
        return weights, with_mean_averages(self.states[0], self.states)

    def _begin(self, rank: int) -> None:
        if self.done[rank] < self._last_step:
            before = self.weights[rank]
            if not self._waits:
                self._send(rank, self._machines[rank].begin(before))
            self._train(rank, lambda trained: self._finish_step(rank, before, trained))

    def _finish_step(self, rank: int, before: np.ndarray, trained: np.ndarray) -> None:
        machine, exchanged = self._machines[rank], self.weights[rank]
        if exchanged is before:
            self.weights[rank] = trained
        else:
            self.weights[rank] = trained - before
            self.weights[rank] += exchanged  # in place, since a copy takes as long as the sum
        if self._waits:
            self._send(rank, machine.begin(before))
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
        if self._waiting[rank] and not (self._during_steps and machine.awaits_reply):
            self._waiting[rank] = False
            self._begin(rank)

    def _send(self, rank: int, messages: Messages) -> None:
        for receiver, message in messages:
            self.network.send(rank, receiver, message.nbytes, self._arrival(receiver, rank, message))

    def _arrival(self, receiver: int, sender: int, message: np.ndarray) -> Callable[[], None]:
        def arrive() -> None:
            self._inboxes[receiver].setdefault(sender, deque()).append(message)
            idle = not self._waits and self.done[receiver] >= self._last_step
            if self._waiting[receiver] or self._during_steps or idle:
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
        return self._global_weights, with_mean_averages(self.states[0], self.states)

    def _begin(self, rank: int) -> None:
        if self.done[rank] < self._last_step:
            self._examples[rank] += self.replicas.examples(rank, self.done[rank])
            self._train(rank, lambda trained: self._finish_step(rank, trained))

    def _finish_step(self, rank: int, trained: np.ndarray) -> None:
        self.weights[rank] = trained
        step_of_epoch = self.done[rank] % self.replicas.steps_per_epoch
        if step_of_epoch and step_of_epoch % self._sync_every:
            self._begin(rank)
            return
        self._arrived.add(rank)
        if len(self._arrived) == self.cluster.size:
            replicas = self.replicas
            slots = (*replicas.averages.slots.values(), *replicas.optimizer.slots.values())
            numbers = replicas.parameters + (sum(int(slot.sum()) for slot in slots) if self._averages_slots else 0)
            self.network.all_reduce(4 * numbers, self._synchronize)

    def _synchronize(self) -> None:
        self._arrived = set()
        shares = [examples / sum(self._examples) for examples in self._examples]
        self._examples = [0] * self.cluster.size
        if self._rule is None:
            workers_mean, size = mean(self.weights), self.cluster.size
            moved = [
                outer_rules.elastic(weights, self._global_weights, workers_mean, self._moving_rate, size)
                for weights in self.weights
            ]
            self.weights = [np.asarray(weights, np.float32) for weights, _ in moved]
            self._global_weights = np.asarray(moved[0][1], np.float32)
        else:
            rate = self.replicas.learning_rate(self.states[0])
            workers_mean = mean(self.weights, shares)
            new_weights, self._memory = self._rule(self._global_weights, workers_mean, self._memory, rate)
            self._global_weights = np.asarray(new_weights, np.float32)
            self.weights = [self._global_weights for _ in self.weights]
            if self._averages_slots:
                self._average_slots(shares)
        for rank in range(self.cluster.size):
            self._begin(rank)

    def _average_slots(self, shares: Sequence[float]) -> None:
        packings, states = self.replicas, self.states
        averages = with_mean_slots([state.averages for state in states], packings.averages.slots, shares)
        optimizers = with_mean_slots([state.optimizer for state in states], packings.optimizer.slots, shares)
        self.states = [State(*values) for values in zip(averages, optimizers, strict=True)]


class Centred(Algorithm):
    """Workers around a centre, which take the next part of the data when they are free.

    As in `tfdist.parameter_server.modes`, there are as many clocks as workers, and a free worker takes the next step of
    the clock that is furthest behind among those without a worker.

    Args:
        cluster: the machines.
        replicas: the training steps of the workers.
        slack: how many steps a clock may be ahead of the slowest one.
    """

    def __init__(self, cluster: Cluster, replicas: Replicas, slack: float = math.inf):
        super().__init__(cluster, replicas)
        self._slack = slack
        self._parts: deque[tuple[int, int]] = deque()  # the numbers of the step and of the part
        self._free: deque[int] = deque()
        self._clocks: list[modes.Clock] = []

    def run(self, steps: int) -> None:
        ranks, first = range(self.cluster.size), self._last_step
        self._last_step += steps
        parts = [(step, part) for step in range(first, self._last_step) for part in ranks]
        self._parts = deque((step, part) for step, part in parts if self.replicas.examples(part, step))
        self._free, self._clocks = deque(ranks), [modes.Clock() for _ in ranks]
        self._hand_out()
        self.clock.run()
        assert not self._parts, "all workers wait for ever"

    def _hand_out(self) -> None:
        """Lets free workers begin with the next parts, as far as the slack permits."""
        while self._free and self._parts:
            clock = modes.next_clock(self._clocks, 1, self._slack)
            if clock is None:
                return
            clock.running = self._free.popleft()
            step, part = self._parts.popleft()
            self._begin_part(clock, part, step)

    def _begin_part(self, clock: modes.Clock, part: int, step: int) -> None:
        """Lets the worker of a clock compute a part of the global batch of a step, and then calls `_end_part`."""
        raise NotImplementedError

    def _end_part(self, clock: modes.Clock) -> None:
        rank, clock.running = clock.running, None
        clock.done += 1
        self.done[rank] += 1
        self._free.append(rank)
        self._hand_out()


class ParameterServer(Centred):
    """Workers that fetch weights from a centre, and push gradients, which the centre's optimizer applies one by one."""

    def __init__(self, cluster: Cluster, replicas: Replicas, slack: float = math.inf):
        super().__init__(cluster, replicas, slack)
        self._centre_weights, self._centre_state = replicas.initial_weights, replicas.initial_state

    def global_model(self) -> tuple[np.ndarray, State]:
        return self._centre_weights, self._centre_state

    def disagreement(self) -> float:
        return 0.0

    def _begin_part(self, clock: modes.Clock, part: int, step: int) -> None:
        rank, weights, state, version = clock.running, self._centre_weights, self._centre_state, len(self.staleness)

        def compute() -> None:
            begun = self.replicas.begin("gradient", part, step, weights, state)
            self._after_step(rank, lambda: push(*self.replicas.result(begun)))

        def push(gradient: np.ndarray, new_state: State) -> None:
            self.network.send(rank, CENTRE, gradient.nbytes, lambda: update(gradient, new_state))

        def update(gradient: np.ndarray, new_state: State) -> None:
            self.staleness.append(len(self.staleness) - version)
            state = with_mean_averages(self._centre_state, [new_state])
            self._centre_weights, self._centre_state = self.replicas.apply(self._centre_weights, state, gradient)
            self._end_part(clock)

        self.network.send(CENTRE, rank, weights.nbytes, compute)


class CentreServer(Centred):
    """Workers with their own weights, which exchange with a centre.

    A worker pushes what it adds to the centre, the centre makes the exchange, and the worker fetches what it reads.

    Args:
        cluster: the machines.
        replicas: the training steps of the workers.
        rule: what a worker exchanges with the centre, and when.
    """

    def __init__(self, cluster: Cluster, replicas: Replicas, rule: centre_rules.Rule):
        super().__init__(cluster, replicas)
        self._rule, self._centre = rule, replicas.initial_weights
        started = [rule.begin(replicas.initial_weights) for _ in range(cluster.size)]
        self.weights, self._memories = [weights for weights, _ in started], [memory for _, memory in started]

    def run(self, steps: int) -> None:
        super().run(steps)
        if self._rule.pushes_at_end:
            for rank in range(self.cluster.size):
                self._memories[rank], change = self._rule.final_push(self.weights[rank], self._memories[rank])
                self.network.send(rank, CENTRE, self._bytes, functools.partial(self._add, change))
            self.clock.run()

    def global_model(self) -> tuple[np.ndarray, State]:
        return np.asarray(self._centre, np.float32), with_mean_averages(self.states[0], self.states)

    @property
    def _bytes(self) -> int:
        return self.replicas.initial_weights.nbytes

    def _add(self, change: np.ndarray) -> None:
        self._centre = self._centre + change

    def _begin_part(self, clock: modes.Clock, part: int, step: int) -> None:
        rank = clock.running
        self.weights[rank], self._memories[rank] = self._rule.settle(self.weights[rank], self._memories[rank])
        due = [exchange for exchange in self._rule.exchanges if self.done[rank] % exchange.every == 0]
        pushes, fetches = sum(exchange.writes for exchange in due), sum(exchange.reads for exchange in due)

        def exchange() -> None:
            self.weights[rank], self._memories[rank], self._centre = self._rule.exchanged(
                self.done[rank], self.weights[rank], self._memories[rank], self._centre
            )
            if fetches:
                self.network.send(CENTRE, rank, fetches * self._bytes, compute)
            else:
                compute()

        def compute() -> None:
            begun = self.replicas.begin(
                "train", part, step, np.asarray(self.weights[rank], np.float32), self.states[rank]
            )
            self._after_step(rank, lambda: finish(*self.replicas.result(begun)))

        def finish(weights: np.ndarray, state: State) -> None:
            self.weights[rank], self._memories[rank] = self._rule.stepped(weights, self._memories[rank])
            self.states[rank] = state
            self._end_part(clock)

        if pushes:
            self.network.send(rank, CENTRE, pushes * self._bytes, exchange)
        else:
            exchange()
