"""What all strategies derive from: the interface, and the methods that users call, such as `fit`."""

from __future__ import annotations

from typing import Any

from tfdist.data.input.feed import Feed
from tfdist.interface.program import Program, Steps
from tfdist.interface.strategy import Strategy
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_routes
from tfdist.jobs.world import World
from tfdist.loop import outer_loop, programs
from tfdist.verification import comparison, verify


class TrainingStrategy(Strategy):
    """A strategy with `fit`, `evaluate`, `predict`, their variants on one batch, `verify` and `prepare`."""

    @classmethod
    def of_job(cls, world: World) -> type[TrainingStrategy]:
        """The class to make in a job, by its name `cls.name`, if not this one."""
        del world
        return cls

    def program(self, steps: Steps) -> Program:
        return programs.of_mesh(self, steps)

    def before_training(self, model: Any, feed: Feed) -> None:
        if keras_internals.take_to_verify(model):
            comparison.verify(self, model, feed.first(comparison.STEPS))

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

    def _in_loop(self, method: str, model: Any, *arguments: Any, **named: Any) -> Any:
        with self.variables.calling(self, model), self.guard():
            return getattr(outer_loop, method)(self, model, *arguments, **named)

    def verify(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """Compares a few steps of `model` on one device and on this strategy, on copies of `model`.

        `tfdist.verification.comparison` says what is compared and how closely. A strategy whose steps differ from those
        of one device by design is held to the bound that it states; see `tfdist.verification.bounds`.

        Args:
            model: compiled.
            arguments: `x`, `y`, `batch_size`, `sample_weight` and `class_weight`, as `fit` takes them.
            named: the same by name, and `steps`, the number of global batches, 3 unless set.

        Returns:
            The `tfdist.verification.report.Report`, or a `BoundReport`.

        Raises:
            VerificationError: the steps differ by more than rounding; the error names the layer and the likely cause.
            UsageError: this strategy does not compute what one device does, by design, and states no bound.
        """
        with self.variables.calling(self, model), self.guard():
            return verify.verify(self, model, *arguments, **named)

    def prepare(self, model: Any, *, verify: bool = False) -> Any:
        """Makes Keras' `fit`, `evaluate`, `predict` and `..._on_batch` this strategy's own for `model`; returns it.

        A `fit` of the model's own class that calls `super().fit` then trains with this strategy. With `verify=True`,
        the next `fit` calls `verify` with its first batches before it trains.
        """
        self.check(model)
        if verify:
            comparison.require_as_one_device(self)
        keras_routes.set_strategy(model, self)
        keras_internals.set_to_verify(model, verify)
        return model
