"""`dlrm`: the deep learning recommendation model, which predicts a click from numbers and categories.

M. Naumov and others, "Deep learning recommendation model for personalization and recommendation systems", arXiv
1906.00091.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import initializers, layers, ops

from tfdist.data.spec import DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Count, Factor

TASKS = ("click_prediction",)
# SGD, whose update is as sparse as the gradient. Rate and batch of the authors' script for Criteo's Kaggle data,
# bench/dlrm_s_criteo_kaggle.sh of github.com/facebookresearch/dlrm.
TRAINING = Training("sgd", learning_rate=0.1, batch_size=128)


def build(
    spec: DataSpec,
    *,
    embedding: Count = 16,
    bottom: Sequence[Count] = (512, 256, 64),
    top: Sequence[Count] = (512, 256),
    width: Factor = 1.0,
) -> keras.Model:
    """Dense layers over the numbers, one table per category, all products of two vectors, dense layers, one logit.

    The default layers are those of the paper for Criteo's Kaggle data, with ReLU, and the first initialization is that
    of the authors' program. With N numbers, C categories of V values in all, embeddings of E, and F(a, b, ...) = (a +
    1) b + ... for dense layers: V E + F(N, bottom, E) + F(E + C (C + 1) / 2, top, 1) parameters. For Criteo's 13
    numbers and 26 categories of 33,762,577 values these are 540,677,217, where about 540 million are published. The
    gradients of the tables stay sparse.

    Input: "numbers" `[B, N]` and "categories" `[B, C]`, each a row of its table. Output: the logit of a click `[B, 1]`,
    float32 under every dtype policy.

    Args:
        spec: the spec of the dataset, with the number of values of each category.
        embedding: the length of a value's vector, and the units of one more layer after those of `bottom`.
        bottom: the units of the dense layers over the numbers.
        top: the units of the dense layers over the products.
        width: a factor on `embedding`, `bottom` and `top`.
    """
    length, *sizes = (_fit.scaled(size, width) for size in (embedding, *bottom, *top))
    numbers = keras.Input(spec.input_shape, name="numbers")
    categories = keras.Input((len(spec.category_sizes),), dtype="int32", name="categories")
    dense = _layers(numbers, [*sizes[: len(bottom)], length], "bottom")
    vectors = [_vector(categories[:, i], i, values, length) for i, values in enumerate(spec.category_sizes)]
    features = ops.concatenate([dense, _products([dense, *vectors])], axis=-1)
    features = _layers(features, sizes[len(bottom) :], "top")
    logit = layers.Dense(1, **_initial(1), dtype="float32", name="logits")(features)
    return keras.Model({"numbers": numbers, "categories": categories}, logit, name="dlrm")


def _layers(values: Any, units: Sequence[int], name: str) -> Any:
    for number, size in enumerate(units):
        values = layers.Dense(size, activation="relu", **_initial(size), name=f"{name}_{number}")(values)
    return values


def _initial(units: int) -> dict[str, Any]:
    # Glorot's, but not truncated as that of Keras.
    kernel = initializers.VarianceScaling(mode="fan_avg", distribution="untruncated_normal")
    return {"kernel_initializer": kernel, "bias_initializer": initializers.RandomNormal(stddev=units**-0.5)}


def _vector(values: Any, number: int, count: int, length: int) -> Any:
    """The vectors of the values `[B]` of category `number`: `[B, length]`."""
    table = initializers.RandomUniform(-(count**-0.5), count**-0.5)
    return layers.Embedding(count, length, embeddings_initializer=table, name=f"category_{number}")(values)


def _products(vectors: Sequence[Any]) -> Any:
    """The products of all pairs of n vectors `[B, length]`, in the authors' order: `[B, n (n - 1) / 2]`."""
    count, stacked = len(vectors), ops.stack(vectors, axis=1)
    products = ops.matmul(stacked, ops.transpose(stacked, (0, 2, 1)))
    pairs = [row * count + column for row in range(count) for column in range(row)]
    return ops.take(ops.reshape(products, (-1, count * count)), pairs, axis=-1)
