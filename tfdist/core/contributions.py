"""What a replica contributes to a value of the global batch, so that the sum over the replicas is that of one device.

| value of a replica's part | its contribution |
|---|---|
| a mean over its examples, or the same on all replicas | share * value |
| a sum over its examples | the value |
| a sum of such values, and of multiples of them | theirs |
| computed of several examples together, see `tfdist.core.joint_values` | share * the value of the global batch |

Which of them it is follows from the graph. Without a graph, and for models of Keras' own classes, whose values are
known, a value counts as a mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.core import joint_values, share
from tfdist.internals import tensorflow as tensorflow_internals

if TYPE_CHECKING:
    from tfdist.core.means_and_sums import Summand
    from tfdist.core.replica import Replica


def to_value(replica: Replica, value: tf.Tensor) -> tf.Tensor:
    """The contribution to a floating-point `value`; one with a row per example counts as a mean."""
    if not is_read(replica, value):
        return share.weigh(replica, value)
    reading = joint_values.reading(replica)
    if reading.axes.of(value):
        return share.weigh(replica, value)
    if (joint := reading.joint(value, differentiated=False)) is not None:
        return share.weigh(replica, joint.value)
    parts = [tf.math.multiply_no_nan(one.tensor, _factor(replica, one)) for one in reading.degrees.summands(value)]
    return sum(parts[1:], parts[0])  # of which some may have fewer axes than others


def to_target(replica: Replica, target: tf.Tensor, given: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Tensors for a tape to differentiate in place of `target`, of which it would sum several values.

    Args:
        replica: this one.
        target: floating-point.
        given: the output gradient of `target`, of the same shape.

    Returns:
        Tensors, which the tape has seen, with their output gradients.
    """
    if not is_read(replica, target):
        # Through sums over the replicas, an example that must not count would reach the other replicas.
        return [(target, replica.only_real(given) if target.shape.rank else share.weigh(replica, given))]
    reading = joint_values.reading(replica)
    if (of_all := _of_all(replica, reading, target, given)) is not None:
        return of_all
    if reading.axes.of(target):
        return [(target, replica.only_real(given))]
    summands = reading.degrees.summands(target)
    if any(one.tensor.shape != target.shape for one in summands):  # of several ranks, which the tape would sum apart
        return [(target, share.weigh(replica, given))]
    return [(one.tensor, _factor(replica, one) * given) for one in summands]


def _of_all(
    replica: Replica, reading: joint_values.Reading, target: tf.Tensor, given: tf.Tensor
) -> list[tuple[tf.Tensor, tf.Tensor]] | None:
    """As `to_target`, of a target that is computed of several examples together; `None` of another one."""
    if not reading.is_joint(target):
        return None
    if tensorflow_internals.tape_is_open():  # which would not see what is computed of all examples
        reading.warn(target)
        return None
    if target.shape.rank:
        target, given = tf.reduce_sum(target * given), tf.ones([], given.dtype)
    joint = reading.joint(target, differentiated=True)
    return None if joint is None else joint.gradients(share.weigh(replica, given))


def is_joint(replica: Replica, value: Any) -> bool:
    """Whether a value is computed of several examples together; without a graph it is not known, and is not."""
    return is_read(replica, value) and joint_values.reading(replica).is_joint(value)


def of_all(replica: Replica, value: Any) -> tf.Tensor | None:
    """`value`, such as a count, of the global batch; `None` where the graph does not say how to compute it.

    Without a graph it is returned as it is.
    """
    value = tf.convert_to_tensor(value)
    if tf.executing_eagerly() or not tf.is_symbolic_tensor(value):
        return value
    return joint_values.reading(replica).whole(value)


def tell(replica: Replica, outputs: Any) -> None:
    """Warns of outputs that a layer computes of several examples together, where losses are differentiated as usual."""
    for output in tf.nest.flatten(outputs):
        if isinstance(output, tf.Tensor) and is_joint(replica, output):
            joint_values.reading(replica).warn(output)


def is_read(replica: Replica, value: Any) -> bool:
    """Whether the graph says what `value` is: there is one, and it is made for parts of any length."""
    return replica.examples is None and not tf.executing_eagerly() and tf.is_symbolic_tensor(value)


def _factor(replica: Replica, summand: Summand) -> Any:
    return tf.cast(replica.real if summand.is_sum else replica.share, summand.tensor.dtype) * summand.factor
