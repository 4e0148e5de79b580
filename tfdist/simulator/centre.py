"""Workers that train on copies and exchange with a centre on a server, as with `parameter_server`, in simulated time.

A rule of `tfdist.relaxed.centre_rules` says what is exchanged. The server's link carries the weights once for what is
pushed, and once for what is read.
"""

from __future__ import annotations

import numpy as np

from tfdist.relaxed.centre_rules import Rule
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
        if self._rule.leaves:
            for rank, weights in enumerate(self.weights):
                self._memory[rank], change = self._rule.left(weights, self._memory[rank])
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
