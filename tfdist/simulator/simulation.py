"""A simulated run: its settings, its algorithm and workers, and the results of its epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfdist
from tfdist import models
from tfdist.advisor.costs import link_of
from tfdist.data.input.array_feed import ArrayFeed
from tfdist.data.tools import for_model
from tfdist.errors import UsageError
from tfdist.relaxed import centre_rules, gossip_rules, outer_rules, topologies
from tfdist.run import optimizers
from tfdist.run.config import TrainConfig
from tfdist.simulator import algorithms
from tfdist.simulator.algorithms import Algorithm, Cluster
from tfdist.simulator.links import Links
from tfdist.simulator.matrix import Run
from tfdist.simulator.replicas import Replicas


@dataclass(frozen=True)
class Settings:
    """The settings of a run besides the model and its data.

    Attributes:
        algorithm: one of `NAMES`.
        speeds: the speed of each worker.
        step_seconds: seconds per step of a worker with speed 1.
        links: the links of the workers and of a centre.
        seed: the seed of the algorithm's random choices.
        sync_every: steps between synchronizations, or exchanges with a centre; `None` is the default of the rule.
        slack: for `ssp`.
        topology: for `dpsgd` and `adpsgd`.
        probability: for `gosgd`.
    """

    algorithm: str
    speeds: tuple[float, ...]
    step_seconds: float
    links: Links
    seed: int = 0
    sync_every: int | None = None
    slack: int = 3
    topology: str = gossip_rules.TOPOLOGY
    probability: float = gossip_rules.PROBABILITY


@dataclass(frozen=True)
class EpochResult:
    """The state of a run after an epoch.

    Attributes:
        epoch: the number of the epoch, from 1.
        seconds: simulated seconds since the beginning.
        metrics: loss and metrics of the global model on the test data.
        loss: the mean loss of the steps of the epoch.
        disagreement: the root mean square distance of the workers' weights from those of the global model.
        staleness: the mean number of other updates between an update and its read, over all updates so far; `None` for
            algorithms without staleness.
        sent_bytes: bytes that all machines have sent so far.
        chance: an accuracy up to which a model may be no better than chance, see `chance_of`; `None` without classes.
    """

    epoch: int
    seconds: float
    metrics: dict[str, float]
    loss: float
    disagreement: float
    staleness: float | None
    sent_bytes: int
    chance: float | None = None


# Local SGD: the outer rule, `None` for elastic averaging, and whether the optimizers' slots are averaged.
OUTER_RULES: dict[str, tuple[outer_rules.Rule | None, bool]] = {
    "average": (outer_rules.average, True),
    "slowmo": (outer_rules.SlowMo(), True),
    "diloco": (outer_rules.Nesterov(), False),
    "easgd": (None, False),
}
# Algorithms whose server has the only weights; the all-reduce takes the place of a server.
SERVERS = ("allreduce", "bsp", "asp", "ssp")
# Workers around a centre: the rule, from the steps between exchanges and the moving rate.
CENTRE_RULES: dict[str, Callable[[int, float], centre_rules.Rule]] = {
    "downpour": lambda every, rate: centre_rules.Downpour(every, every),
    "aeasgd": centre_rules.Easgd,
    "eamsgd": lambda every, rate: centre_rules.Eamsgd(every, rate, centre_rules.MOMENTUM),
}
NAMES = (*SERVERS, *OUTER_RULES, *CENTRE_RULES, *gossip_rules.OPTIONS)


def make_algorithm(replicas: Replicas, settings: Settings) -> Algorithm:
    """Returns the algorithm of a run, with the workers at the beginning."""
    name, size = settings.algorithm, len(settings.speeds)
    cluster = Cluster([settings.step_seconds / speed for speed in settings.speeds], settings.links)
    moving_rate = outer_rules.MOVING_RATE_OF_ALL / size
    if name in ("allreduce", "bsp"):
        return algorithms.Synchronous(cluster, replicas, ring=name == "allreduce")
    if name in ("asp", "ssp"):
        return algorithms.ParameterServer(cluster, replicas, settings.slack if name == "ssp" else math.inf)
    if name in OUTER_RULES:
        rule, averages_slots = OUTER_RULES[name]
        every = settings.sync_every or outer_rules.SYNC_EVERY[name]
        return algorithms.LocalSgd(
            cluster, replicas, rule, every, averages_slots=averages_slots, moving_rate=moving_rate
        )
    if name in CENTRE_RULES:
        every = settings.sync_every or centre_rules.EVERY
        return algorithms.CentreServer(cluster, replicas, CENTRE_RULES[name](every, moving_rate))
    mixing = topologies.matrix(settings.topology, size)
    if name == "adpsgd":
        gossip_rules.require_partners(mixing)
    machines = [gossip_rules.machine(name, rank, mixing, settings.probability, settings.seed) for rank in range(size)]
    return algorithms.Gossip(cluster, replicas, machines, during_steps=name == "adpsgd")


def epochs(
    replicas: Replicas, settings: Settings, count: int, test: Any, *, only_last: bool = False
) -> Iterator[EpochResult]:
    """Trains for `count` epochs; evaluates on the `test` data and yields the results after each, or only the last."""
    algorithm, chance = make_algorithm(replicas, settings), chance_of(test)
    for number in range(1, count + 1):
        replicas.losses.clear()
        algorithm.run(replicas.steps_per_epoch)
        if only_last and number < count:
            continue
        staleness = float(np.mean(algorithm.staleness)) if algorithm.staleness else None
        yield EpochResult(
            number,
            algorithm.clock.now,
            replicas.evaluate(*algorithm.global_model(), test),
            float(np.mean(replicas.losses)),
            algorithm.disagreement(),
            staleness,
            algorithm.sent_bytes,
            chance,
        )


def chance_of(test: Any) -> float | None:
    """Returns the accuracy of always naming the most frequent class of the test data, and two standard errors more.

    `None` if the targets are not the numbers of classes.
    """
    targets = np.asarray(test.arrays[1]) if isinstance(test, ArrayFeed) else np.zeros(0)
    if not np.issubdtype(targets.dtype, np.integer) or targets.size != len(targets):
        return None
    share = float(np.max(np.unique(targets, return_counts=True)[1]) / len(targets))
    return share + 2 * math.sqrt(share * (1 - share) / len(targets))


def make_replicas(
    model: str,
    dataset: str,
    batch_size: int,
    workers: int,
    seed: int,
    *,
    data_dir: Path | None = None,
    data_options: dict[str, Any] | None = None,
    model_options: dict[str, Any] | None = None,
    examples: int | None = None,
    **training: Any,
) -> tuple[Replicas, Any]:
    """Returns the training steps of all workers, and the test data.

    Args:
        model: the name of a model, or `module:function`.
        dataset: the name of a dataset, or `module:function`.
        batch_size: examples per global batch.
        workers: the number of workers.
        seed: the seed of the weights and of the order of examples.
        data_dir: the folder of the dataset's files.
        data_options: options of the dataset.
        model_options: options of the model.
        examples: how many training examples to use; all if `None`.
        training: the optimizer and the learning rate.

    Raises:
        UsageError: the dataset is not in memory.
    """
    source = for_model.load(model, dataset, data_dir, **data_options or {})
    source = source if examples is None else source.limit(examples)
    strategy = tfdist.strategy("single", seed=seed)
    keras.utils.set_random_seed(seed)
    feed = source.feed("train", batch_size, world=strategy.world, seed=seed, shuffle=models.shuffles(model))
    if not isinstance(feed, ArrayFeed):
        raise UsageError(
            f"The dataset `{dataset}` is not in memory, and simulated workers access batches in any order",
            "use a dataset in memory, such as `digits`, `fashion_mnist` or `synthetic`",
        )
    built = models.build(model, source.spec, **model_options or {})
    if not built.compiled:
        config = TrainConfig("single", model, dataset, batch_size=batch_size, seed=seed, **training)
        optimizers.compile(built, source.spec, config, feed.num_batches)
    built.optimizer.build(built.trainable_variables)
    strategy.prepare(built)
    order = models.shuffles(model, "test")
    return Replicas(built, feed, workers), source.feed("test", batch_size, world=strategy.world, shuffle=order)


class Runner:
    """Makes the runs of a study; successive runs with the same model, seed and number of workers share their graphs."""

    def __init__(self) -> None:
        self._latest: tuple[Any, tuple[Replicas, Any]] | None = None

    def last_epoch(self, run: Run) -> EpochResult:
        """Makes a run, and returns the result of its last epoch."""
        machine = run.machine
        link = link_of(machine.bandwidth, machine.latency, "bandwidth")
        assert link is not None
        speeds = tuple(machine.speeds[rank % len(machine.speeds)] for rank in range(run.workers))
        replicas, test = self._replicas(run)
        links = Links.of(run.workers, link, machine.links)
        settings = Settings(run.entry.algorithm, speeds, machine.step_seconds, links, run.seed, **run.entry.options)
        (last,) = epochs(replicas, settings, run.case.epochs, test, only_last=True)
        return last

    def _replicas(self, run: Run) -> tuple[Replicas, Any]:
        case = run.case
        divisor = run.workers if run.entry.divide_rate else 1
        rate = None if case.learning_rate is None else case.learning_rate / divisor
        key = (case, rate, run.workers, run.seed)
        if self._latest is None or self._latest[0] != key:
            replicas = make_replicas(
                *(case.model, case.dataset, case.batch_size, run.workers, run.seed),
                data_dir=case.data_dir,
                examples=case.examples,
                optimizer=case.optimizer,
                learning_rate=rate,
                momentum=case.momentum,
                weight_decay=case.weight_decay,
            )
            self._latest = key, replicas
        return self._latest[1]
