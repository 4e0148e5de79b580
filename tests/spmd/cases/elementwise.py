"""Operations that compute each element from those at the same place, in every form of broadcasting."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.spmd.one_operation import Case, between, real, truth, whole

_REAL = """
    Abs Asinh Atan BesselI0e BesselI1e BesselI0 BesselI1 Ceil Cos Cosh Dawsn Elu Erf Erfc Exp Expint Expm1 Floor
    FresnelCos FresnelSin IsFinite IsInf IsNan Neg OnesLike Relu Relu6 Rint Round Selu Sigmoid Sign Sin Sinh Softplus
    Softsign Square Tan Tanh ZerosLike
"""
_POSITIVE = "BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Digamma Inv Lgamma Log Log1p"
_POSITIVE += " Reciprocal Rsqrt Spence Sqrt"
_UNIT = "Acos Asin Atanh Erfinv Ndtri"
_COMPLEX = "Angle ComplexAbs Conj Exp Imag Neg Real Square Tanh"
_WHOLE = "Abs Invert Neg OnesLike PopulationCount Sign Square ZerosLike"

_OF_TWO = """
    AddV2 Add Atan2 Div DivNoNan FloorDiv FloorMod Greater GreaterEqual Less LessEqual Maximum Minimum Mul MulNoNan
    RealDiv SquaredDifference Sub TruncateDiv Xdivy
"""
_OF_POSITIVE = "Igamma Igammac IgammaGradA Pow Xlog1py Xlogy"
_SAME_SHAPE = """
    EluGrad InvGrad LeakyReluGrad NextAfter ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad
    SoftplusGrad SoftsignGrad SqrtGrad TanhGrad
