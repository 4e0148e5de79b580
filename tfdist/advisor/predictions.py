"""Predicts the throughput of strategies on numbers of workers, by the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.advisor import costs
from tfdist.advisor.costs import Compute, Link

MICRO_BATCHES = 4  # per step of a pipeline


@dataclass(frozen=True)
class Prediction:
    """The predicted throughput of a strategy.

    Attributes:
        strategy: the name of the strategy.
        workers: the number of processes, or of pipeline stages.
        examples_per_second: training examples per second after the first epoch.
    """

    strategy: str
    workers: int
    examples_per_second: float

    @property
    def name(self) -> str:
        """The strategy with its number of workers, such as `horovod on 2`."""
        return self.strategy if self.strategy == "single" else f"{self.strategy} on {self.workers}"


@dataclass(frozen=True)
class Facts:
    """The inputs of the cost model.

    Attributes:
        batch_size: examples per global batch.
        steps: steps per epoch.
        bytes: bytes of the gradients, and of the weights.
        compute: the cost of computation, by the number of processes that share the machine; only for 1 if `machines`.
        links: the link of each strategy.
        machines: whether each worker has its own machine.
        copy_seconds: see `costs.averaging`.
    """

    batch_size: int
    steps: int
    bytes: float
    compute: Mapping[int, Compute]
    links: Mapping[str, Link]
    machines: bool
    copy_seconds: float = 0.0


def predict(facts: Facts, worker_counts: Sequence[int]) -> list[Prediction]:
    """Predicts `single`, and each strategy with a link on each number of workers; returns the fastest first."""
    predictions = [Prediction("single", 1, facts.batch_size / facts.compute[1].seconds(facts.batch_size))]
    for workers in worker_counts:
        if workers > 1:
            predictions += [
                Prediction(strategy, workers, facts.batch_size / seconds)
                for strategy, seconds in _step_seconds(facts, workers).items()
            ]
    return sorted(predictions, key=lambda prediction: prediction.examples_per_second, reverse=True)


def _step_seconds(facts: Facts, workers: int) -> dict[str, float]:
    """The seconds per global batch, by strategy."""
    compute, size = facts.compute[1 if facts.machines else workers], facts.batch_size
    seconds = {}
    for name, link in facts.links.items():
        if name == "mpi_split":
            seconds[name] = costs.averaging(compute, link, facts.bytes, size, workers, facts.steps, facts.copy_seconds)
        elif name == "parameter_server":
            seconds[name] = costs.servers(compute, link, facts.bytes, size, workers, servers=1)
        else:
            seconds[name] = costs.collective(compute, link, facts.bytes, size, workers)
    if facts.machines:  # on a single machine, the stages would share its cores
        seconds["pipeline"] = costs.pipeline(compute, size, workers, MICRO_BATCHES)
    return seconds
