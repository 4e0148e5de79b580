"""Synthetic examples with learnable targets for every task, of any shape, size and number of classes.

- classification, autoencoding, generation: each class has a template of uniform noise; a picture is its mean with
  other noise
- segmentation: each class has a colour; a picture is a grid of patches in these colours, with noise
- text_classification: half of the words in a sentence are words of its class
- translation: each source word has one target word, in the same order
- masked_lm: each sentence repeats the four words of a topic
- characters: each character is followed by one of two others
- recommendation: users and items belong to hidden groups; half of a user's items, and the next item, are from the
  user's group, of which some items are more popular
- click_prediction: each number and each value of a category has a hidden effect, and each value is in one of two hidden
  groups; a click is drawn from the logistic function of the effects and of the neighbours that are in the same group

With more pixels, the classes are easier to distinguish; a linear classifier suffices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import numpy as np

from tfdist.data.input import masking, padding
from tfdist.data.input.arrays import Arrays
from tfdist.data.input.source import Source
from tfdist.data.spec import END, PADDING, SPLITS, START, TASKS, UNKNOWN, DataSpec
from tfdist.errors import UnknownNameError, UsageError
from tfdist.options import Count, CountOrZero

# How many examples are generated together: few compared with the dataset, many compared with NumPy's overhead.
_CHUNK = 1024
# The number of patches along each side of a mask.
_PATCHES = 8
# The tasks for which examples have various lengths.
_OF_VARIOUS_LENGTHS = ("text_classification", "translation", "masked_lm", "recommendation")
# The first word that is not special, and the words per topic.
_FIRST_WORD, _TOPIC = UNKNOWN + 1, 4
# The hidden groups of users and items, and the numbers of an example of click_prediction, as in Criteo's logs.
_GROUPS, _NUMBERS = 10, 13


def load(
    data_dir: str | PathLike[str] | None = None,
    *,
    task: str = "classification",
    shape: Sequence[Count] | None = None,
    classes: Count = 10,
    words: Count = 1000,
    length: Count = 32,
    buckets: bool = False,
    train: CountOrZero = 6000,
    validation: CountOrZero = 1000,
    test: CountOrZero = 1000,
    seed: CountOrZero = 0,
) -> Source:
    """The examples of a task, as `tfdist.data.spec` describes them; deterministic for the same options.

    Args:
        data_dir: not used; there are no files.
        task: one of `tfdist.data.spec.TASKS`.
        shape: the shape of one picture; by default `(28, 28, 1)`, for segmentation `(32, 32, 3)`.
        classes: the number of classes; for characters the number of different characters.
        words: the size of a vocabulary, special words included; for recommendation the number of items, for
            click_prediction of values per category.
        length: the largest number of words per sentence, or of items per user; for characters the steps per example,
            for click_prediction the number of categories.
        buckets: make batches of sentences of similar lengths.
        train: the number of training examples.
        validation: the number of validation examples.
        test: the number of test examples.
        seed: the seed of all random numbers.

    Raises:
        UnknownNameError: there is no such task.
        UsageError: there are fewer words than a vocabulary needs, segmentation has no height and width, or `buckets`
            is set for examples of one size.
    """
    if task not in TASKS:
        raise UnknownNameError("task", task, TASKS)
    of_topic = _FIRST_WORD + _TOPIC + 1
    needed = {
        "text_classification": 2 * classes,
        "masked_lm": of_topic,
        "translation": END + 2,
        "recommendation": _FIRST_WORD + _GROUPS,
    }.get(task, 0)
    if words < needed:
        raise UsageError(f"`words` is {words}, too few for `{task}` with {classes} classes", f"use {needed} or more")
    if buckets and task not in _OF_VARIOUS_LENGTHS:
        raise UsageError(f"`buckets` is set, but all examples of `{task}` have the same size", "leave it out")
    if task == "segmentation" and shape is not None and len(shape) != 3:
        raise UsageError(f"`shape` is `{tuple(shape)}`, but `segmentation` needs pictures", "use for example `32,32,3`")
    examples = {"train": train, "validation": validation, "test": test}
    spec = _spec(task, shape, classes, words, length, examples)
    make = _MAKERS[task]
    return Source(spec, lambda split, count: make(spec, seed, SPLITS.index(split), count), bucketed=buckets)


def _spec(
    task: str, shape: Sequence[int] | None, classes: int, words: int, length: int, examples: dict[str, int]
) -> DataSpec:
    picture = tuple(shape or ((32, 32, 3) if task == "segmentation" else (28, 28, 1)))
    sentence: dict[str, Any] = {"input_shape": (length,), "vocabulary_size": words}
    facts: dict[str, dict[str, Any]] = {
        "classification": {"input_shape": picture, "classes": classes},
        "autoencoding": {"input_shape": picture, "classes": 0, "target_shape": picture},
        "generation": {"input_shape": picture, "classes": 0, "target_shape": picture},
        "segmentation": {"input_shape": picture, "classes": classes, "target_shape": picture[:2]},
        "text_classification": sentence | {"classes": classes},
        "masked_lm": sentence | {"classes": words, "target_shape": (length,), "ignored_class": masking.NOT_CHOSEN},
        "translation": sentence | {"classes": words, "target_shape": (length + 1,), "ignored_class": PADDING},
        "characters": sentence | {"classes": classes, "target_shape": (length,), "vocabulary_size": classes},
        "recommendation": sentence | {"classes": words},
        "click_prediction": {"input_shape": (_NUMBERS,), "classes": 2, "category_sizes": (words,) * length},
    }
    return DataSpec("synthetic", task, examples=examples, **facts[task])


def _shared(seed: int) -> np.random.Generator:
    """The generator for properties that all splits share."""
    return np.random.default_rng([seed, len(SPLITS)])


def _pictures(spec: DataSpec, seed: int, stream: int, count: int) -> Arrays:
    classes = spec.classes or 10
    templates = _shared(seed).random((classes, *spec.input_shape), np.float32)
    y = np.random.default_rng([seed, stream, 0]).integers(classes, size=count, dtype=np.int32)
    noise = np.random.default_rng([seed, stream, 1])
    x = np.empty((count, *spec.input_shape), np.float32)
    for first in range(0, count, _CHUNK):
        chunk = x[first : first + _CHUNK]
        noise.random(out=chunk, dtype=np.float32)
        chunk += templates[y[first : first + _CHUNK]]
        chunk *= np.float32(0.5)
    return (x, y) if spec.classes else (x, x)


def _masks(spec: DataSpec, seed: int, stream: int, count: int) -> Arrays:
    height, width, channels = spec.input_shape
    colours = _shared(seed).random((spec.classes, channels), np.float32)
    generator = np.random.default_rng([seed, stream])
    patches = generator.integers(spec.classes, size=(count, _PATCHES, _PATCHES), dtype=np.int32)
    rows, columns = np.arange(height) * _PATCHES // height, np.arange(width) * _PATCHES // width
    y = patches[:, rows][:, :, columns]
    x = generator.random((count, *spec.input_shape), np.float32)
    x += 3 * colours[y]
    x *= np.float32(0.25)
    return x, y


def _sentences(spec: DataSpec, seed: int, stream: int, count: int) -> Arrays:
    (length,) = spec.input_shape
    generator = np.random.default_rng([seed, stream])
    y = generator.integers(spec.classes, size=count, dtype=np.int32)
    any_word = generator.integers(UNKNOWN + 1, spec.vocabulary_size, size=(count, length), dtype=np.int32)
    # A word belongs to the class that is the remainder of its number modulo `classes`.
    of_class = any_word - any_word % spec.classes + y[:, np.newaxis]
    of_class = np.where((of_class > UNKNOWN) & (of_class < spec.vocabulary_size), of_class, any_word)
    x = np.where(generator.random((count, length)) < 0.5, of_class, any_word)
    x[np.arange(length) >= _lengths(generator, count, length)] = PADDING
    return x, y


def _topics(spec: DataSpec, seed: int, stream: int, count: int) -> Arrays:
    (length,) = spec.input_shape
    generator = np.random.default_rng([seed, stream])
    topics = (spec.vocabulary_size - 1 - _FIRST_WORD) // _TOPIC  # the last word is the mask
    x = _FIRST_WORD + _TOPIC * generator.integers(topics, size=(count, 1), dtype=np.int32)
    x = x + generator.integers(_TOPIC, size=(count, length), dtype=np.int32)
    x[np.arange(length) >= _lengths(generator, count, length)] = PADDING
    return x, x


def _translations(spec: DataSpec, seed: int, stream: int, count: int) -> Arrays:
    (length,) = spec.input_shape
    generator = np.random.default_rng([seed, stream])
    of_word = np.arange(spec.vocabulary_size)
    of_word[END + 1 :] = END + 1 + _shared(seed).permutation(spec.vocabulary_size - END - 1)
    source = generator.integers(END + 1, spec.vocabulary_size, size=(count, length), dtype=np.int32)
    lengths = _lengths(generator, count, length)
    source[np.arange(length) >= lengths] = PADDING
    sentences = [of_word[row[:words]].tolist() for row, words in zip(source, lengths[:, 0], strict=True)]
    shifted = padding.padded([[START, *sentence] for sentence in sentences], length + 1)
    return {"source": source, "target": shifted}, padding.padded(
        [[*sentence, END] for sentence in sentences], length + 1
    )


def _characters(spec: DataSpec, seed: int, stream: int, count: int) -> Arrays:
    (steps,) = spec.input_shape
    # One of the two followers is the next number, so that every character occurs.
    next_one, other = (np.arange(spec.classes) + 1) % spec.classes, _shared(seed).permutation(spec.classes)
    followers = np.stack([next_one, other], axis=1).tolist()
    choices = np.random.default_rng([seed, stream]).integers(2, size=count * steps).tolist()
    text = [0]
    for choice in choices:
        text.append(followers[text[-1]][choice])
    tokens = np.array(text, np.int32)
    return tokens[:-1].reshape(count, steps), tokens[1:].reshape(count, steps)


def _users(spec: DataSpec, seed: int, stream: int, count: int) -> Arrays:
    (length,) = spec.input_shape
    generator = np.random.default_rng([seed, stream])
    own, drawn = generator.integers(_GROUPS, size=(count, 1)), generator.integers(_GROUPS, size=(count, length + 1))
    from_own = generator.random((count, length + 1)) < 0.5
    from_own[:, -1] = True
    groups = np.where(from_own, own, drawn)
    # An item belongs to the group that is the remainder of its number; the first of a group are the most popular.
    of_group = (spec.classes - _FIRST_WORD - groups + _GROUPS - 1) // _GROUPS
    ranks = (of_group * generator.random(groups.shape) ** 3).astype(np.int32)
    items = (_FIRST_WORD + ranks * _GROUPS + groups).astype(np.int32)
    x, y = items[:, :-1], items[:, -1]
    x[np.arange(length) >= _lengths(generator, count, length)] = PADDING
    return x, y


def _clicks(spec: DataSpec, seed: int, stream: int, count: int) -> Arrays:
    shared, generator = _shared(seed), np.random.default_rng([seed, stream])
    categories, values = len(spec.category_sizes), max(spec.category_sizes)
    of_numbers, of_values = shared.normal(size=_NUMBERS), shared.normal(size=(categories, values))
    groups = shared.choice([-1.0, 1.0], size=(categories, values))
    numbers = generator.normal(size=(count, _NUMBERS)).astype(np.float32)
    chosen = generator.integers(spec.category_sizes, size=(count, categories), dtype=np.int32)
    columns = np.arange(categories)
    group = groups[columns, chosen]
    effects = numbers @ of_numbers + of_values[columns, chosen].sum(axis=1) + (group[:, 1:] * group[:, :-1]).sum(axis=1)
    logits = 3 * effects / np.sqrt(_NUMBERS + 2 * categories - 1)  # with a standard deviation of 3
    y = generator.random(count) < 1 / (1 + np.exp(-logits))
    return {"numbers": numbers, "categories": chosen}, y.astype(np.int32)


def _lengths(generator: np.random.Generator, count: int, length: int) -> np.ndarray:
    """Random lengths of sentences, from a quarter of `length` to `length`: `[count, 1]`."""
    return generator.integers(max(1, length // 4), length + 1, size=(count, 1))


_MAKERS: dict[str, Callable[[DataSpec, int, int, int], Arrays]] = {
    "classification": _pictures,
    "autoencoding": _pictures,
    "generation": _pictures,
    "segmentation": _masks,
    "text_classification": _sentences,
    "masked_lm": _topics,
    "translation": _translations,
    "characters": _characters,
    "recommendation": _users,
    "click_prediction": _clicks,
}
