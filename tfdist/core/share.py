"""Who multiplies by a replica's share, and who divides by it: only the functions here.

The share of a replica is its part of the examples of the global batch, w = n / N; the shares add up to 1
(docs/contract.md). What each replica computes of its own examples counts so that the sum over the replicas is what one
device computes of all of them:

    what                                                     on a replica            counts with     here
    a scalar that is a mean over the examples, or            the mean over its own   w               parts_of_scalar
      does not depend on them
    a scalar that is a sum over the examples                 the sum over its own    1               parts_of_scalar
    a value per example that a tape sums                     its own values          1               `Replica.only_real`
    gradients that no tape has reduced, which a step         those of its mean       w               weigh
      gives to an optimizer
    a tensor that a step assigns, or returns in its logs     its own                 w               weigh
    Keras' reduction "sum"                                   sum / w                 w               undone
    Keras' masks and "mean_with_sample_weight"               sum / (w * divisor of   w               over_global
                                                               all)
    a scalar that is given to a `Mean` metric                its part / w            w               undone

A replica without examples has the share 0: whatever it computes, NaN included, counts for exactly nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.core import means_and_sums

if TYPE_CHECKING:
    from tfdist.core.replica import Replica


def is_whole(replica: Replica) -> bool:
    """Whether the replica has all examples, so that nothing is to be weighed."""
    return isinstance(replica.share, float) and replica.share == 1.0


def weigh(replica: Replica, value: Any) -> Any:
    """share * `value`, a tensor or `tf.IndexedSlices`; `None` stays `None`."""
    if value is None:
        return None
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(weigh(replica, value.values), value.indices, value.dense_shape)
    return tf.math.multiply_no_nan(value, tf.cast(replica.share, value.dtype))


def parts_of_scalar(replica: Replica, scalar: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Tensors that `scalar` is made of, with weights: their sum over the replicas is the scalar of the global batch."""
    share = tf.cast(replica.share, scalar.dtype)
    if tf.executing_eagerly() or replica.examples is not None:
        return [(scalar, share)]
    return [
        (one.tensor, (tf.cast(replica.real, scalar.dtype) if one.is_sum else share) * one.factor)
        for one in means_and_sums.summands(scalar, replica.data, replica.means)
    ]


def weigh_scalar(replica: Replica, scalar: tf.Tensor) -> tf.Tensor:
    """This replica's part of a scalar: the sum of all parts is what one device computes."""
    return tf.add_n([tf.math.multiply_no_nan(one, weight) for one, weight in parts_of_scalar(replica, scalar)])


def undone(replica: Replica, part: tf.Tensor) -> tf.Tensor:
    """`part` / share, of what is multiplied by the share afterwards and must count as it is."""
    return tf.math.divide_no_nan(part, tf.cast(replica.share, part.dtype))


def over_global(replica: Replica, total: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
    """A local sum over the divisor of all replicas together, to be multiplied by the share afterwards."""
    (divisor,) = replica.all_reduce([replica.only_real(tf.stop_gradient(divisor))])
    return tf.math.divide_no_nan(total, divisor * tf.cast(replica.share, total.dtype))
