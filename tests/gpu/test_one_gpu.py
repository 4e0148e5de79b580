"""On one GPU, divided into logical devices: what only GPUs have, beside the contract, which `tests/contract` is."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.contract import contestants
from tests.contract.comparison import STOCK, assert_same, start
from tests.gpu.traces import traced
from tfdist.interface import devices as _devices
from tfdist.study import measure

CONTESTANTS = [STOCK, ("single", 1), ("custom", 2), ("mirrored", 2)]
EXAMPLES, BATCH = 22, 8
RANDOM = np.random.default_rng(0)
SENTENCES = RANDOM.integers(1, 20, (EXAMPLES, 7))
SENTENCES[np.arange(7) >= RANDOM.integers(2, 8, (EXAMPLES, 1))] = 0
LABELS = RANDOM.integers(0, 3, EXAMPLES)


def recurrent(layer):
    """A model whose layer cuDNN computes: it does where the mask has no gaps."""
    return keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(20, 6, mask_zero=True),
            layer(5, return_sequences=True),
            layer(5),
            layers.Dense(3),
        ]
    )


def trained(contestant, make, x, y, loss="mse", jit_compile=False, optimizer="adam"):
    strategy = start(contestant)
    with strategy.scope():
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if loss == "labels" else loss
        model.compile(optimizer, loss, jit_compile=jit_compile)
    history = strategy.fit(model, x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": model.get_weights()}


@pytest.mark.parametrize("layer", [layers.LSTM, layers.GRU], ids=["LSTM", "GRU"])
@pytest.mark.parametrize("contestant", CONTESTANTS[1:], ids=lambda one: f"{one[0]}-{one[1]}")
def test_recurrent_layers_of_cudnn_with_masks_end_with_the_weights_of_one_device(contestant, layer):
    found, expected = (
        trained(one, lambda: recurrent(layer), SENTENCES, LABELS, "labels") for one in (contestant, STOCK)
    )
    assert_same(found, expected, tolerance=2e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "rmsprop", "adagrad"])
def test_steps_that_xla_compiles_end_with_the_weights_of_stock_keras(optimizer):
    def make():
        return keras.Sequential([keras.Input((6, 6, 1)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(3)])

    x = RANDOM.normal(size=(EXAMPLES, 6, 6, 1)).astype("float32")
    found, expected = (
        trained(one, make, x, LABELS, "labels", jit_compile=True, optimizer=optimizer) for one in (("single", 1), STOCK)
    )
    assert_same(found, expected, tolerance=2e-4)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("contestant", CONTESTANTS[1:], ids=lambda one: f"{one[0]}-{one[1]}")
def test_half_precision_trains_as_on_one_device(contestant, policy):
    keras.config.set_dtype_policy(policy)
    x = RANDOM.normal(size=(EXAMPLES, 4)).astype("float32")

    def make():
        return keras.Sequential([keras.Input((4,)), layers.Dense(5), layers.Dense(1, dtype=None)])

    found, expected = (trained(one, make, x, x[:, :1]) for one in (contestant, STOCK))
    assert_same(found, expected, tolerance=3e-2)


WIDE, ROWS, STEPS = 512, 64, 8


def wide_model():
    model = keras.Sequential([keras.Input((WIDE,)), layers.Dense(64), layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    return model


@pytest.mark.parametrize("device_data_bytes", [0, 1 << 30], ids=["larger arrays", "a copy on each device"])
@pytest.mark.parametrize("contestant", CONTESTANTS[1:], ids=lambda one: f"{one[0]}-{one[1]}")
def test_a_step_sends_its_devices_no_more_than_its_examples_and_the_weights(contestant, device_data_bytes):
    x = RANDOM.normal(size=(ROWS * STEPS, WIDE)).astype("float32")
    strategy = contestants.start(*contestant, device_data_bytes=device_data_bytes, steps_per_call=STEPS)
    with strategy.scope():
        model = wide_model()
    y = np.zeros((len(x), 1), "float32")

    def epoch():
        strategy.fit(model, x, y, batch_size=ROWS, shuffle=False, verbose=0)

    epoch()  # traces the graph, and copies what each device holds
    copied = traced(epoch).copied_bytes
    batch_bytes, weight_bytes = ROWS * (WIDE + 1) * 4, model.count_params() * 4
    assert 0 < copied["H2D"] <= 2 * STEPS * batch_bytes
    per_step = copied["D2D"] + copied["P2P"]
    if contestant[0] == "single":
        assert per_step <= STEPS * batch_bytes
    else:  # weights to the replicas and gradients back, or gradients to each other; logical devices copy on the GPU
        assert per_step <= STEPS * (4 * weight_bytes + 2 * batch_bytes)


def test_a_step_reads_nothing_from_the_gpu_between_calls():
    x, y = RANDOM.normal(size=(ROWS * STEPS, WIDE)).astype("float32"), np.zeros((ROWS * STEPS, 1), "float32")
    strategy = tfdist.strategy("single", steps_per_call=STEPS)
    model = wide_model()
    options = {"batch_size": ROWS, "verbose": 0, "callbacks": [tfdist.callbacks.StopAtNonFiniteLoss()]}
    strategy.fit(model, x, y, **options)
    copied = traced(lambda: strategy.fit(model, x, y, **options)).copied_bytes["D2H"]
    assert copied < 64 * STEPS  # the metrics of one call, not the loss of each step


def test_the_devices_are_the_logical_ones_and_their_peak_is_known():
    logical = [device.name.removeprefix("/device:") for device in tf.config.list_logical_devices("GPU")]
    assert _devices.choose(None) == logical
    assert tfdist.strategy("single").devices == ["GPU:0"]
    from tfdist.callbacks import memory

    assert memory.peak_gpu_bytes() > 0


def test_a_gpu_that_trains_is_seen_to_be_busy():
    x = RANDOM.normal(size=(4096, 1024)).astype("float32")
    strategy = contestants.start("single", 1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1024,)), layers.Dense(4096, "relu"), layers.Dense(1024)])
        model.compile("sgd", "mse")
    with measure.gpu_monitor() as seen:
        began = time.perf_counter()
        while time.perf_counter() - began < 5:
            strategy.fit(model, x, x, batch_size=1024, epochs=10, verbose=0)
    assert 0.05 < seen.busy <= len(tf.config.list_physical_devices("GPU"))
    assert seen.memory_bytes > 2**28
