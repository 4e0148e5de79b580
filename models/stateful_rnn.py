"""`stateful_rnn`: an LSTM over streams of characters, whose state continues from batch to batch.

R. J. Williams and J. Peng, "An efficient gradient-based algorithm for on-line training of recurrent network
trajectories", Neural Computation, 1990: back-propagation through time, truncated to the steps of a batch. The network
is from A. Karpathy's "The unreasonable effectiveness of recurrent neural networks", 2015.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from tfdist.data.spec import DataSpec
from tfdist.models import _fit
from tfdist.models._training import Training
from tfdist.options import Count, Factor, Fraction

TASKS = ("characters",)
# Rate and batch of the recipe `tinyshakespeare-stateful_rnn`.
TRAINING = Training("adam", learning_rate=2e-3, batch_size=32)


def build(
    spec: DataSpec,
    *,
    streams: Count = 32,
    embedding: Count = 64,
    units: Count = 256,
    layers: Count = 2,
    dropout: Fraction = 0.0,
    width: Factor = 1.0,
) -> keras.Model:
    """Embed, `layers` LSTMs with one state per stream, dense.

    0.85 million parameters besides the embedding and the last layer. Each example contains the number of its stream. A
    replica reads and writes only the states of its examples' streams, so that the result does not depend on how a batch
    is divided over replicas.

    Input: a dict of `tokens` `[B, steps]`; `stream` `[B]`, the number of the stream, 0 to `streams - 1`, each once per
    batch; `position` `[B]`, the number of the example in its stream; at 0 the state is reset to zero. Output: logits
    `[B, steps, spec.classes]`, float32 under every dtype policy.

    Args:
        spec: the spec of the dataset.
        streams: the number of streams, which is the number of examples per global batch.
        embedding: the length of a character's vector.
        units: the units of each LSTM.
        layers: the number of LSTMs.
        dropout: the fraction of values that are dropped between layers in training, in [0, 1).
        width: a factor on `embedding` and `units`.
    """
    inputs = {
        "tokens": keras.Input((None,), dtype="int32", name="tokens"),
        "stream": keras.Input((), dtype="int32", name="stream"),
        "position": keras.Input((), dtype="int32", name="position"),
    }
    size = _fit.scaled(embedding, width)
    values = keras.layers.Embedding(spec.vocabulary_size, size, name="characters")(inputs["tokens"])
    for _ in range(layers):
        values = StreamLSTM(_fit.scaled(units, width), streams)(values, inputs["stream"], inputs["position"])
        values = keras.layers.Dropout(dropout)(values)
    logits = keras.layers.Dense(spec.classes, dtype="float32", name="logits")(values)
    return keras.Model(inputs, logits, name="stateful_rnn")


@keras.saving.register_keras_serializable("tfdist")
class StreamLSTM(keras.layers.Layer):
    """An LSTM whose initial state for an example is the final state of the previous example in the same stream.

    The states of all streams are two variables `[streams, units]`. Each replica changes the rows of its streams; the
    changes of all replicas are added, because the aggregation of the variables is "sum".

    Args:
        units: the size of the state.
        streams: the number of states.
    """

    def __init__(self, units: int, streams: int, **options: Any):
        super().__init__(**options)
        self.units = units
        self.streams = streams
        self.lstm = keras.layers.LSTM(units, return_sequences=True, return_state=True, dtype=self.dtype_policy)

    def build(self, sequence_shape: Any, stream_shape: Any, position_shape: Any) -> None:
        del stream_shape, position_shape
        self.lstm.build(sequence_shape)
        self.states = [
            self.add_weight((self.streams, self.units), "zeros", trainable=False, aggregation="sum", name=name)
            for name in ("hidden", "cell")
        ]

    def call(self, sequence: Any, stream: Any, position: Any) -> Any:
        """The outputs `[B, steps, units]` for sequences `[B, steps, D]` of the streams with numbers `stream` `[B]`."""
        continues = ops.expand_dims(position > 0, -1)
        initial = [ops.take(state, stream, axis=0) for state in self.states]
        initial = [ops.where(continues, state, ops.zeros_like(state)) for state in initial]
        outputs, *final = self.lstm(sequence, initial_state=initial)
        rows = ops.expand_dims(stream, -1)
        for state, value in zip(self.states, final, strict=True):
            state.assign(ops.scatter_update(state, rows, ops.cast(value, state.dtype)))
        return outputs

    def compute_output_shape(self, sequence_shape: Any, stream_shape: Any, position_shape: Any) -> Any:
        del stream_shape, position_shape
        return (*sequence_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"units": self.units, "streams": self.streams}
