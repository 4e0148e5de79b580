"""The cost model, which predicts the throughput of strategies from the costs of computation and communication.

Seconds per step:

    computation of n examples            c(n), measured for the part of a process, or a + b n from two measurements
    all-reduce of N processes (ring)     2 (N - 1) latency + 2 (N - 1) / N · bytes / bandwidth
    collective strategies                max of c(n_i) + max(0, all-reduce - overlap)
    averaging after H steps              max of c(n_i) + (copies + all-reduce) / H
    parameter servers, asynchronous      max(c(B) / W, 2 · bytes / (P · bandwidth))
    pipeline                             the flow shop of M micro-batches over measured stages, see `pipeline`
    where a job of two was measured      the above, and what that job takes more or less than the above, see `Jobs`

B is the global batch size, n_i the batch size of process i, W the number of workers, P that of servers, and M that of
micro-batches. c(n) includes the update of the weights, which every process makes. The bytes of an averaging are those
of the weights and the slots. Sources: the ring is Patarasuk and Yuan's (2009, Journal of Parallel and Distributed
Computing 69), the schedule of the pipeline Huang et al.'s (arXiv 1811.06965).

Synopsis:

    >>> compute = Compute.through((32, 0.010), (64, 0.018))
    >>> round(compute.seconds(128), 3)
    0.034
    >>> link = Link(latency_seconds=1e-4, bytes_per_second=1e9)
    >>> round(link.all_reduce_seconds(bytes_=4_000_000, processes=2), 5)
    0.0042
    >>> round(collective(compute, link, gradient_bytes=4_000_000, batch_size=64, processes=2), 4)
    0.0142
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfdist.errors import UsageError
from tfdist.study import ratios

MICRO_BATCHES = 4  # per step of a predicted pipeline, the default of the strategy
_STEPS = 20  # of a computed pipeline, of which the first half fills it
_NUMBER = r"(\d+\.?\d*|\.\d+)"
_BITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Compute:
    """The computation time of a step: `fixed_seconds`, plus `example_seconds` per example."""

    fixed_seconds: float
    example_seconds: float

    @classmethod
    def through(cls, small: tuple[int, float], large: tuple[int, float]) -> Compute:
        """Fits a line through two measurements, each a number of examples and seconds; no cost is negative."""
        (few_examples, few_seconds), (many_examples, many_seconds) = small, large
        example_seconds = max(0.0, (many_seconds - few_seconds) / (many_examples - few_examples))
        return cls(max(0.0, few_seconds - example_seconds * few_examples), example_seconds)

    def seconds(self, examples: float) -> float:
        """Returns the seconds of a step with this number of examples."""
        return self.fixed_seconds + self.example_seconds * examples


@dataclass(frozen=True)
class Link:
    """The connection between two processes: latency of a message in seconds, and bytes per second."""

    latency_seconds: float
    bytes_per_second: float

    def all_reduce_seconds(self, bytes_: float, processes: int) -> float:
        """Returns the seconds of a ring all-reduce of this many bytes."""
        hops = 2 * (processes - 1)
        return hops * self.latency_seconds + hops / processes * bytes_ / self.bytes_per_second


def collective(
    compute: Compute, link: Link, gradient_bytes: float, batch_size: int, processes: int, overlap_seconds: float = 0.0
) -> float:
    """Returns the step time of `multiworker` or `horovod`, whose slowest process has the largest part of the batch."""
    all_reduce = link.all_reduce_seconds(gradient_bytes, processes)
    return compute.seconds(math.ceil(batch_size / processes)) + max(0.0, all_reduce - overlap_seconds)


def averaging(
    compute: Compute,
    link: Link,
    averaged_bytes: float,
    batch_size: int,
    processes: int,
    steps_between: int,
    copy_seconds: float = 0.0,
) -> float:
    """Returns the step time of `mpi_split`, including its share of an averaging of weights and slots.

    `copy_seconds` is what an averaging takes besides the all-reduce: copying weights and slots into one array and back.
    """
    averaging_seconds = copy_seconds + link.all_reduce_seconds(averaged_bytes, processes)
    return compute.seconds(math.ceil(batch_size / processes)) + averaging_seconds / steps_between


def servers(compute: Compute, link: Link, gradient_bytes: float, batch_size: int, workers: int, servers: int) -> float:
    """Returns the time between updates of asynchronous parameter servers, which send weights and receive gradients."""
    return max(compute.seconds(batch_size) / workers, 2 * gradient_bytes / (servers * link.bytes_per_second))


@dataclass(frozen=True)
class Message:
    """What a micro-batch sends from stage `source` to the later stage `target`, and back in the backward pass."""

    source: int
    target: int
    forward_bytes: float
    backward_bytes: float


@dataclass(frozen=True)
class Stages:
    """The stages of a model, one per process.

    Attributes:
        forward_seconds: the time of the forward pass of a micro-batch, by stage.
        backward_seconds: the time of its backward pass, which adds the gradients to those of earlier micro-batches.
        parameters: the number of parameters, by stage.
        messages: the tensors between stages.
    """

    forward_seconds: Sequence[float]
    backward_seconds: Sequence[float]
    parameters: Sequence[float]
    messages: Sequence[Message]


def pipeline(stages: Stages, step_seconds: float, link: Link, micro_batches: int) -> float:
    """Returns the step time of a pipeline with the schedule GPipe.

    A stage computes the forward passes of all micro-batches in order, then their backward passes, and then updates its
    weights. A pass begins once the stage is free and its messages have arrived. A stage sends before it computes
    further, for bytes / bandwidth, and a message arrives after the latency.

    The passes were measured on their own, and the step of one device in a training. What the step takes besides all
    passes, such as the update, is divided among the stages by their parameters; if it takes less, the passes are scaled
    down.

    Args:
        stages: the stages.
        step_seconds: the time of a step of one device, which computes the same micro-batches through all stages.
        link: the link between two stages.
        micro_batches: the number of micro-batches.
    """
    all_seconds = micro_batches * (sum(stages.forward_seconds) + sum(stages.backward_seconds))
    scale = min(1.0, step_seconds / all_seconds)
    rest_seconds = max(0.0, step_seconds - all_seconds)
    count, parameters = len(stages.parameters), max(1.0, sum(stages.parameters))
    forward, backward = _sent(stages.messages)
    passes = (
        (range(count), stages.forward_seconds, forward),
        (range(count - 1, -1, -1), stages.backward_seconds, backward),
    )
    free = [0.0] * count  # when each stage is free
    ends = []
    for _ in range(_STEPS):
        for order, seconds, sent in passes:
            for _ in range(micro_batches):
                arrived = [0.0] * count
                for stage in order:
                    free[stage] = max(free[stage], arrived[stage]) + scale * seconds[stage]
                    for target, bytes_ in sent.get(stage, ()):
                        free[stage] += bytes_ / link.bytes_per_second
                        arrived[target] = max(arrived[target], free[stage] + link.latency_seconds)
        free = [end + rest_seconds * own / parameters for end, own in zip(free, stages.parameters, strict=True)]
        ends.append(max(free))
    half = _STEPS // 2
    return (ends[-1] - ends[half - 1]) / half


def _sent(messages: Sequence[Message]) -> tuple[dict[int, list[tuple[int, float]]], ...]:
    """The targets and bytes of what each stage sends in a forward pass, and in a backward pass."""
    forward: dict[int, list[tuple[int, float]]] = {}
    backward: dict[int, list[tuple[int, float]]] = {}
    for message in messages:
        forward.setdefault(message.source, []).append((message.target, message.forward_bytes))
        if message.backward_bytes:
            backward.setdefault(message.target, []).append((message.source, message.backward_bytes))
    return forward, backward


@dataclass(frozen=True)
class Prediction:
    """The predicted throughput of a strategy.

    Attributes:
        strategy: the name of the strategy.
        workers: the number of processes, or of pipeline stages.
        examples_per_second: training examples per second after the first epoch.
        within: the factor by which a run's examples per second differ at most from the prediction, with a probability
            of 95 %, as far as the measurements vary; infinite for a single measurement.
    """

    strategy: str
    workers: int
    examples_per_second: float
    within: float = math.inf

    @property
    def name(self) -> str:
        """The strategy with its number of workers, such as `horovod on 2`."""
        return self.strategy if self.strategy == "single" else f"{self.strategy} on {self.workers}"


@dataclass(frozen=True)
class Jobs:
    """Jobs that were measured on this machine, with the fewest processes that predictions are for.

    They have costs that the formulas leave out: the beginning and the end of an epoch, threads of the communication
    that compete for the cores, and exchanges that overlap with the computation.

    Attributes:
        processes: the number of processes of each job.
        steps: steps per epoch.
        step_seconds: the time of an epoch divided by its steps, by strategy.
    """

    processes: int
    steps: int
    step_seconds: Mapping[str, float]


@dataclass(frozen=True)
class Facts:
    """The inputs of the cost model.

    Attributes:
        batch_size: examples per global batch.
        steps: steps per epoch.
        bytes: bytes of the gradients.
        compute: the cost of computation, by the number of processes that share the machine; only for 1 if `machines`.
        links: the link of each strategy.
        machines: whether each worker has its own machine.
        averaged_bytes: bytes of the weights and slots that `mpi_split` averages.
        copy_seconds: see `averaging`.
        micro_batched_seconds: the time of a step of one device in `MICRO_BATCHES` micro-batches, by the number of
            processes that share the machine, as `compute`.
        stages: the stages of the model, by their number.
        jobs: measured jobs of processes that share this machine.
    """

    batch_size: int
    steps: int
    bytes: float
    compute: Mapping[int, Compute]
    links: Mapping[str, Link]
    machines: bool
    averaged_bytes: float = 0.0
    copy_seconds: float = 0.0
    micro_batched_seconds: Mapping[int, float] = field(default_factory=dict)
    stages: Mapping[int, Stages] = field(default_factory=dict)
    jobs: Jobs | None = None


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


def combined(rounds: Sequence[Sequence[Prediction]]) -> list[Prediction]:
    """Returns the geometric mean of the predictions from each round of measurements, and how far a run may be from it.

    Args:
        rounds: the predictions from each round, for the same strategies and numbers of workers.
    """
    rates: dict[tuple[str, int], list[float]] = {}
    for prediction in (prediction for predictions in rounds for prediction in predictions):
        rates.setdefault((prediction.strategy, prediction.workers), []).append(prediction.examples_per_second)
    predictions = []
    for (strategy, workers), values in rates.items():
        logarithms = tuple(map(math.log, values))
        mean = math.exp(statistics.fmean(logarithms))
        within = ratios.of_next(logarithms)[1] / mean if len(values) > 1 else math.inf
        predictions.append(Prediction(strategy, workers, mean, within))
    return sorted(predictions, key=lambda prediction: prediction.examples_per_second, reverse=True)


def _step_seconds(facts: Facts, workers: int) -> dict[str, float]:
    """The seconds per global batch, by strategy, corrected by the measured jobs."""
    seconds = modelled_step_seconds(facts, workers)
    if facts.jobs is None:
        return seconds
    of_jobs = modelled_step_seconds(dataclasses.replace(facts, steps=facts.jobs.steps), facts.jobs.processes)
    for name, measured in facts.jobs.step_seconds.items():
        if name in seconds and name in of_jobs:
            # A cost that was left out does not become less with more processes; what overlaps stays a proportion.
            more = measured - of_jobs[name]
            seconds[name] = seconds[name] + more if more > 0 else seconds[name] * measured / of_jobs[name]
    return seconds


def modelled_step_seconds(facts: Facts, workers: int) -> dict[str, float]:
    """The seconds per global batch, by strategy, as the formulas have it."""
    sharing = 1 if facts.machines else workers
    compute, size = facts.compute[sharing], facts.batch_size
    seconds = {}
    for name, link in facts.links.items():
        if name == "mpi_split":
            bytes_ = facts.averaged_bytes
            seconds[name] = averaging(compute, link, bytes_, size, workers, facts.steps, facts.copy_seconds)
        elif name == "parameter_server":
            seconds[name] = servers(compute, link, facts.bytes, size, workers, servers=1)
        elif name != "pipeline":
            seconds[name] = collective(compute, link, facts.bytes, size, workers)
        elif workers in facts.stages:
            seconds[name] = pipeline(facts.stages[workers], facts.micro_batched_seconds[sharing], link, MICRO_BATCHES)
    return seconds


def link_of(rate: str | None, latency: str | None, option: str = "--link") -> Link | None:
    """Parses the options of a link; `None` if neither is set.

    Args:
        rate: bits per second, such as `10Gbit`.
        latency: a time, such as `50us`.
        option: the name of the option for the rate.

    Raises:
        UsageError: only one of the two is set, or a value is not valid.
    """
    if rate is None and latency is None:
        return None
    if rate is None or latency is None:
        raise UsageError(f"Only one of `{option}` and `--latency` is set", "set both: a link has a rate and a latency")
    bits = re.fullmatch(_NUMBER + r" ?([kmg]?)bit(?:/s)?", rate.lower())
    time = re.fullmatch(_NUMBER + r" ?(s|ms|us|ns)", latency.lower())
    if bits is None or float(bits[1]) <= 0:
        raise UsageError(f"`{option}` is `{rate}`", "use bits per second, such as 10Gbit or 800Mbit")
    if time is None:
        raise UsageError(f"`--latency` is `{latency}`", "use a time, such as 50us or 1ms")
    return Link(float(time[1]) * _SECONDS[time[2]], float(bits[1]) * _BITS[bits[2]] / 8)
