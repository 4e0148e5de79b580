"""Linear scaling of the learning rate with gradual warm-up (Goyal et al. 2017, sections 2.1 and 2.2).

With batches that are k times larger, an epoch has k times fewer steps. A learning rate that is k times larger
compensates for that, but would make training diverge at the start, when the weights change quickly. The rate therefore
rises linearly from the base rate to k times the base rate during the first epochs.

Synopsis:

    model.compile(optimizer=keras.optimizers.SGD(0.1), ...)  # the rate for the batch of one replica
    model.fit(..., callbacks=[LearningRateWarmup(strategy.num_replicas, warmup_epochs=5)])
"""

from __future__ import annotations

from typing import Any

import keras

from tfdist.errors import UsageError
from tfdist.internals import keras as keras_internals
from tfdist.options import Finite, checks_arguments


def current(optimizer: Any) -> float:
    """The learning rate of the next step."""
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def refuse_schedule(optimizer: Any, callback: str) -> None:
    """Raises `UsageError` if `callback` cannot set the learning rate, because the optimizer follows a schedule."""
    rate = keras_internals.learning_rate(keras_internals.inner(optimizer))
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        raise UsageError(
            f"{callback} cannot set the learning rate: the optimizer follows a schedule, `{type(rate).__name__}`",
            "compile the optimizer with a number, or build the warm-up into the schedule "
            "(`keras.optimizers.schedules.CosineDecay` has `warmup_target` and `warmup_steps`)",
        )


class LearningRateWarmup(keras.callbacks.Callback):
    """Raises the optimizer's learning rate from its base value to `factor` times that, step by step.

    At step t of the T steps in `warmup_epochs` the rate is `base * (1 + (factor - 1) * t / T)`; from step T on it is
    `base * factor`, and other callbacks, such as ReduceLROnPlateau, may change it. If steps run in chunks, the rate is
    set at the beginning of each chunk.

    A training that is continued with `initial_epoch` uses the rate of that epoch. After the warm-up it keeps the rate
    that was restored with the optimizer, which `Checkpoint` scales to a new factor.

    Args:
        factor: the global batch size divided by the batch size for which the base rate was chosen: the number of
            replicas if each replica keeps its batch size.
        warmup_epochs: the length of the warm-up in epochs, which may be a fraction; 0 scales at once.
        base_learning_rate: the rate at step 0; by default the initial rate of the optimizer. It is needed to continue a
            training with an optimizer that was loaded from a file.
        steps_per_epoch: needed if `fit` does not know it, for example for a generator.

    Raises:
        UsageError: before the first step: the optimizer follows a schedule, so that its rate cannot be set; the number
            of steps per epoch or the base rate is unknown; or an argument is out of range.
    """

    @checks_arguments
    def __init__(
        self,
        factor: Finite,
        warmup_epochs: Finite = 5,
        base_learning_rate: Finite | None = None,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        if factor <= 0 or warmup_epochs < 0:
            raise UsageError(
                "LearningRateWarmup needs factor > 0 and warmup_epochs >= 0. "
                f"Received: factor `{factor}`, warmup_epochs `{warmup_epochs}`",
                "pass the number of replicas as factor",
            )
        self.factor = factor
        self.warmup_epochs = warmup_epochs
        self.base_learning_rate = base_learning_rate
        self.steps_per_epoch = steps_per_epoch
        self._optimizer: Any = None
        self._optimizer_was_used = False
        self._base = base_learning_rate
        self._epoch = 0
        self._first_epoch: int | None = None
        self._done = False

    def set_model(self, model: keras.Model) -> None:
        """Notes the base rate, before another callback restores a later rate."""
        super().set_model(model)
        if model.optimizer is None or model.optimizer is self._optimizer:
            return
        refuse_schedule(model.optimizer, "LearningRateWarmup")
        self._optimizer = model.optimizer
        self._optimizer_was_used = _steps_taken(model.optimizer) > 0
        self._base = self.base_learning_rate
        if self._base is None:
            self._base = current(model.optimizer)

    def batches_until_hook(self, batch: int) -> int | None:
        """Returns 1 during the warm-up, and `None` after it."""
        return None if self._done else 1

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._first_epoch, self._done = None, False
        if self._steps() is None:
            raise UsageError(
                "LearningRateWarmup does not know the number of steps per epoch: the length of the data is unknown",
                "pass `LearningRateWarmup(..., steps_per_epoch=...)`",
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        if self._first_epoch is None:
            self._first_epoch = epoch
            self._start_at(epoch)
        self._set_rate(batch=0)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._set_rate(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds `learning_rate` to `logs`, as Keras' own schedulers do."""
        if logs is not None:
            logs["learning_rate"] = current(self.model.optimizer)

    def checkpoint_state(self) -> dict[str, float]:
        """The state that `tfdist.callbacks.Checkpoint` stores."""
        return {"factor": self.factor}

    def restore_checkpoint_state(self, state: dict[str, float]) -> None:
        """Scales the restored rate if the run is resumed with another factor, for example with more workers."""
        if state["factor"] != self.factor:
            self.model.optimizer.learning_rate = current(self.model.optimizer) * self.factor / state["factor"]

    def _start_at(self, epoch: int) -> None:
        """Checks a training that starts at a later epoch; after the warm-up, a restored rate is kept."""
        if epoch == 0:
            return
        restored = _steps_taken(self.model.optimizer) > 0
        if epoch > self.warmup_epochs:
            self._done = restored
        elif self._optimizer_was_used and self.base_learning_rate is None:
            raise UsageError(
                f"LearningRateWarmup starts at epoch {epoch} with an optimizer that has already taken steps: "
                f"its rate `{current(self.model.optimizer):g}` may not be the base rate",
                "pass `LearningRateWarmup(..., base_learning_rate=...)`",
            )

    def _set_rate(self, batch: int) -> None:
        if self._done:
            return
        steps = self._steps()
        assert steps is not None and self._base is not None  # on_train_begin and set_model have checked this
        done_epochs = self._epoch + batch / steps
        self._done = done_epochs >= self.warmup_epochs
        progress = 1.0 if self._done else done_epochs / self.warmup_epochs
        self.model.optimizer.learning_rate = self._base * (1 + (self.factor - 1) * progress)

    def _steps(self) -> int | None:
        return self.steps_per_epoch or self.params.get("steps")


def _steps_taken(optimizer: Any) -> int:
    return int(keras.ops.convert_to_numpy(optimizer.iterations))
