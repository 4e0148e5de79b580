"""The base class of all strategies: the interface, and the methods that users call, such as `fit`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from tfdist.data.input import adapters
from tfdist.data.input.feed import DataPasses, Feed
from tfdist.errors import UsageError
from tfdist.interface.program import Program, Steps
from tfdist.interface.strategy import Strategy
from tfdist.internals import keras_routes
from tfdist.internals.patching import Attached
from tfdist.jobs.world import World
from tfdist.loop import outer_loop, programs
from tfdist.verification import bounds, comparison

_to_verify: Attached[bool] = Attached("to_verify")  # whether the next training of a model is verified first


class TrainingStrategy(Strategy):
    """A strategy with `fit`, `evaluate`, `predict`, their variants on one batch, `verify` and `prepare`."""

    @classmethod
    def of_job(cls, world: World) -> type[TrainingStrategy]:
        """Returns the class to use in a job, which may be another class than the one called `cls.name`."""
        del world
        return cls

    def program(self, steps: Steps) -> Program:
        return programs.of_mesh(self, steps)

    def fit(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.fit` with this strategy: the same arguments and callbacks; `batch_size` is global."""

        def before_training(feed: Feed) -> None:
            if _to_verify.get(model):
                _to_verify.set(model, None)
                steps = comparison.steps_with_an_update(model, comparison.STEPS)
                comparison.verify(self, model, feed.first(steps))

        with self._calling(model):
            return outer_loop.fit(self, model, *arguments, before_training=before_training, **named)

    def evaluate(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.evaluate` with this strategy: every example counts once, and metrics are merged by state."""
        with self._calling(model):
            return outer_loop.evaluate(self, model, *arguments, **named)

    def predict(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.predict` with this strategy: one output per example, in the order of the input."""
        with self._calling(model):
            return outer_loop.predict(self, model, *arguments, **named)

    def train_on_batch(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.train_on_batch` with this strategy, on a global batch."""
        with self._calling(model):
            return outer_loop.train_on_batch(self, model, *arguments, **named)

    def test_on_batch(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.test_on_batch` with this strategy, on a global batch."""
        with self._calling(model):
            return outer_loop.test_on_batch(self, model, *arguments, **named)

    def predict_on_batch(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """`keras.Model.predict_on_batch` with this strategy, on a global batch."""
        with self._calling(model):
            return outer_loop.predict_on_batch(self, model, *arguments, **named)

    def verify(
        self,
        model: Any,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        steps: int = comparison.STEPS,
    ) -> Any:
        """Compares a few steps of `model` on one device and on this strategy, and then restores `model`.

        `tfdist.verification.comparison` describes what is compared and how closely. A strategy whose steps differ from
        those of one device by design is checked against its error bound; see `tfdist.verification.bounds`.

        Args:
            model: a compiled model.
            x: the input, like all data as for `fit`.
            y: the targets.
            batch_size: the global batch size.
            sample_weight: the weights of the examples.
            class_weight: the weights of the classes.
            steps: the number of global batches; more if the optimizer accumulates gradients over more.

        Returns:
            The `tfdist.verification.report.Report`, or a `BoundReport`.

        Raises:
            VerificationError: the steps differ by more than rounding; the error names the layer and the likely cause.
            UsageError: the steps of this strategy differ from those of one device by design, and it has no bound.
        """
        with self._calling(model):
            if self.bound is None:
                comparison.require_as_one_device(self)
            outer_loop.check(self, model, "verify")
            steps = comparison.steps_with_an_update(model, steps)
            data = {"class_weight": class_weight, "batch_size": batch_size, "shuffle": False}
            feed = outer_loop.feed_of(self, adapters.request(x, y, sample_weight, **data))
            programs.build(self, model, "train", feed)
            with DataPasses(feed, steps):
                if self.bound is not None:
                    return bounds.verify(self, model, feed, steps)
                return comparison.verify(self, model, feed.first(steps))

    def prepare(self, model: Any, *, verify: bool = False) -> Any:
        """Makes Keras' `fit`, `evaluate`, `predict` and `..._on_batch` of `model` use this strategy; returns `model`.

        A custom `fit` that calls `super().fit` then trains with this strategy, too. With `verify=True`, the next `fit`
        calls `verify` with its first batches before it trains.
        """
        if not isinstance(model, keras.Model):
            raise UsageError(f"`prepare` takes a Keras model, and got `{type(model).__name__}`", "pass it a model")
        self.check(model)
        if verify:
            comparison.require_as_one_device(self)
        keras_routes.set_strategy(model, self)
        _to_verify.set(model, verify)
        return model

    @contextlib.contextmanager
    def _calling(self, model: Any) -> Iterator[None]:
        with self.variables.calling(self, model), self.guard():
            yield
