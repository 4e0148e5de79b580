"""Beam search for the likeliest sequences of an autoregressive model; greedy decoding with one beam.

Synopsis:

    >>> after = np.log(np.array([[0.1, 0.6, 0.3], [0.1, 0.3, 0.6]]))  # token 0 ends; 1 and 2 depend on the token before
    >>> step = lambda tokens, states: (after[tokens - 1], states)
    >>> beams(step, {}, first=np.array([1]), end=0, length=2, width=3).tolist()
    [[1, 1]]
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

States = dict[str, np.ndarray]
# From the last tokens [R] and the states, each [R, ...], to log probabilities [R, tokens] and new states.
Step = Callable[[np.ndarray, States], tuple[np.ndarray, States]]


def beams(step: Step, states: States, *, first: np.ndarray, end: int, length: int, width: int) -> np.ndarray:
    """The likeliest sequence of each of B searches, by its mean log probability per token.

    Args:
        step: one step of the model, for R = B * width sequences at once.
        states: the initial states of each search, each `[B, ...]`.
        first: the token before the first one, int `[B]`.
        end: the token that ends a sequence.
        length: the largest number of tokens in a sequence.
        width: the number of beams per search; 1 is greedy decoding.

    Returns:
        int32 `[B, L]`, L at most `length`: tokens, filled up with `end`.
    """
    searches = len(first)
    states = {name: np.repeat(state, width, axis=0) for name, state in states.items()}
    tokens = np.repeat(first, width)
    found = np.zeros((searches, width, 0), np.int32)
    # All beams of a search begin equally, so only the first one is extended; otherwise they would stay equal.
    scores = np.full((searches, width), -np.inf)
    scores[:, 0] = 0.0
    lengths = np.zeros((searches, width))
    ended = np.zeros((searches, width), bool)
    for _ in range(length):
        log_probabilities, states = step(tokens, states)
        count = log_probabilities.shape[-1]
        more = log_probabilities.astype(np.float64).reshape(searches, width, count)
        more[ended] = -np.inf  # a sequence that has ended stays unchanged, at no cost
        more[ended, end] = 0.0
        candidates = (scores[..., None] + more).reshape(searches, width * count)
        longer = np.repeat(np.maximum(lengths + ~ended, 1), count, axis=1)
        best = _largest(candidates / longer, width)
        beam, token = best // count, best % count
        scores = np.take_along_axis(candidates, best, axis=1)
        lengths = np.take_along_axis(lengths + ~ended, beam, axis=1)
        ended = np.take_along_axis(ended, beam, axis=1) | (token == end)
        found = np.concatenate([np.take_along_axis(found, beam[..., None], axis=1), token[..., None]], axis=2)
        rows = (np.arange(searches)[:, None] * width + beam).ravel()
        states = {name: state[rows] for name, state in states.items()}
        tokens = token.ravel()
        if ended.all():
            break
    return found[:, 0].astype(np.int32)


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """The indices of the `count` largest values of each row, the largest first: int `[rows, count]`."""
    if count < values.shape[1]:
        found = np.argpartition(-values, count, axis=1)[:, :count]
    else:
        found = np.tile(np.arange(values.shape[1]), (len(values), 1))
    order = np.argsort(-np.take_along_axis(values, found, axis=1), axis=1, kind="stable")
    return np.take_along_axis(found, order, axis=1)
