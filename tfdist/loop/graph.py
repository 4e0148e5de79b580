"""A function that is traced at its first call, and called many times."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.interface.strategy import Strategy
from tfdist.internals import keras_variables
from tfdist.internals import tensorflow as tensorflow_internals

_NOTHING = contextlib.nullcontext()


class Graph:
    """A `tf.function` of `function`, run by the executor that is faster for its graph."""

    def __init__(self, function: Callable[..., Any], strategy: Strategy):
        self._function = function
        self._strategy = strategy
        self._compiled: Any = None
        self._serial = False

    def __call__(self, *arguments: Any) -> Any:
        if self._compiled is None:
            self._compiled, self._serial = self._choose(arguments)
        # A profile would not show a serial call.
        serial = self._serial and not tensorflow_internals.profiling()
        with keras_variables.looking_up_rows(), tensorflow_internals.serial_calls() if serial else _NOTHING:
            return self._compiled(*arguments)

    def _choose(self, arguments: tuple[Any, ...]) -> tuple[Any, bool]:
        """The `tf.function`, and whether its calls are serial."""
        if self._strategy.single_threaded:
            # The serial executor cannot run a graph that was traced for the usual one, which optimizes its graphs.
            serial = self._new()
            with keras_variables.looking_up_rows(), tensorflow_internals.serial_calls():
                graph = serial.get_concrete_function(*arguments).graph
            if tensorflow_internals.flat(graph) and tensorflow_internals.light(graph):
                return serial, True
        return self._new(), False

    def _new(self) -> Any:
        # TensorFlow warns of retracing by a function's code, which all programs share, unless it is wrapped.
        return tf.function(functools.partial(self._function), autograph=False, reduce_retracing=True)
