"""What a dataset's task asks of a run: the loss, the metrics, and what to look at in the end.

Each file beside this one is one task of `tfdist.data.spec.TASKS`: `loss(spec)`, `metrics(spec)` and `show(run)`. What
`spec.ignored_class` names (padding, unlabelled pixels) has no part in loss and metrics, on any number of replicas:
the loss of a global batch is a mean over its other targets.

Importing this package imports neither Keras nor TensorFlow; its functions do.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import keras

    from tfdist.data import Source
    from tfdist.data.spec import DataSpec


@dataclass
class Run:
    """A run whose training is done.

    Attributes:
        model: trained.
        source: what it was trained on.
        strategy: what it was trained with; all processes of a job show together, and the chief writes.
        folder: where files go.
        batch_size: examples in a global batch.
        seed: of what is drawn at random.
        files: what was written so far: what each is, and its name in the folder.
        scores: the metrics that were found so far.
    """

    model: keras.Model
    source: Source
    strategy: Any
    folder: Path
    batch_size: int
    seed: int = 0
    files: dict[str, str] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def split(self) -> str:
        """The split to look at: test, or the one that comes nearest."""
        examples = self.source.spec.examples
        return next(split for split in ("test", "validation", "train") if examples[split])

    def examples(self, count: int) -> tuple[Any, Any]:
        """The first `count` examples x and targets y of the split to look at; no more pictures are read."""
        if self.source.spec.vocabulary_size:
            x, y = self.source.arrays(self.split)
            return ({name: array[:count] for name, array in x.items()} if isinstance(x, dict) else x[:count]), y[:count]
        batches = self.source.pipeline(self.split, min(count, self.batch_size), shuffle=False)
        xs, ys = zip(*batches.take(-(-count // min(count, self.batch_size))).as_numpy_iterator(), strict=True)
        return np.concatenate(xs)[:count], np.concatenate(ys)[:count]

    def file(self, what: str, name: str) -> Path:
        """The path of a file that is about to be written."""
        self.files[what] = name
        return self.folder / name


def compile(model: keras.Model, spec: DataSpec, optimizer: Any) -> None:
    """Compiles `model` with the loss and the metrics of the task of `spec`."""
    task = _module(spec)
    model.compile(optimizer, task.loss(spec), metrics=task.metrics(spec))


def show(run: Run) -> None:
    """Writes what the task shows at the end of a run into its folder, and adds its scores.

    | task | files | scores |
    |---|---|---|
    | classification, text_classification | `confusion_matrix.png` | |
    | segmentation | `masks.png`: pictures, masks, predictions | |
    | translation | `translations.txt` | `bleu` |
    | characters | `sample.txt` | |
    | autoencoding | `reconstructions.png` | |
    """
    _module(run.source.spec).show(run)


def _module(spec: DataSpec) -> Any:
    return importlib.import_module(f"tfdist.tasks.{spec.task}")
