"""Masked language modelling: the words of each example that a model predicts from the others.

Each word is chosen with a probability of 15 %. Of the chosen words, 80 % are replaced by the mask token and 10 % by a
random word, and 10 % stay (J. Devlin and others, "BERT", NAACL 2019, section 3.1). The draws depend on (seed, epoch,
example) only, as those of an augmentation: an example has the same masks on any replica, in any batch, and after a run
is resumed. Validation and test have the same masks in every epoch.

Synopsis:

    >>> texts = DataSpec("mine", "text_classification", (4,), 2, {"train": 8}, vocabulary_size=9)
    >>> changes, shift = facts(texts)
    >>> changes["vocabulary_size"], shift  # one more, the mask
    (10, 0)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.data.input import order
from tfdist.data.input.arrays import Arrays
from tfdist.data.spec import PADDING, DataSpec
from tfdist.errors import UsageError

if TYPE_CHECKING:
    import tensorflow as tf

CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1
# In place of the targets that are not predicted.
NOT_CHOSEN = -1
PADDING_TOKEN, MASK_TOKEN = "<padding>", "<mask>"
_STREAM = 3  # [seed, epoch, 3] seeds the masks of an epoch; 1 and 2 seed its augmentation and blocks


def facts(spec: DataSpec) -> tuple[dict[str, Any], int]:
    """The changes of the spec of a text dataset for masked language modelling, and what is added to its tokens.

    The vocabulary gets a last token, the mask, and for a text without padding a first token, the padding, unless it has
    them: the vocabulary in the folder of a run has them.

    Raises:
        UsageError: the examples are not texts.
    """
    if spec.task not in ("text_classification", "characters"):
        raise UsageError(
            f"The dataset `{spec.name}` is for {spec.task.replace('_', ' ')}, and has no texts of which words can be "
            "masked",
            "use a dataset for text classification, or `characters`",
        )
    names = spec.vocabulary
    padded = names[0] == PADDING_TOKEN if names else spec.task == "text_classification"
    before, after = int(not padded), int(names[-1:] != (MASK_TOKEN,))
    size = before + spec.vocabulary_size + after
    vocabulary = ((PADDING_TOKEN,) * before + names + (MASK_TOKEN,) * after) if names else ()
    changes = {
        "task": "masked_lm",
        "classes": size,
        "class_names": (),
        "target_shape": spec.input_shape,
        "vocabulary_size": size,
        "ignored_class": NOT_CHOSEN,
        "vocabulary": vocabulary,
        "target_vocabulary": (),
    }
    return changes, before


def without_special_tokens(vocabulary: tuple[str, ...]) -> tuple[str, ...]:
    """The tokens of a text without padding, from the vocabulary of a run, which may be of masked language modelling."""
    return vocabulary[vocabulary[0] == PADDING_TOKEN : len(vocabulary) - (vocabulary[-1] == MASK_TOKEN)]


def texts_alone(arrays: Arrays, shift: int) -> Arrays:
    """Examples of a text dataset without their targets, each its own target; `shift` is added to the tokens."""
    tokens = np.add(arrays[0], shift, dtype=np.int32)
    return tokens, tokens


@dataclass(frozen=True)
class Masked:
    """A `Transform` that masks words in x, and leaves in y only the words that were chosen.

    Attributes:
        spec: the spec of the dataset, whose last token is the mask.
        seed: with the epoch, determines the draws.
        each_epoch: whether each epoch has its own masks.
    """

    spec: DataSpec
    seed: int
    each_epoch: bool

    def extras(self, epoch: int, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        """Two random numbers per word: float32 `[n, 2 * length]`."""
        key = [self.seed, epoch if self.each_epoch else 0, _STREAM]
        return (order.uniform(indices, 2 * self.spec.input_shape[0], key),)

    def __call__(self, data: tuple[Any, Any], draws: tf.Tensor) -> tuple[Any, Any]:
        import tensorflow as tf

        _, words = data
        choice, kind = tf.split(draws, 2, axis=1)
        chosen = (words != PADDING) & (choice < CHOSEN)
        mask = self.spec.vocabulary_size - 1
        # The words between padding and mask are equally probable.
        place = tf.cast((kind - MASKED) / REPLACED * (mask - 1), tf.int32)
        replaced = tf.where(kind < MASKED + REPLACED, 1 + tf.clip_by_value(place, 0, mask - 2), words)
        x = tf.where(chosen, tf.where(kind < MASKED, mask, replaced), words)
        return x, tf.where(chosen, words, NOT_CHOSEN)
