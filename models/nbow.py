"""`nbow`: the neural bag of words, an average of word vectors.

N. Kalchbrenner, E. Grefenstette and P. Blunsom, "A convolutional neural network for modelling sentences", ACL 2014; as
M. Iyyer, V. Manjunatha, J. Boyd-Graber and H. Daumé III, "Deep unordered composition rivals syntactic methods for text
classification", ACL 2015, train it.
"""

from __future__ import annotations

import keras
from keras import layers, ops

from tfdist.data.spec import PADDING, DataSpec
from tfdist.models import _fit
from tfdist.options import Count, CountOrZero, Factor, Share

TASKS = ("text_classification",)
# The rare rows of a large table need Adagrad's large steps, and its update is as sparse as their gradient.
TRAINING = {"optimizer": "adagrad", "learning_rate": 0.5}


def build(
    spec: DataSpec, *, embedding: Count = 300, rows: CountOrZero = 0, dropout: Share = 0.3, width: Factor = 1.0
) -> keras.Model:
    """Embed, average over the words, dense.

    One word vector for each token of the vocabulary: 300 parameters a word. Whole words are dropped in training, as
    Iyyer's deep averaging network does. The vectors start at random, and padding has no part in the average.

    Input: tokens `[B, length]` of any length, padded with 0. Output: logits `[B, spec.classes]`, float32 under every
    dtype policy.

    Args:
        spec: the facts about the dataset.
        embedding: numbers in a word vector.
        rows: word vectors; the vocabulary's size where it is larger. More than that measure a large table.
        dropout: the share of words dropped in training, in [0, 1).
        width: a factor on `embedding`.
    """
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    size = _fit.scaled(embedding, width)
    words = layers.Embedding(max(rows, spec.vocabulary_size), size, name="words")(tokens)
    words = layers.Dropout(dropout, noise_shape=(None, None, 1))(words)
    there = ops.expand_dims(ops.cast(ops.not_equal(tokens, PADDING), words.dtype), -1)
    # A text without words has the average 0, not 0/0.
    average = ops.sum(words * there, axis=1) / ops.maximum(ops.sum(there, axis=1), 1)
    return keras.Model(tokens, layers.Dense(spec.classes, dtype="float32", name="logits")(average), name="nbow")
