"""Names of what is sent, by which Horovod finds out which tensors of the processes belong together."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import tensorflow as tf

# How many exchanges of a kind a graph, and the graphs inside it, have.
_in_graph: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def next_name(kind: str) -> str:
    """The name of an exchange, which differs from those of the others of its kind in a graph and in the graphs inside.

    Two exchanges of one graph may run at the same time. Outside of graphs, exchanges take turns, and the name is
    `kind`.
    """
    if tf.executing_eagerly():
        return kind
    graph = tf.compat.v1.get_default_graph()
    outer = getattr(graph, "outer_graph", None)
    while outer is not None and hasattr(outer, "outer_graph"):
        graph, outer = outer, outer.outer_graph
    counts = _in_graph.setdefault(graph, Counter())
    counts[kind] += 1
    return f"{kind}.{counts[kind]}"
