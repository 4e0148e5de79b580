"""What strategies share whose processes train apart and meet at times: joining, and what is kept with a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import keras

from tfdist.data.input import together
from tfdist.errors import UnknownNameError, UsageError
from tfdist.groups import ProcessGroup, joining
from tfdist.interface import state as strategy_state
from tfdist.interface.program import Steps
from tfdist.internals import keras as keras_internals
from tfdist.relaxed.averages import Averages
from tfdist.training.job_strategy import JobStrategy, needs_whole_state


class ApartStrategy(JobStrategy):
    """Trains on all processes of a job, each on its part of the global batches by itself, until they meet.

    An epoch ends with a meeting, and a checkpoint within an epoch is one. What all processes have in common then is
    what evaluations, callbacks at the end of an epoch and saved models see. Within an epoch, callbacks see the weights
    of their own process.

    Args:
        engine: what carries the weights, see `tfdist.groups.joining`.
        alike: the settings of the algorithm, which must be the same in all processes.
        options: see `tfdist.training.job_strategy.JobStrategy`.
    """

    as_one_device = False
    engines: ClassVar[tuple[str, ...]] = joining.NAMES
    remembers = True  # more than the model and its optimizer, or each process has its own

    def __init__(self, *, engine: str, alike: Mapping[str, Any], job_settings: Any = None, **options: Any):
        if engine not in self.engines:
            raise UnknownNameError("engine", engine, self.engines)
        self._engine = engine
        settings = dict(job_settings or {}) | {name: str(value) for name, value in alike.items()}
        super().__init__(job_settings=settings, **options)

    def join(self) -> ProcessGroup:
        return joining.join(self._engine, self.world, self.name, self.timeout_seconds, self.start_timeout_seconds)

    def before_checkpoint(self, model: Any) -> None:
        kept = strategy_state.of(model).kept
        if kept is not None:
            kept.settle()

    def check(self, model: Any) -> None:
        super().check(model)
        layers = keras_internals.all_layers(model) if self.world.world_size > 1 else ()
        for layer in layers:
            if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
                raise UsageError(
                    f"The layer `{layer.name}` is `synchronized`, and processes of `{self.name}` do not meet in a step",
                    "make it without `synchronized=True`, or use `horovod`, `mpi` or `multiworker`",
                )

    def check_callbacks(self, callbacks: Iterable[Any]) -> None:
        super().check_callbacks(callbacks)
        for callback in callbacks:
            if self.remembers and isinstance(callback, keras.callbacks.BackupAndRestore):
                raise UsageError(
                    "`BackupAndRestore` keeps one model and its optimizer, and a run that goes on from there would "
                    "lack what the processes remember besides",
                    "use `tfdist.callbacks.Checkpoint` in its place",
                )
            what = needs_whole_state(callback)
            if what is not None and "within epochs" in what:
                raise UsageError(
                    f"{what} saves the weights of one process, and those of others are elsewhere",
                    "save at the end of an epoch, or use `tfdist.callbacks.Checkpoint(every_steps=...)`",
                )

    def require_whole_data(self, steps: Steps) -> None:
        """Raises `UsageError` for data that the user has divided among the processes."""
        if isinstance(steps.batches, together.JoinedBatches):
            raise UsageError(
                f"`{self.name}` divides the data among the processes itself, and `per_process` has them divided",
                "pass the whole data to each process; `horovod` and `multiworker` train on parts of your own",
            )

    def averages_of(self, model: Any, make: Callable[[], Averages]) -> Averages:
        """The meetings of `model`, kept with it: programs for other data go on with what they remember.

        All processes call it at the same time.
        """
        state = strategy_state.of(model)
        optimizers = keras_internals.optimizers(model)
        made_for = (id(self), *map(id, [*model.variables, *(v for one in optimizers for v in one.variables)]))
        if state.made_for != made_for:
            averages = make()
            state = strategy_state.StrategyState(*averages.remembered, averages, made_for)
            strategy_state.keep(model, state)
            self.broadcast_variables([*state.own, *state.shared], unless_equal=True)
        found: Averages = state.kept
        return found


def refuse_averages_of_optimizers(model: Any, what: str, hint: str) -> None:
    """Raises `UsageError` for an optimizer with `use_ema`, where each process has an optimizer of its own."""
    if any(one.use_ema for one in keras_internals.optimizers(model)):
        raise UsageError(
            f"The optimizer keeps a moving average of the weights (`use_ema`), and with {what} each process has "
            "another one",
            f"leave `use_ema` out, or {hint}",
        )
