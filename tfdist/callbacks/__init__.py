"""Callbacks for any Keras code: stock `model.fit` and tfdist's loop alike. One idea a file.

tfdist's loop runs many steps in one call. A callback that overrides batch hooks may define
`batches_until_hook(batch)`: after how many batches, from number `batch` of the epoch on, its hooks must be
called next; None if not in this epoch. Without it they are called at every batch.

Synopsis:

    from tfdist.callbacks import MemoryUsage, Throughput

    model.fit(x, y, batch_size=128, callbacks=[Throughput(global_batch_size=128), MemoryUsage()])
"""

from tfdist.callbacks.checkpoint import Checkpoint
from tfdist.callbacks.chief_only import ChiefOnly
from tfdist.callbacks.memory import MemoryUsage
from tfdist.callbacks.non_finite import StopAtNonFiniteLoss
from tfdist.callbacks.profile import Profile
from tfdist.callbacks.throughput import Throughput
from tfdist.callbacks.time_to_target import TimeToTarget
from tfdist.callbacks.warmup import LearningRateWarmup

__all__ = [
    "Checkpoint",
    "ChiefOnly",
    "LearningRateWarmup",
    "MemoryUsage",
    "Profile",
    "StopAtNonFiniteLoss",
    "Throughput",
    "TimeToTarget",
]
