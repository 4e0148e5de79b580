"""One interface over TensorFlow's distribution strategies for Keras 3: exact, fast and measured.

Synopsis:

    import tfdist

    strategy = tfdist.strategy("mirrored", devices=2)
    with strategy.scope():
        model = build_model()
        model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    strategy.prepare(model)             # model.fit, evaluate and predict are now the strategy's own
    model.fit(x, y, batch_size=128, epochs=3)

In a step, a loss or a metric of your own, `tfdist.gather` and `tfdist.all_reduce` reach what other replicas have.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy

__version__ = "0.1.0"


_PUBLIC_MODULES = ("callbacks", "data", "models")


def __getattr__(name: str) -> Any:
    """Imports the modules that users reach as `tfdist.callbacks` when they are first used: `import tfdist` is quick."""
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"tfdist.{name}")
    raise AttributeError(f"module `tfdist` has no attribute `{name}`")


def strategy(name: str, **options: Any) -> Strategy:
    """The strategy `name`, with its options.

    | name | replicas |
    |---|---|
    | "single" | one device |
    | "mirrored" | several devices of this machine, by `tf.distribute.MirroredStrategy` |
    | "custom" | several devices of this machine, by tfdist's own data-parallel loop |
    | "hogwild" | several threads on one device, which update the same weights without locks |
    | "multiworker" | several processes, by `tf.distribute.MultiWorkerMirroredStrategy` |
    | "parameter_server" | several processes, whose variables are on servers |
    | "horovod" | several processes, by Horovod over MPI or Gloo |
    | "mpi" | several processes, by MPI through mpi4py |
    | "local_sgd" | several processes that train apart, and make new weights of their mean now and then |
    | "gossip" | several processes that train apart, and average with few others around each step |
    | "mpi_split" | several processes that average their weights now and then |

    All take the options of `tfdist.interface.strategy.Strategy`; docs/strategies.md has those of each.

    Raises:
        UnknownNameError: no strategy, or no device, has that name.
        UsageError: an option is unknown or cannot work here, or Keras runs on another backend than TensorFlow.
    """
    from tfdist import startup, strategies

    startup.require_tensorflow_backend()
    return strategies.create(name, **options)


def gather(tensor: Any) -> Any:
    """`tensor` itself: a step of one's own sees the whole global batch, and needs to gather nothing.

    Kept for code that was written for steps on parts of a batch.
    """
    return tensor


def all_reduce(tensor: Any) -> Any:
    """`tensor` itself: a step of one's own sees the whole global batch, whose sums are those of all replicas.

    Kept for code that was written for steps on parts of a batch.
    """
    return tensor
