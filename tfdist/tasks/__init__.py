"""The loss, the metrics and the final outputs of a run, for each task.

Each file in this folder is one task of `tfdist.data.spec.TASKS`, with `loss(spec)`, `metrics(spec)` and `show(run)`.
Targets equal to `spec.ignored_class` (padding, unlabelled pixels) are ignored in the loss and the metrics: the loss of
a global batch is the mean over its other targets, for any number of replicas.

Importing this package imports neither Keras nor TensorFlow; its functions do.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.errors import UsageError

if TYPE_CHECKING:
    import keras

    from tfdist.data import Source
    from tfdist.data.spec import DataSpec


@dataclass
class Run:
    """A run after training.

    Attributes:
        model: the trained model.
        source: the dataset.
        strategy: the strategy; all processes of a job call `show`, and the chief writes the files.
        folder: the folder for the files.
        batch_size: examples per global batch.
        seed: the seed of random draws.
        files: the names in the folder of the files written so far, by their purpose.
        scores: the metrics computed so far.
        skipped: why the final outputs are missing; `None` if they are not missing.
    """

    model: keras.Model
    source: Source
    strategy: Any
    folder: Path
    batch_size: int
    seed: int = 0
    files: dict[str, str] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    skipped: str | None = None

    @property
    def split(self) -> str:
        """The split for the final outputs: test, else validation, else train."""
        examples = self.source.spec.examples
        return next(split for split in ("test", "validation", "train") if examples[split])

    def examples(self, count: int) -> tuple[Any, Any]:
        """The first `count` examples x and targets y of the split `split`, without reading further images."""
        if self.source.spec.vocabulary_size:
            x, y = self.source.arrays(self.split)
            return ({name: array[:count] for name, array in x.items()} if isinstance(x, dict) else x[:count]), y[:count]
        batches = self.source.pipeline(self.split, min(count, self.batch_size), shuffle=False)
        xs, ys = zip(*batches.take(-(-count // min(count, self.batch_size))).as_numpy_iterator(), strict=True)
        if isinstance(xs[0], dict):
            return {name: np.concatenate([x[name] for x in xs])[:count] for name in xs[0]}, np.concatenate(ys)[:count]
        return np.concatenate(xs)[:count], np.concatenate(ys)[:count]

    def predict(self, x: Any, shape: tuple[int, ...]) -> np.ndarray | None:
        """The outputs of the model for `x`, `[n, *shape]`; `None` if they have a different shape, see `fits`."""
        outputs = self.strategy.predict(self.model, x, batch_size=self.batch_size, verbose=0)
        return outputs if self.fits(outputs, shape) else None

    def fits(self, outputs: Any, shape: tuple[int, ...]) -> bool:
        """Whether `outputs` are `[n, *shape]`, as the task expects; a user's own model may return something else."""
        if isinstance(outputs, np.ndarray) and outputs.shape[1:] == shape:
            return True
        actual = f"shape {list(outputs.shape[1:])}" if isinstance(outputs, np.ndarray) else type(outputs).__name__
        self.skipped = (
            f"The final outputs of the task `{self.source.spec.task}` are left out: they need a model that returns "
            f"{list(shape)} per example, but `{self.model.name}` returns {actual}"
        )
        return False

    def file(self, purpose: str, name: str) -> Path:
        """The path for a new file, which is added to `files`."""
        self.files[purpose] = name
        return self.folder / name


def compile(model: keras.Model, spec: DataSpec, optimizer: Any) -> None:
    """Compiles `model` with the loss and the metrics of the task of `spec`.

    Raises:
        UsageError: the model returns fewer numbers than there are classes.
    """
    import keras

    task = _module(spec)
    loss = task.loss(spec)
    if isinstance(loss, keras.losses.SparseCategoricalCrossentropy):
        _require_logits_of_all_classes(model, spec.classes)
    model.compile(optimizer, loss, metrics=task.metrics(spec))


def _require_logits_of_all_classes(model: keras.Model, classes: int) -> None:
    shape = getattr(model, "output_shape", None) if model.built else None  # unknown for a subclassed model
    if isinstance(shape, tuple) and isinstance(shape[-1], int) and shape[-1] < classes:
        raise UsageError(
            f"The outputs of the model `{model.name}` are {list(shape[1:])} per example, for {classes} classes",
            f"end it with one logit per class, as in `keras.layers.Dense({classes})`, or compile it with another loss",
        )


def show(run: Run) -> None:
    """Writes the final outputs of the task to the run's folder, and adds its scores.

    | task | files | scores |
    |---|---|---|
    | classification, text_classification | `confusion_matrix.png` | |
    | segmentation | `masks.png`: images, masks, predictions | |
    | translation | `translations.txt` | `bleu` |
    | masked_lm | `masked_words.txt` | |
    | characters | `sample.txt` | |
    | autoencoding | `reconstructions.png` | |
    | generation | `samples.png` | |
    | recommendation | `recommendations.txt` | |
    | click_prediction | `calibration.png` | |
    """
    _module(run.source.spec).show(run)


def _module(spec: DataSpec) -> Any:
    return importlib.import_module(f"tfdist.tasks.{spec.task}")
