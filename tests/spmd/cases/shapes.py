"""Operations that change shapes, join values and take them apart."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.spmd.one_operation import Case, real, whole


def _reshape() -> list[Case]:
    forms = [
        ((7, 14), [98], "01"),
        ((7, 3, 14), [21, 14], "02"),
        ((7, 3, 14), [-1, 14], "02"),
        ((7, 3, 14), [7, -1], "02"),
        ((7, 3, 14), [7, 42], "02"),
        ((7, 3, 14), [3, 7, 14], "2"),
        ((3, 14, 2), [3, 2, 7, 2], "-"),
        ((3, 14, 2), [3, 7, 4], "1"),
        ((3, 14), [42], "1"),
        ((14, 2), [2, 7, 2], "-"),
        ((14, 2), [7, 4], "0"),
        ((2, 3, 7), [6, 7], "2"),
        ((7, 4), [7, 1, 2, 1, 2], "0"),
        ((7,), [7, 1], "0"),
        ((7,), [1, 7], "0"),
        ((7, 1, 1), [7], "0"),
        ((7, 0), [0, 7], "0"),
        ((7, 0), [7, 0, 3], "0"),
        ((0, 7), [0, 14], "-"),
    ]
    return [Case("Reshape", (real(*shape), target), local) for shape, target, local in forms]


def _other() -> list[Case]:
    return [
        Case("Transpose", (real(7, 3, 14), [2, 0, 1]), "02"),
        Case("Transpose", (real(7, 14), [1, 0]), "01"),
        Case("ConjugateTranspose", (real(7, 14, dtype=np.complex128), [1, 0]), "01"),
        *(Case("ExpandDims", (real(7, 14), axis), "01") for axis in (0, 1, 2, -1, -2, -3)),
        Case("Squeeze", (real(7, 1, 14, 1),), "02", {"squeeze_dims": []}),
        Case("Squeeze", (real(7, 1, 14, 1),), "02", {"squeeze_dims": [1]}),
        Case("Squeeze", (real(1, 7, 14, 1),), "12", {"squeeze_dims": [-1, 0]}),
        Case("Squeeze", (real(7, 14),), "-", {"squeeze_dims": []}),
        Case("BroadcastTo", (real(7, 1, 14), [3, 7, 2, 14]), "02"),
        Case("BroadcastTo", (real(7, 14), [7, 14]), "01"),
        Case("BroadcastTo", (real(1), [7]), "-"),
        Case("Tile", (real(7, 3, 14), [1, 2, 1]), "02"),
        Case("Tile", (real(7, 14), [2, 3]), "01"),
        Case("Tile", (real(7, 14), [0, 1]), "1"),
        Case("Pad", (real(7, 3, 14), [[0, 0], [1, 2], [0, 0]]), "02"),
        Case("Pad", (real(7, 14), [[1, 0], [0, 0]]), "1"),
        Case("PadV2", (real(7, 14), [[0, 0], [1, 1]], 3.5), "0"),
        Case("MirrorPad", (real(7, 14), [[0, 0], [1, 1]]), "0", {"mode": "REFLECT"}),
        Case("MirrorPad", (real(7, 14), [[2, 1], [0, 0]]), "1", {"mode": "SYMMETRIC"}),
        Case("MirrorPadGrad", (real(7, 14), [[0, 0], [1, 1]]), "0", {"mode": "REFLECT"}),
        Case("SpaceToBatchND", (real(7, 4, 6, 7), [2, 3], [[0, 0], [0, 0]]), "03"),
        Case("SpaceToBatchND", (real(7, 3, 7), [2], [[1, 0]]), "02"),
        Case("BatchToSpaceND", (real(14, 3, 7), [2], [[1, 0]]), "2"),
        Case("BatchToSpaceND", (real(42, 2, 2, 7), [2, 3], [[0, 0], [0, 0]]), "3"),
        Case("BatchToSpaceND", (real(7, 2, 2, 7), [1, 1], [[0, 0], [0, 0]]), "03"),
        Case("Shape", (real(7, 3),), "0", {"out_type": tf.int64}),
        Case("Size", (real(7, 3),), "0"),
    ]


def _joined() -> list[Case]:
    three = [real(7, 14), real(7, 14), real(7, 14)]
    found = [Case("Pack", (three,), "01 01 01", {"axis": axis}) for axis in (0, 1, 2, -1)]
    found += [Case("Unpack", (real(7, 3, 14),), "02", {"axis": axis, "num": 3}) for axis in (1, -2)]
    return [
        *found,
        Case("Unpack", (real(7, 2),), "-", {"axis": 0, "num": 7}),
        Case("Pack", ([real(), real()],), "- -", {"axis": 0}),
        Case("ConcatV2", (three, 0), "1 1 1"),
        Case("ConcatV2", (three, -1), "0 0 0"),
        Case("ConcatV2", ([real(7, 2), real(7, 3)], 1), "0 0"),
        Case("ConcatV2", ([real(7, 2), real(14, 2)], 0), "- -"),
        Case("ConcatV2", ([real(7, 2), real(3, 2)], 0), "- -"),
        Case("Split", (1, real(7, 14)), "0", {"num_split": 2}),
        Case("Split", (-2, real(14, 7)), "1", {"num_split": 2}),
        Case("SplitV", (real(7, 14), [3, 4, -1], 1), "0", {"num_split": 3}),
        Case("SplitV", (real(7, 14), [3, 4], 0), "1", {"num_split": 2}),
        Case("ConcatV2", ([whole(0, 9, 7, 14), whole(0, 9, 7, 7)], 1), "0 0"),
    ]


def rotated(x: tf.Tensor) -> tf.Tensor:
    """Two halves of which the second comes first."""
    return tf.concat(tf.split(tf.concat([x, x + 1.0], 0), 2)[::-1], 0)


def read_lengths(x: tf.Tensor) -> tf.Tensor:
    """Shapes that are computed from others."""
    batch, length, width = tf.unstack(tf.shape(x))
    flat = tf.reshape(x, [batch * length, width])
    return tf.reshape(tf.tanh(flat), [batch, length, width])


def inferred(x: tf.Tensor) -> tf.Tensor:
    """A length of -1 beside one that is read."""
    flat = tf.reshape(x, tf.stack([-1, tf.shape(x)[-1]]))
    return tf.reshape(flat * 2.0, tf.concat([tf.shape(x)[:-1], [-1]], 0))


CASES = [
    *_reshape(),
    *_other(),
    *_joined(),
    Case("Reshape", (real(7, 3, 14),), "02", function=read_lengths),
    Case("Reshape", (real(7, 3, 14),), "02", function=inferred),
    Case("ConcatV2", (real(7, 3),), "0", function=rotated),
]
