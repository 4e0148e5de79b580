"""The functions of Keras' own `fit` that `tfdist.horovod` replaces permanently, of which stock Keras keeps the loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend.tensorflow import trainer as tensorflow_trainer

Unary = Callable[[Any], Any]


def around_steps(
    around_step: Callable[[Any, Unary], Unary] = lambda model, step: step,
    around_call: Callable[[Unary], Unary] = lambda call: call,
) -> None:
    """From now on Keras' own loop takes other steps. Models whose functions Keras has made before keep them.

    Args:
        around_step: is given a model and its `train_step`, `test_step` or `predict_step`, and returns the step to take.
        around_call: is given the function that takes the steps of a call, from an iterator, and returns another one.
    """
    kind = tensorflow_trainer.TensorFlowTrainer
    original = kind._make_function

    @functools.wraps(original)
    def make_function(model: Any, step: Unary) -> Any:
        return around_call(original(model, around_step(model, step)))

    kind._make_function = make_function


def add_to_callback_lists(kind: type, make: Callable[[Any], Any]) -> None:
    """From now on the last callback of a list of a model is `make(callback_list)`, of the class `kind` or `None`."""
    original = keras.callbacks.CallbackList.set_model

    @functools.wraps(original)
    def set_model(callback_list: Any, model: Any) -> None:
        has_one = any(isinstance(callback, kind) for callback in callback_list.callbacks)
        if model is not None and not has_one and (made := make(callback_list)) is not None:
            callback_list.callbacks.append(made)
        original(callback_list, model)

    keras.callbacks.CallbackList.set_model = set_model
