"""`textcnn`: convolutions over word vectors, with max-pooling over the sentence.

Y. Kim, "Convolutional neural networks for sentence classification", EMNLP 2014, model CNN-rand.
"""

from __future__ import annotations

import keras
from keras import layers, ops

from tfdist.data.spec import PADDING, DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Count, Factor, Fraction

TASKS = ("text_classification",)
# The batch of the paper, section 3.1, with Adam instead of its Adadelta.
TRAINING = Training("adam", learning_rate=1e-3, batch_size=50)
WINDOWS = (3, 4, 5)


def build(
    spec: DataSpec, *, embedding: Count = 300, filters: Count = 100, dropout: Fraction = 0.5, width: Factor = 1.0
) -> keras.Model:
    """Embed; 100 filters per window of 3, 4 and 5 words, with ReLU and the maximum over the sentence; dropout; dense.

    300 parameters per word, 360,300 in the filters, 301 per class. The vectors are initialized at random. Windows are
    centred on the words of the sentence, so that padding has no effect; the paper's windows also cover padding. The
    paper's limit on the norm of the last layer's weights is left out.

    Input: tokens `[B, length]` of any length, padded with 0. Output: logits `[B, spec.classes]`, float32 under every
    dtype policy.

    Args:
        spec: the spec of the dataset.
        embedding: the length of a word vector.
        filters: the number of filters per window size.
        dropout: the fraction of features that are dropped in training, in [0, 1).
        width: a factor on `embedding` and `filters`.
    """
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    words = layers.Embedding(spec.vocabulary_size, _fit.scaled(embedding, width), name="words")(tokens)
    mask = ops.expand_dims(ops.cast(ops.not_equal(tokens, PADDING), words.dtype), -1)
    maxima = []
    for window in WINDOWS:
        values = layers.Conv1D(_fit.scaled(filters, width), window, padding="same", activation="relu")(words * mask)
        # Padding gets the value 0, which never exceeds a value after a ReLU.
        maxima.append(ops.max(values * mask, axis=1))
    features = layers.Dropout(dropout)(layers.Concatenate()(maxima))
    return keras.Model(tokens, layers.Dense(spec.classes, dtype="float32", name="logits")(features), name="textcnn")
