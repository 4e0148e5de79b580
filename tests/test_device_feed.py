"""Data go to the device that uses them, once: logical CPU devices stand for GPUs, and CPU:0 for the host.

What crosses between devices is read from the graphs that TensorFlow ran, cut into one part per device.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.contract.comparison import assert_same
from tfdist.callbacks import Checkpoint, StopAtNonFiniteLoss
from tfdist.data.pipeline import device_feed
from tfdist.data.pipeline.array_feed import ArrayFeed, tensors
from tfdist.data.pipeline.source import Source
from tfdist.errors import UsageError
from tfdist.internals import tensorflow as tensorflow_internals

READ_WHERE_THEY_ARE, PREFETCHED, RESIDENT = None, 0, 1 << 30
HOST = "CPU:0"


def pictures(examples):
    return np.random.default_rng(0).normal(size=(examples, 6)).astype("float32"), np.arange(examples) % 3


def sentences(examples):
    return np.random.default_rng(1).integers(0, 9, (examples, 4), "int32"), np.arange(examples) % 3


def model_of(x):
    tokens = [layers.Embedding(9, 4), layers.GlobalAveragePooling1D()] if x.dtype.kind == "i" else []
    model = keras.Sequential([layers.Input(x.shape[1:]), *tokens, layers.Dropout(0.3, seed=5), layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def trained(name, devices, budget, data, **fit):
    """The history, the predictions and the weights of a training with `device_data_bytes=budget`."""
    keras.utils.set_random_seed(3)
    strategy = tfdist.strategy(name, devices=devices, seed=7, device_data_bytes=budget)
    with strategy.scope():
        model = model_of(data[0])
    history = strategy.fit(model, *data, batch_size=8, epochs=2, verbose=0, validation_data=data, **fit).history
    return [history, strategy.predict(model, data[0], batch_size=8, verbose=0), model.get_weights()]


class InterruptionError(Exception):
    pass


class Interrupts(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3:
            raise InterruptionError


STRATEGIES = [("single", "CPU:1"), ("custom", ["CPU:1", "CPU:2"]), ("mirrored", 3)]
# Its steps run in one thread, unless data come from others.
ALONE = ("single", "CPU:0")


class TestTheResultDoesNotDependOnWhereTheArraysAre:
    @pytest.mark.parametrize("budget", [PREFETCHED, RESIDENT], ids=["prefetched", "resident"])
    @pytest.mark.parametrize(("name", "devices"), [*STRATEGIES, ALONE], ids=["single", "custom", "mirrored", "alone"])
    @pytest.mark.parametrize("data", [pictures(48), pictures(41), sentences(42)], ids=["even", "uneven", "tokens"])
    def test_of_a_training(self, name, devices, budget, data):
        # The last batch of 41 has one example, fewer than there are replicas.
        assert_same(trained(name, devices, budget, data), trained(name, devices, READ_WHERE_THEY_ARE, data), 1e-6)

    @pytest.mark.parametrize("budget", [PREFETCHED, RESIDENT], ids=["prefetched", "resident"])
    @pytest.mark.parametrize(("name", "devices"), STRATEGIES[:2], ids=["single", "custom"])
    def test_of_a_training_that_is_resumed_within_an_epoch(self, name, devices, budget, tmp_path):
        data = pictures(41)
        with pytest.raises(InterruptionError):
            trained(name, devices, budget, data, callbacks=[Checkpoint(tmp_path, every_steps=2), Interrupts()])
        resumed = trained(name, devices, budget, data, callbacks=[Checkpoint(tmp_path, resume=True)])
        assert_same(resumed, trained(name, devices, READ_WHERE_THEY_ARE, data), 1e-6)

    @pytest.mark.parametrize("budget", [PREFETCHED, RESIDENT], ids=["prefetched", "resident"])
    def test_of_epochs_that_are_parts_of_a_pass_with_sample_weights_and_steps_of_the_users_length(self, budget):
        data = (*pictures(50), np.linspace(0.5, 2, 50).astype("float32"))
        x, y, weights = data

        def run(budget):
            return trained("custom", ["CPU:1", "CPU:2"], budget, (x, y), sample_weight=weights, steps_per_epoch=3)

        assert_same(run(budget), run(READ_WHERE_THEY_ARE), 1e-6)

    @pytest.mark.parametrize("budget", [PREFETCHED, RESIDENT], ids=["prefetched", "resident"])
    def test_of_a_dataset_by_name_that_is_augmented(self, budget):
        x = np.random.default_rng(2).random((20, 16, 16, 3), np.float32)
        source = Source.from_arrays("mine", classes=2, train=(x, np.arange(20) % 2))

        def batches(budget):
            feed = source.feed("train", 8, seed=4, augment="crop_flip")
            strategy = tfdist.strategy("custom", devices=["CPU:1", "CPU:2"], device_data_bytes=budget)
            placed, parts = device_feed.placed(feed, strategy), []
            state = placed.start(1, 1)  # as a run that is resumed begins within a pass
            for batch in placed.batches.take(state, 1, 2):
                parts += [placed.batches.part(state, batch, index, 2) for index in range(2)]
            return [(x.numpy(), y.numpy(), float(share)) for (x, y), share in parts]

        assert_same(batches(budget), batches(READ_WHERE_THEY_ARE), 0)


class TestWhatStaysOnTheHost:
    @pytest.mark.parametrize(
        "x",
        [tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.constant([["a"], ["b"]]), tf.sparse.eye(2)],
        ids=["ragged", "strings", "sparse"],
    )
    def test_is_what_a_gpu_cannot_index(self, x):
        strategy = tfdist.strategy("custom", devices=["CPU:1", "CPU:2"], device_data_bytes=RESIDENT)
        feed = ArrayFeed(tensors(x, np.zeros(2)), 2, lambda epoch: np.arange(2, dtype=np.int32))
        assert device_feed.placed(feed, strategy) is feed

    def test_an_array_that_is_input_and_target_is_copied_once(self):
        x = np.ones((4, 2), np.float32)
        strategy = tfdist.strategy("single", devices="CPU:1", device_data_bytes=x.nbytes)
        feed = ArrayFeed(tensors(x, x), 2, lambda epoch: np.arange(4, dtype=np.int32))
        placed = device_feed.placed(feed, strategy)
        ((copied, target),), _ = placed.start(0, 0)
        assert isinstance(placed, device_feed.ResidentFeed)
        assert copied is target
        assert copied.device.endswith("CPU:1")

    def test_a_negative_budget_is_refused(self):
        with pytest.raises(UsageError, match="device_data_bytes"):
            tfdist.strategy("single", device_data_bytes=-1)


class TestWhatCrossesToADevice:
    def test_in_a_step_on_arrays_of_the_host_is_the_part_of_its_replica(self):
        sent = _sent("custom", ["CPU:1", "CPU:2"], READ_WHERE_THEY_ARE)
        assert _data_to(sent, "CPU:1") == ["GatherV2", "GatherV2_1"]  # x and y
        assert _data_to(sent, "CPU:2") == ["replica_1/GatherV2", "replica_1/GatherV2_1"]

    @pytest.mark.parametrize(("name", "devices"), STRATEGIES[:2], ids=["single", "custom"])
    def test_in_a_step_on_prefetched_parts_is_nothing_that_the_step_would_wait_for(self, name, devices):
        sent = _sent(name, devices, PREFETCHED)
        assert _data_to(sent, "CPU:1") == _data_to(sent, "CPU:2") == []

    def test_ahead_of_a_step_is_the_part_of_its_replica(self):
        strategy = tfdist.strategy("custom", devices=["CPU:1", "CPU:2"], device_data_bytes=PREFETCHED)
        x, y = pictures(48)
        feed = ArrayFeed(tensors(x, y), 8, lambda epoch: np.arange(48, dtype=np.int32))
        state = device_feed.placed(feed, strategy).start(0, 0)
        data, _ = state.element_spec
        assert [spec.shape.as_list() for spec in data] == [[4, 6], [4]]
        assert [x.device[-5:] for (x, _), _ in state.get_next()] == ["CPU:1", "CPU:2"]

    def test_in_a_step_on_arrays_that_it_holds_are_the_numbers_of_examples(self):
        sent = _sent("custom", ["CPU:1", "CPU:2"], RESIDENT)
        assert _data_to(sent, "CPU:1") == ["strided_slice"]
        assert _data_to(sent, "CPU:2") == ["replica_1/strided_slice"]

    @pytest.mark.parametrize("budget", [READ_WHERE_THEY_ARE, PREFETCHED, RESIDENT])
    def test_back_to_the_host_within_a_step_is_nothing(self, budget):
        # The loop's condition and the watch for NaN among them: a GPU would have to be waited for at each step.
        sent = _sent("single", "CPU:1", budget, callbacks=[StopAtNonFiniteLoss()])
        assert [name for source, target, name in sent if target == HOST and _is_data(name)] == []


def _sent(name, devices, budget, **fit):
    """What the graph of a training's loop sends between devices: (from, to, name of the operation in the loop)."""
    with tensorflow_internals.collected_graphs() as graphs:
        trained(name, devices, budget, pictures(48), **fit)
    found = set()
    for node in (node for graph in graphs for node in graph.node if node.op in ("_Send", "_HostSend")):
        source, target = (node.attr[end].s.decode()[-5:] for end in ("send_device", "recv_device"))
        if source != target and "while/body/" in node.input[0]:
            found.add((source, target, node.input[0].partition("/while/")[2]))
    assert found
    return found


def _data_to(sent, device):
    """The tensors that `device` gets from the host."""
    return sorted(name for source, target, name in sent if (source, target) == (HOST, device) and _is_data(name))


def _is_data(name):
    """Whether it is a tensor; the order of operations on two devices is sent too, as an edge without values."""
    return "/ctrl/" not in name and not name.startswith(("NoOp", "LoopCond"))
