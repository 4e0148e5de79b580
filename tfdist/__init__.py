"""One interface over TensorFlow's distribution strategies for Keras 3: exact, fast and measured.

Synopsis:

    import tfdist

    strategy = tfdist.strategy("mirrored", devices=2)
    with strategy.scope():
        model = build_model()
        model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    strategy.prepare(model)             # model.fit, evaluate and predict now run on the strategy
    model.fit(x, y, batch_size=128, epochs=3)
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy

__version__ = "0.1.0"


if "ipykernel" in sys.modules:
    # A notebook shows what TensorFlow's C++ code logs. The variable takes effect if TensorFlow is imported later.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

_PUBLIC_MODULES = ("callbacks", "data", "models", "ray", "spark")
_FUNCTIONS = {"evaluate_checkpoints": "checkpointing.evaluation", "launch_notebook": "notebook"}


def __getattr__(name: str) -> Any:
    """Imports public modules, such as `tfdist.callbacks`, and functions when first used: `import tfdist` is fast."""
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"tfdist.{name}")
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"tfdist.{_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module `tfdist` has no attribute `{name}`")


def strategy(name: str, **options: Any) -> Strategy:
    """Returns the strategy `name`, with its options.

    | name | replicas |
    |---|---|
    | "single" | one device |
    | "mirrored" | several devices of this machine, with `tf.distribute.MirroredStrategy` |
    | "custom" | several devices of this machine, with tfdist's own data-parallel loop |
    | "pipeline" | the stages of one model, on several devices of this machine or in several processes |
    | "hogwild" | several threads on one device, which update the same weights without locks |
    | "multiworker" | several processes, with `tf.distribute.MultiWorkerMirroredStrategy` |
    | "parameter_server" | several processes, with the variables on parameter servers |
    | "horovod" | several processes, with Horovod over MPI or Gloo |
    | "mpi" | several processes, with MPI through mpi4py |
    | "local_sgd" | several processes that train locally and periodically compute new weights from their mean |
    | "gossip" | several processes that train locally and average with a few neighbours around each step |
    | "mpi_split" | several processes that periodically average their weights |

    All take the options of `tfdist.interface.strategy.Strategy`; docs/strategies.md lists the options of each strategy.

    Raises:
        UnknownNameError: there is no strategy, or no device, with that name.
        UsageError: an option is unknown or invalid here, or the backend of Keras is not TensorFlow.
    """
    from tfdist import startup, strategies

    startup.require_tensorflow_backend()
    return strategies.create(name, **options)


def gather(tensor: Any) -> Any:
    """Returns `tensor` unchanged, because a custom step already sees the whole global batch.

    Kept for code that was written for steps on a replica's part of the batch.

    Args:
        tensor: of any dtype and shape, `[global batch size, ...]` for values per example.
    """
    return tensor


def all_reduce(tensor: Any) -> Any:
    """Returns `tensor` unchanged, because sums in a custom step are already over the whole global batch.

    Kept for code that was written for steps on a replica's part of the batch.

    Args:
        tensor: of any dtype and shape.
    """
    return tensor
