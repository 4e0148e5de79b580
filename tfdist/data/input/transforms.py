"""What a graph does to the examples of a batch, from the type in which they are held to what a model sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tfdist.data.input.arrays import seen_types
from tfdist.data.spec import DataSpec

if TYPE_CHECKING:
    import tensorflow as tf


class Transform(Protocol):
    """What is done to the examples of a batch once they are gathered; equal ones can share a graph."""

    def extras(self, epoch: int, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        """What it must know of each example of a pass, in the pass' order: arrays `[n, ...]`."""

    def __call__(self, data: Any, *extras: tf.Tensor) -> Any:
        """The examples `data`, as Keras' (x, y), transformed; in the graph. `extras` are theirs: `[b, ...]`."""


@dataclass(frozen=True)
class FromHeld:
    """Casts examples that are held in the type of their file to what a model sees, and then transforms them.

    Attributes:
        spec: of the dataset.
        divisor: x is divided by it, in float32.
        then: a further transformation, if any.
    """

    spec: DataSpec
    divisor: int = 1
    then: Transform | None = None

    def extras(self, epoch: int, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        return () if self.then is None else self.then.extras(epoch, indices)

    def __call__(self, data: Any, *extras: tf.Tensor) -> Any:
        data = self._cast(data)
        return data if self.then is None else self.then(data, *extras)

    def specs(self, held: Any) -> Any:
        """The `tf.TensorSpec`s of what a model sees of examples with the specs `held`."""
        import tensorflow as tf

        return self._map(held, lambda spec, dtype: tf.TensorSpec(spec.shape, dtype))

    def _cast(self, data: Any) -> Any:
        import tensorflow as tf

        x, y = self._map(data, tf.cast)
        if self.divisor != 1:
            # TensorFlow turns the division by a constant into a product, which rounds differently.
            divisor = tf.raw_ops.PlaceholderWithDefault(input=np.float32(self.divisor), shape=[])
            x = tf.raw_ops.RealDiv(x=x, y=divisor)
        return x, (x if self.spec.task == "autoencoding" else y)

    def _map(self, data: Any, function: Any) -> Any:
        """`data` with `function(part, dtype)` in place of each part of another type than the model's."""
        (x, y), (x_type, y_type) = data, seen_types(self.spec)

        def of(one: Any, dtype: type[np.generic]) -> Any:
            # The number of a stream may need int64.
            return function(one, dtype) if one.dtype.size < np.dtype(dtype).itemsize else one

        x = {name: of(one, x_type) for name, one in x.items()} if isinstance(x, dict) else of(x, x_type)
        return x, of(y, y_type)
