"""Measures the speed of a pipeline, the time of each stage, and the limit of the machine."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.input.array_feed import ArrayFeed
from tfdist.data.input.decoding import Decoder
from tfdist.data.input.division import WHOLE
from tfdist.data.input.pictures import PictureSource
from tfdist.data.input.source import FeedArguments, Source
from tfdist.jobs.job_environment import cores

# Each stage is timed alone, on at most this number of examples, for this time.
_EXAMPLES, _SECONDS = 512, 0.5
_BYTES_TO_COPY = 1 << 28


@dataclass(frozen=True)
class Speed:
    """The measurements of a pipeline.

    Attributes:
        examples_per_second: the rate of the whole pipeline on all cores.
        bytes_per_example: the size of x and y as a step gets them.
        stage_seconds: the seconds that one core spends on an example, per stage.
        bound: the largest examples/s that the machine allows, and what limits it.
    """

    examples_per_second: float
    bytes_per_example: int
    stage_seconds: dict[str, float]
    bound: tuple[float, str]


def measure(source: Source, split: str, batch_size: int, augment: str, seed: int, seconds: float) -> Speed:
    """Measures the pipeline of a split for about `seconds` seconds, and its stages for a few more."""
    batches = _epochs(lambda epoch: source.pipeline(split, batch_size, augment=augment, seed=seed, epoch=epoch))
    first = next(batches)  # builds the pipeline, and reads data that stay in memory
    size = sum(part.nbytes for part in first) // len(first[-1])
    rate = _rate((len(batch[-1]) for batch in batches), seconds)
    if isinstance(source, PictureSource) and not source.in_memory(split, source.augmentation(augment)):
        stages = _stages_of_files(source, split, batch_size, augment)
        decoding = stages["read"] + stages["decode"]
        return Speed(rate, size, stages, (cores() / decoding, f"reading and decoding on {cores()} cores"))
    stages = _stages_of_arrays(source, split, batch_size, augment, seed)
    return Speed(rate, size, stages, (memory_bandwidth() / (2 * size), "copying in memory"))


def memory_bandwidth() -> float:
    """Bytes read and written per second when one core copies memory; the best of three runs."""
    source, target = np.ones(_BYTES_TO_COPY, np.uint8), np.empty(_BYTES_TO_COPY, np.uint8)
    np.copyto(target, source)
    return max(2 * _BYTES_TO_COPY / _seconds(lambda: np.copyto(target, source)) for _ in range(3))


def _stages_of_arrays(source: Source, split: str, batch_size: int, augment: str, seed: int) -> dict[str, float]:
    """Seconds per example for the order of an epoch, gathering, and augmentation."""
    seconds = {}
    for name in dict.fromkeys(("none", augment)):
        feed = source.pipelines(FeedArguments(split, batch_size, seed, None, name))
        if isinstance(feed, ArrayFeed):  # otherwise computing the order is part of gathering
            seconds["order"] = _seconds(functools.partial(feed.start, 1, 0)) / feed.examples
        full_batches = max(1, feed.examples // batch_size)
        dataset = feed.dataset(0, WHOLE, 1, 0).take(full_batches)
        seconds["gather" if name == "none" else name] = _seconds_per_element(dataset) / min(batch_size, feed.examples)
    if augment != "none":
        seconds[augment] = max(0.0, seconds[augment] - seconds["gather"])
    return seconds


def _stages_of_files(source: PictureSource, split: str, batch_size: int, augment: str) -> dict[str, float]:
    """Seconds per example on one core that each stage adds to the stages before it."""
    augmentation = source.augmentation(augment)
    decoder = Decoder(source.spec, source.files[split], augmentation)
    count = min(len(decoder), _EXAMPLES)
    batch_examples = min(batch_size, count)
    draws = tf.zeros(augmentation.draws if augmentation else 0)
    numbers = tf.data.Dataset.range(count, output_type=tf.int32)

    def through(stage: Callable[[tf.Tensor], Any]) -> tf.data.Dataset:
        return numbers.map(tf.autograph.experimental.do_not_convert(stage))

    complete = through(lambda index: decoder(index, draws))
    until = {
        "read": through(decoder.read),
        "decode": through(decoder.decoded),
        "check and fit": through(lambda index: decoder.fitted(index, draws)),
        **({augment: complete} if augmentation is not None else {}),
        "batch": complete.batch(batch_examples, drop_remainder=True),
    }
    _seconds_per_element(until["decode"])  # afterwards the files are in the cache of the operating system
    totals = {name: _seconds_per_element(dataset) for name, dataset in until.items()}
    totals["batch"] /= batch_examples
    previous = [0.0, *totals.values()]
    return {name: max(0.0, total - earlier) for (name, total), earlier in zip(totals.items(), previous, strict=False)}


def _epochs(make: Callable[[int], tf.data.Dataset]) -> Iterator[list[np.ndarray]]:
    for epoch in itertools.count():
        for batch in make(epoch):
            yield [part.numpy() for part in tf.nest.flatten(batch)]


def _rate(counts: Iterable[int], seconds: float) -> float:
    """Examples per second, measured for about `seconds` seconds."""
    began, total = time.perf_counter(), 0
    for count in counts:
        total += count
        if time.perf_counter() - began > seconds:
            break
    return total / (time.perf_counter() - began)


def _seconds_per_element(dataset: tf.data.Dataset) -> float:
    """Seconds per element on one core, after the pipeline has started; the elements are repeated."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.autotune.enabled = False
    elements = iter(dataset.repeat().with_options(options))
    next(elements)
    done, began = 0, time.perf_counter()
    while done == 0 or time.perf_counter() - began < _SECONDS:
        next(elements)
        done += 1
    return (time.perf_counter() - began) / done


def _seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
