"""Two versions of the trained variables of a model, so that a step need not wait for the update of the one before.

    W(t + 1) = W(t) - the update by the gradient of batch t at W(t - 1)

Between steps the variables of the model are the newest version, W(t). While a step is traced, or runs eagerly, they
stand for the version of before the last update, W(t - 1); its optimizer updates the newest one. The first step after
`begin` has one version for both, so that W(1) = W(0) - the update by the gradient at W(0).

Source: PipeDream-2BW, Narayanan et al., Memory-efficient pipeline-parallel DNN training, arXiv 2006.09503, 2021.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.internals import keras_variables, tensorflow_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.attached import Attached
from tfdist.internals.keras import tf_variable

_ASSIGNING = ("assign", "assign_add", "assign_sub", "scatter_update", "scatter_add", "scatter_sub", "scatter_nd_update")


class _Thread(threading.local):
    current: PreviousWeights | None = None


_thread = _Thread()


class PreviousWeights:
    """The weights of before the last update, beside those of the model.

    Args:
        variables: of Keras, of this process, each with its `tf.Variable` on one device.
    """

    def __init__(self, variables: Sequence[Any]):
        self._variables = list(variables)
        self._newest = [tf_variable(one) for one in variables]
        self._previous = [_like(one, variable.path) for one, variable in zip(self._newest, variables, strict=True)]

    def are_of(self, variables: Sequence[Any]) -> bool:
        """Whether they were made for these variables, where these are now."""
        return list(map(id, self._newest)) == [id(tf_variable(one)) for one in variables]

    def of(self, variable: Any) -> list[tf.Variable]:
        """The previous version of a Keras variable, if it has one."""
        found = zip(self._variables, self._previous, strict=True)
        return [previous for one, previous in found if one is variable]

    def begin(self) -> None:
        """Has the next step compute with the newest weights."""
        for previous, newest in zip(self._previous, self._newest, strict=True):
            _assign(previous, newest)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """In this context, of the code of a step, the variables stand for the weights of before the last update."""
        before, _thread.current = _thread.current, self
        try:
            with keras_variables.backed_by(self._variables, self._previous):
                yield
        finally:
            _thread.current = before

    def late(self, update: Callable[..., None]) -> Callable[..., None]:
        """`update`, the optimizer's, of the newest weights; the next step computes with those of before it."""

        def updated(*arguments: Any) -> None:
            self.begin()
            with keras_variables.backed_by(self._variables, self._newest):
                update(*arguments)

        return updated

    @contextlib.contextmanager
    def updating_late(self, optimizer: Any) -> Iterator[None]:
        """In this context `optimizer` updates the newest weights."""
        # Set on the instance and past Keras' attribute tracking, so that nothing of it is saved with the model.
        object.__setattr__(optimizer, "apply", self.late(optimizer.apply))
        try:
            yield
        finally:
            object.__delattr__(optimizer, "apply")


def current() -> PreviousWeights | None:
    """Those of the step that this thread traces; `None` in a step that computes with the newest weights."""
    return _thread.current


_previous: Attached[PreviousWeights] = Attached("previous_weights")


def of(model: Any, variables: Sequence[Any]) -> PreviousWeights:
    """The previous version of `variables`, trained ones of `model`, with which it is kept."""
    found = kept(model)
    if found is None or not found.are_of(variables):
        found = PreviousWeights(variables)
        _previous.set(model, found)
    return found


def kept(model: Any) -> PreviousWeights | None:
    """What `of` has made for `model`."""
    return _previous.get(model)


def held_before(model: Any, variable: Any) -> list[tf.Variable]:
    """The previous version of a Keras variable of `model`, if there is one."""
    found = kept(model)
    return [] if found is None else found.of(variable)


def _like(newest: tf.Variable, path: str) -> tf.Variable:
    name = newest.name.partition(":")[0]
    with tensorflow_internals.without_strategy():
        made = tensorflow_variables.without_value(newest.shape, newest.dtype, newest.device, name, trainable=True)
    _assign(made, newest)  # without elements in a process that has not got this variable

    def refuse(*arguments: Any, **named: Any) -> None:
        raise UsageError(
            f"A step of the model assigns to `{path}`, which is trained, and the schedule `2bw` keeps two versions of "
            "that",
            "leave the layer out that assigns to it, or use the schedule `gpipe` or `1f1b`",
        )

    for method in _ASSIGNING:
        setattr(made, method, refuse)
    return made


def _assign(to: tf.Variable, from_: tf.Variable) -> None:
    # The raw operation, because replicas agree on what a step assigns by the method. Both share the memory until one is
    # updated.
    with tf.device(to.device):
        tf.raw_ops.AssignVariableOp(resource=to.handle, value=from_.read_value())
