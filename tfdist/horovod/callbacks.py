"""Horovod's callbacks for Keras 3: in stock `model.fit`, and in tfdist's loop.

The learning-rate rules are those of Goyal et al. 2017, "Accurate, Large Minibatch SGD", sections 2.1 and 2.2. Where one
graph runs several batches (`steps_per_execution`), a rate is set at the first of them for all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import keras
import numpy as np

from tfdist.callbacks import rate
from tfdist.communicators import horovod as engine
from tfdist.errors import UsageError
from tfdist.horovod import collectives

Logs = dict[str, Any] | None


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives all processes the weights and the optimizer's state of one of them, before the first step of a `fit`.

    So they begin alike, whether from random weights or from a checkpoint that one process has read. A model that its
    first batch builds is broadcast after that batch. Metrics and the states of random layers stay each process' own.

    Args:
        root_rank: the process that the others follow.
        local_variables: variables that are not sent.
    """

    def __init__(self, root_rank: int, local_variables: Collection[Any] = ()):
        super().__init__()
        self.root_rank = root_rank
        self.local_variables = local_variables
        self._done = False

    def batches_until_hook(self, batch: int) -> int | None:
        """Only at the first batch; see `tfdist.callbacks`."""
        return None if self._done else 1

    def on_train_begin(self, logs: Logs = None) -> None:
        """A new `fit` begins."""
        self._done = False

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """All callbacks have begun, those that read checkpoints too."""
        if not self._done and self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """By now the model is built."""
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        local = {id(variable) for variable in self.local_variables}
        variables = [v for v in [*self.model.weights, *optimizer.variables] if id(v) not in local]
        collectives.broadcast_variables(variables, self.root_rank)
        self._done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Puts the means over all processes into the logs of an epoch.

    Callbacks that come later in the list see the means: ReduceLROnPlateau, TensorBoard, EarlyStopping. All processes
    must have the same names in their logs.
    """

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Replaces the values in `logs`."""
        if not logs:
            return
        names = sorted(logs)
        values = np.array([logs[name] for name in names], np.float64)
        means = collectives.allreduce(values, name="tfdist.metrics", op=engine.load().Average)
        logs.update(zip(names, means.numpy().tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier` from one epoch to another.

    The logs of an epoch have the rate as `lr`.

    Args:
        initial_lr: the rate that is multiplied.
        multiplier: a function of the epoch, or a number whose power `epoch - start_epoch` is taken.
        start_epoch: the first epoch in which the rate is set.
        end_epoch: the first epoch in which it is left as it is; `None` for none.
        staircase: set it once an epoch, with a whole number; or else at each batch, with `epoch + batch / steps`.
        momentum_correction: where the velocity of SGD or RMSprop has the rate in it, scale it when the rate changes
            (section 2.2, remark 2).
        steps_per_epoch: needed without `staircase` where `fit` cannot know it (a generator).

    Raises:
        UsageError: before the first step: the optimizer follows a schedule of its own; the steps of an epoch
            cannot be known.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def batches_until_hook(self, batch: int) -> int | None:
        """Each batch without `staircase`, the first of an epoch with it; see `tfdist.callbacks`."""
        return None if self.staircase or not self._applies() else 1

    def on_train_begin(self, logs: Logs = None) -> None:
        """Checks that the rate can be set."""
        rate.refuse_schedule(self.model.optimizer, type(self).__name__)
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps")
        if not self.staircase and not self.steps_per_epoch:
            raise UsageError(
                f"{type(self).__name__} does not know how many steps an epoch has: `fit` cannot tell the length of "
                "this data",
                f"pass `{type(self).__name__}(..., steps_per_epoch=...)`",
            )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Sets the rate, if it is time to."""
        if not self._applies() or (self.staircase and batch > 0):
            return
        self._set(self._epoch if self.staircase else self._epoch + batch / (self.steps_per_epoch or 1))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Adds `lr` to `logs`."""
        if logs is not None:
            logs["lr"] = rate.current(self.model.optimizer)

    def _applies(self) -> bool:
        return self._epoch >= self.start_epoch and (self.end_epoch is None or self._epoch < self.end_epoch)

    def _set(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before, now = rate.current(optimizer), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = now
        if self.momentum_correction and before not in (0, now):
            for velocity in _velocities(optimizer):
                velocity.assign(velocity * (now / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / hvd.size()` to `initial_lr`, batch by batch.

    In the batch that ends e epochs after the start, it is `initial_lr / size * (1 + (size - 1) * e / warmup_epochs)`.

    Args:
        initial_lr: the rate after the warm-up: `hvd.size()` times the one for a single process.
        warmup_epochs: the length of the warm-up.
        momentum_correction: see `LearningRateScheduleCallback`.
        steps_per_epoch: needed where `fit` cannot know it (a generator).
        verbose: 1 prints a line when the warm-up ends.

    Raises:
        UsageError: see `LearningRateScheduleCallback`.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        super().__init__(
            initial_lr,
            self._factor,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Adds `lr` to `logs`, and says when the warm-up ends."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch == self.warmup_epochs - 1 and engine.load().rank() == 0:
            reached = rate.current(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {reached:g}.")

    def _factor(self, epoch: float) -> float:
        # That of the last batch that runs with it, so that the rate ends at `initial_lr`.
        assert self.steps_per_epoch is not None
        epoch = min(epoch + self.model.steps_per_execution / self.steps_per_epoch, self.warmup_epochs)
        size = engine.load().size()
        return (1 + (size - 1) * epoch / self.warmup_epochs) / size


def _velocities(optimizer: Any) -> list[Any]:
    """The slots of an optimizer that have grown by `learning_rate * gradient`."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    slots: list[Any] = []
    if isinstance(optimizer, keras.optimizers.SGD):
        slots = getattr(optimizer, "momentums", [])
    elif isinstance(optimizer, keras.optimizers.RMSprop):
        slots = getattr(optimizer, "_momentums", [])
    return [slot for slot in slots if slot is not None]
