"""Graphs, for the tests of what is read from them."""

import contextlib

import tensorflow as tf
from tensorflow.python.eager import context


def while_traced(function, *specs):
    """What `function` returns while it is traced for tensors of `specs`."""
    found = []

    @tf.function(autograph=False)
    def step(*tensors):
        found.append(function(*tensors))

    step.get_concrete_function(*specs)
    return found[0]


@contextlib.contextmanager
def collected_graphs():
    """Collects the graphs, a `GraphDef` per device, that TensorFlow makes in this context to run functions.

    The list is filled at the end of the context. It lacks functions that have run before.
    """
    graphs = []
    context.context().enable_run_metadata()
    context.context().export_run_metadata()  # discards what others, such as TensorBoard, have collected
    try:
        yield graphs
        graphs += context.context().export_run_metadata().partition_graphs
    finally:
        context.context().disable_run_metadata()
