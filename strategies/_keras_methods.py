"""The methods of a strategy that users call: those of a Keras model, and `verify` and `prepare`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_routes


class KerasMethods:
    """`fit`, `evaluate`, `predict`, their variants on one batch, `verify` and `prepare`, for any strategy."""

    def __init_subclass__(cls, **named: Any):
        super().__init_subclass__(**named)
        if "scope" in vars(cls):
            cls.scope = _noted(vars(cls)["scope"])  # type: ignore[attr-defined]

    def fit(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.fit` with this strategy: the same arguments and callbacks; `batch_size` is global."""
        return self._in_loop("fit", model, *arguments, **named)

    def evaluate(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.evaluate` with this strategy: every example counts once, metrics are merged by their state."""
        return self._in_loop("evaluate", model, *arguments, **named)

    def predict(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.predict` with this strategy: one output per example, in the order of the input."""
        return self._in_loop("predict", model, *arguments, **named)

    def train_on_batch(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.train_on_batch` with this strategy, on a global batch."""
        return self._in_loop("train_on_batch", model, *arguments, **named)

    def test_on_batch(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.test_on_batch` with this strategy, on a global batch."""
        return self._in_loop("test_on_batch", model, *arguments, **named)

    def predict_on_batch(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.predict_on_batch` with this strategy, on a global batch."""
        return self._in_loop("predict_on_batch", model, *arguments, **named)

    def _in_loop(self: Any, method: str, model: Any, *arguments: Any, **named: Any) -> Any:
        from tfdist.core import outer_loop

        with self.guard():
            return getattr(outer_loop, method)(self, model, *arguments, **named)

    def verify(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """Compares a few steps of `model` on one device and on this strategy, on copies of `model`.

        `tfdist.core.verification` says what is compared and how closely. A strategy whose steps differ from those of
        one device by design is held to the bound that it states; see `tfdist.core.verification_bounds`.

        Args:
            model: compiled.
            arguments: `x`, `y`, `batch_size`, `sample_weight` and `class_weight`, as `fit` takes them.
            named: the same by name, and `steps`, the number of global batches, 3 unless set.

        Returns:
            The `tfdist.core.verification_report.Report`, or a `BoundReport`.

        Raises:
            VerificationError: the steps differ by more than rounding; the error names the layer and the likely cause.
            UsageError: this strategy does not compute what one device does, by design, and states no bound.
        """
        return self._in_loop("verify", model, *arguments, **named)

    def prepare(self: Any, model: Any, *, verify: bool = False) -> Any:
        """Makes Keras' `fit`, `evaluate`, `predict` and `..._on_batch` this strategy's own for `model`; returns it.

        A `fit` of the model's own class that calls `super().fit` then trains with this strategy. With `verify=True`,
        the next `fit` calls `verify` with its first batches before it trains.
        """
        self.check(model)
        if verify:
            from tfdist.core import verification

            verification.require_as_one_device(self)
        keras_routes.set_strategy(model, self)
        keras_internals.set_to_verify(model, verify)
        return model


def _noted(scope: Callable[[Any], contextlib.AbstractContextManager[Any]]) -> Callable[[Any], Any]:
    """A method `scope` whose context marks the models that are made in it, see `keras_routes.Scope`."""

    @functools.wraps(scope)
    def method(strategy: Any) -> contextlib.AbstractContextManager[Any]:
        return keras_routes.Scope(strategy.name, scope(strategy))

    return method
