"""Slices, look-ups and sums by index."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.spmd.one_operation import Case, real, whole

# A specification as `x[...]` takes it, of an array [7, 3, 14], and the axes that stay cut.
_SLICES: list[tuple[Any, str]] = [
    (np.s_[:], "02"),
    (np.s_[:, 1], "02"),
    (np.s_[:, -1:], "02"),
    (np.s_[:, ::-1, :], "02"),
    (np.s_[0], "2"),
    (np.s_[1:], "2"),
    (np.s_[:-1], "2"),
    (np.s_[-7:], "02"),
    (np.s_[-6:], "2"),
    (np.s_[0:7], "02"),
    (np.s_[0:99], "02"),
    (np.s_[::-1], "2"),
    (np.s_[::2], "2"),
    (np.s_[:, :, 3:9], "0"),
    (np.s_[:, tf.newaxis], "02"),
    (np.s_[tf.newaxis, :, 0, tf.newaxis], "02"),
    (np.s_[:, 1, tf.newaxis, ::3], "0"),
    (np.s_[3, 1, :], "2"),
    (np.s_[..., 0], "0"),
    (np.s_[..., tf.newaxis], "02"),
    (np.s_[:, ..., 1:2], "0"),
    (np.s_[0, ..., 1:2], "-"),
]


def _sliced() -> list[Case]:
    found = []
    for specification, local in _SLICES:

        def taken(x: tf.Tensor, specification: Any = specification) -> tf.Tensor:
            return x[specification]

        def gradient(x: tf.Tensor, specification: Any = specification) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.square(x[specification]))
            return tape.gradient(loss, x)

        taken.__name__, gradient.__name__ = f"x[{_text(specification)}]", f"gradient of x[{_text(specification)}]"
        found.append(Case("StridedSlice", (real(7, 3, 14),), local, function=taken))
        found.append(Case("StridedSliceGrad", (real(7, 3, 14),), "", function=gradient))
    return found


def _text(specification: Any) -> str:
    parts = specification if isinstance(specification, tuple) else (specification,)
    return (
        ",".join(
            f"{one.start}:{one.stop}:{one.step}".replace("None", "") if isinstance(one, slice) else str(one)
            for one in parts
        )
        .replace("Ellipsis", "...")
        .replace("None", "new")
    )


def last_rows(x: tf.Tensor) -> tf.Tensor:
    """A slice that depends on the batch."""
    return x[: tf.shape(x)[0] - 2]


def to_the_end(x: tf.Tensor) -> tf.Tensor:
    """A slice of as many rows as there are."""
    return x[: tf.shape(x)[0]]


def _slices() -> list[Case]:
    masks = {"begin_mask": 0, "end_mask": 0, "ellipsis_mask": 0, "new_axis_mask": 0, "shrink_axis_mask": 0}
    return [
        Case("StridedSlice", (real(7, 14),), "1", function=last_rows),
        Case("StridedSlice", (real(7, 14),), "01", function=to_the_end),
        Case("Slice", (real(7, 3, 14), [0, 1, 0], [7, 2, 14]), "02"),
        Case("Slice", (real(7, 3, 14), [0, 1, 0], [-1, 2, -1]), "02"),
        Case("Slice", (real(7, 14), [1, 0], [-1, 14]), "1"),
        Case("Slice", (real(7, 14), [0, 0], [6, 7]), "-"),
        Case("StridedSliceGrad", ([7, 3, 14], [0, 1], [7, 2], [1, 1], real(7, 1, 14)), "02", masks),
        Case("StridedSliceGrad", ([14, 3, 14], [7, 1], [14, 2], [1, 1], real(7, 1, 14)), "2", masks),
        Case("StridedSliceGrad", ([7, 14], [-1], [-8], [-1], real(7, 14)), "1", masks),
        Case(
            "StridedSliceGrad",
            ([7, 14], [0, 0], [0, 0], [1, 1], real(1, 7, 14)),
            "12",
            masks | {"new_axis_mask": 1, "begin_mask": 2, "end_mask": 2},
        ),
    ]


def _gathered() -> list[Case]:
    rows, table = whole(0, 7, 14), real(7, 7, 14)
    return [
        Case("GatherV2", (table, rows, 0), "12 0"),
        Case("GatherV2", (table, whole(0, 7, 14, 7), 0), "12 01"),
        Case("GatherV2", (table, rows, 1), "02 0"),
        Case("GatherV2", (table, whole(0, 14, 7, 7), -1), "01 01"),
        Case("GatherV2", (table, whole(0, 7), 0), "12 -"),
        Case("GatherV2", (table, whole(0, 7, 7, 14), 1), "02 0", {"batch_dims": 1}),
        Case("GatherV2", (table, whole(0, 14, 7, 14), 2), "01 0", {"batch_dims": 1}),
        Case("GatherV2", (table, whole(0, 14, 7, 7), 2), "01 01", {"batch_dims": 2}),
        Case("GatherV2", (table, whole(0, 14, 7, 7), -1), "01 0", {"batch_dims": -1}),
        Case("GatherV2", (real(3, 7), whole(0, 3, 7), 0), "1 0"),
        Case("GatherNd", (table, whole(0, 7, 14, 2)), "2 0"),
        Case("GatherNd", (table, whole(0, 7, 7, 14, 1)), "12 01"),
        Case("GatherNd", (table, whole(0, 7, 7, 3)), "- 0"),
        Case("GatherNd", (table, whole(0, 9, 14, 2)), "2 0", {"bad_indices_policy": "IGNORE"}),
        *(Case("OneHot", (whole(-1, 9, 7, 14), 5, 2.0, -1.0), "01", {"axis": axis}) for axis in (-1, 0, 1, 2)),
        Case("OneHot", (whole(0, 9, 7), 7, True, False), "0"),
        Case("ReverseSequence", (real(7, 3), whole(1, 4, 7)), "0 0", {"seq_dim": 1, "batch_dim": 0}),
        Case("LowerBound", (np.sort(real(7, 5)), real(7, 14)), "0 01"),
        Case("UpperBound", (np.sort(real(1, 5)), real(1, 14)), "- 1"),
    ]


def _added() -> list[Case]:
    found = []
    for kind in ("Sum", "Max", "Min", "Prod"):
        found += [
            Case(f"UnsortedSegment{kind}", (real(7, 14, 7), whole(-1, 3, 7), 5), "012 0"),
            Case(f"UnsortedSegment{kind}", (real(7, 14, 7), whole(-1, 3, 7, 14), 5), "012 01"),
            Case(f"UnsortedSegment{kind}", (whole(-9, 9, 7, 3), whole(-1, 3, 7), 5), "0 0"),
        ]
    for kind in ("Sum", "Mean", "Max", "Min", "Prod"):
        found.append(Case(f"Segment{kind}", (real(7, 14), np.array([0, 0, 1, 1, 3, 3, 3])), "1 -"))
    for kind in ("Sum", "Mean", "SqrtN"):
        rows, ids = np.array([0, 3, 6, 2]), np.array([0, 0, 1, 3])
        found += [
            Case(f"SparseSegment{kind}", (real(7, 14), rows, ids), "1 - -"),
            Case(f"SparseSegment{kind}WithNumSegments", (real(7, 14), rows, ids, 5), "1 - -"),
            Case(f"SparseSegment{kind}Grad", (real(4, 14), rows, ids, 7), "1 - -"),
        ]
    for kind in ("Add", "Sub", "Update", "Max", "Min"):
        unique = np.array([[3], [0], [6], [1], [2], [5], [4]])
        found += [
            Case(f"TensorScatter{kind}", (real(14, 7), unique, real(7, 7)), "1 - 1"),
            Case(
                f"TensorScatter{kind}",
                (real(14, 3, 7), whole(0, 3, 2, 2) * 0 + np.eye(2, dtype=int), real(2, 7)),
                "2 - 1",
            ),
        ]
    return [
        *found,
        Case("UnsortedSegmentSum", (real(7, 3, dtype=np.float16), whole(-1, 3, 7), 5), "0 0"),
        Case("UnsortedSegmentSum", (real(7, 3, dtype=np.complex128), whole(0, 3, 7), 5), "0 0"),
        Case("ScatterNd", (whole(0, 5, 7, 1), real(7, 14), [5, 14]), "0 01"),
        Case("ScatterNd", (whole(0, 3, 7, 14, 2), real(7, 14, 7), [3, 3, 7]), "01 012"),
        Case("ScatterNd", (whole(0, 3, 7, 2), real(7), [3, 3]), "0 0"),
        Case("ScatterNd", (whole(0, 9, 7, 1), real(7, 3), [5, 3]), "0 0", {"bad_indices_policy": "IGNORE"}),
        Case("Bincount", (whole(0, 6, 14), 5, np.array([], np.float64)), "0 -"),
        Case("Bincount", (whole(0, 6, 7, 14), 5, real(7, 14)), "01 01"),
        Case("DenseBincount", (whole(0, 6, 14), 5, np.array([], np.float64)), "0 -", {"binary_output": False}),
        Case("DenseBincount", (whole(0, 6, 14), 5, np.array([], np.float64)), "- -", {"binary_output": True}),
        Case("DenseBincount", (whole(0, 6, 14), 5, real(14)), "0 0", {"binary_output": False}),
        Case("DenseBincount", (whole(0, 6, 7, 14), 5, real(7, 14)), "0 0", {"binary_output": False}),
        Case("DenseBincount", (whole(0, 6, 7, 14), 5, np.array([], np.float64)), "0 -", {"binary_output": True}),
        Case(
            "SparseTensorDenseMatMul",
            (np.array([[0, 1], [2, 6]]), real(2), np.array([3, 7]), real(7, 14)),
            "- - - 1",
        ),
        Case(
            "SparseTensorDenseMatMul",
            (np.array([[0, 1], [2, 6]]), real(2), np.array([3, 7]), real(14, 7)),
            "- - - 0",
            {"adjoint_b": True},
        ),
    ]


def _of_variables() -> list[Case]:
    table = tf.Variable(real(7, 3, 14))

    def rows(indices: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.ResourceGather(resource=table.handle, indices=indices, dtype=tf.float64)

    def by_row(indices: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.ResourceGather(resource=table.handle, indices=indices, dtype=tf.float64, batch_dims=1)

    def values(indices: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.ResourceGatherNd(resource=table.handle, indices=indices, dtype=tf.float64)

    return [
        Case("ResourceGather", (whole(0, 7, 14, 7),), "01", function=rows),
        Case("ResourceGather", (whole(0, 3, 7, 2),), "-", function=by_row),
        Case("ResourceGatherNd", (whole(0, 3, 14, 7, 2),), "01", function=values),
    ]


CASES = [*_sliced(), *_slices(), *_gathered(), *_added(), *_of_variables()]
