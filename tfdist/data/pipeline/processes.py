"""Data of which each process of a job brings its own part.

    model.fit(tfdist.data.per_process((x, y)), batch_size=32)      # 32 of each process' own examples

    files = tfdist.data.shard(tf.data.Dataset.list_files("*.jpg", shuffle=False))
    dataset = files.map(decode).batch(32)
    model.fit(tfdist.data.per_process(dataset))                     # each process decodes its own files alone

What becomes of it is in `tfdist.data.pipeline.together`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tfdist.cluster.world import World


@dataclass(frozen=True)
class PerProcess:
    """This process' own part of the data of a job."""

    data: Any


def per_process(data: Any) -> PerProcess:
    """Each process of the job brings its own part of the data; for `fit`, `evaluate`, `predict` and `validation_data`.

    A global batch is what the batches of all processes make together, in the order of their ranks, and each counts by
    the number of its examples, as it would on one device. An epoch ends when the data of all processes have ended; one
    whose data end earlier takes part without examples from then on. `batch_size` is the size of each process' own
    batches. `predict` gives each process the predictions of its own part, and asks nothing of the others.

    In a job of one process, and under `parameter_server`, whose chief reads all data, it is `data` themselves.

    Args:
        data: what Keras takes as `x`: a `tf.data.Dataset`, a `keras.utils.PyDataset`, a generator, or arrays; targets
            and sample weights of arrays in a tuple `(x, y)` or `(x, y, sample_weight)`.
    """
    return PerProcess(data)


def shard(dataset: Any) -> Any:
    """Of the elements of a `tf.data.Dataset`, those of this process: every N-th of N processes, from its rank on.

    To be called before the expensive part of a pipeline, which then runs for this process' elements alone. The
    elements must come in the same order in all processes. What is made of them is to be passed to `per_process`.
    """
    world = World.detect(os.environ)
    if world.tasks_of("ps"):
        return dataset
    return dataset.shard(world.world_size, world.rank)
