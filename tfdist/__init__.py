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


def __getattr__(name: str) -> Any:
    """Imports `tfdist.data` when it is first used, so that `import tfdist` stays quick."""
    if name == "data":
        return importlib.import_module("tfdist.data")
    raise AttributeError(f"module `tfdist` has no attribute `{name}`")


def strategy(name: str, **options: Any) -> Strategy:
    """The strategy `name`: "single", "mirrored" or "custom"; see `tfdist.strategies.base.Strategy` for the options.

    Raises:
        UnknownNameError: no strategy, or no device, has that name.
        UsageError: an option is unknown or cannot work here, or Keras runs on another backend than TensorFlow.
    """
    from tfdist import startup, strategies

    startup.require_tensorflow_backend()
    return strategies.create(name, **options)


def gather(tensor: Any) -> Any:
    """The examples of `tensor` of all replicas, in a step; see `tfdist.core.replica_context.gather`."""
    from tfdist.core import replica_context

    return replica_context.gather(tensor)


def all_reduce(tensor: Any) -> Any:
    """The sum of `tensor` over the replicas, in a step; see `tfdist.core.replica_context.all_reduce`."""
    from tfdist.core import replica_context

    return replica_context.all_reduce(tensor)
