"""Beam search, and the translation of sentences by every model of tfdist for translation; one beam is greedy decoding.

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

from tfdist.data.spec import END, START

States = dict[str, np.ndarray]
# From the last tokens [R] and the states, each [R, ...], to log probabilities [R, tokens] and new states.
Step = Callable[[np.ndarray, States], tuple[np.ndarray, States]]
# From a model and sentences [B, S] to a step of the decoder, and the states before it, each [B, ...].
Decoder = Callable[[keras.Model, np.ndarray], tuple[Step, States]]


def translate(decoder: Decoder, model: keras.Model, source: np.ndarray, *, length: int, width: int) -> np.ndarray:
    """Translates sentences with beam search; see `tfdist.models.translate`."""
    step, states = decoder(model, source)
    first = np.full(len(source), START, np.int32)
    return beams(step, states, first=first, end=END, length=length, width=width)


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
