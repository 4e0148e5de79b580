"""Linear algebra and Fourier transforms, of matrices along batch axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.spmd.one_operation import Case, real


def _symmetric(*batch: int, dtype: Any = np.float64) -> np.ndarray:
    square = real(*batch, 3, 3, dtype=dtype)
    return square @ np.conj(np.swapaxes(square, -1, -2)) + 3 * np.eye(3)


def _of_one() -> list[Case]:
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("Cholesky", {}),
        ("MatrixInverse", {}),
        ("MatrixInverse", {"adjoint": True}),
        ("MatrixDeterminant", {}),
        ("LogMatrixDeterminant", {}),
        ("SelfAdjointEigV2", {}),
        ("Svd", {}),
        ("Svd", {"full_matrices": True}),
        ("Qr", {}),
        ("Qr", {"full_matrices": True}),
        ("Eig", {"Tout": tf.complex128}),
        ("Lu", {}),
        ("MatrixDiagPart", {}),
        ("MatrixDiag", {}),
    ]
    found = [Case(kind, (_symmetric(7, 14),), "01", attributes) for kind, attributes in kinds]
    wide = ("MatrixDiag",)
    found = [case if case.kind not in wide else Case("MatrixDiag", (real(7, 14, 7),), "01") for case in found]
    square = [("Cholesky", real(7, 7)), ("MatrixDeterminant", real(7, 7)), ("Qr", real(7, 14)), ("Svd", real(14, 7))]
    found += [Case(kind, (array @ array.T if kind == "Cholesky" else array,), "-") for kind, array in square]
    found += [
        Case("MatrixSquareRoot", (_symmetric(7, dtype=np.complex128),), "0"),
        Case("MatrixLogarithm", (_symmetric(7, dtype=np.complex128),), "0"),
    ]
    return [
        *found,
        Case("Svd", (_symmetric(7, 14),), "01", function=singular_values),
        Case("Eig", (_symmetric(7, 14),), "01", function=tf.linalg.eigvals),
        Case("SelfAdjointEigV2", (_symmetric(7, 14),), "01", function=tf.linalg.eigvalsh),
    ]


def singular_values(x: tf.Tensor) -> tf.Tensor:
    """Without vectors; TensorFlow leaves the memory of the operation's other results as it was then."""
    return tf.linalg.svd(x, compute_uv=False)


def _of_several() -> list[Case]:
    square = _symmetric(7, 14)
    return [
        Case("MatrixSolve", (square, real(7, 14, 3, 7)), "01 013"),
        Case("MatrixSolve", (square, real(7, 14, 3, 7)), "01 013", {"adjoint": True}),
        Case("MatrixTriangularSolve", (square, real(7, 14, 3, 7)), "01 013"),
        Case("MatrixTriangularSolve", (square, real(7, 14, 3, 2)), "01 01", {"lower": False, "adjoint": True}),
        Case("MatrixTriangularSolve", (_symmetric(1, 14), real(7, 1, 3, 2)), "1 0"),
        Case("MatrixTriangularSolve", (_symmetric(14), real(7, 14, 3, 2)), "0 01"),
        Case("MatrixTriangularSolve", (_symmetric(7, 14), real(14, 3, 2)), "01 0"),
        Case("MatrixSolveLs", (real(7, 4, 3), real(7, 4, 2), 0.1), "0 0"),
        Case("MatrixBandPart", (real(7, 14, 14), 1, -1), "0"),
        Case("MatrixSetDiag", (real(7, 14, 7), real(7, 7)), "0 0"),
        Case("MatrixSetDiagV3", (real(7, 14, 7), real(7, 7), 0), "0 0"),
        Case(
            "MatrixSetDiagV3",
            (real(7, 4, 4), real(7, 2, 4), [0, 1]),
            "0 0",
            {"align": "LEFT_RIGHT"},
            of_known_lengths=True,
        ),
        Case("MatrixDiagV3", (real(7, 14, 7), 0, -1, -1, 0.0), "01"),
        Case("MatrixDiagV3", (real(7, 14, 14), [-13, 0], 14, 14, 0.5), "0", of_known_lengths=True),
        Case("MatrixDiagV3", (real(7, 2, 3), [0, 1], -1, -1, 0.5), "0", {"align": "RIGHT_LEFT"}, of_known_lengths=True),
        Case("MatrixDiagPartV3", (real(7, 14, 7), 0, 0.0), "0"),
        Case("MatrixDiagPartV3", (real(7, 14, 7, 7), [-1, 1], 0.5), "01"),
        Case("TridiagonalSolve", (real(7, 3, 5) + 3, real(7, 5, 7)), "0 0"),
        Case("TridiagonalMatMul", (real(7, 1, 5), real(7, 1, 5), real(7, 1, 5), real(7, 5, 2)), "0 0 0 0"),
        Case("Cross", (real(7, 14, 3), real(7, 14, 3)), "01 01"),
    ]


def _transforms() -> list[Case]:
    numbers = real(7, 14, 7, dtype=np.complex128)
    found = [
        Case(kind, (numbers,), local)
        for kind, local in [
            ("FFT", "01"),
            ("IFFT", "01"),
            ("FFT2D", "0"),
            ("IFFT2D", "0"),
            ("FFT3D", "-"),
            ("IFFT3D", "-"),
        ]
    ]
    return [
        *found,
        Case("RFFT", (real(7, 14, 7), [7]), "01", {"Tcomplex": tf.complex128}),
        Case("RFFT", (real(7, 14, 7), [4]), "01", {"Tcomplex": tf.complex128}),
        Case("IRFFT", (numbers, [12]), "01", {"Treal": tf.float64}),
        Case("RFFT2D", (real(7, 14, 7), [14, 7]), "0", {"Tcomplex": tf.complex128}),
        Case("IRFFT2D", (numbers, [14, 12]), "0", {"Treal": tf.float64}),
        Case("RFFT3D", (real(7, 2, 14, 7), [2, 14, 7]), "0", {"Tcomplex": tf.complex128}),
        Case("IRFFT3D", (real(7, 2, 3, 3, dtype=np.complex128), [2, 3, 4]), "0", {"Treal": tf.float64}),
    ]


CASES = [*_of_one(), *_of_several(), *_transforms()]
