"""Products of matrices and of tensors."""

from __future__ import annotations

import numpy as np

from tests.spmd.one_operation import Case, real, whole

_M, _K, _N = 7, 14, 7


def _matmul() -> list[Case]:
    found = []
    for transpose_a in (False, True):
        for transpose_b in (False, True):
            a = real(_K, _M) if transpose_a else real(_M, _K)
            b = real(_N, _K) if transpose_b else real(_K, _N)
            found.append(Case("MatMul", (a, b), "01 01", {"transpose_a": transpose_a, "transpose_b": transpose_b}))
    a, b = real(7, 14, dtype=np.complex128), real(14, 7, dtype=np.complex128)
    return [
        *found,
        Case("MatMul", (real(7, 3), real(3, 5)), "0 -"),
        Case("MatMul", (whole(-9, 9, 7, 14), whole(-9, 9, 14, 7)), "01 01"),
        Case("MatMul", (whole(2**20, 2**30, 7, 14), whole(2**20, 2**30, 14, 7)), "01 01"),
        Case("MatMul", (a, b), "01 01"),
        Case("MatMul", (real(7, 14, dtype=np.float16), real(14, 7, dtype=np.float16)), "01 01"),
        Case("MatMul", (real(7, 14, dtype=np.float32), real(14, 7, dtype=np.float32)), "01 01"),
        Case("SparseMatMul", (real(7, 14, dtype=np.float32), real(14, 7, dtype=np.float32)), "- -"),
    ]


def _batches() -> list[Case]:
    forms = [
        ((7, 7, 14), (7, 14, 7), "012 012"),
        ((7, 2, 3), (3, 4), "0 -"),
        ((2, 3), (7, 3, 4), "- 0"),
        ((7, 1, 2, 3), (1, 7, 3, 4), "0 1"),
        ((7, 1, 2, 3), (7, 7, 3, 4), "0 01"),
        ((7, 2, 3), (14, 7, 3, 4), "0 01"),
        ((1, 2, 14), (7, 14, 4), "2 01"),
        ((7, 3), (3, 14), "0 1"),
        ((14, 2, 3), (14, 3, 2), "0 0"),
    ]
    found = [Case("BatchMatMulV2", (real(*a), real(*b)), local) for a, b, local in forms]
    for adj_x in (False, True):
        for adj_y in (False, True):
            a = real(7, 14, 7, dtype=np.complex128) if adj_x else real(7, 7, 14, dtype=np.complex128)
            b = real(7, 7, 14, dtype=np.complex128) if adj_y else real(7, 14, 7, dtype=np.complex128)
            found.append(Case("BatchMatMulV2", (a, b), "012 012", {"adj_x": adj_x, "adj_y": adj_y}))
    return [
        *found,
        Case("BatchMatMul", (real(7, 2, 14), real(7, 14, 3)), "02 01"),
        Case("BatchMatMulV3", (real(7, 2, 14), real(7, 14, 3)), "02 01", {"Tout": np.float64}),
        Case("BatchMatMulV2", (real(7, 2, 14, dtype=np.float16), real(7, 14, 3, dtype=np.float16)), "02 01"),
        Case("BatchMatMulV2", (whole(-9, 9, 7, 2, 14), whole(-9, 9, 7, 14, 3)), "02 01"),
    ]


def _einsum() -> list[Case]:
    forms = [
        ("ij,jk->ik", (7, 14), (14, 7), "01 01"),
        ("ij,jk->", (7, 14), (14, 7), "01 01"),
        ("ij,kj->jik", (7, 14), (7, 14), "01 01"),
        ("bij,bjk->bik", (7, 3, 14), (7, 14, 3), "02 01"),
        ("aecd,abcd->acbe", (7, 3, 7, 2), (7, 5, 7, 2), "02 02"),
        ("abc,cde->abde", (7, 3, 7), (7, 2, 7), "02 02"),
        ("ij,k->ik", (7, 14), (7,), "01 0"),
        ("ii,ij->j", (7, 7), (7, 14), "- -"),
        ("ij,jk->iik", (7, 14), (14, 7), "- -"),
        ("...ij,...jk->...ik", (7, 2, 14), (7, 14, 3), "02 01"),
        ("...ij,jk->...ik", (7, 14, 2, 3), (3, 7), "01 1"),
        ("...ij,...jk->...ik", (7, 2, 3), (14, 7, 3, 2), "0 01"),
        ("b...,b->b...", (7, 14, 3), (7,), "01 0"),
        ("b...,b->...b", (7, 14, 3), (7,), "01 0"),
        ("...i,...i->...", (1, 7, 14), (7, 7, 14), "12 012"),
    ]
    found = [Case("Einsum", ([real(*a), real(*b)],), local, {"equation": e}) for e, a, b, local in forms]
    return [
        *found,
        Case("Einsum", ([real(7, 3, 14)],), "02", {"equation": "ijk->kij"}),
        Case("Einsum", ([real(7, 3, 14)],), "02", {"equation": "ijk->j"}),
        Case("Einsum", ([real(7, 7)],), "-", {"equation": "ii->i"}),
        Case("Einsum", ([real(7, 14, 3)],), "01", {"equation": "...i->i..."}),
        Case(
            "Einsum",
            ([real(7, 14, dtype=np.complex128), real(14, 7, dtype=np.complex128)],),
            "01 01",
            {"equation": "ij,jk->ik"},
        ),
        Case(
            "Einsum",
            ([real(7, 14, dtype=np.float16), real(14, 7, dtype=np.float16)],),
            "01 01",
            {"equation": "ij,jk->ik"},
        ),
    ]


CASES = [*_matmul(), *_batches(), *_einsum()]
