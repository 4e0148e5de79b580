"""The examples of a split in memory: once, in the type in which they were read."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import numpy as np

from tfdist.data.input.arrays import Arrays, cast, seen_types
from tfdist.data.spec import DataSpec


class Held:
    """x and y of a split.

    Args:
        spec: of the dataset.
        arrays: x and y as `arrays.checked` gives them.
        divisor: what a model sees is x divided by it.
    """

    def __init__(self, spec: DataSpec, arrays: Arrays, divisor: int):
        self.arrays = arrays
        self._spec = spec
        self._divisor = divisor
        self._cast: weakref.WeakValueDictionary[str, np.ndarray] = weakref.WeakValueDictionary()

    @functools.cached_property
    def tensors(self) -> Any:
        """x and y as `ArrayFeed` takes them: TensorFlow's copy, which from then on is the only one."""
        from tfdist.data.input.array_feed import held_once

        tensors, self.arrays = held_once(self.arrays)
        return tensors

    def seen(self) -> Arrays:
        """x and y as a model sees them; an array that is cast for it is kept as long as it is used."""
        (x, y), (x_type, y_type) = self.arrays, seen_types(self._spec)
        if isinstance(x, dict):
            return {name: self._seen(name, one, x_type) for name, one in x.items()}, self._seen("y", y, y_type)
        seen = self._seen("x", x, x_type, self._divisor)
        return seen, (seen if x is y else self._seen("y", y, y_type))

    def _seen(self, name: str, array: np.ndarray, dtype: type[np.generic], divisor: int = 1) -> np.ndarray:
        found = self._cast.get(name)
        if found is None:
            found = cast(array, dtype, divisor)
            if found is not array:
                self._cast[name] = found
        return found
