"""Operations on strings, and look-ups in tables."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.spmd.one_operation import Case, real, whole

_WORDS = np.array([b" Some", b"WORDS", b"of one", b"to seven", b"", b"letters9", b"5"])
_NUMBERS = np.array([b"1.5", b"2", b"-3", b"4e2", b"0", b"7", b"8.25"])


def _changed() -> list[Case]:
    return [
        Case("StringToHashBucketFast", (_WORDS,), "0", {"num_buckets": 5}),
        Case("StringToHashBucketStrong", (_WORDS,), "0", {"num_buckets": 5, "key": [1, 2]}),
        Case("StringToHashBucket", (_WORDS,), "0", {"num_buckets": 5}),
        Case("StringLower", (_WORDS,), "0"),
        Case("StringUpper", (_WORDS,), "0", {"encoding": "utf-8"}),
        Case("StringStrip", (_WORDS,), "0"),
        Case("StringLength", (_WORDS,), "0", {"unit": "UTF8_CHAR"}),
        Case("StringToNumber", (_NUMBERS,), "0"),
        Case("StaticRegexReplace", (_WORDS,), "0", {"pattern": "[aeiou]", "rewrite": "_"}),
        Case("StaticRegexFullMatch", (_WORDS,), "0", {"pattern": ".*o.*"}),
        Case("RegexReplace", (_WORDS, "[aeiou]", "_"), "0", {"replace_global": False}),
        Case("RegexFullMatch", (_WORDS, ".*o.*"), "0"),
        Case("StringJoin", ([_WORDS, _NUMBERS],), "0 0", {"separator": "-"}),
        Case("Substr", (_NUMBERS, 0, 1), "0"),
        Case("EncodeBase64", (_WORDS,), "0"),
        Case("DecodeBase64", (np.array([b"aGk", b"eW8", b"b25l", b"", b"dHdv", b"aGk", b"eW8"]),), "0"),
        Case("UnicodeTranscode", (_WORDS,), "0", {"input_encoding": "UTF-8", "output_encoding": "UTF-16-BE"}),
        Case("AsString", (real(7, 14),), "01", {"precision": 3}),
        Case("AsString", (whole(0, 99, 7),), "0", {"width": 4, "fill": "0"}),
        Case("Equal", (_WORDS, _WORDS[::-1].copy()), "0 0"),
        Case("ReduceJoin", (_WORDS, 0), "-"),
    ]


def _found() -> list[Case]:
    keys = tf.constant([3, 1, 4], tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, keys * 10), -1)
    vectors = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float64, [0.0, 0.0])
    vectors.insert(keys, [[1.0, 2.0]] * 3)

    def numbers(x: tf.Tensor) -> tf.Tensor:
        return table.lookup(x)

    def rows(x: tf.Tensor) -> tf.Tensor:
        return vectors.lookup(x)

    return [
        Case("LookupTableFindV2", (whole(0, 6, 7, 14, dtype=np.int64),), "01", function=numbers),
        Case("LookupTableFindV2", (whole(0, 6, 7, 14, dtype=np.int64),), "-", function=rows),
    ]


CASES = [*_changed(), *_found()]
