"""Metrics over all replicas: how they are updated in a step, reset, and read between the steps.

A partitioned step updates metrics as one device does. Where processes train apart, or workers do not wait for each
other, each adds its own examples to a part of a metric's state, and the state of all is the sum of these parts
(`Strategy.sum_metrics`). That holds for Keras' own metrics. The state of a user's own class may be something else: a
maximum, a mean of batch means, a number of batches. Such a metric is refused there, unless

- the class, or the metric function, has the attribute `additive = True`; or
- the metric function returns one value per example.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.interface.program import Logs
from tfdist.interface.strategy import Strategy
from tfdist.internals import keras as keras_internals
from tfdist.internals.keras import tf_variable


def results(strategy: Strategy, model: Any) -> Logs:
    """The results of the metrics of `model` over all replicas."""
    with _over_all_replicas(strategy, model.metrics_variables):
        return _values(model.get_metrics_result())


def results_in(strategy: Strategy, model: Any, logs: Logs, updated: set[int]) -> Logs:
    """The `logs` of a step, with results over all replicas for the metrics that the step updated.

    A value that a step returns under the name of such a metric is the metric's result on one replica.

    Args:
        strategy: of the replicas.
        model: has the metrics.
        logs: the dict that the step returned.
        updated: the `id`s of the variables that the step has updated.
    """
    own = [metric for metric in model.metrics if any(id(variable) in updated for variable in metric.variables)]
    merged: Logs = {}
    with _over_all_replicas(strategy, [variable for metric in own for variable in metric.variables]):
        for metric in own:
            result = _values(metric.result())
            merged |= {metric.name: result} | (result if isinstance(result, dict) else {})
    return logs | {name: value for name, value in merged.items() if name in logs}


def own_part(variable: Any) -> tf.Tensor:
    """One variable of a metric, summed over the replicas of this process alone."""
    held = tf_variable(variable)
    copies = held.values if isinstance(held, tf.distribute.DistributedValues) else (held,)
    return tf.add_n([tf.convert_to_tensor(copy) for copy in copies])


def names(model: Any) -> set[str]:
    """The names in the logs of Keras' own step; none before the compiled metrics are built."""
    if not keras_internals.compiled_metrics_are_built(model):
        return set()
    # Computed from constants, since reading the metrics' variables in a step would sum them over all processes.
    constants = [(v, tf.zeros(v.shape, tf_variable(v).dtype)) for v in model.metrics_variables]
    with keras.StatelessScope(constants):
        return set(model.get_metrics_result())


def reset(strategy: Strategy, model: Any) -> None:
    """Resets the metrics of `model`."""
    model.reset_metrics()
    if not strategy.metrics_by_process or strategy.world.is_chief:
        return
    # The initial state of a metric that is not a sum may differ from zero, and must count once in the job.
    for metric in keras_internals.metrics_of(model):
        if not keras_internals.is_additive(metric):
            for variable in metric.variables:
                tf_variable(variable).assign(tf.zeros_like(tf_variable(variable)))


def add(variables: Sequence[Any], parts: Iterable[Sequence[np.ndarray]]) -> None:
    """Adds to the `variables` of metrics the `parts`, each with one array per variable, as closures return them."""
    for variable, *added in zip(variables, *parts, strict=True):
        if added:
            held = tf_variable(variable)
            held.assign_add(np.sum(added, axis=0).astype(held.dtype.as_numpy_dtype))


@contextlib.contextmanager
def _over_all_replicas(strategy: Strategy, variables: Sequence[Any]) -> Iterator[None]:
    """The context in which reading `variables` of metrics gives their sums over all replicas."""
    with strategy.scope():
        if strategy.alone:
            yield
            return
        totals = strategy.sum_metrics(variables, "metrics")
        with keras.StatelessScope(list(zip(variables, totals, strict=True))):
            yield


def _values(found: Any) -> Any:
    """The results of metrics, with the present values of variables in their place."""
    return tf.nest.map_structure(lambda one: one.value if isinstance(one, keras.Variable) else one, found)


@contextlib.contextmanager
def refused(model: Any, strategy_name: str) -> Iterator[None]:
    """Steps that are traced in this context refuse metrics that may be no sums: the processes do not meet in a step."""
    own = [metric for metric in keras_internals.metrics_of(model) if not keras_internals.is_additive(metric)]
    for metric in own:
        update = functools.partial(_refuse, strategy_name, metric, metric.update_state)
        # Set on the instance and past Keras' attribute tracking, so that nothing of it is saved with the model.
        object.__setattr__(metric, "update_state", update)
    try:
        yield
    finally:
        for metric in own:
            object.__delattr__(metric, "update_state")


def _refuse(strategy_name: str, metric: Any, update_state: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    if not keras_internals.gives_values_per_example(metric, *arguments, **named):
        raise UsageError(
            f"The metric `{metric.name}` may be no sum over the examples, and the workers of `{strategy_name}` do "
            "not meet in each step to compute it",
            "if what it counts can be added up, give it the attribute `additive = True`; else use a strategy that is "
            "synchronous, such as `multiworker`",
        )
    update_state(*arguments, **named)
