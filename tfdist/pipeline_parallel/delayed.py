"""The schedule `2bw`: a step need not wait for the previous update, because it uses the weights from before it.

    W(t + 1) = W(t) - the update with the gradient of batch t at W(t - 1)

Between steps the model's variables have the newest version, W(t). While a step is traced or runs eagerly, they have the
version from before the last update, W(t - 1), and the optimizer updates the newest one. In the first step of an epoch
both versions are equal, so that W(1) = W(0) - the update with the gradient at W(0).

Source: PipeDream-2BW, Narayanan et al., Memory-efficient pipeline-parallel DNN training, arXiv 2006.09503, 2021.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.interface.program import Logs, Steps
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_variables, tensorflow_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.keras import tf_variable
from tfdist.internals.patching import Attached
from tfdist.loop.inner_loop import StepProgram
from tfdist.loop.partitioned_program import OneReplicaProgram, PartitionedProgram
from tfdist.pipeline_parallel.schedule import DELAYED

_ASSIGNING = ("assign", "assign_add", "assign_sub", "scatter_update", "scatter_add", "scatter_sub", "scatter_nd_update")


class PreviousWeights:
    """A model's weights from before the last update, stored in addition to the newest ones.

    Args:
        variables: trained Keras variables of this process, each with its `tf.Variable` on one device.
    """

    def __init__(self, variables: Sequence[Any]):
        self._variables = list(variables)
        self._newest = [tf_variable(variable) for variable in variables]
        self._previous = [
            _previous_variable(newest, variable.path) for newest, variable in zip(self._newest, variables, strict=True)
        ]

    def belong_to(self, variables: Sequence[Any]) -> bool:
        """Whether they were made for these variables, on the devices where these are now."""
        return list(map(id, self._newest)) == [id(tf_variable(variable)) for variable in variables]

    def begin(self) -> None:
        """Lets the next step use the newest weights."""
        for previous, newest in zip(self._previous, self._newest, strict=True):
            _assign(previous, newest)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Within this context, which surrounds a step, the variables have the weights from before the last update."""
        with keras_variables.backed_by(self._variables, self._previous):
            yield

    @contextlib.contextmanager
    def updating_newest(self, optimizer: Any) -> Iterator[None]:
        """Within this context, `optimizer` updates the newest weights, after these become the previous ones."""
        apply: Callable[..., None] = optimizer.apply

        def apply_to_newest(*arguments: Any) -> None:
            self.begin()
            with keras_variables.backed_by(self._variables, self._newest):
                apply(*arguments)

        # Set on the instance and past Keras' attribute tracking, so that nothing of it is saved with the model.
        object.__setattr__(optimizer, "apply", apply_to_newest)
        try:
            yield
        finally:
            object.__delattr__(optimizer, "apply")

    def versions_of(self, variable: Any) -> list[tf.Variable]:
        """Returns the previous version of a Keras variable, in a list that is empty if there is none."""
        pairs = zip(self._variables, self._previous, strict=True)
        return [previous for candidate, previous in pairs if candidate is variable]


_attached: Attached[PreviousWeights] = Attached("previous_weights")


def previous_versions(model: Any, variable: Any) -> list[tf.Variable]:
    """Returns the previous version of a variable of `model`, in a list that is empty if there is none."""
    previous = _attached.get(model)
    return [] if previous is None else previous.versions_of(variable)


def before_checkpoint(model: Any) -> None:
    """Lets the next step of `model` use its newest weights, as after a resume."""
    previous = _attached.get(model)
    if previous is not None:
        previous.begin()


def _previous_weights(model: Any) -> PreviousWeights:
    """Returns the previous weights that are attached to `model`; attaches them if they are missing or outdated."""
    variables = model.trainable_variables
    previous = _attached.get(model)
    if previous is None or not previous.belong_to(variables):
        previous = PreviousWeights(variables)
        _attached.set(model, previous)
    return previous


def _previous_variable(newest: tf.Variable, path: str) -> tf.Variable:
    name = newest.name.partition(":")[0]
    with tensorflow_internals.without_strategy():
        previous = tensorflow_variables.without_value(newest.shape, newest.dtype, newest.device, name, trainable=True)
    _assign(previous, newest)  # without elements in a process that does not have this variable

    def refuse(*arguments: Any, **named: Any) -> None:
        raise UsageError(
            f"A step of the model assigns to `{path}`, which is trained, and the schedule `{DELAYED}` keeps two "
            "versions of it",
            "remove the layer that assigns to it, or use the schedule `gpipe` or `1f1b`",
        )

    for method in _ASSIGNING:
        setattr(previous, method, refuse)
    return previous


def _assign(target: tf.Variable, source: tf.Variable) -> None:
    # The raw operation, because the method is patched so that replicas agree on what a step assigns. Both variables
    # share the memory until one of them is updated.
    with tf.device(target.device):
        tf.raw_ops.AssignVariableOp(resource=target.handle, value=source.read_value())


class _Delayed(StepProgram):
    """Trains with gradients at the weights from before the last update; in an epoch's first step both are equal."""

    def __init__(self, strategy: Any, steps: Steps):
        self._previous = _previous_weights(steps.model)
        super().__init__(strategy, steps)

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._previous.begin()

    @contextlib.contextmanager
    def _delaying(self) -> Iterator[None]:
        with self._previous.computing(), self._previous.updating_newest(self._model.optimizer):
            yield


class DelayedProgram(_Delayed, PartitionedProgram):
    """Trains the micro-batches of a pipeline with delayed gradients."""

    def _traced_step(self, data: Any) -> Logs:
        with self._delaying():
            return super()._traced_step(data)


class DelayedEagerProgram(_Delayed, OneReplicaProgram):
    """Trains a model with `run_eagerly=True` with delayed gradients."""

    def _computed(self, data: Any) -> Logs:
        with self._delaying():
            return super()._computed(data)


def program(strategy: Any, steps: Steps) -> StepProgram:
    """Returns the inner loop that trains with delayed gradients."""
    kind = DelayedEagerProgram if strategy.runs_eagerly(steps.model) else DelayedProgram
    return kind(strategy, steps)


def is_delayed(schedule: str, kind: str) -> bool:
    """Whether steps of this `kind`, such as "train", have delayed gradients with the `schedule`."""
    return schedule == DELAYED and kind == "train"


def refuse_backups_within_epochs(callbacks: Iterable[Any]) -> None:
    """Raises `UsageError` for Keras' backups within epochs, since a run resumed from one would start without delay."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore) and callback.save_freq not in ("epoch", False):
            raise UsageError(
                f"`BackupAndRestore` saves every {callback.save_freq} steps, and a run that goes on from there would "
                f"lack the delay of the schedule `{DELAYED}`",
                'use `tfdist.callbacks.Checkpoint(every_steps=...)` instead, or `save_freq="epoch"`',
            )


def require_keras_step(model: Any) -> None:
    """Raises `UsageError` for a model with a custom `train_step`, which may use its weights after an update."""
    if keras_internals.has_own_step(model, "train"):
        raise UsageError(
            f"The model `{model.name}` has a custom `train_step`, and the schedule `{DELAYED}` delays the gradients of "
            "Keras' own",
            "remove it, or use the schedule `gpipe` or `1f1b`",
        )
