"""The share of a replica: what is multiplied or divided by it, and the only functions that do so.

The share of a replica is its fraction of the examples of the global batch, w = n / N; the shares add up to 1
(docs/contract.md). Each replica computes from its own examples. Multiplied by the factor below and summed over the
replicas, its values are what one device computes from all examples:

    value                                                    on a replica              factor    function
    a scalar that is a mean over the examples, or            mean of its examples      w         `contributions`
      does not depend on them
    a scalar that is a sum over the examples                 sum of its examples       1         `contributions`
    values per example, which a tape sums                    its own values            1         `Replica.only_real`
    gradients that a step passes to an optimizer and         gradients of its mean     w         weigh
      that no tape has reduced
    a tensor that a step assigns, or returns in its logs     its own                   w         weigh
    a loss with Keras' reduction "sum"                       sum / w                   w         undone
    a loss with a mask, or with the reduction                sum / (w * divisor over   w         over_global
      "mean_with_sample_weight"                                all replicas)
    a scalar that is passed to a `Mean` metric               its part / w              w         undone

A replica without examples has the share 0, and nothing that it computes counts, not even NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from tfdist.core.replica import Replica


def is_whole(replica: Replica) -> bool:
    """Whether the replica has all examples of the global batch."""
    return isinstance(replica.share, float) and replica.share == 1.0


def weigh(replica: Replica, value: Any) -> Any:
    """share * `value`, a tensor or `tf.IndexedSlices`; `None` stays `None`."""
    if value is None:
        return None
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(weigh(replica, value.values), value.indices, value.dense_shape)
    return tf.math.multiply_no_nan(value, tf.cast(replica.share, value.dtype))


def undone(replica: Replica, part: tf.Tensor) -> tf.Tensor:
    """`part` / share, for a value that is multiplied by the share afterwards and must count with the factor 1."""
    return tf.math.divide_no_nan(part, tf.cast(replica.share, part.dtype))


def over_global(replica: Replica, total: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
    """`total` / (share * the sum of `divisor` over the replicas), to be multiplied by the share afterwards."""
    (divisor,) = replica.all_reduce([replica.only_real(tf.stop_gradient(divisor))])
    return tf.math.divide_no_nan(total, divisor * tf.cast(replica.share, total.dtype))
