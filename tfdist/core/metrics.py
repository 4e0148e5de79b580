"""Metrics that are no sums over the examples are updated with the whole global batch, as one device updates them.

A metric of Keras adds up what it counts, so that each replica counts its own examples, and readers add up the counts.
Of a class of the user's own nobody knows that: a maximum, a mean of batch means, a number of batches are not sums. All
replicas gather what such a metric is given, and update it alike. Two ways say that this is not needed:

- a class, or a metric function, has the attribute `additive = True`;
- a metric function returns one value per example.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.core import gradient_tape, keras_steps, replica_context
from tfdist.errors import UsageError
from tfdist.internals import keras as keras_internals


def gathered(model: Any) -> contextlib.AbstractContextManager[None]:
    """While a step is traced in this context, the metrics of `model` that may be no sums see the global batch."""
    return _updating(model, _update)


def refused(model: Any, strategy_name: str) -> contextlib.AbstractContextManager[None]:
    """While a step is traced in this context, they are refused: processes do not meet in each step."""
    return _updating(model, functools.partial(_refuse, strategy_name))


@contextlib.contextmanager
def _updating(model: Any, update: Callable[..., None]) -> Iterator[None]:
    own = [metric for metric in keras_internals.metrics_of(model) if not keras_internals.is_additive(metric)]
    for metric in own:
        # Set on the instance and past Keras' attribute tracking, so that nothing of it is saved with the model.
        object.__setattr__(metric, "update_state", functools.partial(update, metric, metric.update_state))
    try:
        yield
    finally:
        for metric in own:
            object.__delattr__(metric, "update_state")


def _update(metric: Any, update_state: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    replica = replica_context.current()
    if replica is None or keras_internals.values_per_example(replica, metric, *arguments, **named):
        update_state(*arguments, **named)
        return
    replica_context.require_meeting(replica, f"An update of the metric `{metric.name}`")
    arguments, named = keras_steps.gathered((arguments, named))
    arguments, named = keras_internals.tree.map_structure(
        functools.partial(_global_scalar, replica), (arguments, named)
    )
    with replica.updates.whole(metric.variables), replica_context.on_replica(None):
        update_state(*arguments, **named)


def _refuse(strategy_name: str, metric: Any, update_state: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    if not keras_internals.values_per_example(None, metric, *arguments, **named):
        raise UsageError(
            f"The metric `{metric.name}` may be no sum over the examples, and the processes of `{strategy_name}` do "
            "not meet in each step to compute it",
            "if what it counts can be added up, give it the attribute `additive = True`; else use it in `evaluate`",
        )
    update_state(*arguments, **named)


def _global_scalar(replica: Any, value: Any) -> Any:
    """A scalar that a step has computed, over the global batch; other values as they are."""
    if not tf.is_tensor(value) or value.shape.rank != 0 or not value.dtype.is_floating:
        return value
    return replica.all_reduce([gradient_tape.part_of_global(replica, value)])[0]
