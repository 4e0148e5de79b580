"""Marks data of which each process of a job reads its own part.

    model.fit(tfdist.data.per_process((x, y)), batch_size=32)      # 32 examples of each process

    files = tfdist.data.shard(tf.data.Dataset.list_files("*.jpg", shuffle=False))
    dataset = files.map(decode).batch(32)
    model.fit(tfdist.data.per_process(dataset))                     # each process decodes only its own files

`tfdist.data.input.together` joins the parts to global batches.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tfdist.jobs.world import World


@dataclass(frozen=True)
class PerProcess:
    """The part of a job's data that this process reads."""

    data: Any


def per_process(data: Any) -> PerProcess:
    """Marks `data` as the part of this process, for `fit`, `evaluate`, `predict` and `validation_data`.

    A global batch consists of the batches of all processes, in the order of their ranks, and each batch is weighted by
    its number of examples, as on one device. An epoch ends when the data of all processes have ended; a process whose
    data end earlier takes part without examples. `batch_size` is the size of the batches of each process. `predict`
    returns to each process the predictions of its own part, without communication.

    In a job of one process, and under `parameter_server`, whose chief reads all data, the result is `data` itself.

    Args:
        data: any data that Keras accepts as `x`: a `tf.data.Dataset`, a `keras.utils.PyDataset`, a generator, or
            arrays; targets and sample weights of arrays in a tuple `(x, y)` or `(x, y, sample_weight)`.
    """
    return PerProcess(data)


def shard(dataset: Any) -> Any:
    """The elements of a `tf.data.Dataset` for this process: every N-th element for N processes, starting at its rank.

    Call it before the expensive part of a pipeline, which then runs only for the elements of this process. The elements
    must be in the same order in all processes. Pass the resulting dataset to `per_process`.
    """
    world = World.detect(os.environ)
    if world.tasks_of("ps"):
        return dataset
    return dataset.shard(world.world_size, world.rank)
