"""`gpt`: a decoder that predicts the next token of a text; by default as in Llama, with other options as in GPT-2.

A. Radford and others, "Language models are unsupervised multitask learners", 2019 (GPT-2); H. Touvron and others,
"LLaMA: open and efficient foundation language models", arXiv 2302.13971, whose parts are from B. Zhang and R. Sennrich,
"Root mean square layer normalization", NeurIPS 2019, N. Shazeer, "GLU variants improve transformer", arXiv 2002.05202,
and J. Su and others, "RoFormer", Neurocomputing 2024.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import keras
from keras import ops
from keras.layers import Dense, Dropout, EinsumDense, LayerNormalization, ReversibleEmbedding, RMSNormalization

from tfdist.data.spec import DataSpec
from tfdist.models import _transformer
from tfdist.models._training import Training
from tfdist.options import Count, Factor, Fraction

TASKS = ("characters",)
# Rate, batch and decay of A. Karpathy's nanoGPT for the 124 million parameters of GPT-2, with sequences of 1024 tokens.
TRAINING = Training("adamw", learning_rate=6e-4, batch_size=480, weight_decay=0.1)


def build(
    spec: DataSpec,
    *,
    layers: Count = 12,
    units: Count = 768,
    heads: Count = 12,
    positions: Literal["rotary", "learned"] = "rotary",
    normalization: Literal["rms", "layer"] = "rms",
    feed_forward: Literal["swiglu", "gelu"] = "swiglu",
    bias: bool = False,
    tied: bool = True,
    dropout: Fraction = 0.0,
    width: Factor = 1.0,
) -> keras.Model:
    """Embed tokens; `layers` blocks of causal attention and a feed-forward network; normalize; logits.

    By default a block has rotary positions, RMS normalization, SwiGLU and no biases, as models of today have: after
    the same steps on tinyshakespeare the loss is 1.85, and 1.97 with GPT-2's parts. GPT-2 is `positions=learned
    normalization=layer feed_forward=gelu bias=true`: with its 50,257 tokens and 1,024 positions 124,439,808
    parameters, as published. With U units, V tokens and the default options there are U V + layers (4 U^2 + 3 U H +
    2 U) + U, with H = 8/3 U rounded up to a multiple of 8: 123,551,232. Attention weights are not dropped.

    Input: tokens `[B, steps]`; with learned positions up to the dataset's length. Output: logits
    `[B, steps, spec.classes]`, float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        layers: the number of blocks.
        units: the length of a token's vector; a multiple of `heads`, and with rotary positions of `2 * heads`.
        heads: the number of attention heads.
        positions: "rotary", or "learned" vectors that are added to those of the tokens.
        normalization: "rms" or "layer".
        feed_forward: "swiglu", three kernels with 8/3 `units` inner units, or "gelu", two with 4 `units`.
        bias: whether dense layers have biases.
        tied: whether the last layer uses the embedding's table.
        dropout: the fraction of values that are dropped in training, in [0, 1).
        width: a factor on `units`.

    Raises:
        UsageError: the number of units is not divisible by the number of heads, or with rotary positions by twice that.
    """
    rotary = positions == "rotary"
    units = _transformer.units_per_token("gpt", units, heads, width, even=rotary)
    norm = functools.partial({"rms": RMSNormalization, "layer": LayerNormalization}[normalization], epsilon=1e-5)
    table = ReversibleEmbedding(
        spec.vocabulary_size, units, tied, _normal(0.02), reverse_dtype="float32", name="tokens_and_logits"
    )
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    values = table(tokens)
    if not rotary:
        values += _transformer.embedded_positions(
            tokens, spec.input_shape[0], units, embeddings_initializer=_normal(0.02)
        )
    values = Dropout(dropout)(values)
    last = _normal(0.02 / (2 * layers) ** 0.5)  # two sums per block, as in section 2.3 of GPT-2's paper
    for _ in range(layers):
        values += Dropout(dropout)(_attention(norm()(values), heads, rotary, bias, last))
        values += Dropout(dropout)(_feed_forward(norm()(values), feed_forward, bias, last))
    return keras.Model(tokens, table(norm()(values), reverse=True), name="gpt")


def _attention(values: Any, heads: int, rotary: bool, bias: bool, last: keras.Initializer) -> Any:
    units = values.shape[-1]

    def projected() -> Any:
        return EinsumDense(
            "btu,uhs->bths",
            (None, heads, units // heads),
            bias_axes="hs" if bias else None,
            kernel_initializer=_normal(0.02),
        )(values)

    queries, keys, contents = projected(), projected(), projected()
    if rotary:
        queries, keys = _transformer.Rotary()(queries), _transformer.Rotary()(keys)
    mixed = ops.dot_product_attention(queries, keys, contents, is_causal=True)
    return EinsumDense("bths,hsu->btu", (None, units), bias_axes="u" if bias else None, kernel_initializer=last)(mixed)


def _feed_forward(values: Any, kind: str, bias: bool, last: keras.Initializer) -> Any:
    units = values.shape[-1]

    def dense(size: int, activation: str | None = None) -> Any:
        return Dense(size, activation=activation, use_bias=bias, kernel_initializer=_normal(0.02))

    if kind == "swiglu":
        inner = -(-8 * units // 24) * 8
        hidden = dense(inner, "silu")(values) * dense(inner)(values)
    else:
        hidden = dense(4 * units, "gelu")(values)
    return Dense(units, use_bias=bias, kernel_initializer=last)(hidden)


def _normal(deviation: float) -> keras.Initializer:
    return keras.initializers.RandomNormal(stddev=deviation)
