"""Which operations have effects outside of the step, or draw from a state of their own, and so run once in a job."""

from __future__ import annotations

import tensorflow as tf

# Stateful operations that each replica may run: they check, or run functions whose operations are asked one by one.
_EVERYWHERE = frozenset(("Assert", "If", "While", "Case", "NoOp"))


def once(operation: tf.Operation) -> bool:
    """Whether an operation must run once for all replicas: `tf.print`, Python's functions, unseeded draws.

    What reads or changes a variable runs once for each copy of the variable instead.
    """
    resources = any(tensor.dtype == tf.resource for tensor in (*operation.inputs, *operation.outputs))
    return operation.op_def.is_stateful and not resources and operation.type not in _EVERYWHERE
