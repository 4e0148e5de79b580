"""Data go to the device that uses them, once: logical CPU devices stand for GPUs, and CPU:0 for the host.

What crosses between devices is read from the graphs that TensorFlow ran, cut into one part per device.
"""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
import tfdist.data
from tests.contract.comparison import assert_same
from tests.graphs import collected_graphs
from tests.interruption import InterruptionError, Interrupts
from tfdist.callbacks import Checkpoint, StopAtNonFiniteLoss
from tfdist.data.input import device_feed
from tfdist.data.input.array_feed import ArrayFeed, tensors
from tfdist.data.input.division import Division
from tfdist.data.input.source import Source
from tfdist.errors import DataError, UsageError

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


STRATEGIES = [("single", "CPU:1"), ("custom", ["CPU:1", "CPU:2"]), ("mirrored", 3)]
# Its steps run in one thread, unless data come from others.
ALONE = ("single", "CPU:0")


WHERE = dict(zip(("single", "custom", "mirrored", "alone"), (*STRATEGIES, ALONE), strict=True))
DATA = {"even": pictures(48), "uneven": pictures(41), "tokens": sentences(42)}


class TestTheResultDoesNotDependOnWhereTheArraysAre:
    @pytest.mark.thorough
    @pytest.mark.parametrize("budget", [PREFETCHED, RESIDENT], ids=["prefetched", "resident"])
    @pytest.mark.parametrize("data", DATA)
    @pytest.mark.parametrize("strategy", WHERE)
    def test_of_a_training(self, strategy, data, budget):
        (name, devices), data = WHERE[strategy], DATA[data]
        # The last batch of 41 has one example, fewer than there are replicas.
        assert_same(trained(name, devices, budget, data), trained(name, devices, READ_WHERE_THEY_ARE, data), 1e-6)

    @pytest.mark.thorough
    @pytest.mark.parametrize("budget", [PREFETCHED, RESIDENT], ids=["prefetched", "resident"])
    @pytest.mark.parametrize(
        ("name", "devices"),
        STRATEGIES[:2],
        ids=["single", "custom"],
    )
    def test_of_a_training_that_is_resumed_within_an_epoch(self, name, devices, budget, tmp_path):
        data = pictures(41)
        with pytest.raises(InterruptionError):
            trained(name, devices, budget, data, callbacks=[Checkpoint(tmp_path, every_steps=2), Interrupts()])
        resumed = trained(name, devices, budget, data, callbacks=[Checkpoint(tmp_path, resume=True)])
        assert_same(resumed, trained(name, devices, READ_WHERE_THEY_ARE, data), 1e-6)

    @pytest.mark.thorough
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
            placed, parts = strategy.placed(feed), []
            state = placed.start(1, 1)  # as a run that is resumed begins within a pass
            for batch in placed.batches.take(state, 1, 2):
                parts += [placed.batches.part(state, batch, index, Division(2)) for index in range(2)]
            return [(x.numpy(), y.numpy(), float(share)) for (x, y), share in parts]

        assert_same(batches(budget), batches(READ_WHERE_THEY_ARE), 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """20 pictures in two classes."""
    root = tmp_path_factory.mktemp("pictures")
    for number in range(20):
        path = root / "train" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        keras.utils.save_img(path, np.random.default_rng(number).integers(0, 256, (8, 8, 3)))
    return root


def of_files(folder):
    return tfdist.data.load("image_folder", folder, cache="off", size=(8, 8))


def of_reader(folder):
    x = np.random.default_rng(2).random((20, 8, 8, 3), np.float32)
    spec = tfdist.data.DataSpec("mine", "classification", (8, 8, 3), 2, {"train": 20})
    return tfdist.data.IndexedSource(spec, lambda split, indices: (x[indices], indices % 2))


def trained_on_feed(source, devices, budget, batch_size=6, **fit):
    """The history and the weights of a training; of the batches of 6, the last one has two examples."""
    keras.utils.set_random_seed(3)
    strategy = tfdist.strategy("custom", devices=devices, seed=7, device_data_bytes=budget)
    with strategy.scope():
        model = keras.Sequential([layers.Input((8, 8, 3)), layers.Flatten(), layers.Dense(2)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    feed = source.feed("train", batch_size, seed=4, augment="crop_flip")
    history = strategy.fit(model, feed, epochs=2, verbose=0, **fit).history
    return [history, strategy.evaluate(model, source.feed("train", batch_size), verbose=0), model.get_weights()]


@pytest.mark.parametrize("source_of", [of_files, of_reader])
class TestWhatThisProcessReadsIsSentAhead:
    @pytest.mark.thorough
    @pytest.mark.parametrize("devices", [["CPU:1"], 3], ids=str)
    def test_and_the_result_is_the_same(self, source_of, folder, devices):
        sent_ahead = trained_on_feed(source_of(folder), devices, PREFETCHED)
        assert_same(sent_ahead, trained_on_feed(source_of(folder), devices, READ_WHERE_THEY_ARE), 1e-6)

    @pytest.mark.thorough
    def test_also_in_a_run_that_is_resumed_within_an_epoch(self, source_of, folder, tmp_path):
        source, devices = source_of(folder), ["CPU:1", "CPU:2"]
        callbacks = [Checkpoint(tmp_path, every_steps=2), Interrupts()]
        with pytest.raises(InterruptionError):
            trained_on_feed(source, devices, PREFETCHED, callbacks=callbacks)
        resumed = trained_on_feed(source, devices, PREFETCHED, callbacks=[Checkpoint(tmp_path, resume=True)])
        assert_same(resumed, trained_on_feed(source, devices, READ_WHERE_THEY_ARE), 1e-6)

    @pytest.mark.thorough
    def test_so_that_nothing_crosses_in_a_step(self, source_of, folder):
        devices = ["CPU:1", "CPU:2"]
        sent = _crossing(lambda: trained_on_feed(source_of(folder), devices, PREFETCHED, 5))
        assert _data_to(sent, "CPU:1") == _data_to(sent, "CPU:2") == []
        on_the_host = _crossing(lambda: trained_on_feed(source_of(folder), devices, READ_WHERE_THEY_ARE, 5))
        assert len(_data_to(on_the_host, "CPU:2")) >= 2  # x and y

    def test_to_the_device_of_its_replica(self, source_of, folder):
        strategy = tfdist.strategy("custom", devices=["CPU:1", "CPU:2"], device_data_bytes=PREFETCHED)
        feed = source_of(folder).feed("train", 6, seed=4)
        whole = [
            feed.batches.part(None, batch, 0, Division(1))[0] for batch in feed.batches.take(feed.start(1, 2), 2, 2)
        ]
        state = strategy.placed(feed).start(1, 2)
        for x, y in whole:
            parts = [data for data, _ in state.get_next()]
            assert [part[0].device[-5:] for part in parts] == ["CPU:1", "CPU:2"]
            np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), x)
            np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), y)

    def test_but_not_where_devices_are_the_hosts(self, source_of, folder):
        feed = source_of(folder).feed("train", 6)
        assert tfdist.strategy("custom", devices=2).placed(feed) is feed


