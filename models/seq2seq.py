"""`seq2seq`: a recurrent encoder and decoder with attention, for translation.

M.-T. Luong, H. Pham and C. D. Manning, "Effective approaches to attention-based neural machine translation", EMNLP
2015; with the GRU and the bidirectional encoder of D. Bahdanau, K. Cho and Y. Bengio, "Neural machine translation by
jointly learning to align and translate", ICLR 2015.

    source ── embed ── GRU both ways ──┬── states [B, S, units] ──┐
                                       └── last state             attention ── dense tanh ── logits [B, T, classes]
    target ── embed ──────────────────────── GRU [B, T, units] ───┘

It translates with a beam search, `beams`; with one beam that is greedy decoding.

Synopsis:

    >>> table = np.log(np.array([[0.1, 0.6, 0.3], [0.1, 0.3, 0.6]]))  # probabilities of 0 (end), 1 and 2 after 1 and 2
    >>> step = lambda tokens, states: (table[tokens - 1], states)
    >>> beams(step, {}, first=np.array([1]), end=0, length=2, width=3).tolist()
    [[1, 1]]
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
from keras import layers, ops

from tfdist.data.spec import END, START, DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Count, Factor, Fraction

States = dict[str, np.ndarray]
# From the last tokens [R] and the states, each [R, ...], to log probabilities [R, tokens] and new states.
Step = Callable[[np.ndarray, States], tuple[np.ndarray, States]]


def beams(step: Step, states: States, *, first: np.ndarray, end: int, length: int, width: int) -> np.ndarray:
    """Returns the most probable sequence of each of B searches, by its mean log probability per token.

    Args:
        step: one step of the model, for R = B * width sequences at once.
        states: the initial states of each search, each `[B, ...]`.
        first: the start token of each sequence, int `[B]`, which is not returned.
        end: the token that ends a sequence.
        length: the largest number of tokens in a sequence.
        width: the number of beams per search; 1 is greedy decoding.

    Returns:
        Tokens int32 `[B, L]`, L at most `length`, padded with `end`.
    """
    searches = len(first)
    states = {name: np.repeat(state, width, axis=0) for name, state in states.items()}
    tokens = np.repeat(first, width)
    sequences = np.zeros((searches, width, 0), np.int32)
    # All beams of a search start with the same token, so only the first beam is extended; else all would stay equal.
    scores = np.full((searches, width), -np.inf)
    scores[:, 0] = 0.0
    lengths = np.zeros((searches, width))
    ended = np.zeros((searches, width), bool)
    for _ in range(length):
        log_probabilities, states = step(tokens, states)
        count = log_probabilities.shape[-1]
        gains = log_probabilities.astype(np.float64).reshape(searches, width, count)
        gains[ended] = -np.inf  # an ended sequence is only extended by `end`, which does not change its score
        gains[ended, end] = 0.0
        candidates = (scores[..., None] + gains).reshape(searches, width * count)
        new_lengths = np.repeat(np.maximum(lengths + ~ended, 1), count, axis=1)
        best = _largest(candidates / new_lengths, width)
        beam, token = best // count, best % count
        scores = np.take_along_axis(candidates, best, axis=1)
        lengths = np.take_along_axis(lengths + ~ended, beam, axis=1)
        ended = np.take_along_axis(ended, beam, axis=1) | (token == end)
        sequences = np.concatenate([np.take_along_axis(sequences, beam[..., None], axis=1), token[..., None]], axis=2)
        rows = (np.arange(searches)[:, None] * width + beam).ravel()
        states = {name: state[rows] for name, state in states.items()}
        tokens = token.ravel()
        if ended.all():
            break
    return sequences[:, 0].astype(np.int32)


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """The indices of the `count` largest values per row in descending order of value, int `[rows, count]`."""
    if count < values.shape[1]:
        indices = np.argpartition(-values, count, axis=1)[:, :count]
    else:
        indices = np.tile(np.arange(values.shape[1]), (len(values), 1))
    order = np.argsort(-np.take_along_axis(values, indices, axis=1), axis=1, kind="stable")
    return np.take_along_axis(indices, order, axis=1)


TASKS = ("translation",)
# Rate and batch of the recipe `multi30k-seq2seq`.
TRAINING = Training("adam", learning_rate=1e-3, batch_size=64)


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


def can_translate(model: keras.Model) -> bool:
    """Whether `translate` can use a model, that is, whether it has the layers of `build`."""
    parts = {"encoder", "last_state", "target_words", "decoder", "attention", "attentional", "logits"}
    return parts <= {layer.name for layer in model.layers}


def translate(model: keras.Model, source: np.ndarray, *, length: int = 50, width: int = 1) -> np.ndarray:
    """Translates sentences with beam search.

    Args:
        model: a trained model from `build`.
        source: tokens, int `[B, S]`, padded with 0.
        length: the largest number of tokens in a translation, including the end token.
        width: the number of beams; 1 is greedy decoding.

    Returns:
        Tokens int32 `[B, L]`, padded with the end token.
    """
    encoder, decoder = _parts(model)
    states, state = encoder.predict_on_batch(source)

    def step(tokens: np.ndarray, current: States) -> tuple[np.ndarray, States]:
        inputs = [tokens[:, None].astype(np.int32), current["state"], current["states"], current["mask"]]
        log_probabilities, new_state = decoder.predict_on_batch(inputs)
        return log_probabilities, current | {"state": new_state}

    first = np.full(len(source), START, np.int32)
    initial = {"state": state, "states": states, "mask": np.asarray(source) != 0}
    return beams(step, initial, first=first, end=END, length=length, width=width)


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
