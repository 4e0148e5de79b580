"""The description of a dataset, which is known before any example is read, without TensorFlow.

| task | x of N examples | y |
|---|---|---|
| classification | float32 `[N, H, W, C]`, pixels in [0, 1], or `[N, D]` | int32 `[N]` |
| segmentation | float32 `[N, H, W, C]`, pixels in [0, 1] | int32 `[N, H, W]` |
| text_classification | int32 `[N, length]`, padded with 0 at the end | int32 `[N]` |
| translation | "source" int32 `[N, S]`, "target" int32 `[N, T]`: start + sentence | int32 `[N, T]`: sentence + end |
| characters | int32 `[N, steps]` | int32 `[N, steps]`, the next character, byte or token of each |
| masked_lm | int32 `[N, length]`, padded with 0; a feed masks words | x; a feed leaves -1 in place of other words |
| autoencoding, generation | float32 `[N, H, W, C]`, pixels in [0, 1] | x itself |
| recommendation | int32 `[N, length]`: the last items of a user, padded with 0 | int32 `[N]`, the next item |
| click_prediction | "numbers" float32 `[N, D]`, "categories" int32 `[N, C]` | int32 `[N]`, 1 for a click, else 0 |

Synopsis:

    >>> examples = {"train": 1347, "validation": 150, "test": 300}
    >>> spec = DataSpec("digits", "classification", (8, 8, 1), 10, examples)
    >>> spec.examples["train"], spec.input_shape, spec.target_shape
    (1347, (8, 8, 1), ())
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tfdist.errors import UsageError

SPLITS = ("train", "validation", "test")
TASKS = (
    *("classification", "segmentation", "text_classification", "translation", "characters", "masked_lm"),
    *("autoencoding", "generation", "recommendation", "click_prediction"),
)
# The tasks whose examples are texts, sequences of tokens.
OF_TEXTS = ("text_classification", "translation", "characters", "masked_lm")
# The tasks whose targets are the examples themselves, pictures.
OF_PICTURES = ("autoencoding", "generation")
# The tasks whose targets are made of the examples, so that a dataset for another task can be used for them.
DERIVED = (*OF_PICTURES, "masked_lm")

# The first tokens of every vocabulary; only the targets of translation use the last two.
PADDING, UNKNOWN, START, END = range(4)


@dataclass(frozen=True)
class DataSpec:
    """The facts that a model, a strategy and the record of a run need about a dataset.

    Attributes:
        name: the name that users type.
        task: one of `TASKS`, which the module's table describes.
        input_shape: the shape of one example, without the batch: `(28, 28, 1)`, `(16,)`; `(length,)` for token
            sequences; for translation the shape of the source sentence, for click_prediction that of "numbers".
        classes: the number of classes, with labels from 0 to `classes - 1`; for translation the size of the target's
            vocabulary, for characters and masked_lm the number of different tokens, for recommendation of items, for
            autoencoding and generation 0.
        examples: the number of examples in "train", "validation" and "test"; an absent split has 0.
        class_names: one name per class, or empty.
        target_shape: the shape of one example's target, without the batch: `()` for class labels, `(H, W)` for
            masks, `(T,)` for token sequences, `(H, W, C)` for pictures.
        vocabulary_size: the number of different input tokens or items; 0 if the input is not a sequence of them.
        ignored_class: a label that loss and metrics leave out, such as that of unlabelled pixels or padding.
        vocabulary: the input tokens, by number, or empty.
        target_vocabulary: the target's tokens, by number, or empty.
        byte_tokens: whether each token of `vocabulary` is a sequence of bytes, each written as the character with its
            number (Latin-1).
        category_sizes: for click_prediction the number of different values of each of the "categories".

    Raises:
        UsageError: a value is out of range.
    """

    name: str
    task: str
    input_shape: tuple[int, ...]
    classes: int
    examples: Mapping[str, int] = field(hash=False)
    class_names: tuple[str, ...] = ()
    target_shape: tuple[int, ...] = ()
    vocabulary_size: int = 0
    ignored_class: int | None = None
    vocabulary: tuple[str, ...] = field(default=(), hash=False, repr=False)
    target_vocabulary: tuple[str, ...] = field(default=(), hash=False, repr=False)
    byte_tokens: bool = False
    category_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        tasks = ", ".join(f"`{task}`" for task in TASKS)
        self._check(self.task in TASKS, "task", self.task, f"use one of {tasks}")
        unknown = [split for split in self.examples if split not in SPLITS]
        self._check(not unknown, "split", unknown, "use `train`, `validation` and `test`")
        for name in ("input_shape", "target_shape", "category_sizes"):
            object.__setattr__(self, name, tuple(int(size) for size in getattr(self, name)))
        object.__setattr__(self, "examples", {split: int(self.examples.get(split, 0)) for split in SPLITS})
        object.__setattr__(self, "class_names", tuple(self.class_names))
        shape_fits = bool(self.input_shape) and min(self.input_shape) > 0
        self._check(shape_fits, "input_shape", self.input_shape, "use positive sizes, such as `(28, 28, 1)`")
        target_fits = min(self.target_shape, default=1) > 0
        self._check(target_fits, "target_shape", self.target_shape, "use positive sizes, or `()` for labels")
        classes_fit = self.classes > 0 or (self.targets_are_inputs and self.classes == 0)
        self._check(classes_fit, "classes", self.classes, "use the number of different labels")
        counts_fit = min(self.examples.values()) >= 0
        self._check(counts_fit, "examples", dict(self.examples), "use 0 for a split without examples")
        self._check_names("class_names", self.classes)
        self._check(self.vocabulary_size >= 0, "vocabulary_size", self.vocabulary_size, "use 0 for none")
        self._check_names("vocabulary", self.vocabulary_size)
        self._check_names("target_vocabulary", self.classes)
        sizes_fit = min(self.category_sizes, default=1) > 0
        self._check(sizes_fit, "category_sizes", self.category_sizes, "use positive numbers of values")

    @property
    def targets_are_inputs(self) -> bool:
        """Whether the target of each example is the example itself."""
        return self.task in OF_PICTURES

    def _check_names(self, attribute: str, count: int) -> None:
        names = getattr(self, attribute)
        received = names if len(names) < 10 else f"of {len(names)} entries"
        self._check(len(names) in (0, count), attribute, received, f"give {count} names, or none")

    def _check(self, fits: bool, attribute: str, received: object, hint: str) -> None:
        if not fits:
            raise UsageError(f"Dataset `{self.name}` cannot have {attribute} `{received}`", hint)
