"""`seq2seq`: a recurrent encoder and decoder with attention, for translation.

M.-T. Luong, H. Pham and C. D. Manning, "Effective approaches to attention-based neural machine translation", EMNLP
2015; with the GRU and the bidirectional encoder of D. Bahdanau, K. Cho and Y. Bengio, "Neural machine translation by
jointly learning to align and translate", ICLR 2015.

    source ── embed ── GRU both ways ──┬── states [B, S, units] ──┐
                                       └── last state             attention ── dense tanh ── logits [B, T, classes]
    target ── embed ──────────────────────── GRU [B, T, units] ───┘
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

from tfdist.data.spec import DataSpec
from tfdist.models import _fit
from tfdist.models._decoding import States, Step
from tfdist.models._training import Training
from tfdist.options import Count, Factor, Fraction

TASKS = ("translation",)
# Rate and batch of the recipe `multi30k-seq2seq`.
TRAINING = Training("adam", learning_rate=1e-3, batch_size=64)
# The layers that `decoder` uses.
PARTS = {"encoder", "last_state", "target_words", "decoder", "attention", "attentional", "logits"}


def build(
    spec: DataSpec, *, embedding: Count = 256, units: Count = 256, dropout: Fraction = 0.3, width: Factor = 1.0
) -> keras.Model:
    """A bidirectional GRU, a GRU that starts from its last state, dot-product attention, dense tanh, dense.

    256 parameters per word of each language, 0.69 million in the GRUs, 131,329 in the attention, 257 per target word.
    Attention comes after the decoder's GRU, as in Luong's paper, but its result is not an input of the next step.

    Input: a dict of `source` `[B, S]`, tokens padded with 0, and `target` `[B, T]`, the start token and the sentence
    (teacher forcing). Output: logits `[B, T, spec.classes]` of the sentence and the end token, float32 under every
    dtype policy.

    Args:
        spec: the spec of the dataset.
        embedding: the length of a word vector.
        units: the units of the decoder; each direction of the encoder has half of them.
        dropout: the fraction of values that are dropped in training, in [0, 1).
        width: a factor on `embedding` and `units`.
    """
    size, half = _fit.scaled(embedding, width), _fit.scaled(units, width / 2)
    source = keras.Input((None,), dtype="int32", name="source")
    target = keras.Input((None,), dtype="int32", name="target")
    # With Keras' default, which is twenty times smaller, attention learns nothing for thousands of steps.
    vectors = keras.initializers.RandomNormal(stddev=1.0)
    words = layers.Embedding(
        spec.vocabulary_size, size, embeddings_initializer=vectors, mask_zero=True, name="source_words"
    )(source)
    gru = layers.GRU(half, return_sequences=True, return_state=True)
    states, *last = layers.Bidirectional(gru, name="encoder")(layers.Dropout(dropout)(words))
    state = layers.Concatenate(name="last_state")(last)

    words = layers.Embedding(spec.classes, size, embeddings_initializer=vectors.clone(), name="target_words")(target)
    decoder = layers.GRU(2 * half, return_sequences=True, return_state=True, name="decoder")
    decoded, _ = decoder(layers.Dropout(dropout)(words), initial_state=state)
    context = layers.Attention(use_scale=True, name="attention")([decoded, states])
    attentional = layers.Dense(2 * half, activation="tanh", name="attentional")(
        layers.Concatenate()([context, decoded])
    )
    logits = layers.Dense(spec.classes, dtype="float32", name="logits")(layers.Dropout(dropout)(attentional))
    return keras.Model({"source": source, "target": target}, logits, name="seq2seq")


def decoder(model: keras.Model, source: np.ndarray) -> tuple[Step, States]:
    """One step of the decoder, and its states before the first token, for sentences `source` int `[B, S]`."""
    encoder, one_step = _parts(model)
    states, state = encoder.predict_on_batch(source)

    def step(tokens: np.ndarray, current: States) -> tuple[np.ndarray, States]:
        inputs = [tokens[:, None].astype(np.int32), current["state"], current["states"], current["mask"]]
        log_probabilities, new_state = one_step.predict_on_batch(inputs)
        return log_probabilities, current | {"state": new_state}

    return step, {"state": state, "states": states, "mask": np.asarray(source) != 0}


def _parts(model: keras.Model) -> tuple[keras.Model, keras.Model]:
    """The encoder, from tokens to all states and the last state, and a decoder step, to log probabilities and state."""
    states, *_ = model.get_layer("encoder").output
    last = model.get_layer("last_state").output
    encoder = keras.Model(model.input["source"], [states, last])

    token = keras.Input((1,), dtype="int32")
    state = keras.Input(last.shape[1:], dtype=last.dtype)
    states = keras.Input(states.shape[1:], dtype=states.dtype)
    mask = keras.Input((None,), dtype="bool")
    decoded, new_state = model.get_layer("decoder")(model.get_layer("target_words")(token), initial_state=state)
    context = model.get_layer("attention")([decoded, states], mask=[None, mask])
    attentional = model.get_layer("attentional")(ops.concatenate([context, decoded], axis=-1))
    log_probabilities = ops.log_softmax(model.get_layer("logits")(attentional)[:, 0])
    return encoder, keras.Model([token, state, states, mask], [log_probabilities, new_state])
