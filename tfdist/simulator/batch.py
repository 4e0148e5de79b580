"""What is simulated, made from names: a model, its data, and the workers' steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

import tfdist
from tfdist import models, tasks
from tfdist.advisor.costs import link_of
from tfdist.data.input.array_feed import ArrayFeed
from tfdist.data.tools import for_model
from tfdist.errors import UsageError
from tfdist.run import optimizers
from tfdist.run.config import TrainConfig
from tfdist.simulator import study
from tfdist.simulator.matrix import Run
from tfdist.simulator.replicas import Replicas
from tfdist.simulator.study import EpochResult, Settings


def replicas(
    model: str,
    dataset: str,
    batch_size: int,
    workers: int,
    seed: int,
    *,
    data_dir: Path | None = None,
    data_options: dict[str, Any] | None = None,
    model_options: dict[str, Any] | None = None,
    examples: int | None = None,
    **training: Any,
) -> tuple[Replicas, Any]:
    """The steps of all workers, and the data to evaluate with.

    Args:
        model: its name, or the user's own.
        dataset: the same.
        batch_size: examples in a global batch.
        workers: their number.
        seed: of the weights and of the order.
        data_dir: the folder of the dataset's files.
        data_options: of the dataset.
        model_options: of the model.
        examples: of training that are used; all if `None`.
        training: the optimizer and the learning rate.

    Raises:
        UsageError: the dataset is not held in memory.
    """
    source = for_model.load(model, dataset, data_dir, **data_options or {})
    source = source if examples is None else source.limit(examples)
    strategy = tfdist.strategy("single", seed=seed)
    keras.utils.set_random_seed(seed)
    feed = source.feed("train", batch_size, world=strategy.world, seed=seed)
    if not isinstance(feed, ArrayFeed):
        raise UsageError(
            f"The dataset `{dataset}` is not held in memory, and simulated workers take batches in any order",
            "use one that is, such as `digits`, `fashion_mnist` or `synthetic`",
        )
    built = models.build(model, source.spec, **model_options or {})
    if not built.compiled:
        config = TrainConfig("single", model, dataset, batch_size=batch_size, seed=seed, **training)
        tasks.compile(built, source.spec, optimizers.make(config, feed.num_batches))
    built.optimizer.build(built.trainable_variables)
    strategy.prepare(built)
    return Replicas(built, feed, workers), source.feed("test", batch_size, world=strategy.world)


class Runner:
    """Runs the runs of a study; those of the same model, seed and number of workers share their graphs."""

    def __init__(self) -> None:
        self._made: tuple[Any, tuple[Replicas, Any]] | None = None

    def last_epoch(self, run: Run) -> EpochResult:
        """The state after the last epoch of a run."""
        machine = run.machine
        link = link_of(machine.bandwidth, machine.latency, "bandwidth")
        assert link is not None
        speeds = tuple(machine.speeds[rank % len(machine.speeds)] for rank in range(run.workers))
        steps, test = self._replicas(run)
        settings = Settings(run.entry.algorithm, speeds, machine.step_seconds, link, run.seed, **run.entry.options)
        *_, last = study.epochs(steps, settings, run.case.epochs, test, only_last=True)
        return last

    def _replicas(self, run: Run) -> tuple[Replicas, Any]:
        case = run.case
        divided = run.workers if run.entry.divide_rate else 1
        rate = None if case.learning_rate is None else case.learning_rate / divided
        shared = (case, rate, run.workers, run.seed)
        if self._made is None or self._made[0] != shared:
            made = replicas(
                *(case.model, case.dataset, case.batch_size, run.workers, run.seed),
                data_dir=case.data_dir,
                examples=case.examples,
                optimizer=case.optimizer,
                learning_rate=rate,
            )
            self._made = shared, made
        return self._made[1]