@pytest.mark.thorough
def test_a_bad_file_is_named_by_a_training_to_which_it_is_sent_ahead(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "some")
    bad = tmp_path / "some" / "train" / "a" / "4.png"
    bad.write_bytes(bad.read_bytes()[:60])
    with pytest.raises(DataError, match=r"4\.png"):
        trained_on_feed(of_files(tmp_path / "some"), ["CPU:1", "CPU:2"], PREFETCHED)


class TestWhatStaysOnTheHost:
    @pytest.mark.parametrize(
        "x",
        [tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.constant([["a"], ["b"]]), tf.sparse.eye(2)],
        ids=["ragged", "strings", "sparse"],
    )
    def test_is_what_a_gpu_cannot_index(self, x):
        strategy = tfdist.strategy("custom", devices=["CPU:1", "CPU:2"], device_data_bytes=RESIDENT)
        feed = ArrayFeed(tensors(x, np.zeros(2)), 2, lambda epoch: np.arange(2, dtype=np.int32))
        assert strategy.placed(feed) is feed

    def test_an_array_that_is_input_and_target_is_copied_once(self):
        x = np.ones((4, 2), np.float32)
        strategy = tfdist.strategy("single", devices="CPU:1", device_data_bytes=x.nbytes)
        feed = ArrayFeed(tensors(x, x), 2, lambda epoch: np.arange(4, dtype=np.int32))
        placed = strategy.placed(feed)
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
        assert _data_to(sent, "CPU:2") == ["GatherV2_2", "GatherV2_3"]

    @pytest.mark.thorough
    @pytest.mark.parametrize(("name", "devices"), STRATEGIES[:2], ids=["single", "custom"])
    def test_in_a_step_on_prefetched_parts_is_nothing_that_the_step_would_wait_for(self, name, devices):
        sent = _sent(name, devices, PREFETCHED)
        assert _data_to(sent, "CPU:1") == _data_to(sent, "CPU:2") == []

    def test_ahead_of_a_step_is_the_part_of_its_replica(self):
        strategy = tfdist.strategy("custom", devices=["CPU:1", "CPU:2"], device_data_bytes=PREFETCHED)
        x, y = pictures(48)
        feed = ArrayFeed(tensors(x, y), 8, lambda epoch: np.arange(48, dtype=np.int32))
        state = strategy.placed(feed).start(0, 0)
        data, _ = state.element_spec
        assert [spec.shape.as_list() for spec in data] == [[4, 6], [4]]
        assert [x.device[-5:] for (x, _), _ in state.get_next()] == ["CPU:1", "CPU:2"]

    def test_in_a_step_on_arrays_that_it_holds_are_the_numbers_of_examples(self):
        sent = _sent("custom", ["CPU:1", "CPU:2"], RESIDENT)
        assert _data_to(sent, "CPU:1") == ["strided_slice"]
        assert _data_to(sent, "CPU:2") == ["strided_slice_1"]

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("budget", [READ_WHERE_THEY_ARE, PREFETCHED, RESIDENT])
    def test_from_another_one_are_weights_gradients_counts_and_the_part_of_a_mask(self, budget):
        sent = _sent("custom", ["CPU:1", "CPU:2"], budget)
        weights, (mask,) = _split(_data_to(sent, "CPU:2", source="CPU:1"), "ReadVariableOp")
        assert len(weights) == 2
        assert mask.startswith("Slice")
        gradients, sums = _split(_data_to(sent, "CPU:1", source="CPU:2"), "gradient_tape")
        assert len(gradients) == 2
        # Terms of two sums: the correct examples, and the loss times the examples.
        assert sorted(name.partition("_")[0] for name in sums) == ["Sum", "mul"]

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("budget", [READ_WHERE_THEY_ARE, PREFETCHED, RESIDENT])
    def test_back_to_the_host_within_a_step_is_nothing(self, budget):
        # The loop's condition and the watch for NaN among them: a GPU would have to be waited for at each step.
        sent = _sent("single", "CPU:1", budget, callbacks=[StopAtNonFiniteLoss()])
        assert [name for source, target, name in sent if target == HOST and _is_data(name)] == []


def _sent(name, devices, budget, **fit):
    """What the graph of a training's loop sends between devices: (from, to, name of the operation in the loop)."""
    return _crossing(lambda: trained(name, devices, budget, pictures(48), **fit))


def _crossing(training):
    """What the loop of a `training` sends between devices, as `_sent`."""
    with collected_graphs() as graphs:
        training()
    found = set()
    for node in (node for graph in graphs for node in graph.node if node.op in ("_Send", "_HostSend")):
        source, target = (node.attr[end].s.decode()[-5:] for end in ("send_device", "recv_device"))
        if source != target and "while/body/" in node.input[0]:
            found.add((source, target, node.input[0].partition("/while/")[2]))
    assert found
    return found


def _data_to(sent, device, source=HOST):
    """The tensors that `device` gets from the host, or from another device."""
    return sorted(name for begin, end, name in sent if (begin, end) == (source, device) and _is_data(name))


def _split(names, word):
    """The names with that `word`, and those without."""
    return [name for name in names if word in name], [name for name in names if word not in name]


def _is_data(name):
    """Whether it is a tensor; the order of operations on two devices is sent too, as an edge without values."""
    return "/ctrl/" not in name and not name.startswith(("NoOp", "LoopCond"))
