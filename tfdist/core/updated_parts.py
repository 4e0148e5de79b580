"""Where a process updates its part of a variable: in a variable of its own, which has memory only meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.communicators import opaque, parts
from tfdist.communicators.parts import Part
from tfdist.internals import keras as keras_internals
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals import tensorflow_variables


def local(variable: Any) -> tf.Variable:
    """The copy of this process of a Keras variable."""
    return tensorflow_variables.copies(variable)[0]


def place(variable: Any, part: Part | None) -> tf.Variable:
    """A place for the part of a variable; `None` stands for the whole, which is updated where it is."""
    if part is None:
        return local(variable)
    held = local(variable)
    with tf.init_scope(), tensorflow_internals.without_strategy(), tf.device(held.device):
        made = tf.Variable(tf.zeros(part.shape, held.dtype), trainable=False, name=variable.name)
        release(made)
    return made


def flat(whole: tf.Tensor, part: Part) -> tf.Tensor:
    """All elements of a variable, `[size]`."""
    return tf.reshape(whole, [part.ends[-1]])


def assign(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assigns `value` on this replica alone; on what a step assigns by the method, the replicas agree."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def release(variable: tf.Variable) -> None:
    """Frees the memory of the value, once what has read it is done."""
    if variable.shape.rank:
        # The number of rows is hidden from TensorFlow, which would compare the shape with that of the variable.
        no_rows = opaque(tf.constant(0))
        assign(variable, tf.zeros([no_rows, *variable.shape[1:]], variable.dtype))


def divide_slot(slot: Any, part: Part | None, shape: tuple[int, ...]) -> None:
    """Reduces a slot, for a variable of `shape`, to the part of this process."""
    if part is None or parts.part_of(slot) is not None:
        return
    own = part if tuple(slot.shape) in (shape, part.shape) else _of_shape(part, tuple(slot.shape))
    if tuple(slot.shape) != own.shape or part.whole_shape != own.whole_shape:
        mine = own.of(tensorflow_variables.read(local(slot)))
        with tf.init_scope(), tensorflow_internals.without_strategy(), tf.device(local(slot).device):
            made = tf.Variable(mine, trainable=False, dtype=local(slot).dtype, name=slot.name)
        keras_internals.set_tf_variable(slot, made)
    parts.mark(slot, own)


def _of_shape(part: Part, shape: tuple[int, ...]) -> Part:
    """The part in a slot of another shape, of a variable that one process has as a whole."""
    size = int(np.prod(shape))
    return Part(shape, tuple(size if end else 0 for end in part.ends), part.rank)
