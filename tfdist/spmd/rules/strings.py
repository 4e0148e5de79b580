"""Operations on each string by itself, and look-ups of each key in a table."""

from __future__ import annotations

from tfdist.spmd.operation import Operation
from tfdist.spmd.placements import Shard
from tfdist.spmd.rules.elementwise import elementwise
from tfdist.spmd.rules.registry import Local, rule

rule("StringStrip", "StringToNumber")(elementwise)
rule("StringLower", "StringUpper", attributes="encoding")(elementwise)
rule("StringLength", attributes="unit")(elementwise)
rule("StringToHashBucket", "StringToHashBucketFast", attributes="num_buckets")(elementwise)
rule("StringToHashBucketStrong", attributes="num_buckets key")(elementwise)
rule("StaticRegexFullMatch", attributes="pattern")(elementwise)
rule("StaticRegexReplace", attributes="pattern rewrite replace_global")(elementwise)
rule("RegexFullMatch")(elementwise)
rule("RegexReplace", attributes="replace_global")(elementwise)
rule("StringJoin", attributes="N separator")(elementwise)
rule("Substr", attributes="unit")(elementwise)
rule("EncodeBase64", attributes="pad")(elementwise)
rule("DecodeBase64")(elementwise)
rule("AsString", attributes="precision scientific shortest width fill")(elementwise)
rule(
    "UnicodeTranscode",
    attributes="input_encoding output_encoding errors replacement_char replace_control_characters",
)(elementwise)


@rule("LookupTableFindV2")
def look_up(operation: Operation, index: int, shard: Shard) -> Local | None:
    """Of keys and values that are scalars."""
    if index != 1 or operation.rank(1) is None or operation.rank(1) != operation.output_rank():
        return None
    return Local([None, shard.axis, None], [shard.axis])
