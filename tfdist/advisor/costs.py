"""The cost model: seconds of a step of each strategy, from the cost of computation and of a link.

    computation of n examples            c(n) = a + b n, from two measurements
    all-reduce of N processes (ring)     2 (N - 1) latency + 2 (N - 1) / N · bytes / bandwidth
    collective strategies                max of c(n_i) + max(0, all-reduce - overlap)
    averaging after H steps              max of c(n_i) + (copies + all-reduce) / H
    parameter servers, asynchronous      max(c(B) / W, 2 · bytes / (P · bandwidth))
    pipeline of S even stages            (M + S - 1) / M · c(B) / S

c(n) includes the update of the weights, which every process makes. Sources: the ring is Patarasuk and Yuan's (2009,
Journal of Parallel and Distributed Computing 69), the pipeline Huang et al.'s (arXiv 1811.06965).

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

import math
import re
from dataclasses import dataclass

from tfdist.errors import UsageError

_BITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Compute:
    """Seconds of the computation of a step: `fixed_seconds`, and `example_seconds` for each example."""

    fixed_seconds: float
    example_seconds: float

    @classmethod
    def through(cls, small: tuple[int, float], large: tuple[int, float]) -> Compute:
        """The line through two measurements, each a number of examples and seconds; no cost is below zero."""
        (fewer, less), (more, longer) = small, large
        each = max(0.0, (longer - less) / (more - fewer))
        return cls(max(0.0, less - each * fewer), each)

    def seconds(self, examples: float) -> float:
        """Of a step with so many examples."""
        return self.fixed_seconds + self.example_seconds * examples


@dataclass(frozen=True)
class Link:
    """What lies between two processes: seconds until a message is there, and bytes a second."""

    latency_seconds: float
    bytes_per_second: float

    def all_reduce_seconds(self, bytes_: float, processes: int) -> float:
        """Of a sum of so many bytes over a ring."""
        hops = 2 * (processes - 1)
        return hops * self.latency_seconds + hops / processes * bytes_ / self.bytes_per_second


def collective(
    compute: Compute, link: Link, gradient_bytes: float, batch_size: int, processes: int, overlap_seconds: float = 0.0
) -> float:
    """A step of `multiworker` or `horovod`; the slowest process has the largest part of the batch."""
    summed = link.all_reduce_seconds(gradient_bytes, processes)
    return compute.seconds(math.ceil(batch_size / processes)) + max(0.0, summed - overlap_seconds)


def averaging(
    compute: Compute,
    link: Link,
    weight_bytes: float,
    batch_size: int,
    processes: int,
    steps_between: int,
    copy_seconds: float = 0.0,
) -> float:
    """A step of `mpi_split`, with its part of an averaging.

    `copy_seconds` are those of an averaging in which nothing is sent but the weights' own bytes: the copies of weights
    and slots to one array and back, and the slots' part of the sum.
    """
    averaged = copy_seconds + link.all_reduce_seconds(weight_bytes, processes)
    return compute.seconds(math.ceil(batch_size / processes)) + averaged / steps_between


def servers(compute: Compute, link: Link, gradient_bytes: float, batch_size: int, workers: int, servers: int) -> float:
    """Seconds from one update to the next of asynchronous parameter servers; weights come and gradients go."""
    return max(compute.seconds(batch_size) / workers, 2 * gradient_bytes / (servers * link.bytes_per_second))


def pipeline(compute: Compute, batch_size: int, stages: int, micro_batches: int) -> float:
    """A step of a pipeline of stages that take the same time."""
    return (micro_batches + stages - 1) / micro_batches * compute.seconds(batch_size) / stages


def link_of(rate: str | None, latency: str | None, option: str = "--link") -> Link | None:
    """The link that two options describe; `option` is the name of that for the rate."""
    if rate is None and latency is None:
        return None
    if rate is None or latency is None:
        raise UsageError(f"Only one of `{option}` and `--latency` is set", "set both: a link has a rate and a latency")
    bits = re.fullmatch(r"([\d.]+) ?([kmg]?)bit(?:/s)?", rate.lower())
    time = re.fullmatch(r"([\d.]+) ?(s|ms|us|ns)", latency.lower())
    if bits is None or float(bits[1]) <= 0:
        raise UsageError(f"`{option}` is `{rate}`", "give bits a second, such as 10Gbit or 800Mbit")
    if time is None:
        raise UsageError(f"`--latency` is `{latency}`", "give a time, such as 50us or 1ms")
    return Link(float(time[1]) * _SECONDS[time[2]], float(bits[1]) * _BITS[bits[2]] / 8)
