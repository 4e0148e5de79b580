"""Horovod's callbacks for Keras 3, for stock `model.fit` and for tfdist's loop.

The learning rate rules are those of Goyal et al. 2017, "Accurate, Large Minibatch SGD", sections 2.1 and 2.2. If one
call runs several batches (`steps_per_execution`), the rate of the first batch applies to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import keras
import numpy as np

from tfdist.callbacks import warmup
from tfdist.errors import UsageError
from tfdist.groups import horovod as engine
from tfdist.horovod import collectives, operations
from tfdist.internals import keras as keras_internals
from tfdist.options import checks_arguments

Logs = dict[str, Any] | None


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts the weights and the optimizer state of one process before the first step of a `fit`.

    All processes then start with the same values, whether random or from a checkpoint that one process has read. A
    model that is built by its first batch is broadcast after that batch. Metrics and the states of random layers are
    not broadcast.

    Args:
        root_rank: the process whose values the others receive.
        local_variables: variables that are not broadcast.
    """

    def __init__(self, root_rank: int, local_variables: Collection[Any] = ()):
        super().__init__()
        self.root_rank = root_rank
        self.local_variables = local_variables
        self._done = False

    def batches_until_hook(self, batch: int) -> int | None:
        """Asks for the first batch only; see `tfdist.callbacks`."""
        return None if self._done else 1

    def on_train_begin(self, logs: Logs = None) -> None:
        self._done = False

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Broadcasts after `on_train_begin` of all callbacks, some of which read checkpoints."""
        if not self._done and self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcasts a model that was built by its first batch."""
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        local = {id(variable) for variable in self.local_variables}
        variables = [variable for variable in (*self.model.weights, *optimizer.variables) if id(variable) not in local]
        with operations.named("the values of `BroadcastGlobalVariablesCallback`"):
            collectives.broadcast_variables(variables, self.root_rank)
        self._done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces the logs of an epoch by their means over all processes.

    Later callbacks in the list, such as `EarlyStopping`, see the means. All processes must have the same names in their
    logs.
    """

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if not logs:
            return
        names = sorted(logs)
        values = np.array([logs[name] for name in names], np.float64)
        with operations.named("the metrics of `MetricAverageCallback`"):
            means = collectives.allreduce(values, name="tfdist.metrics", op=engine.load().Average)
        logs.update(zip(names, means.numpy().tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier` in a range of epochs, and logs it as `lr`.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a function of the epoch, or a number that is raised to the power `epoch - start_epoch`.
        start_epoch: the first epoch of the range.
        end_epoch: the first epoch after the range; `None` for no end.
        staircase: set the rate once per epoch, from the integer epoch; otherwise at each batch, from
            `epoch + batch / steps`.
        momentum_correction: when the rate changes, scale the velocity of SGD or RMSprop, which includes the rate
            (section 2.2, remark 2).
        steps_per_epoch: required without `staircase` if `fit` does not know it, for example for a generator.

    Raises:
        UsageError: before the first step, if the optimizer has a schedule, or the steps per epoch are unknown.
    """

    @checks_arguments
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
        """Asks for every batch without `staircase`, and for none within an epoch with it; see `tfdist.callbacks`."""
        return None if self.staircase or not self._applies() else 1

    def on_train_begin(self, logs: Logs = None) -> None:
        warmup.refuse_schedule(self.model.optimizer, type(self).__name__)
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps")
        if not self.staircase and not self.steps_per_epoch:
            raise UsageError(
                f"{type(self).__name__} does not know the number of steps per epoch: the data have no known length",
                f"pass `{type(self).__name__}(..., steps_per_epoch=...)`",
            )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Sets the learning rate if it changes at this batch."""
        if not self._applies() or (self.staircase and batch > 0):
            return
        self._set(self._epoch if self.staircase else self._epoch + batch / (self.steps_per_epoch or 1))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs["lr"] = warmup.current(self.model.optimizer)

    def _applies(self) -> bool:
        return self._epoch >= self.start_epoch and (self.end_epoch is None or self._epoch < self.end_epoch)

    def _set(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old_rate, new_rate = warmup.current(optimizer), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new_rate
        if self.momentum_correction and old_rate not in (0, new_rate):
            for velocity in _velocities(optimizer):
                velocity.assign(velocity * (new_rate / old_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / hvd.size()` to `initial_lr`, batch by batch.

    In the batch that ends e epochs after the start, the rate is `initial_lr / size * (1 + (size - 1) * e /
    warmup_epochs)`.

    Args:
        initial_lr: the learning rate after the warm-up: `hvd.size()` times that of a single process.
        warmup_epochs: the number of epochs of the warm-up.
        momentum_correction: see `LearningRateScheduleCallback`.
        steps_per_epoch: required if `fit` does not know it, for example for a generator.
        verbose: 1 prints a line when the warm-up ends.

    Raises:
        UsageError: see `LearningRateScheduleCallback`.
    """

    @checks_arguments
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
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch == self.warmup_epochs - 1 and engine.load().rank() == 0:
            rate = warmup.current(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")

    def _factor(self, epoch: float) -> float:
        # The epoch of the last batch of the call, so that the rate ends at `initial_lr`.
        assert self.steps_per_epoch is not None
        epoch = min(epoch + self.model.steps_per_execution / self.steps_per_epoch, self.warmup_epochs)
        size = engine.load().size()
        return (1 + (size - 1) * epoch / self.warmup_epochs) / size


def _velocities(optimizer: Any) -> list[Any]:
    """Returns the slots of an optimizer to which `learning_rate * gradient` is added."""
    optimizer = keras_internals.inner(optimizer)
    slots: list[Any] = []
    if isinstance(optimizer, keras.optimizers.SGD):
        slots = getattr(optimizer, "momentums", [])
    elif isinstance(optimizer, keras.optimizers.RMSprop):
        slots = getattr(optimizer, "_momentums", [])
    return [slot for slot in slots if slot is not None]
