"""The states of the global random generators of Python, NumPy, Keras and TensorFlow."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import stateful_random_ops

from tfdist.checkpointing.format import Entry
from tfdist.checkpointing.state import assign_all
from tfdist.internals import keras_variables
from tfdist.internals.tensorflow_variables import copies


def snapshot() -> list[Entry]:
    """Copies the states of all generators.

    The state of TensorFlow's stateful operations, such as `tf.random.normal`, is part of a graph and cannot be read.
    """
    version, numbers, gauss = random.getstate()
    del version
    gauss = np.array([] if gauss is None else [gauss])
    name, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {"python": np.array(numbers, "uint32"), "python_gauss": gauss}
    if name == "MT19937":
        states["numpy"] = np.asarray(key, "uint32")
        states["numpy_rest"] = np.array([position, has_gauss, cached], "float64")
    generator = keras_variables.generator_of_unseeded()
    if generator is not None:
        states["keras"] = copies(generator.state)[0].numpy()
    generator = getattr(stateful_random_ops, "global_generator", None)
    if generator is not None:
        states["tensorflow"] = copies(generator.state)[0].numpy()
        states["tensorflow_kind"] = np.array(generator.algorithm)
    return [Entry("random", name, value) for name, value in states.items()]


def restore(entries: Iterable[Entry]) -> None:
    """Restores the generators from the result of `snapshot`."""
    states = {entry.name: entry.value for entry in entries if entry.group == "random"}
    if "keras" in states:  # before Python's generator, from which a new Keras generator draws its seed
        assign_all(keras_variables.made_generator_of_unseeded().state, states["keras"])
    else:
        keras_variables.forget_generator_of_unseeded()
    if "tensorflow" in states:
        if getattr(stateful_random_ops, "global_generator", None) is None:
            generator = tf.random.Generator.from_state(states["tensorflow"], int(states["tensorflow_kind"]))
            tf.random.set_global_generator(generator)
        else:
            assign_all(tf.random.get_global_generator().state, states["tensorflow"])
    if "numpy" in states:
        position, has_gauss, cached = states["numpy_rest"].tolist()
        np.random.set_state(("MT19937", states["numpy"], int(position), int(has_gauss), cached))
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
