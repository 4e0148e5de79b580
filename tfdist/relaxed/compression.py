"""Arrays of float32 in fewer bytes: each process encodes its own, and decodes those of all.

    bf16, fp16      2 bytes a number, rounded to 8 or 11 bits
    int8            1 byte a number, and 4 for each block: a whole number of 127ths of the block's largest

What rounding has lost can be added to what is sent next (error feedback: Seide et al., 1-bit stochastic gradient
descent, Interspeech 2014; Karimireddy et al., Error feedback fixes SignSGD, ICML 2019).

Synopsis:

    >>> sent = encode("int8", np.array([1.0, -0.5, 0.004], np.float32))
    >>> len(sent), [round(float(number), 3) for number in decode("int8", sent, 3)]
    (7, [1.0, -0.504, 0.008])
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

NAMES = ("none", "bf16", "fp16", "int8")
BLOCK = 1024  # numbers that share a scale
_TYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}


def encode(name: str, values: np.ndarray) -> bytes:
    """`values`, float32 `[n]`, as bytes."""
    if name in _TYPES:
        return values.astype(_TYPES[name]).tobytes()
    blocks = _blocks(values)
    scales = (np.abs(blocks).max(axis=1, keepdims=True, initial=0) / 127).astype(np.float32)
    steps = np.rint(np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales > 0))
    return scales.tobytes() + steps.astype(np.int8).reshape(-1)[: len(values)].tobytes()


def decode(name: str, sent: bytes, size: int) -> np.ndarray:
    """The values that `encode` was given, rounded: float32 `[size]`."""
    if name in _TYPES:
        return np.frombuffer(sent, _TYPES[name]).astype(np.float32)
    count = -(-size // BLOCK)
    scales = np.frombuffer(sent, np.float32, count)[:, np.newaxis]
    steps = _blocks(np.frombuffer(sent, np.int8, size, offset=scales.nbytes).astype(np.float32))
    return (steps * scales).reshape(-1)[:size]


def _blocks(values: np.ndarray) -> np.ndarray:
    return np.pad(values, (0, -len(values) % BLOCK)).reshape(-1, BLOCK)
