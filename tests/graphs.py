"""Graphs, for the tests of what is read from them."""

import tensorflow as tf


def while_traced(function, *specs):
    """What `function` returns while it is traced for tensors of `specs`."""
    found = []

    @tf.function(autograph=False)
    def step(*tensors):
        found.append(function(*tensors))

    step.get_concrete_function(*specs)
    return found[0]
