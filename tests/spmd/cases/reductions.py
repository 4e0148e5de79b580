"""Sums, means and the like, and what runs along an axis."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.spmd.one_operation import Case, between, real, truth, whole

_AXES = [0, 1, -1, [0, 2], [0, 1, 2], [-3, -1], []]
_NOT_FINITE = np.array([[np.nan, 1.0], [2.0, np.inf], [1.0, 2.0], [-np.inf, 0.0], [0.0, 1.0], [3.0, 1.0], [1.0, 1.0]])


def _reductions() -> list[Case]:
    found = []
    for axis in _AXES:
        for keep_dims in (False, True):
            found.append(Case("Sum", (real(7, 14, 7), axis), "012", {"keep_dims": keep_dims}))
    for kind in ("Mean", "Max", "Min", "Prod"):
        found += [
            Case(kind, (real(7, 14, 7), -2), "012", {"keep_dims": True}),
            Case(kind, (real(7, 14, 7), [0, 2]), "012"),
        ]
    for kind in ("Sum", "Max", "Min", "Prod"):
        found += [
            Case(kind, (whole(-3, 4, 7, 14, dtype=dtype), 0), "01")
            for dtype in (np.int32, np.int64, np.uint8, np.int8, np.uint16)
        ]
    for dtype in (np.float16, np.float32):
        found += [Case(kind, (real(7, 14, dtype=dtype), 0), "01") for kind in ("Sum", "Mean", "Max", "Min")]
    for kind in ("Sum", "Mean", "Max", "Min", "Prod"):
        found += [Case(kind, (_NOT_FINITE, axis), "0") for axis in (0, 1, [0, 1])]
    return [
        *found,
        Case("Sum", (real(70, 3, dtype=np.float16) * 100, 0), "0"),
        Case("Sum", (whole(2**30, 2**31 - 1, 7, 2), 0), "0"),
        Case("Prod", (whole(2**20, 2**31 - 1, 7, 2), 0), "0"),
        Case("Sum", (real(7, 0, 2), 0), "0"),
        Case("Max", (real(7, 0, 2), 1), "0"),
        Case("Sum", (real(7, 14, dtype=np.complex128), 0), "01"),
        Case("Mean", (real(7, 14, dtype=np.complex128), 0), "1"),
        Case("Prod", (real(7, 14, dtype=np.complex128), 0), "1"),
        Case("Mean", (whole(-9, 9, 7, 14), 0), "1"),
        Case("Mean", (whole(-9, 9, 7, 14, dtype=np.int64), [0, 1]), "-"),
        *(Case(kind, (truth(7, 14), axis), "01") for kind in ("All", "Any") for axis in (0, 1, [0, 1])),
        Case("EuclideanNorm", (real(7, 14), 1), "0", {"keep_dims": True}),
        Case("EuclideanNorm", (real(7, 14), 0), "1"),
        Case("L2Loss", (real(7, 14),), "01"),
        Case("L2Loss", (real(7, 14, dtype=np.float16),), "01"),
    ]


def _along() -> list[Case]:
    found = []
    for kind in ("Cumsum", "Cumprod"):
        for exclusive in (False, True):
            for reverse in (False, True):
                attributes = {"exclusive": exclusive, "reverse": reverse}
                found += [
                    Case(kind, (real(7, 14), 0), "1", attributes),
                    Case(kind, (real(7, 14), -1), "0", attributes),
                ]
    return [
        *found,
        Case("CumulativeLogsumexp", (real(7, 14), 0), "1"),
        Case("CumulativeLogsumexp", (real(7, 14), -1), "0", {"exclusive": True, "reverse": True}),
        Case("ReverseV2", (real(7, 14, 7), [1]), "02"),
        Case("ReverseV2", (real(7, 14, 7), [0, -1]), "1"),
        Case("ReverseV2", (real(7, 14, 7), np.empty(0, np.int32).tolist()), "012"),
        Case("Roll", (real(7, 14, 7), 2, 0), "12"),
        Case("Roll", (real(7, 14, 7), [2, -1], [0, -1]), "1"),
        # Axes that only the run tells are whole.
        Case("Cumsum", (real(7, 14), np.int32(0)), "- -"),
        Case("ReverseV2", (real(7, 14), np.array([0], np.int32)), "- -"),
        Case("Roll", (real(7, 14), np.int32(2), np.int32(0)), "- - -"),
        *(Case(kind, (real(7, 14, 7), axis), local) for kind in ("ArgMax", "ArgMin") for axis, local in _ARG),
        Case("ArgMax", (whole(0, 2, 7, 14), 1), "0", {"output_type": tf.int32}),
        Case("ArgMax", (_NOT_FINITE, 1), "0"),
        Case("TopKV2", (real(7, 14), 3), "0"),
        Case("TopKV2", (real(7, 14, 7), 7), "01", {"sorted": False}),
        Case("TopKV2", (real(7), 3), "-"),
        Case("NthElement", (real(7, 14), 3), "0"),
        Case("NthElement", (real(7, 7, 3), 1), "01", {"reverse": True}),
        Case("ReverseSequence", (real(7, 14, 7), whole(0, 14, 7)), "02 0", {"seq_dim": 1, "batch_dim": 0}),
        Case("ReverseSequence", (real(14, 3, 7), whole(0, 3, 7)), "02 0", {"seq_dim": 1, "batch_dim": 2}),
        Case("Softmax", (real(7, 14, 7),), "01"),
        Case("LogSoftmax", (real(7, 14),), "0"),
        Case("Softmax", (real(14),), "-"),
        Case("HistogramFixedWidth", (between(0, 1, 7, 14), [0.0, 1.0], 5), "01"),
    ]


_ARG = [(0, "12"), (-1, "01"), (1, "02")]
CASES = [*_reductions(), *_along()]
