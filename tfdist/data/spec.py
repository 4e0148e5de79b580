"""What a dataset is, before a single example is read.

Pure values: this module never imports TensorFlow.

Synopsis:

    >>> examples = {"train": 1347, "validation": 150, "test": 300}
    >>> spec = DataSpec("digits", "classification", (8, 8, 1), 10, examples)
    >>> spec.examples["train"], spec.input_shape
    (1347, (8, 8, 1))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tfdist.errors import UsageError

SPLITS = ("train", "validation", "test")
TASKS = ("classification",)


@dataclass(frozen=True)
class DataSpec:
    """The facts that a model, a strategy and the record of a run need about a dataset.

    Attributes:
        name: as users type it.
        task: "classification": one integer label for each example.
        input_shape: the shape of one example, without the batch: `(28, 28, 1)`, `(16,)`.
        classes: the number of classes; labels are 0 to `classes - 1`.
        examples: the number of examples in "train", "validation" and "test"; a split that is left out has 0.
        class_names: one name a class, or empty.

    Raises:
        UsageError: a value that no dataset can have.
    """

    name: str
    task: str
    input_shape: tuple[int, ...]
    classes: int
    examples: Mapping[str, int] = field(hash=False)
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check(self.task in TASKS, "task", self.task, "use `classification`")
        unknown = [split for split in self.examples if split not in SPLITS]
        self._check(not unknown, "split", unknown, "use `train`, `validation` and `test`")
        object.__setattr__(self, "input_shape", tuple(int(size) for size in self.input_shape))
        object.__setattr__(self, "examples", {split: int(self.examples.get(split, 0)) for split in SPLITS})
        object.__setattr__(self, "class_names", tuple(self.class_names))
        shape_fits = bool(self.input_shape) and min(self.input_shape) > 0
        self._check(shape_fits, "input_shape", self.input_shape, "use positive sizes, such as `(28, 28, 1)`")
        self._check(self.classes > 0, "classes", self.classes, "use the number of different labels")
        counts_fit = min(self.examples.values()) >= 0
        self._check(counts_fit, "examples", dict(self.examples), "use 0 for a split without examples")
        named = len(self.class_names)
        names_fit = named in (0, self.classes)
        self._check(names_fit, "class_names", self.class_names, f"give {self.classes} names, or none")

    def _check(self, fits: bool, what: str, received: object, hint: str) -> None:
        if not fits:
            raise UsageError(f"Dataset `{self.name}` cannot have {what} `{received}`", hint)
