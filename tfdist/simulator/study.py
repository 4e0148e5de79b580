"""One simulated run: what was reached after each epoch, when, and what it took.

`Centring` is the algorithm whose workers train on copies and exchange with a centre on a server. A rule of
`tfdist.relaxed.centre_rules` says what is exchanged. The server's link carries the weights once for what is pushed, and
once for what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.advisor.costs import Link
from tfdist.relaxed import centre_rules, gossip_rules, outer_rules, topologies
from tfdist.relaxed.centre_rules import Downpour, Eamsgd, Easgd, Rule
from tfdist.simulator import algorithms
from tfdist.simulator.algorithms import Algorithm, Cluster, ServerLink
from tfdist.simulator.replicas import Replicas, State


class Centring(Algorithm):
    """Workers with weights of their own around a centre.

    Args:
        cluster: the machines; the server is one more.
        replicas: their steps.
        rule: what a worker does with its weights and the centre.
    """

    def __init__(self, cluster: Cluster, replicas: Replicas, rule: Rule):
        super().__init__(cluster, replicas)
        self._rule, self._centre = rule, replicas.first
        self._link = ServerLink(cluster, replicas.first.nbytes)
        begun = [rule.begin(replicas.first) for _ in range(cluster.size)]
        self.weights, self._memory = [own for own, _ in begun], [memory for _, memory in begun]

    def run(self, steps: int) -> None:
        super().run(steps)
        if self._rule.pushes_at_end:
            for rank, weights in enumerate(self.weights):
                self._memory[rank], change = self._rule.final_push(weights, self._memory[rank])
                self._centre = self._centre + change
                self.sent_bytes += change.nbytes

    def shown(self) -> tuple[np.ndarray, State]:
        return np.asarray(self._centre, np.float32), self.replicas.with_moving(self.rest[0], self.rest)

    def _begin(self, rank: int) -> None:
        if self.done[rank] >= self._until:
            return
        self.weights[rank], self._memory[rank] = self._rule.settle(self.weights[rank], self._memory[rank])
        due = [one for one in self._rule.exchanges if self.done[rank] % one.every == 0]
        messages = sum(one.reads + one.writes for one in due)
        if not messages:
            self._after_step(rank, lambda: self._stepped(rank))
            return
        self.sent_bytes += messages * self.replicas.first.nbytes
        self._link.carry(messages, lambda: self._exchanged(rank))

    def _exchanged(self, rank: int) -> None:
        self.weights[rank], self._memory[rank], self._centre = self._rule.exchanged(
            self.done[rank], self.weights[rank], self._memory[rank], self._centre
        )
        self._after_step(rank, lambda: self._stepped(rank))

    def _stepped(self, rank: int) -> None:
        self.weights[rank] = np.asarray(self.weights[rank], np.float32)
        self._train(rank)
        own, memory = self._rule.stepped(self.weights[rank], self._memory[rank])
        self.weights[rank], self._memory[rank] = own, memory
        self._begin(rank)


@dataclass(frozen=True)
class Settings:
    """What is simulated besides the model and its data.

    Attributes:
        algorithm: one of `NAMES`.
        speeds: of each worker.
        step_seconds: of a step of a worker of speed 1.
        link: between any two workers.
        seed: of what algorithms draw.
        sync_every: steps between meetings, or exchanges with a centre; `None` is that of the rule.
        slack: of `ssp`.
        topology: of `dpsgd` and `adpsgd`.
        probability: of `gosgd`.
    """

    algorithm: str
    speeds: tuple[float, ...]
    step_seconds: float
    link: Link
    seed: int = 0
    sync_every: int | None = None
    slack: int = 3
    topology: str = gossip_rules.TOPOLOGY
    probability: float = gossip_rules.PROBABILITY


@dataclass(frozen=True)
class EpochResult:
    """The state after an epoch.

    Attributes:
        epoch: its number, from 1.
        seconds: simulated, since the beginning.
        metrics: of the model that is shown, on the test data.
        loss: the mean of the steps' losses in the epoch.
        disagreement: the root of the mean squared distance of the workers from what is shown.
        staleness: the mean over all updates so far, in updates by others; `None` where there is none.
        sent_bytes: by all so far.
    """

    epoch: int
    seconds: float
    metrics: dict[str, float]
    loss: float
    disagreement: float
    staleness: float | None
    sent_bytes: int


# The rule of each algorithm that meets, and whether the optimizers' slots are averaged; `None` is elastic averaging.
RULES: dict[str, tuple[outer_rules.Rule | None, bool]] = {
    "average": (outer_rules.average, True),
    "slowmo": (outer_rules.SlowMo(), True),
    "diloco": (outer_rules.Nesterov(), False),
    "easgd": (None, False),
}
# The arguments of `algorithms.Serving`; that of `ssp` is a setting.
SERVED: dict[str, dict[str, bool]] = {"allreduce": {"ring": True}, "bsp": {"rounds": True}, "asp": {}, "ssp": {}}
# Of workers with copies around a centre the rule, of the steps between exchanges and of the moving rate.
CENTRED: dict[str, Callable[[int, float], Rule]] = {
    "downpour": lambda every, rate: Downpour(every, every),
    "aeasgd": Easgd,
    "eamsgd": lambda every, rate: Eamsgd(every, rate, centre_rules.MOMENTUM),
}
NAMES = (*SERVED, *RULES, *CENTRED, *gossip_rules.OPTIONS)


def made(replicas: Replicas, settings: Settings) -> Algorithm:
    """The algorithm of a run."""
    name, size = settings.algorithm, len(settings.speeds)
    cluster = Cluster([settings.step_seconds / speed for speed in settings.speeds], settings.link)
    if name in SERVED:
        slack = settings.slack if name == "ssp" else None
        return algorithms.Serving(cluster, replicas, slack, **SERVED[name])
    if name in RULES:
        rule, averages_slots = RULES[name]
        every = settings.sync_every or outer_rules.SYNC_EVERY[name]
        rate = outer_rules.MOVING_RATE_OF_ALL / size
        return algorithms.Meeting(cluster, replicas, rule, every, averages_slots=averages_slots, moving_rate=rate)
    if name in CENTRED:
        rate = outer_rules.MOVING_RATE_OF_ALL / size
        return Centring(cluster, replicas, CENTRED[name](settings.sync_every or centre_rules.EVERY, rate))
    mixing = topologies.matrix(settings.topology, size)
    machines = [gossip_rules.machine(name, rank, mixing, settings.probability, settings.seed) for rank in range(size)]
    return algorithms.Gossiping(cluster, replicas, machines)


def epochs(
    replicas: Replicas, settings: Settings, count: int, test: Any, *, only_last: bool = False
) -> Iterator[EpochResult]:
    """Trains for `count` epochs, and evaluates on the `test` data after each, or after the last one only."""
    algorithm = made(replicas, settings)
    for number in range(1, count + 1):
        replicas.losses.clear()
        algorithm.run(replicas.steps_per_epoch)
        if only_last and number < count:
            continue
        staleness = float(np.mean(algorithm.staleness)) if algorithm.staleness else None
        yield EpochResult(
            number,
            algorithm.clock.now,
            replicas.evaluate(*algorithm.shown(), test),
            float(np.mean(replicas.losses)),
            algorithm.disagreement(),
            staleness,
            algorithm.sent_bytes,
        )
