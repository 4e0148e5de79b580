"""What a run has made of its machine: the FLOPs of its steps, and their share of the machine's peak (MFU).

The model FLOPs utilization is that of A. Chowdhery and others, "PaLM", arXiv 2204.02311, appendix B: the FLOPs that one
device needs for the examples of a second, divided by the peak of all devices of the job.
"""

from __future__ import annotations

import os
import statistics
import subprocess
from typing import Any

import keras

from tfdist import models
from tfdist.data import Source
from tfdist.jobs.job_environment import cores
from tfdist.loop import model_flops, traced_step
from tfdist.run import optimizers, peak
from tfdist.run.config import TrainConfig
from tfdist.run.schema import RunRecord, UtilizationRecord
from tfdist.strategies.single import SingleStrategy


def of_run(
    record: RunRecord, config: TrainConfig, options: dict[str, Any], source: Source, strategy: Any
) -> UtilizationRecord | None:
    """The record of a run's utilization, when its training has ended; `None` if the FLOPs of its steps are not known.

    Args:
        record: the record of the run.
        config: its options.
        options: the options of the model.
        source: its dataset.
        strategy: its strategy.
    """
    flops = flops_per_step(config, options, source)
    if flops is None:
        return None
    rates = [epoch.examples_per_second for epoch in record.epochs[1:] or record.epochs if epoch.examples_per_second]
    speed = statistics.median(rates) / config.batch_size * flops if rates else None
    highest = _peak(strategy)
    mfu = None if speed is None or highest is None else speed / highest
    return UtilizationRecord(flops_per_step=flops, flops_per_second=speed, peak_flops_per_second=highest, mfu=mfu)


def flops_per_step(config: TrainConfig, options: dict[str, Any], source: Source) -> int | None:
    """The FLOPs of a training step on a full batch; sentences are as long as the longest of the first batch.

    The step is traced anew, for a model without memory, on one device: strategies trace steps of other sizes.
    """
    strategy = SingleStrategy(seed=0)  # of which `tfdist.strategy` would warn in a process of a job
    shuffle, streams = models.shuffles(config.model), models.knows(config.model, "streams")
    feed = source.feed(
        "train",
        config.batch_size,
        world=strategy.world,
        seed=config.seed,
        shuffle=shuffle,
        stream_positions=streams,
    )
    with optimizers.compiled_without_memory(strategy, config, source.spec, feed.num_batches, options) as model:
        if model.run_eagerly:
            return None
        length = _length(source, config)
        return model_flops.of_step(traced_step.operations(strategy, model, config.batch_size, feed.spec, length))


def _length(source: Source, config: TrainConfig) -> int:
    """The length of the first batch's sentences; 1 for other data."""
    if not source.spec.vocabulary_size:
        return 1
    pipeline = source.pipeline("train", config.batch_size, shuffle=False, seed=config.seed)
    x, _ = next(iter(pipeline.as_numpy_iterator()))
    return max(part.shape[1] for part in keras.tree.flatten(x))


def _peak(strategy: Any) -> float | None:
    """The peak of all devices of the job, in FLOPs per second; `None` if it is not known."""
    world = strategy.world
    if hasattr(strategy, "num_workers"):  # with parameter servers, only the coordinator is in this world
        return None
    gpus = [device for device in strategy.devices if device.startswith("GPU")]
    if gpus:
        dtype = keras.config.dtype_policy().compute_dtype
        return peak.of_gpu(gpus[0], dtype) * len(gpus) * world.world_size
    # The processes of a machine divide its cores, or share all of them.
    on_machine = min(cores() * world.local_world_size, os.cpu_count() or 1)
    try:
        return peak.of_cores(on_machine) * world.world_size / world.local_world_size
    except (OSError, subprocess.SubprocessError):
        return None
