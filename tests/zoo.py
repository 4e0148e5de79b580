"""Every model of the zoo at a size that a test can train: its options, and a small dataset of its task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfdist.data import Source, load
from tfdist.data.input import masking
from tfdist.data.spec import END, OF_PICTURES, START, DataSpec

WORDS, LENGTH, STEPS, STREAMS = 30, 12, 6, 4
VOID = 3


def spec_of(task: str, *input_shape: int, **facts: Any) -> DataSpec:
    """The facts about a dataset called `some`."""
    return DataSpec("some", task, input_shape, **({"classes": 3, "examples": {"train": 1}} | facts))


def images(height: int, width: int, channels: int, classes: int = 3) -> DataSpec:
    return spec_of("classification", height, width, channels, classes=classes)


def masks(height: int, width: int, channels: int = 3, classes: int = 4) -> DataSpec:
    shape = (height, width)
    return spec_of("segmentation", height, width, channels, classes=classes, target_shape=shape, ignored_class=VOID)


def pictures(height: int, width: int, channels: int) -> DataSpec:
    return spec_of("generation", height, width, channels, classes=0, target_shape=(height, width, channels))


TEXTS = spec_of("text_classification", LENGTH, vocabulary_size=WORDS)
CHARACTERS = spec_of("characters", STEPS, target_shape=(STEPS,), vocabulary_size=WORDS, classes=WORDS)
MASKED_TEXTS = spec_of(
    "masked_lm", LENGTH, target_shape=(LENGTH,), vocabulary_size=WORDS, classes=WORDS, ignored_class=masking.NOT_CHOSEN
)
TRANSLATION = spec_of(
    "translation", LENGTH, target_shape=(LENGTH - 2,), vocabulary_size=WORDS, classes=WORDS - 5, ignored_class=0
)
USERS = spec_of("recommendation", LENGTH, vocabulary_size=WORDS, classes=WORDS)
CLICKS = spec_of("click_prediction", 5, classes=2, category_sizes=(WORDS, 7, 3))


def arrays(spec: DataSpec, examples: int, seed: int = 0) -> tuple[Any, np.ndarray]:
    """Examples x and targets y, at random."""
    rng = np.random.default_rng(seed)
    if spec.task in ("classification", "segmentation", *OF_PICTURES):
        x: Any = rng.random((examples, *spec.input_shape), np.float32)
        if spec.targets_are_inputs:
            return x, x
        return x, rng.integers(0, spec.classes, (examples, *spec.target_shape)).astype(np.int32)
    if spec.task == "characters":
        text = rng.integers(0, spec.classes, (examples, spec.input_shape[0] + 1)).astype(np.int32)
        return text[:, :-1], text[:, 1:]
    return _clicks(rng, spec, examples) if spec.task == "click_prediction" else _tokens(rng, spec, examples)


def _tokens(rng: np.random.Generator, spec: DataSpec, examples: int) -> tuple[Any, np.ndarray]:
    sentences = _sentences(rng, examples, spec.input_shape[0], spec.vocabulary_size)
    if spec.task == "masked_lm":
        chosen = (sentences != 0) & (rng.random(sentences.shape) < 0.5)
        return np.where(chosen, WORDS - 1, sentences), np.where(chosen, sentences, spec.ignored_class)
    if spec.task == "translation":
        return _translations(rng, spec, sentences)
    return sentences, rng.integers(0, spec.classes, examples).astype(np.int32)


def _clicks(rng: np.random.Generator, spec: DataSpec, examples: int) -> tuple[Any, np.ndarray]:
    categories = rng.integers(0, spec.category_sizes, (examples, len(spec.category_sizes))).astype(np.int32)
    numbers = rng.normal(size=(examples, *spec.input_shape)).astype(np.float32)
    return {"numbers": numbers, "categories": categories}, rng.integers(0, 2, examples).astype(np.int32)


def _translations(rng: np.random.Generator, spec: DataSpec, sentences: np.ndarray) -> tuple[Any, np.ndarray]:
    examples = len(sentences)
    target = _sentences(rng, examples, spec.target_shape[0] - 1, spec.classes)
    before = np.pad(target, ((0, 0), (1, 0)), constant_values=START)
    after = np.pad(target, ((0, 0), (0, 1)))
    after[np.arange(examples), (target != 0).sum(axis=1)] = END
    return {"source": sentences, "target": before}, after


def _sentences(rng: np.random.Generator, examples: int, length: int, words: int) -> np.ndarray:
    lengths = rng.integers(1, length + 1, examples)
    tokens = rng.integers(END + 1, words, (examples, length))
    return (tokens * (np.arange(length) < lengths[:, None])).astype(np.int32)


def streamed(x: np.ndarray) -> dict[str, np.ndarray]:
    """Characters as `stateful_rnn` takes them, in global batches of `STREAMS`."""
    number = np.arange(len(x), dtype=np.int32)
    return {"tokens": x, "stream": number % STREAMS, "position": number // STREAMS}


@dataclass(frozen=True)
class Small:
    """One model to try: the dataset's facts, and options that leave nothing random.

    Attributes:
        spec: the facts.
        options: for a small model whose replicas can equal one device.
        learning_rate: of SGD, small enough for the loss to fall: a training that diverges amplifies each rounding.
    """

    spec: DataSpec
    options: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 0.05


SMALL = {
    "lenet": Small(images(16, 16, 1), {"width": 0.5, "dropout": 0.0}),
    "mlp": Small(images(4, 4, 1), {"width": 0.1, "dropout": 0.0}),
    "cnn": Small(images(10, 10, 1), {"width": 0.1}),
    "vgg11": Small(images(32, 32, 3), {"width": 0.05, "dropout": 0.0}),
    "vgg16": Small(images(32, 32, 3), {"width": 0.05}),
    "resnet20": Small(images(8, 8, 3), {"width": 0.25, "synchronized": True}),
    "resnet18": Small(images(64, 64, 3), {"width": 0.0625, "synchronized": True}),
    "resnet50": Small(images(64, 64, 3), {"width": 0.125, "synchronized": True}),
    "vit": Small(images(10, 12, 3), {"blocks": 2, "heads": 2, "patch": 4, "width": 0.0625, "dropout": 0.0}),
    "convnext_tiny": Small(images(32, 32, 3), {"width": 0.0625}),
    "mobilenet_v3_small": Small(images(64, 64, 3), {"width": 0.125, "dropout": 0.0, "synchronized": True}),
    "efficientnet_b0": Small(
        images(64, 64, 3),
        {"width": 0.125, "dropout": 0.0, "stochastic_depth": 0.0, "synchronized": True},
        learning_rate=0.002,
    ),
    "unet": Small(masks(20, 24), {"width": 0.0625, "dropout": 0.0}),
    "segnet": Small(masks(36, 32), {"width": 0.0625, "synchronized": True}),
    "nbow": Small(TEXTS, {"width": 0.02, "dropout": 0.0}),
    "textcnn": Small(TEXTS, {"width": 0.05, "dropout": 0.0}),
    "bilstm": Small(TEXTS, {"width": 0.05, "dropout": 0.0}),
    "transformer": Small(TEXTS, {"layers": 2, "width": 0.125, "heads": 2, "dropout": 0.0}),
    "transformer, characters": Small(CHARACTERS, {"layers": 2, "width": 0.125, "heads": 2, "dropout": 0.0}),
    "gpt": Small(CHARACTERS, {"layers": 2, "units": 16, "heads": 2}),
    "gpt, as GPT-2": Small(
        CHARACTERS,
        {"layers": 2, "units": 16, "heads": 2, "tied": False, "bias": True}
        | {"positions": "learned", "normalization": "layer", "feed_forward": "gelu"},
    ),
    "bert": Small(MASKED_TEXTS, {"layers": 2, "units": 16, "heads": 2, "dropout": 0.0}),
    "transformer_translation": Small(TRANSLATION, {"layers": 2, "units": 16, "heads": 2, "dropout": 0.0}),
    "seq2seq": Small(TRANSLATION, {"width": 0.05, "dropout": 0.0}),
    "conv_autoencoder": Small(spec_of("autoencoding", 10, 12, 1, classes=0), {"width": 0.25}),
    "vae": Small(pictures(10, 12, 1), {"width": 0.02, "code": 4}),
    "dcgan": Small(pictures(10, 12, 1), {"width": 0.125, "code": 6}),
    "ddpm": Small(pictures(10, 12, 1), {"width": 0.125, "steps": 20, "multipliers": (1, 2)}),
    "stateful_rnn": Small(CHARACTERS, {"width": 0.05, "streams": STREAMS}),
    "two_tower": Small(USERS, {"width": 0.05}),
    "dlrm": Small(CLICKS, {"width": 0.125}),
}


def name_of(case: str) -> str:
    """The model that a case of `SMALL` or `LEARNS` tries, such as "transformer" of "transformer, characters"."""
    return case.partition(",")[0]


def data(case: str, examples: int, seed: int = 0) -> tuple[Any, np.ndarray]:
    """Examples for a case of `SMALL`, as its model takes them."""
    x, y = arrays(SMALL[case].spec, examples, seed)
    return (streamed(x) if case == "stateful_rnn" else x), y


@dataclass(frozen=True)
class Learnable:
    """A short training of a model with its usual settings, on data that it can learn.

    Attributes:
        data: the options of the dataset `synthetic`; or `{"digits": n, "channels": c}`, the digits of scikit-learn with
            each pixel repeated n times in both directions, and c times as a channel.
        options: the options of the model, which make it small.
        steps: the steps at batch 32, and at batch 256.
        parts: the parts of the first validation loss below which the last must be, at batch 32 and at batch 256.
    """

    data: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    steps: tuple[int, int] = (300, 300)
    parts: tuple[float, float] = (0.5, 0.25)


_SMALL_DIGITS = {"digits": 2, "channels": 1}
_DIGITS = {"digits": 4, "channels": 3}
_TEXTS = {"task": "text_classification", "length": 16}
_CHARACTERS = {"task": "characters", "length": 16}

# The parts are about twice what was measured, which leaves room for other seeds and roundings.
LEARNS = {
    "mlp": Learnable({"digits": 1, "channels": 1}, parts=(0.2, 0.1)),
    "cnn": Learnable(_SMALL_DIGITS, {"width": 0.25}, parts=(0.4, 0.15)),
    "lenet": Learnable(_SMALL_DIGITS, parts=(0.6, 0.15)),
    "vgg11": Learnable(_DIGITS, {"width": 0.125}, steps=(300, 120), parts=(0.5, 0.5)),
    "vgg16": Learnable(_DIGITS, {"width": 0.125}, steps=(120, 60), parts=(0.5, 0.8)),
    "resnet20": Learnable({"digits": 2, "channels": 3}, {"width": 0.5}, steps=(120, 60), parts=(0.1, 0.1)),
    "resnet18": Learnable(_DIGITS, {"width": 0.125}, steps=(120, 60), parts=(0.2, 0.1)),
    "resnet50": Learnable(_DIGITS, {"width": 0.0625}, steps=(100, 60), parts=(0.5, 0.7)),
    "unet": Learnable(
        {"task": "segmentation", "shape": (16, 16, 3), "classes": 4},
        {"width": 0.125},
        steps=(120, 60),
        parts=(0.5, 0.5),
    ),
    "segnet": Learnable(
        {"task": "segmentation", "shape": (32, 32, 3), "classes": 4},
        {"width": 0.125},
        steps=(200, 60),
        parts=(0.6, 0.8),
    ),
    "nbow": Learnable(_TEXTS, {"width": 0.2}, parts=(0.7, 0.25)),
    "textcnn": Learnable(_TEXTS, {"width": 0.2}, steps=(400, 120), parts=(0.7, 0.3)),
    "bilstm": Learnable(_TEXTS, {"width": 0.25}, steps=(300, 120), parts=(0.6, 0.4)),
    "transformer": Learnable(_TEXTS, {"width": 0.25}, steps=(300, 120), parts=(0.5, 0.5)),
    "transformer, characters": Learnable(_CHARACTERS, {"width": 0.25}, steps=(120, 60), parts=(0.4, 0.4)),
    "seq2seq": Learnable(
        {"task": "translation", "length": 8, "words": 50}, {"width": 0.25}, steps=(300, 150), parts=(0.5, 0.25)
    ),
    "stateful_rnn": Learnable(_CHARACTERS, {"width": 0.25}, steps=(120, 60), parts=(0.5, 0.5)),
    "vit": Learnable({"digits": 2, "channels": 1}, {"blocks": 2, "width": 0.25}, steps=(300, 120), parts=(0.7, 0.7)),
    "convnext_tiny": Learnable(_DIGITS, {"width": 0.125}, steps=(300, 120), parts=(0.7, 0.7)),
    "mobilenet_v3_small": Learnable(_DIGITS, {"width": 0.25}, steps=(300, 120), parts=(0.7, 0.7)),
    "efficientnet_b0": Learnable(_DIGITS, {"width": 0.125}, steps=(300, 120), parts=(0.9, 0.7)),
    # The noise of these pictures cannot be predicted, so that the loss of `vae` has a high floor.
    "vae": Learnable(
        {"task": "generation", "shape": (16, 16, 1)}, {"width": 0.5}, steps=(300, 120), parts=(0.97, 0.97)
    ),
    "dcgan": Learnable(
        {"task": "generation", "shape": (16, 16, 1)}, {"width": 0.125}, steps=(120, 60), parts=(0.9, 0.9)
    ),
    "ddpm": Learnable({"task": "generation", "shape": (8, 8, 1)}, {"width": 0.25}, steps=(120, 60), parts=(0.65, 0.45)),
    "gpt": Learnable(_CHARACTERS, {"layers": 2, "units": 64, "heads": 2}, steps=(300, 120), parts=(0.5, 0.5)),
    "bert": Learnable(
        {"task": "masked_lm", "length": 16, "words": 40}, {"layers": 2, "units": 64, "heads": 2}, parts=(0.95, 0.95)
    ),
    "transformer_translation": Learnable(
        {"task": "translation", "length": 8, "words": 50},
        {"layers": 2, "units": 64, "heads": 2},
        parts=(0.8, 0.5),
    ),
    "conv_autoencoder": Learnable(
        {"task": "autoencoding", "shape": (16, 16, 1)}, {"width": 0.5}, steps=(300, 120), parts=(0.8, 0.8)
    ),
    "two_tower": Learnable({"task": "recommendation", "words": 300}, {"width": 0.25}, parts=(0.5, 0.5)),
    # The loss of the first weights is 0.80; 0.86 of it is 0.69, the loss of guesses.
    "dlrm": Learnable({"task": "click_prediction", "words": 20, "length": 8}, steps=(600, 600), parts=(0.83, 0.7)),
}


def learnable_data(data: dict[str, Any], batch_size: int, steps: int) -> Any:
    """A source with as many examples as `steps` batches have, and 256 for validation."""
    if "digits" not in data:
        return load("synthetic", train=batch_size * steps, validation=256, test=0, **data)
    digits = load("digits")

    def enlarged(split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = digits.arrays(split)
        chosen = np.arange(count) % len(y)
        x = np.repeat(np.repeat(x, data["digits"], axis=1), data["digits"], axis=2)
        return np.repeat(x, data["channels"], axis=3)[chosen], y[chosen]

    splits = {"train": enlarged("train", batch_size * steps), "validation": enlarged("test", 256)}
    return Source.from_arrays("digits", classes=10, task="classification", **splits)
