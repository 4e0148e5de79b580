"""Callbacks for any Keras code, in stock `model.fit` and in tfdist's loop.

tfdist's loop runs many steps in one call. A callback that overrides batch hooks may define
`batches_until_hook(batch)`, which returns the number of batches, from batch `batch` of the epoch on, after which its
hooks must be called next, or `None` if they are not needed in this epoch. By default they are called at every batch.

Synopsis:

    from tfdist.callbacks import MemoryUsage, Throughput

    model.fit(x, y, batch_size=128, callbacks=[Throughput(global_batch_size=128), MemoryUsage()])
"""

from tfdist.callbacks.checkpoint import Checkpoint
from tfdist.callbacks.chief_only import ChiefOnly
from tfdist.callbacks.memory import MemoryUsage
from tfdist.callbacks.non_finite import StopAtNonFiniteLoss
from tfdist.callbacks.profile import Profile
from tfdist.callbacks.throughput import Throughput, TimeToTarget
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