"""
_OF_INTEGERS = "AddV2 BitwiseAnd BitwiseOr BitwiseXor FloorDiv FloorMod Maximum Minimum Mod Mul Sub TruncateDiv"
_OF_INTEGERS += " TruncateMod SquaredDifference Div Less"


def _broadcast() -> list[Case]:
    """All the forms in which shapes are joined."""
    a, b = between(0.5, 2.0, 7, 1, 14), between(0.5, 2.0, 7, 14)
    forms = [
        (a, b, "02 01"),
        (b, a, "01 02"),
        (real(7, 14), real(14), "01 0"),
        (real(14), real(7, 14), "0 01"),
        (real(7, 14), real(7, 1), "01 0"),
        (real(1, 14), real(7, 1), "1 0"),
        (real(7, 7), real(1), "01 -"),
        (real(7, 7), real(), "01 -"),
        (real(), real(7, 14), "- 01"),
        (real(1, 1, 1), real(7), "- 0"),
        (real(7, 7, 7), real(7, 7), "012 01"),
        (real(7, 0), real(7, 1), "0 0"),
        (real(1, 7), real(7, 7), "1 01"),
    ]
    return [Case(kind, (x, y), local) for kind in ("AddV2", "Greater") for x, y, local in forms]


def _of_one() -> list[Case]:
    found = [Case(kind, (real(7, 3, 14),), "02") for kind in _REAL.split()]
    found += [Case(kind, (between(0.1, 3.0, 3, 14),), "1") for kind in _POSITIVE.split()]
    found += [Case(kind, (between(1.1, 3.0, 14),), "0") for kind in ("Acosh",)]
    found += [Case(kind, (between(-0.9, 0.9, 7, 3),), "0") for kind in _UNIT.replace("Ndtri", "").split()]
    found += [Case("Ndtri", (between(0.1, 0.9, 7, 3),), "0")]
    attributes = {"Angle": tf.float64, "ComplexAbs": tf.float64, "Imag": tf.float64, "Real": tf.float64}
    for kind in _COMPLEX.split():
        of = {"Tout": attributes[kind]} if kind in attributes else {}
        found.append(Case(kind, (real(7, 14, dtype=np.complex128),), "01", of))
    found += [Case(kind, (whole(-9, 9, 7, 14),), "01") for kind in _WHOLE.split()]
    found += [
        Case("LogicalNot", (truth(7, 14),), "01"),
        Case("LeakyRelu", (real(7, 14),), "01", {"alpha": 0.3}),
        Case("CheckNumerics", (real(7, 14),), "01", {"message": "found"}),
        Case("CheckNumericsV2", (real(7, 14),), "01", {"message": "found"}),
        Case("Tanh", (real(7, 14, dtype=np.float16),), "01"),
        Case("Tanh", (np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 2.0]),), "0"),
        Case("OnesLike", (real(),), "-"),
    ]
    return found


def _converted() -> list[Case]:
    found = [
        Case("Cast", (source,), "0", {"DstT": target})
        for source in (real(7), whole(-3, 300, 7), truth(7), real(7, dtype=np.float32))
        for target in (tf.float64, tf.float32, tf.float16, tf.int32, tf.int64, tf.bool, tf.uint8)
    ]
    found += [
        Case("Cast", (real(7) * 1e3,), "0", {"DstT": tf.float32, "Truncate": True}),
        Case("Bitcast", (whole(0, 99, 7, 14),), "01", {"type": tf.float32}),
        Case("Bitcast", (whole(0, 99, 7, 14),), "-", {"type": tf.uint8}),
        Case("Bitcast", (whole(0, 99, 7, 2),), "-", {"type": tf.int64}),
        Case("Complex", (real(7, 14), real(7, 14)), "01 01", {"Tout": tf.complex128}),
    ]
    return found


def _of_several() -> list[Case]:
    found = [Case(kind, (real(7, 3, 14), real(7, 1, 14)), "02 02") for kind in _OF_TWO.split() if kind != "Xdivy"]
    found += [Case(kind, (between(0.5, 2, 7, 14), between(0.5, 2, 14)), "01 0") for kind in _OF_POSITIVE.split()]
    found += [Case("Xdivy", (real(7, 14), real(7, 14)), "01 01")]
    found += [Case(kind, (between(0.1, 0.9, 7, 14), real(7, 14)), "01 01") for kind in _SAME_SHAPE.split()]
    found += [Case(kind, (whole(-9, 9, 7, 14), whole(1, 5, 7, 14)), "01 01") for kind in _OF_INTEGERS.split()]
    found += [Case(kind, (whole(1, 9, 7), whole(0, 5, 7)), "0 0") for kind in ("LeftShift", "RightShift")]
    found += [Case(kind, (truth(7, 14), truth(14)), "01 0") for kind in ("LogicalAnd", "LogicalOr")]
    found += [Case(kind, (real(7, 14, dtype=np.float16), real(7, 1, dtype=np.float16)), "01 0") for kind in ("Mul",)]
    found += [
        Case(kind, (whole(0, 3, 7, 14), whole(0, 3, 7, 1)), "01 0", {"incompatible_shape_error": True})
        for kind in ("Equal", "NotEqual")
    ]
    found += [
        Case(kind, (whole(0, 3, 7), whole(0, 3, 14)), "- -", {"incompatible_shape_error": False})
        for kind in ("Equal", "NotEqual")
    ]
    found += [
        Case("Mul", (whole(2**30, 2**31 - 1, 7), whole(2**30, 2**31 - 1, 7)), "0 0"),
        Case("Mul", (real(7, 14, dtype=np.complex128), real(14, dtype=np.complex128)), "01 0"),
        Case("Maximum", (np.array([np.nan, 1, np.inf, 0, 1, 2, 3]), np.array([1, np.nan, 0, 0, 1, 2, 3])), "0 0"),
        Case("ApproximateEqual", (real(7, 14), real(7, 14)), "01 01", {"tolerance": 0.5}),
        Case("AddN", ([real(7, 14), real(7, 14), real(7, 14)],), "01 01 01"),
        Case("Betainc", (between(0.5, 2, 7), between(0.5, 2, 7), between(0.1, 0.9, 7)), "0 0 0"),
        Case("Betainc", (between(0.5, 2), between(0.5, 2), between(0.1, 0.9, 7)), "- - 0"),
        Case("ClipByValue", (real(7, 14), real() - 1, real() + 1), "01 - -"),
        Case("ClipByValue", (real(7, 14), real(7, 14) - 1, real(7, 14) + 1), "01 01 01"),
        Case("Polygamma", (whole(1, 3, 7, 14).astype(float), between(0.5, 2, 7, 1)), "01 0"),
        Case("RandomGammaGrad", (between(0.5, 2, 7), between(0.5, 2, 7)), "0 0"),
        Case("Zeta", (between(1.5, 3, 7, 14), between(0.5, 2, 14)), "01 0"),
    ]
    return found


def _selected() -> list[Case]:
    return [
        Case("Select", (truth(7, 14), real(7, 14), real(7, 14)), "01 01 01"),
        Case("Select", (truth(7), real(7, 14), real(7, 14)), "0 01 01"),
        Case("Select", (truth(7), real(7, 7), real(7, 7)), "0 01 01"),
        Case("Select", (truth(7), real(7), real(7)), "0 0 0"),
        Case("Select", (truth(), real(7, 14), real(7, 14)), "- 01 01"),
        Case("SelectV2", (truth(7, 1), real(7, 14), real(14)), "0 01 0"),
        Case("SelectV2", (truth(), real(7, 14), real(7, 1)), "- 01 0"),
        Case("SelectV2", (truth(7, 14), real(), real(1, 14)), "01 - 1"),
        Case("SelectV2", (truth(7, 7, 7), real(7), real(7, 7)), "012 0 01"),
    ]


def _quantized() -> list[Case]:
    found = [
        Case("FakeQuantWithMinMaxArgs", (real(7, 14, dtype=np.float32),), "01", {"min": -1.0, "max": 2.0}),
        Case("FakeQuantWithMinMaxArgs", (real(7, dtype=np.float32),), "0", {"num_bits": 4, "narrow_range": True}),
        Case(
            "FakeQuantWithMinMaxArgsGradient",
            (real(7, 14, dtype=np.float32), 9 * real(7, 14, dtype=np.float32)),
            "01 01",
        ),
        Case(
            "FakeQuantWithMinMaxVars",
            (real(7, 14, dtype=np.float32), np.float32(-1), np.float32(1)),
            "01 - -",
            {"num_bits": 6},
        ),
        Case(
            "FakeQuantWithMinMaxVarsGradient",
            (real(7, 14, dtype=np.float32), real(7, 14, dtype=np.float32), np.float32(-1), np.float32(1)),
            "01 01 - -",
        ),
        Case(
            "FakeQuantWithMinMaxVarsPerChannel",
            (real(7, 14, dtype=np.float32), real(14, dtype=np.float32) - 3, real(14, dtype=np.float32) + 3),
            "01 0 0",
        ),
        Case(
            "FakeQuantWithMinMaxVarsPerChannelGradient",
            (
                real(7, 3, dtype=np.float32),
                real(7, 3, dtype=np.float32),
                real(3, dtype=np.float32) - 3,
                real(3, dtype=np.float32) + 3,
            ),
            "0 0 - -",
            {"num_bits": 6, "narrow_range": True},
        ),
        Case("Bucketize", (real(7, 14),), "01", {"boundaries": [-1.0, 0.0, 1.0]}),
        Case("Bucketize", (whole(-3, 3, 7),), "0", {"boundaries": [-1.0, 0.0, 1.0]}),
    ]
    return found


BROADCAST = _broadcast()
CASES = [*BROADCAST, *_of_one(), *_converted(), *_of_several(), *_selected(), *_quantized()]
