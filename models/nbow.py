"""`nbow`: the neural bag of words, an average of word vectors.

N. Kalchbrenner, E. Grefenstette and P. Blunsom, "A convolutional neural network for modelling sentences", ACL 2014;
trained as in M. Iyyer, V. Manjunatha, J. Boyd-Graber and H. Daumé III, "Deep unordered composition rivals syntactic
methods for text classification", ACL 2015.
"""

from __future__ import annotations

import keras
from keras import layers, ops

from tfdist.data.spec import PADDING, DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Count, CountOrZero, Factor, Fraction

TASKS = ("text_classification",)
# Adagrad, because rare rows of a large table need large steps, and its update is as sparse as the gradient. Rate and
# batch of the recipe `mr-nbow`.
TRAINING = Training("adagrad", learning_rate=0.5, batch_size=32)


def build(
    spec: DataSpec, *, embedding: Count = 300, rows: CountOrZero = 0, dropout: Fraction = 0.3, width: Factor = 1.0
) -> keras.Model:
    """Embed, average over the words, dense.

    One word vector per token of the vocabulary: 300 parameters per word. Whole words are dropped in training, as in
    Iyyer's deep averaging network. The vectors are initialized at random, and the average ignores padding.

    Input: tokens `[B, length]` of any length, padded with 0. Output: logits `[B, spec.classes]`, float32 under every
    dtype policy.

    Args:
        spec: the spec of the dataset.
        embedding: the length of a word vector.
        rows: the number of word vectors, at least the size of the vocabulary; larger numbers are for benchmarks.
        dropout: the fraction of words that are dropped in training, in [0, 1).
        width: a factor on `embedding`.
    """
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    size = _fit.scaled(embedding, width)
    words = layers.Embedding(max(rows, spec.vocabulary_size), size, name="words")(tokens)
    words = layers.Dropout(dropout, noise_shape=(None, None, 1))(words)
    mask = ops.expand_dims(ops.cast(ops.not_equal(tokens, PADDING), words.dtype), -1)
    # A text without words has the average 0, not 0/0.
    average = ops.sum(words * mask, axis=1) / ops.maximum(ops.sum(mask, axis=1), 1)
    return keras.Model(tokens, layers.Dense(spec.classes, dtype="float32", name="logits")(average), name="nbow")
