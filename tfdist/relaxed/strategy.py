"""The base of strategies whose processes train independently and synchronize from time to time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import keras

from tfdist.data.input import job_feeds
from tfdist.errors import UnknownNameError, UsageError
from tfdist.groups import ProcessGroup, joining
from tfdist.interface.program import Steps
from tfdist.interface.variables import StrategyState, keep_strategy_state, strategy_state
from tfdist.internals import keras as keras_internals
from tfdist.relaxed.averages import Averages
from tfdist.training.job_strategy import JobStrategy, needs_whole_state


class IndependentStrategy(JobStrategy):
    """Trains on all processes of a job, each of which computes steps on its part of the global batches by itself.

    The processes synchronize at the end of an epoch and at a checkpoint within an epoch. Evaluations, callbacks at the
    end of an epoch and saved models see the weights that all processes then have in common. Within an epoch, callbacks
    see the weights of their own process.

    Args:
        engine: the transport of the weights, see `tfdist.groups.joining`.
        same_settings: the settings of the algorithm, which must be the same in all processes.
        options: see `tfdist.training.job_strategy.JobStrategy`.
    """

    as_one_device = False
    engines: ClassVar[tuple[str, ...]] = joining.NAMES
    remembers = True  # it has variables beside those of the model and its optimizer, or values per process

    def __init__(self, *, engine: str, same_settings: Mapping[str, Any], job_settings: Any = None, **options: Any):
        if engine not in self.engines:
            raise UnknownNameError("engine", engine, self.engines)
        self._engine = engine
        settings = dict(job_settings or {}) | {name: str(value) for name, value in same_settings.items()}
        super().__init__(job_settings=settings, **options)

    def join(self) -> ProcessGroup:
        return joining.join(self._engine, self.world, self.name, self.timeout_seconds, self.start_timeout_seconds)

    def before_checkpoint(self, model: Any) -> None:
        kept = strategy_state(model).kept
        if kept is not None:
            kept.synchronize()

    def check(self, model: Any) -> None:
        super().check(model)
        layers = keras_internals.all_layers(model) if self.world.world_size > 1 else ()
        for layer in layers:
            if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
                raise UsageError(
                    f"The layer `{layer.name}` is `synchronized`, and processes of `{self.name}` do not communicate "
                    "within a step",
                    "make it without `synchronized=True`, or use `horovod`, `mpi` or `multiworker`",
                )

    def check_callbacks(self, callbacks: Iterable[Any]) -> None:
        super().check_callbacks(callbacks)
        for callback in callbacks:
            if self.remembers and isinstance(callback, keras.callbacks.BackupAndRestore):
                raise UsageError(
                    "`BackupAndRestore` saves only one model and its optimizer, and a run that is resumed from there "
                    f"would lack the other state of `{self.name}`",
                    "use `tfdist.callbacks.Checkpoint` in its place",
                )
            description = needs_whole_state(callback)
            if description is not None and "within epochs" in description:
                raise UsageError(
                    f"{description} saves the weights of one process, which differ from those of the others",
                    "save at the end of an epoch, or use `tfdist.callbacks.Checkpoint(every_steps=...)`",
                )

    def require_whole_data(self, steps: Steps) -> None:
        """Raises `UsageError` for data that the user has divided among the processes."""
        if isinstance(steps.batches, job_feeds.JoinedBatches):
            raise UsageError(
                f"`{self.name}` divides the data among the processes itself, and with `per_process` they are divided "
                "already",
                "pass the whole data to each process; `horovod` and `multiworker` train on data that you have divided",
            )

    def averages_of(self, model: Any, make: Callable[[], Averages]) -> Averages:
        """The `Averages` that are kept with `model`, so that programs for other data continue with the same state.

        All processes call it at the same time. `make` is called if there are none, or if the model has other variables.
        """
        state = strategy_state(model)
        made_for = (id(self), *map(id, [*model.variables, *keras_internals.optimizer_variables(model)]))
        if state.made_for != made_for:
            averages = make()
            state = StrategyState(*averages.remembered, averages, made_for)
            keep_strategy_state(model, state)
            self.broadcast_variables([*state.own, *state.shared], unless_equal=True)
        averages = state.kept
        return averages


def refuse_use_ema(model: Any, feature: str, hint: str) -> None:
    """Raises `UsageError` if an optimizer has `use_ema`; `feature` is why each process has its own optimizer state."""
    if any(optimizer.use_ema for optimizer in keras_internals.optimizers(model)):
        raise UsageError(
            f"The optimizer keeps a moving average of the weights (`use_ema`), which differs between processes with "
            f"{feature}",
            f"leave `use_ema` out, or {hint}",
        )
