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
    from pathlib import Path

    from tfdist.strategies.base import Strategy

__version__ = "0.1.0"


if "ipykernel" in sys.modules:
    # A notebook shows what TensorFlow's C++ code logs. The variable takes effect if TensorFlow is imported later.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

_PUBLIC_MODULES = ("callbacks", "data", "models", "ray", "spark")
_FUNCTIONS = {"launch_notebook": "notebook"}


def __getattr__(name: str) -> Any:
    """Imports public modules, such as `tfdist.callbacks`, when they are first used, so that `import tfdist` is fast."""
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


def evaluate_checkpoints(
    model: Any,
    folder: str | Path,
    x: Any,
    y: Any = None,
    *,
    log_dir: str | Path | None = None,
    seconds: float = 3600.0,
    **options: Any,
) -> list[dict[str, Any]]:
    """Evaluates each checkpoint of a training that runs in other processes, until the training has ended.

    This is what the process with the role `evaluator` of TF_CONFIG does. It takes no part in the training. The weights
    of every checkpoint are assigned to `model`, and `model.evaluate` runs. The results are appended to `history.csv`,
    with a row per checkpoint, and to a TensorBoard log.

    Args:
        model: the compiled model of the training; without a strategy, or with one of this process alone.
        folder: the folder of the training's callback `tfdist.callbacks.Checkpoint`, on a shared file system.
        x: the data for `model.evaluate`, usually the validation data.
        y: the targets, if `x` does not contain them.
        log_dir: the folder for the results; by default `evaluator` beside `folder`.
        seconds: how long to wait for the next checkpoint.
        options: further options of `model.evaluate`, such as `batch_size`.

    Returns:
        A dict per checkpoint: its `step`, its `epoch` (the finished epochs), and the results such as `val_loss`.

    Raises:
        CheckpointError: a checkpoint is of another model.
        ClusterError: no new checkpoint has appeared for `seconds`.
    """
    from tfdist.checkpointing.evaluation import evaluate_folder

    return evaluate_folder(model, folder, x, y, log_dir=log_dir, seconds=seconds, **options)


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
