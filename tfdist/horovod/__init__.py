"""Horovod for Keras 3, under the names that its users know: a port of a script changes its imports.

    import tfdist.horovod as hvd  # was: import horovod.tensorflow.keras as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size()))
    model.compile(optimizer, ...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])

`DistributedOptimizer`, `load_model`, `broadcast_variables`, the four collectives of values and the `callbacks` are made
for Keras 3; all other names (`init`, `rank`, `local_rank`, `Average`, `Compression`, ...) are those of
`horovod.tensorflow`, which is imported when one of them is first used.
"""

from __future__ import annotations

from typing import Any

from tfdist.communicators import horovod as engine
from tfdist.horovod import callbacks
from tfdist.horovod.collectives import allgather, allreduce, broadcast, broadcast_variables, reducescatter
from tfdist.horovod.optimizer import DistributedOptimizer, load_model

__all__ = [
    "DistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_variables",
    "callbacks",
    "load_model",
    "reducescatter",
]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    return getattr(engine.load(), name)
