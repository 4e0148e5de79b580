"""Predictions for strategies and numbers of workers, made of measurements by the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.advisor import costs
from tfdist.advisor.costs import Compute, Link

MICRO_BATCHES = 4  # of a pipeline


@dataclass(frozen=True)
class Prediction:
    """What is expected of a strategy.

    Attributes:
        strategy: its name.
        workers: its processes, or the stages of a pipeline.
        examples_per_second: of training, after the first epoch.
    """

    strategy: str
    workers: int
    examples_per_second: float

    @property
    def name(self) -> str:
        """Such as `horovod on 2`."""
        return self.strategy if self.strategy == "single" else f"{self.strategy} on {self.workers}"


@dataclass(frozen=True)
class Facts:
    """What predictions are made of.

    Attributes:
        batch_size: examples in a global batch.
        steps: steps of an epoch.
        bytes: of the gradients, and of the weights.
        compute: by the number of processes that share the machine; with 1 alone, workers are machines of their own.
        links: by strategy.
        machines: whether each worker has a machine of its own.
        copy_seconds: of an averaging, see `costs.averaging`.
    """

    batch_size: int
    steps: int
    bytes: float
    compute: Mapping[int, Compute]
    links: Mapping[str, Link]
    machines: bool
    copy_seconds: float = 0.0

    def compute_of(self, workers: int) -> Compute:
        """The cost of computation in each of so many workers."""
        return self.compute[1 if self.machines else workers]


def all_of(facts: Facts, workers: Sequence[int]) -> list[Prediction]:
    """The predictions for `single`, and for each strategy that has a link with each number of workers, best first."""
    found = [Prediction("single", 1, facts.batch_size / facts.compute[1].seconds(facts.batch_size))]
    for count in workers:
        if count > 1:
            steps = _steps(facts, count)
            found += [Prediction(name, count, facts.batch_size / seconds) for name, seconds in steps.items()]
    return sorted(found, key=lambda one: one.examples_per_second, reverse=True)


def _steps(facts: Facts, count: int) -> dict[str, float]:
    """Seconds of a step of a global batch on so many workers, by strategy."""
    compute, size = facts.compute_of(count), facts.batch_size
    found = {}
    for name, link in facts.links.items():
        if name == "mpi_split":
            found[name] = costs.averaging(compute, link, facts.bytes, size, count, facts.steps, facts.copy_seconds)
        elif name == "parameter_server":
            found[name] = costs.servers(compute, link, facts.bytes, size, count, servers=1)
        else:
            found[name] = costs.collective(compute, link, facts.bytes, size, count)
    if facts.machines:  # on one machine, the stages would share its cores
        found["pipeline"] = costs.pipeline(compute, size, count, MICRO_BATCHES)
    return found
