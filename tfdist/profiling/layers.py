"""The costs of operations by layer and by type, derived from the names of the operations.

Keras opens the scope of a layer for each call, and TensorFlow appends a number to a scope that already exists: when a
step is traced, `cnn_1/conv2d_1` is the layer `conv2d` of the model `cnn`. In this case the last number is removed.

Synopsis:

    >>> layer_of("gradient_tape/cnn_1/conv2d_1_2/convolution/Conv2DBackpropFilter", "Conv2DBackpropFilter")
    'conv2d_1, backward'
    >>> layer_of("adam/ResourceApplyAdam_4", "ResourceApplyAdam")
    'update of the weights'
    >>> layer_of("while/body/_1/gradient_tape/while/cnn_1/dense_1/MatMul", "MatMul")
    'dense, backward'
    >>> kind_of("_MklNativeFusedConv2D")
    'FusedConv2D'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tfdist.profiling.breakdown import is_communication

if TYPE_CHECKING:
    from tfdist.profiling.trace import OpCost

UPDATE, LOSS, INPUT = "update of the weights", "loss", "input pipeline"
COMMUNICATION, OTHER = "communication", "other operations of the step"
_NUMBER = re.compile(r"_\d+$")
# The prefix of the names of operations in a loop.
_LOOP = re.compile(r"^.*\bwhile/(?:body/_\d+/)?(?:while/)?")


def layer_of(name: str, kind: str) -> str:
    """Returns the layer of the operation `name` of the type `kind`, with its direction, or else its purpose."""
    if is_communication(f"{name}:{kind}"):
        return COMMUNICATION
    if kind == "Dataset" or kind.startswith("Iterator"):
        return INPUT
    if "Apply" in kind:
        return UPDATE
    backward = "gradient_tape/" in name
    first, *inside = _LOOP.sub("", name).removeprefix("gradient_tape/").split("/")
    if first == "compile_loss":
        return LOSS
    if len(inside) < 2:  # not in the scope of a layer
        return OTHER
    layer = inside[0]
    if _NUMBER.search(first):
        layer = _NUMBER.sub("", layer)
    return f"{layer}, {'backward' if backward else 'forward'}"


def kind_of(kind: str) -> str:
    """Returns the type of an operation without the prefix of its kernel's library."""
    return re.sub(r"^_?(Mkl)?(Native)?", "", kind)


def by_layer(ops: Iterable[OpCost]) -> dict[str, float]:
    """Returns the share of each layer and direction, 0 to 1, the largest first."""
    return _summed(ops, lambda op: layer_of(op.name, op.type))


def by_kind(ops: Iterable[OpCost]) -> dict[str, float]:
    """Returns the share of each type of operation, 0 to 1, the largest first."""
    return _summed(ops, lambda op: kind_of(op.type))


def _summed(ops: Iterable[OpCost], key: Callable[[OpCost], str]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for op in ops:
        shares[key(op)] = shares.get(key(op), 0.0) + op.share
    return dict(sorted(shares.items(), key=lambda item: item[1], reverse=True))
