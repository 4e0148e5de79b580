"""Updates, resets and reads metrics over all replicas.

A partitioned step updates metrics as one device does. If processes train independently, or workers are asynchronous,
each of them adds its own examples to its part of a metric's state, and the state is the sum of the parts
(`Strategy.sum_metrics`). This is correct for Keras' own metrics. The state of a custom class may be something else: a
maximum, a mean of batch means, a number of batches. With these strategies such a metric raises an error, unless

- the class or the metric function has the attribute `additive = True`, or
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
    """Returns the results of the metrics of `model` over all replicas."""
    with _over_all_replicas(strategy, model.metrics_variables):
        return _values(model.get_metrics_result())


def results_in(strategy: Strategy, model: Any, logs: Logs, updated: set[int]) -> Logs:
    """Returns the `logs` of a step, with results over all replicas for the metrics that the step updated.

    A value that a step returns under the name of such a metric is the metric's result on one replica.

    Args:
        strategy: the strategy that ran the step.
        model: the model with the metrics.
        logs: the dict that the step returned.
        updated: the `id`s of the variables that the step has updated.
    """
    metrics = [metric for metric in model.metrics if any(id(variable) in updated for variable in metric.variables)]
    merged: Logs = {}
    with _over_all_replicas(strategy, [variable for metric in metrics for variable in metric.variables]):
        for metric in metrics:
            result = _values(metric.result())
            merged |= {metric.name: result} | (result if isinstance(result, dict) else {})
    return logs | {name: value for name, value in merged.items() if name in logs}


def require_logs(model: Any, step_name: str, logs: Any) -> Logs:
    """Returns the `logs` of the step called `step_name`.

    Raises:
        UsageError: they are not a dict.
    """
    if not isinstance(logs, dict):
        raise UsageError(
            f"`{step_name}` of the model `{model.name}` returned `{logs}`",
            "return a dict of metrics and their values",
        )
    return logs


def own_part(variable: Any) -> tf.Tensor:
    """Returns a variable of a metric, summed over the replicas of this process only."""
    values = tf_variable(variable)
    copies = values.values if isinstance(values, tf.distribute.DistributedValues) else (values,)
    return tf.add_n([tf.convert_to_tensor(copy) for copy in copies])


def names(model: Any) -> set[str]:
    """Returns the names in the logs of Keras' own step; empty before the compiled metrics are built."""
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
    # The initial state of a non-additive metric may differ from zero, and must be counted once in the job.
    for metric in keras_internals.metrics_of(model):
        if not keras_internals.is_additive(metric):
            for variable in metric.variables:
                tf_variable(variable).assign(tf.zeros_like(tf_variable(variable)))


def add(variables: Sequence[Any], parts: Iterable[Sequence[np.ndarray]]) -> None:
    """Adds `parts`, each with one array per variable, to the `variables` of metrics."""
    for variable, *terms in zip(variables, *parts, strict=True):
        if terms:
            target = tf_variable(variable)
            target.assign_add(np.sum(terms, axis=0).astype(target.dtype.as_numpy_dtype))


@contextlib.contextmanager
def _over_all_replicas(strategy: Strategy, variables: Sequence[Any]) -> Iterator[None]:
    """The context in which reading `variables` of metrics returns their sums over all replicas."""
    with strategy.scope():
        if strategy.alone:
            yield
            return
        totals = strategy.sum_metrics(variables, "metrics")
        with keras.StatelessScope(list(zip(variables, totals, strict=True))):
            yield


def _values(results: Any) -> Any:
    """Replaces Keras variables among the results of metrics by their current values."""
    return tf.nest.map_structure(lambda item: item.value if isinstance(item, keras.Variable) else item, results)


@contextlib.contextmanager
def refused(model: Any, strategy_name: str) -> Iterator[None]:
    """Within this context, traced steps raise `UsageError` for metrics that may be non-additive."""
    metrics = [metric for metric in keras_internals.metrics_of(model) if not keras_internals.is_additive(metric)]
    for metric in metrics:
        update = functools.partial(_update_if_additive, strategy_name, metric, metric.update_state)
        # Set on the instance and past Keras' attribute tracking, so that nothing of it is saved with the model.
        object.__setattr__(metric, "update_state", update)
    try:
        yield
    finally:
        for metric in metrics:
            object.__delattr__(metric, "update_state")


def _update_if_additive(
    strategy_name: str, metric: Any, update_state: Callable[..., Any], *arguments: Any, **named: Any
) -> None:
    if not keras_internals.gives_values_per_example(metric, *arguments, **named):
        raise UsageError(
            f"The metric `{metric.name}` may not be a sum over the examples, and the workers of `{strategy_name}` do "
            "not compute each step together",
            "if its state is a sum over the examples, set its attribute `additive = True`; otherwise use a synchronous "
            "strategy, such as `multiworker`",
        )
    update_state(*arguments, **named)
