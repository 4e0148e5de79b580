"""`bilstm`: a bidirectional LSTM.

A. Graves and J. Schmidhuber, "Framewise phoneme classification with bidirectional LSTM and other neural network
architectures", Neural Networks, 2005.
"""

from __future__ import annotations

import keras
from keras import layers

from tfdist.data.spec import DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Count, Factor, Fraction

TASKS = ("text_classification",)
# Keras' usual rate of Adam, at the batch of Keras' example "Bidirectional LSTM on IMDB".
TRAINING = Training("adam", learning_rate=1e-3, batch_size=32)


def build(
    spec: DataSpec, *, embedding: Count = 128, units: Count = 64, dropout: Fraction = 0.5, width: Factor = 1.0
) -> keras.Model:
    """Embed, a bidirectional LSTM, dropout, dense on the last states of both directions.

    128 parameters per word, 98,816 in the LSTM, 129 per class. The paper labels each step; here the whole text has a
    single label. Both directions skip padding.

    Input: tokens `[B, length]` of any length, padded with 0. Output: logits `[B, spec.classes]`, float32 under every
    dtype policy.

    Args:
        spec: the spec of the dataset.
        embedding: the length of a word vector.
        units: the units of each direction.
        dropout: the fraction of features that are dropped in training before and after the LSTM, in [0, 1).
        width: a factor on `embedding` and `units`.
    """
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    size = _fit.scaled(embedding, width)
    words = layers.Embedding(spec.vocabulary_size, size, mask_zero=True, name="words")(tokens)
    lstm = layers.LSTM(_fit.scaled(units, width))
    states = layers.Bidirectional(lstm)(layers.Dropout(dropout)(words))
    logits = layers.Dense(spec.classes, dtype="float32", name="logits")(layers.Dropout(dropout)(states))
    return keras.Model(tokens, logits, name="bilstm")
