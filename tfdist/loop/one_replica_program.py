"""The inner loop for `run_eagerly=True` with several replicas, of which one computes each step."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.interface.program import Logs, Steps
from tfdist.internals import keras_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.loop import building
from tfdist.loop.inner_loop import PredictProgram, StepProgram
from tfdist.loop.one_device_step import OneDeviceStep, own_logs
from tfdist.optimizers import fused as fused_optimizers


@contextlib.contextmanager
def _on_one_replica(strategy: Any, model: Any) -> Iterator[None]:
    """The context of an eager step; variables that it creates belong to all replicas."""
    made_in_scope = tensorflow_internals.variables_made_in(strategy.scope)
    with made_in_scope, strategy.tracing(model), keras_variables.looking_up_rows():
        yield


class OneReplicaProgram(StepProgram):
    """Runs eager steps, which have no graph to partition, on one replica.

    Each process of a job computes the whole of each batch.
    """

    def __init__(self, strategy: Any, steps: Steps):
        super().__init__(strategy, steps)
        self._one_device = OneDeviceStep(strategy, steps, getattr(steps.model, self._step_name))
        warnings.warn(
            f"The model `{steps.model.name}` has `run_eagerly=True`, so that one replica of `{strategy.name}` computes "
            "its steps; compile the model without it to train on all replicas",
            stacklevel=2,
        )

    def _steps_eagerly(self, state: Any, first: tf.Tensor, count: tf.Tensor) -> tuple[Any, Any, Logs]:
        mesh = self._one_device.mesh
        done, finite = 0, True
        logs: Logs = {}
        mesh.begin(self._model.metrics_variables)
        for batch in self._batches.take(state, int(first), int(count)):
            logs = self._computed(self._one_device.whole_batch(state, batch))
            done += 1
            finite = bool(self._goes_on())
            if not finite:
                break
        mesh.end(self._model.metrics_variables)  # the first step may have created some of them
        building.spread(self._strategy, self._model)
        return done, done == int(count) or not finite, logs or self._results({})

    def _computed(self, data: Any) -> Logs:
        update = fused_optimizers.fused(self._model.optimizer, self._strategy.fused)
        with _on_one_replica(self._strategy, self._model), update:
            return own_logs(self._model, self._step_name, getattr(self._model, self._step_name)(data))


class OneReplicaPredictProgram(PredictProgram):
    """Predicts eagerly on one replica."""

    def __init__(self, strategy: Any, steps: Steps):
        super().__init__(strategy, steps)
        self._one_device = OneDeviceStep(strategy, steps, steps.model.predict_step)

    def _outputs(self, state: Any, batch: Any) -> Any:
        data = self._one_device.whole_batch(state, batch)
        with _on_one_replica(self._strategy, self._model):
            return self._model.predict_step(data)
