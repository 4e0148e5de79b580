"""The states of the random generators that belong to no model: those of Python, NumPy, Keras and TensorFlow."""

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
    """The states of all generators.

    The state that TensorFlow's stateful operations (`tf.random.normal` and the like) keep in a graph cannot be read.
    """
    version, numbers, gauss = random.getstate()
    del version
    gauss = np.array([] if gauss is None else [gauss])
    name, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    found = [("python", np.array(numbers, "uint32")), ("python_gauss", gauss)]
    if name == "MT19937":
        found += [
            ("numpy", np.asarray(key, "uint32")),
            ("numpy_rest", np.array([position, has_gauss, cached], "float64")),
        ]
    generator = keras_variables.generator_of_unseeded()
    if generator is not None:
        found.append(("keras", copies(generator.state)[0].numpy()))
    generator = getattr(stateful_random_ops, "global_generator", None)
    if generator is not None:
        found += [
            ("tensorflow", copies(generator.state)[0].numpy()),
            ("tensorflow_kind", np.array(generator.algorithm)),
        ]
    return [Entry("random", name, value) for name, value in found]


def restore(entries: Iterable[Entry]) -> None:
    """Restores the generators from the result of `snapshot`."""
    found = {entry.name: entry.value for entry in entries if entry.group == "random"}
    if "keras" in found:  # before Python's, from which a new generator draws its seed
        assign_all(keras_variables.made_generator_of_unseeded().state, found["keras"])
    else:
        keras_variables.forget_generator_of_unseeded()
    if "tensorflow" in found:
        if getattr(stateful_random_ops, "global_generator", None) is None:
            generator = tf.random.Generator.from_state(found["tensorflow"], int(found["tensorflow_kind"]))
            tf.random.set_global_generator(generator)
        else:
            assign_all(tf.random.get_global_generator().state, found["tensorflow"])
    if "numpy" in found:
        position, has_gauss, cached = found["numpy_rest"].tolist()
        np.random.set_state(("MT19937", found["numpy"], int(position), int(has_gauss), cached))
    gauss = found["python_gauss"].tolist()
    random.setstate((3, tuple(found["python"].tolist()), gauss[0] if gauss else None))
