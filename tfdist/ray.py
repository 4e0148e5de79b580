"""The callback `Report` for training functions of Ray Train: results, checkpoints, and an exact continuation.

    def train_loop():
        strategy = tfdist.strategy("multiworker")
        with strategy.scope():
            model = build_model()
            model.compile("adam", "mse")
        strategy.prepare(model)
        model.fit(x, y, batch_size=64, epochs=10, callbacks=[tfdist.ray.Report()])

    TensorflowTrainer(train_loop, scaling_config=ScalingConfig(num_workers=2)).fit()

Ray starts `train_loop` in each of its workers, with a TF_CONFIG that names all of them. After a failure it starts all
of them again, and `Report` continues from the checkpoint that was reported last.

Source: Ray 2.60, "Get Started with Distributed Training using TensorFlow/Keras", "Saving and Loading Checkpoints",
https://docs.ray.io/en/latest/train/distributed-tensorflow-keras.html.
"""

from __future__ import annotations

import tempfile
from typing import Any, ClassVar

import numpy as np

from tfdist import extras
from tfdist.callbacks.checkpoint import Checkpoint
from tfdist.errors import UsageError
from tfdist.options import checks_arguments

with extras.importing("ray", "`tfdist.ray`"):
    import ray.train


class Report(Checkpoint):
    """Reports to Ray Train after each epoch, with a checkpoint, and continues from the last one after a failure.

    The checkpoint is the one of `tfdist.callbacks.Checkpoint`, with which a training that is continued ends with the
    weights of one that was never interrupted; the chief writes it, and Ray stores it.

    A training function has one `fit` with this callback, because Ray hands out its last checkpoint only, and another
    `fit` would continue from that of the first.

    Args:
        every_steps: the number of steps between checkpoints, counted over the whole run; `None` for the ends of epochs
            alone. A checkpoint within an epoch is reported with the metrics of the epoch so far.
        every_epochs: the number of epochs between checkpoints. The last epoch has always one.

    Raises:
        UsageError: this is not a worker of Ray Train; it is the second `fit` with such a callback; or Ray has several
            workers, and the model has no strategy.
    """

    _is_used: ClassVar[bool] = False  # in this process, which Ray starts for one call of the training function

    @checks_arguments
    def __init__(self, every_steps: int | None = None, every_epochs: int | None = 1):
        try:
            reported = ray.train.get_checkpoint()
            is_chief = ray.train.get_context().get_world_rank() == 0
        except (RuntimeError, DeprecationWarning) as error:  # the latter in a function that was given to Ray Tune
            raise UsageError(
                "`tfdist.ray.Report` was made outside of a training function of Ray Train",
                "make it in the function that is given to `TensorflowTrainer`",
            ) from error
        self._temporary = tempfile.TemporaryDirectory(prefix="tfdist-ray-")
        super().__init__(self._temporary.name, every_steps, every_epochs, keep=1, resume=reported is not None)
        if reported is not None and is_chief:
            reported.to_directory(self.folder)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuses a `fit` that is the second or has no strategy, and chooses the checkpoint that is resumed."""
        workers = ray.train.get_context().get_world_size()
        if self._strategy is None and workers > 1:
            raise UsageError(
                f"`fit` runs without a strategy, and each of Ray's {workers} workers would train a model of its own",
                'make `strategy = tfdist.strategy("multiworker")`, and call `strategy.prepare(model)` before `fit`',
            )
        if Report._is_used:
            raise UsageError(
                "`tfdist.ray.Report` is used a second time in this training function, and only one `fit` can continue "
                "from Ray's last checkpoint",
                "give it to the last `fit` only, since the others are repeated after a failure; or train them with a "
                "`TensorflowTrainer` of their own",
            )
        Report._is_used = True
        super().on_train_begin(logs)

    def save_within_epoch(self, logs: dict[str, Any]) -> None:
        """Saves and reports if a checkpoint is due."""
        before = self._position.step_saved
        super().save_within_epoch(logs)
        if self._position.step_saved != before:
            self._report(logs)

    def save_at_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Saves if a checkpoint is due, and reports."""
        super().save_at_epoch_end(epoch, logs)
        self._report({**logs, "epoch": epoch})

    def _report(self, logs: dict[str, Any]) -> None:
        self._finish_write()
        is_new = self._position.step_saved == self.step
        folder = self.folder if is_new and self._peers.world.is_chief else None
        checkpoint = None if folder is None else ray.train.Checkpoint.from_directory(folder)
        ray.train.report({name: _plain(value) for name, value in logs.items()}, checkpoint=checkpoint)


def _plain(value: Any) -> Any:
    """A metric in a form that Ray can store; arrays, such as a value for each class, become lists."""
    return value if isinstance(value, str) else np.asarray(value).tolist()
