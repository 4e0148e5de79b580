"""`two_tower`: a tower for users and a tower for items, whose products say which item a user wants next.

X. Yi and others, "Sampling-bias-corrected neural modeling for large corpus item recommendations", RecSys 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import layers, ops

from tfdist.data.spec import PADDING, DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Count, Factor

TASKS = ("recommendation",)
# Adagrad, as in the paper: items that are seen rarely need large steps, and its update is as sparse as the gradient.
# Rate and batch are tfdist's choice; the paper's batches of 8192 are for its sampled softmax.
TRAINING = Training("adagrad", learning_rate=0.05, batch_size=256)


def build(
    spec: DataSpec,
    *,
    embedding: Count = 128,
    units: Sequence[Count] = (512, 128),
    temperature: Factor = 0.05,
    width: Factor = 1.0,
) -> keras.Model:
    """Average the vectors of a user's items, dense layers; dense layers over each item; products of unit vectors.

    As in the paper, a user is the average of the vectors of the items so far, both towers are dense layers with ReLU
    that end in a vector of length 1, and the logits are the products of these vectors divided by a temperature. The
    loss is the softmax over all items, which the paper's softmax over the items of a batch, with its correction of the
    sampling bias, estimates: it is the same for every division of a batch, and does not depend on the batch's size. But
    each step computes the tower and the logits of all items.

    With V items, embeddings of E numbers, and dense layers of U1, ..., Un units: 2 (V E + (E + 1) U1 + ... +
    (Un-1 + 1) Un) parameters. The paper publishes no number. The towers have two tables: the gradient of the users'
    stays sparse, and every item is in the gradient of the items'.

    Input: items `[B, length]` of any length, padded with 0. Output: logits `[B, spec.classes]`, float32 under every
    dtype policy.

    Args:
        spec: the spec of the dataset.
        embedding: the length of an item's vector in both tables.
        units: the units of the dense layers of each tower; the last are the length of the vectors that are multiplied.
        temperature: the products, from -1 to 1, are divided by it.
        width: a factor on `embedding` and `units`.
    """
    length, units = _fit.scaled(embedding, width), [_fit.scaled(size, width) for size in units]
    items = keras.Input((None,), dtype="int32", name="items")
    vectors = layers.Embedding(spec.vocabulary_size, length, name="history")(items)
    mask = ops.expand_dims(ops.cast(ops.not_equal(items, PADDING), vectors.dtype), -1)
    # A user without items has the average 0, not 0/0.
    user = ops.sum(vectors * mask, axis=1) / ops.maximum(ops.sum(mask, axis=1), 1)
    for number, size in enumerate(units):
        user = layers.Dense(size, activation=_activation(number, units), name=f"user_{number}")(user)
    logits = Catalogue(spec.classes, length, units, temperature, name="catalogue")(user)
    return keras.Model(items, logits, name="two_tower")


def _activation(number: int, units: Sequence[int]) -> str:
    return "linear" if number == len(units) - 1 else "relu"


@keras.saving.register_keras_serializable("tfdist")
class Catalogue(layers.Layer):
    """The tower of the items, and its products with the vectors of users.

    Input: `[B, units[-1]]`. Output: float32 `[B, items]`, the cosines of the angles between the vectors of a user and
    of each item, divided by the temperature.

    Args:
        items: the number of items.
        embedding: the length of an item's vector in the table.
        units: the units of the dense layers.
        temperature: the products are divided by it.
        **options: those of every layer.
    """

    def __init__(self, items: int, embedding: int, units: Sequence[int], temperature: float, **options: Any):
        super().__init__(**options)
        self.items, self.embedding, self.units, self.temperature = items, embedding, tuple(units), temperature
        self.tower = [
            layers.Dense(size, activation=_activation(number, units), name=f"item_{number}", dtype=self.dtype_policy)
            for number, size in enumerate(units)
        ]

    def build(self, input_shape: Any) -> None:
        del input_shape
        self.table = self.add_weight((self.items, self.embedding), "uniform", name="items")
        for layer, length in zip(self.tower, (self.embedding, *self.units), strict=False):
            layer.build((self.items, length))

    def call(self, users: Any) -> Any:
        vectors = self.table
        for layer in self.tower:
            vectors = layer(vectors)
        return ops.matmul(_unit(users), ops.transpose(_unit(vectors))) / self.temperature

    def get_config(self) -> dict[str, Any]:
        names = ("items", "embedding", "units", "temperature")
        return super().get_config() | {name: getattr(self, name) for name in names}


def _unit(vectors: Any) -> Any:
    """Vectors `[N, units]` of length 1, in float32; a vector of zeros stays."""
    vectors = ops.cast(vectors, "float32")
    return vectors * ops.rsqrt(ops.maximum(ops.sum(ops.square(vectors), axis=-1, keepdims=True), 1e-12))
