"""Point 5, nothing lost: what is on the disk after each mishap, and that a resumed run ends as an unbroken one.

A killed process is played by an error in the middle of `fit`: no further hook is called. The process that resumes has
another random seed, so that whatever does not come from the checkpoint shows. Real kills are in processes/test_kill.py.
"""

import ast
import contextlib
import doctest
import functools
import gc
import hashlib
import json
import os
import pickle
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tfdist.callbacks import Checkpoint, LearningRateWarmup
from tfdist.checkpointing import format as checkpoint_format
from tfdist.checkpointing import state as training_state
from tfdist.checkpointing.format import Entry, Header
from tfdist.errors import CheckpointError, CheckpointWarning, UnknownNameError, UsageError

ROOT = Path(__file__).parents[1]
STEPS = 6  # in an epoch
EVERY = 4  # steps, where checkpoints are made within epochs: no call of the inner loop has one step then
X = np.random.default_rng(0).normal(size=(8 * STEPS, 4)).astype("float32")
Y = X[:, :1] - 2 * X[:, 1:2]


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """After each test Keras collects garbage; the objects of TensorFlow's modules would take a third of a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class KilledError(Exception):
    """Plays SIGKILL."""


class AtStep(keras.callbacks.Callback):
    """Does something right after step `step` of the run, before a checkpoint of that step is written."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def batches_until_hook(self, batch):
        """Only then: `single` rounds differently where steps are run one by one."""
        left = self.step - int(self.model.optimizer.iterations.numpy())
        return left if left > 0 else None

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == self.step:
            self.act(logs)


class Kill(AtStep):
    """Ends the process."""

    def act(self, logs):
        raise KilledError


class Poison(AtStep):
    """Sets a weight; the loss of that step has been noted before."""

    def __init__(self, step, value):
        super().__init__(step)
        self.value = value

    def act(self, logs):
        assert np.isfinite(logs["loss"])
        first, *others = self.model.get_weights()
        first[0, 0] = self.value
        self.model.set_weights([first, *others])


def network(units=8, optimizer=keras.optimizers.Adam, hidden=1, **options):
    hidden_layers = [layer for _ in range(hidden) for layer in (layers.Dense(units, "relu"), layers.Dropout(0.3))]
    model = keras.Sequential([layers.Input((4,)), *hidden_layers, layers.Dense(1)])
    model.compile(optimizer(0.01), **{"loss": "mse", "metrics": ["mae"], "jit_compile": False, **options})
    return model


def run(strategy="single", callbacks=(), build=network, *, seed=0, **fit):
    """A training as a process of its own begins it; `None` is Keras' own fit, `strategy.seed` is always 7."""
    keras.utils.set_random_seed(seed)
    fit = {"epochs": 3, "batch_size": 8, "verbose": 0, "callbacks": list(callbacks), **fit}
    if strategy is None:
        model = build()
        return SimpleNamespace(model=model, history=model.fit(X, Y, **fit).history)
    chosen = tfdist.strategy(strategy, devices=1 if strategy == "single" else 2, seed=7)
    with chosen.scope():
        model = build()
    return SimpleNamespace(model=model, history=chosen.fit(model, X, Y, **fit).history)


def killed(step, strategy="single", callbacks=(), build=network, **fit):
    with pytest.raises(KilledError):
        run(strategy, [*callbacks, Kill(step)], build, **fit)


def resumed(strategy="single", callbacks=(), build=network, **fit):
    return run(strategy, callbacks, build, seed=1, **fit)


@pytest.mark.thorough
@pytest.mark.parametrize("step", [4, STEPS])
def test_a_script_that_gives_no_seed_is_resumed_with_that_of_the_checkpoint(tmp_path, step):
    def script(*callbacks, **seed):
        strategy = tfdist.strategy("custom", **seed)  # without a seed each process draws another one
        with strategy.scope():
            model = network(optimizer=keras.optimizers.SGD)
        named = {"epochs": 3, "batch_size": 8, "verbose": 0, "callbacks": list(callbacks)}
        with contextlib.suppress(KilledError):
            strategy.fit(model, X, Y, **named)
        return strategy, model

    keras.utils.set_random_seed(1)
    whole, expected = script(Checkpoint(tmp_path / "whole", 2))
    keras.utils.set_random_seed(1)
    script(Checkpoint(tmp_path / "killed", 2), Kill(step + 1))
    keras.utils.set_random_seed(2)
    strategy, model = script(Checkpoint(tmp_path / "killed", 2, resume=True))
    assert strategy.seed == whole.seed
    assert_same_bits(values(model), values(expected))
    strategy, _ = script(Checkpoint(tmp_path / "whole", 2, resume=True), seed=3)  # at the end of an epoch it may differ
    assert strategy.seed == 3


def values(model):
    return [keras.ops.convert_to_numpy(variable) for variable in [*model.variables, *model.optimizer.variables]]


def assert_same_bits(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@contextlib.contextmanager
def refuses(error, *words):
    """The block raises `error`: one sentence with these words, and a hint."""
    with pytest.raises(error) as raised:
        yield raised
    assert "\n" not in raised.value.sentence
    assert raised.value.hint
    for word in words:
        assert word in raised.value.sentence


def test_the_synopsis_runs():
    assert doctest.testmod(checkpoint_format).failed == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The checkpoints of two epochs of a run, and its weights."""
    folder = tmp_path_factory.mktemp("trained")
    found = run(callbacks=[Checkpoint(folder)], epochs=2)
    return {path.name: path.read_bytes() for path in checkpoint_format.paths(folder)}, values(found.model)


@pytest.fixture
def folder(trained, tmp_path):
    """A folder with the two checkpoints."""
    for name, content in trained[0].items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def altered(content, position):
    changed = bytearray(content)
    changed[position] ^= 1
    return bytes(changed)


MISHAPS = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "altered in the header": lambda content: altered(content, 100),
    "altered in the middle": lambda content: altered(content, len(content) // 2),
    "altered in the digest": lambda content: altered(content, -1),
}


class TestDamage:
    """A damaged file is passed over."""

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("mishap", MISHAPS)
    def test_the_one_before_is_used_and_a_warning_names_the_file(self, mishap, folder, trained):
        newest = folder / "step-00000012.ckpt"
        newest.write_bytes(MISHAPS[mishap](newest.read_bytes()))
        keep = Checkpoint(folder, resume=True)
        with pytest.warns(UserWarning, match=re.escape(f"`{newest}` cannot be used")) as warned:
            found = resumed(callbacks=[keep], epochs=2)
        assert len([w for w in warned if str(newest) in str(w.message)]) == 1
        assert keep.resumed_from == folder / "step-00000006.ckpt"
        assert found.model.optimizer.iterations == 12
        assert_same_bits(values(found.model), trained[1])
        assert checkpoint_format.latest(folder).step == 12  # written anew

    def test_where_all_are_damaged_the_run_is_refused_before_its_first_step(self, folder):
        for path in checkpoint_format.paths(folder):
            path.write_bytes(path.read_bytes()[:-5])
        model = network()
        none_whole = refuses(CheckpointError, f"No checkpoint in `{folder}` is intact: 2 damaged")
        with none_whole, pytest.warns(UserWarning, match="cannot be used"):
            run(callbacks=[Checkpoint(folder, resume=True)], build=lambda: model)
        assert model.optimizer.iterations == 0
        assert names(folder) == ["step-00000006.ckpt", "step-00000012.ckpt"]

    def test_no_byte_can_be_altered_and_none_be_missing_unnoticed(self, tmp_path):
        path = checkpoint_format.write(tmp_path, Header(0, 1, 1, "SGD"), [Entry("model", "w", np.ones(5, "float32"))])
        content = path.read_bytes()
        for position in range(len(content)):
            for damaged in (altered(content, position), content[:position]):
                path.write_bytes(damaged)
                with pytest.raises(CheckpointError, match=re.escape(f"`{path}` cannot be used")):
                    checkpoint_format.read(path)

    def test_a_damaged_newer_file_does_not_push_out_what_the_resumed_run_saves(self, folder):
        newest = folder / "step-00000012.ckpt"
        newest.write_bytes(newest.read_bytes()[:-5])
        with pytest.warns(UserWarning, match="cannot be used"):
            killed(11, callbacks=[Checkpoint(folder, every_steps=2, keep=1, resume=True)])
        with pytest.warns(UserWarning, match="cannot be used"):
            assert checkpoint_format.latest(folder).step == 10


def fifo(path):
    os.mkfifo(path)


def link(path):
    path.with_name("aside").write_bytes(b"x")
    path.symlink_to("aside")


class TestStrangeFiles:
    """What is in a folder of checkpoints without being a checkpoint of this run."""

    @pytest.mark.parametrize("make", [fifo, link, Path.mkdir])
    def test_only_regular_files_are_opened(self, make, folder):
        make(folder / "step-00000099.ckpt")
        with pytest.warns(CheckpointWarning, match="not a regular file; the previous checkpoint is used"):
            assert checkpoint_format.latest(folder).step == 12

    def test_the_step_is_that_of_the_content_and_not_of_the_name(self, folder):
        newest, older = folder / "step-00000012.ckpt", folder / "step-00000006.ckpt"
        newest.rename(folder / "step-00000999.ckpt")
        older.rename(newest)
        assert checkpoint_format.latest(folder).step == 12
        assert [path.name for path in checkpoint_format.paths(folder)] == ["step-00000999.ckpt", "step-00000012.ckpt"]
        checkpoint_format.prune(folder, keep=1, written=folder / "step-00000999.ckpt")
        assert names(folder) == ["step-00000999.ckpt"]

    def test_a_header_beyond_its_limit_is_not_read(self, folder):
        newest = folder / "step-00000012.ckpt"
        content = bytearray(newest.read_bytes()[:-32])
        content[20:28] = (1 << 62).to_bytes(8, "little")
        newest.write_bytes(content + hashlib.sha256(content).digest())
        with pytest.warns(CheckpointWarning, match="and at most 67,108,864 are read"):
            assert checkpoint_format.latest(folder).step == 6

    def test_a_file_that_is_larger_than_its_header_says_is_not_read(self, folder):
        os.truncate(folder / "step-00000012.ckpt", 1 << 40)  # which would take many minutes
        with pytest.warns(CheckpointWarning, match=r"it has 1,099,511,627,776 bytes, and its header"):
            assert checkpoint_format.latest(folder).step == 6

    @pytest.mark.parametrize("field", ["epoch", "callbacks", "run"])
    def test_a_header_with_other_types_is_refused(self, field, tmp_path):
        header = Header(0, 1, 1, "SGD")
        path = checkpoint_format.write(tmp_path, header, [])
        content = path.read_bytes()
        begin = 28
        described = json.loads(content[begin:-32])
        described["header"][field] = "x"
        text = json.dumps(described).encode()
        changed = content[:20] + len(text).to_bytes(8, "little") + text
        path.write_bytes(changed + hashlib.sha256(changed).digest())
        with pytest.raises(CheckpointError, match=rf"its header is not that of a checkpoint \({field}"):
            checkpoint_format.read(path)

    def test_a_checkpoint_of_another_run_of_the_script_is_refused(self, folder, tmp_path_factory):
        other = tmp_path_factory.mktemp("other")
        run(callbacks=[Checkpoint(other)], epochs=1)
        (other / "step-00000006.ckpt").replace(folder / "step-00000099.ckpt")
        with refuses(CheckpointError, "has checkpoints of 2 runs", "`step-00000099.ckpt` of the run that began at"):
            run(callbacks=[Checkpoint(folder, resume=True)])

    def test_facts_that_differ_are_refused_by_name_and_files_without_them_are_taken(self, folder, tmp_path):
        run(callbacks=[Checkpoint(tmp_path / "named", run={"model": "mlp", "place": "here"})], epochs=1)
        words = "is of another run, with the model `mlp`; this run has the model `cnn`"
        with refuses(CheckpointError, words):
            run(callbacks=[Checkpoint(tmp_path / "named", resume=True, run={"model": "cnn"})])
        keep = Checkpoint(folder, resume=True, run={"model": "mlp"})
        resumed(callbacks=[keep], epochs=2)
        assert keep.resumed_from == folder / "step-00000012.ckpt"

    def test_only_what_a_callback_remembers_is_restored_to_it(self):
        callback = keras.callbacks.ModelCheckpoint("mine.keras")
        states = [{"name": "ModelCheckpoint 0", "state": {"best": 0.5, "filepath": "/elsewhere"}}]
        training_state._restore_callbacks_state([callback], states, [], 0.0)
        assert (callback.best, callback.filepath) == (0.5, "mine.keras")


class TestFullDisk:
    class FillDisk(keras.callbacks.Callback):
        def __init__(self, disk, free, keep):
            super().__init__()
            self.disk, self.free, self.keep = disk, free, keep

        def on_epoch_begin(self, epoch, logs=None):
            if epoch != 1:
                return
            assert self.keep.saved is not None  # waits until the first checkpoint is written
            content = bytes(4096)
            with contextlib.suppress(OSError), open(self.disk / "filling", "wb", buffering=0) as file:
                while file.write(content):
                    pass
            os.truncate(self.disk / "filling", (self.disk / "filling").stat().st_size - self.free)

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("free", [0, 4096], ids=["for no byte", "for the first bytes"])
    def test_it_is_told_in_a_sentence_and_the_earlier_checkpoint_stays_whole(self, disk, free, trained):
        folder = disk / "checkpoints"
        words = f"cannot be written to `{folder}`", f"where {free:,} are free", "No space left"
        with refuses(CheckpointError, *words) as raised:
            keep = Checkpoint(folder)
            run(callbacks=[self.FillDisk(disk, free, keep), keep], epochs=2)
        good = "the last checkpoint, `step-00000006.ckpt`, is unchanged"
        assert raised.value.hint == f"make room there, or choose another folder; {good}"
        assert names(folder) == ["step-00000006.ckpt"]
        (disk / "filling").unlink()
        again = resumed(callbacks=[Checkpoint(folder, resume=True)], epochs=2)
        assert_same_bits(values(again.model), trained[1])


def scaled(rate):
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(rate))


def amsgrad(rate):
    return keras.optimizers.Adam(rate, amsgrad=True)


OTHER_MODELS = {
    "larger layer": ({"units": 16}, "/kernel` float32 [4, 8], where", "/kernel` float32 [4, 16]"),
    "a layer more": ({"hidden": 2}, "/kernel` float32 [8, 1], where", "/kernel` float32 [8, 8]"),
    "a layer less": ({"hidden": 0}, "/kernel` float32 [4, 8], where", "/kernel` float32 [4, 1]"),
    "another optimizer": ({"optimizer": keras.optimizers.SGD}, "has the optimizer `Adam`, and the model `SGD`"),
    "loss scaling": ({"optimizer": scaled}, "has the optimizer `Adam`, and the model `LossScaleOptimizer(Adam)`"),
    "another option of the optimizer": (
        {"optimizer": amsgrad},
        "it has no further optimizer variable, where the model has the optimizer variable `adam",
        "velocity_hat",
    ),
}


class TestAnotherRun:
    """What does not fit a checkpoint is refused before its first step, and left as it was."""

    @pytest.mark.sampled(7)
    @pytest.mark.parametrize("name", OTHER_MODELS)
    @pytest.mark.parametrize("strategy", ["single", None])
    def test_a_model_or_optimizer_that_differs_is_refused_by_name(self, strategy, name, folder):
        options, *words = OTHER_MODELS[name]
        model = network(**options)
        before = model.get_weights()
        with refuses(CheckpointError, f"The checkpoint `{folder / 'step-00000012.ckpt'}`", *words):
            run(strategy, [Checkpoint(folder, resume=True)], lambda: model)
        assert model.optimizer.iterations == 0
        assert_same_bits(model.get_weights(), before)
        assert names(folder) == ["step-00000006.ckpt", "step-00000012.ckpt"]

    def test_a_dtype_that_differs_is_refused_by_name(self, folder):
        keras.config.set_dtype_policy("bfloat16")
        with refuses(CheckpointError, "/kernel` float32 [4, 8], where", "/kernel` bfloat16 [4, 8]"):
            run(callbacks=[Checkpoint(folder, resume=True)])

    def test_names_that_keras_counts_up_are_no_difference(self, folder):
        network()
        keep = Checkpoint(folder, resume=True)
        resumed(callbacks=[keep])
        assert keep.resumed_from == folder / "step-00000012.ckpt"

    def test_within_an_epoch_other_batches_are_refused(self, tmp_path):
        killed(4, callbacks=[Checkpoint(tmp_path, every_steps=3)])
        with refuses(CheckpointError, "with 6 steps in an epoch, and this run has 12"):
            run(callbacks=[Checkpoint(tmp_path, resume=True)], batch_size=4)

    @pytest.mark.parametrize("strategy", ["single", None])
    def test_a_new_run_into_a_folder_with_checkpoints_is_refused(self, strategy, folder, trained):
        model = network()
        words = f"`{folder}` already contains checkpoints", "`step-00000012.ckpt` is the newest"
        with refuses(CheckpointError, *words):
            run(strategy, [Checkpoint(folder)], lambda: model)
        assert model.optimizer.iterations == 0
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == trained[0]

    def test_the_same_callback_goes_on_into_its_own_folder(self, tmp_path):
        keep = Checkpoint(tmp_path)
        model = run(callbacks=[keep], epochs=1).model
        tfdist.strategy("single").fit(model, X, Y, batch_size=8, epochs=2, initial_epoch=1, callbacks=[keep], verbose=0)
        assert names(tmp_path) == ["step-00000006.ckpt", "step-00000012.ckpt"]

    def test_resuming_in_an_empty_folder_begins_a_new_run(self, tmp_path, trained):
        keep = Checkpoint(tmp_path / "none", resume=True)
        found = run(callbacks=[keep], epochs=2)
        assert keep.resumed_from is None
        assert_same_bits(values(found.model), trained[1])


class Jitter(keras.callbacks.Callback):
    """Changes the rate at the beginning of each epoch, by chance."""

    def on_epoch_begin(self, epoch, logs=None):
        chance = random.random() + np.random.rand() + float(keras.random.uniform(()))
        self.model.optimizer.learning_rate *= 0.7 + 0.1 * chance


def stored():
    return [(X[k : k + 8], Y[k : k + 8]) for k in range(0, len(X), 8)]


class InBatches(keras.utils.PyDataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, number):
        return stored()[number]


class Shuffling(InBatches):
    def on_epoch_end(self):
        self.order = np.random.permutation(STEPS)

    def __getitem__(self, number):
        return stored()[number]


class Queue(keras.layers.Layer):
    """Adds the mean of the last means, and noise; what it remembers is in variables that Keras does not know."""

    def __init__(self):
        super().__init__()
        self.queue, self.notes = tf.Variable(tf.zeros([3, 4])), {"last": tf.Variable("none")}
        self.generator = tf.random.Generator.from_seed(3)

    def held(self):
        return [self.queue, self.notes["last"], self.generator.state]

    def call(self, x, training=False):
        if not training:
            return x
        self.queue.assign(tf.concat([tf.reduce_mean(x, 0, keepdims=True), self.queue[:-1]], 0))
        self.notes["last"].assign(tf.strings.as_string(self.queue[0, 0]))
        return x + tf.reduce_mean(self.queue, 0) + self.generator.normal([4])


def with_queue():
    model = keras.Sequential([keras.Input((4,)), Queue(), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


class Nothing(keras.callbacks.Callback):
    """Does nothing."""


class TestResume:
    """A run that is killed and resumed ends as an unbroken one, to the bit: weights, optimizer, history."""

    @staticmethod
    @functools.cache
    def unbroken(strategy, every_steps=None, **fit):
        with tempfile.TemporaryDirectory() as folder:
            found = run(strategy, [Checkpoint(folder, every_steps)], **fit)
        return values(found.model), found.history

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(("strategy", "step"), [("single", 10), ("custom", 17), ("mirrored", 5)])
    def test_in_the_middle_of_an_epoch(self, strategy, step, tmp_path):
        killed(step, strategy, [Checkpoint(tmp_path, EVERY)])
        last = step // EVERY * EVERY
        assert checkpoint_format.latest(tmp_path).step == last
        keep = Checkpoint(tmp_path, EVERY, resume=True)
        found = resumed(strategy, [keep])
        assert keep.resumed_from == tmp_path / f"step-{last:08d}.ckpt"
        weights, history = self.unbroken(strategy, EVERY)
        assert_same_bits(values(found.model), weights)
        assert found.history == history

    @pytest.mark.thorough
    @pytest.mark.parametrize("strategy", ["single", "mirrored"])
    def test_with_variables_and_generators_of_tensorflow_in_layers(self, strategy, tmp_path):
        unbroken = run(strategy, [Checkpoint(tmp_path / "unbroken", EVERY)], with_queue)
        killed(10, strategy, [Checkpoint(tmp_path / "broken", EVERY)], with_queue)
        found = resumed(strategy, [Checkpoint(tmp_path / "broken", EVERY, resume=True)], with_queue)
        assert_same_bits(values(found.model), values(unbroken.model))
        for ours, theirs in zip(found.model.layers[0].held(), unbroken.model.layers[0].held(), strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs.numpy())

    def test_what_callbacks_do_as_an_epoch_begins_is_not_done_twice(self, tmp_path):
        unbroken = run(callbacks=[Jitter(), Checkpoint(tmp_path / "unbroken", EVERY)])
        killed(10, callbacks=[Jitter(), Checkpoint(tmp_path / "broken", EVERY)])
        found = resumed(callbacks=[Jitter(), Checkpoint(tmp_path / "broken", EVERY, resume=True)])
        assert_same_bits(values(found.model), values(unbroken.model))

    def test_again_and_again(self, tmp_path):
        for number, step in enumerate((5, 11, 18)):
            killed(step, callbacks=[Checkpoint(tmp_path, EVERY, resume=True)], seed=number)
        found = resumed(callbacks=[Checkpoint(tmp_path, EVERY, resume=True)])
        weights, history = self.unbroken("single", EVERY)
        assert_same_bits(values(found.model), weights)
        assert found.history == history

    @pytest.mark.thorough
    @pytest.mark.parametrize(
        ("name", "step"),
        [
            ("shuffle", 4),
            ("shuffle", 7),
            ("shuffle", 16),
            ("repeated", 10),
            pytest.param("repeated", 15, marks=pytest.mark.exhaustive),
            pytest.param("in Python", 10, marks=pytest.mark.exhaustive),
            pytest.param("of files", 10, marks=pytest.mark.exhaustive),
        ],
    )
    def test_where_a_dataset_draws_its_order_as_it_goes(self, name, step, tmp_path):
        (tmp_path / "lines").write_text("\n".join(map(str, range(len(X)))))

        def data():
            tf.random.set_seed(3)  # which the seed of a shuffle is joined with
            numbers = tf.data.Dataset.range(len(X))
            if name == "of files":
                numbers = tf.data.TextLineDataset(str(tmp_path / "lines")).map(tf.strings.to_number)
            if name == "in Python":
                numbers = numbers.map(lambda n: tf.ensure_shape(tf.numpy_function(lambda n: n, [n], tf.int64), []))
            shuffled = numbers.shuffle(20, seed=5).map(lambda n: (tf.gather(X, tf.cast(n, tf.int32)),) * 2)
            batches = shuffled.map(lambda x, y: (x, y[:1])).batch(8)
            return batches.repeat() if name == "repeated" else batches

        def train(folder, *callbacks, **options):
            steps = STEPS - 1 if name == "repeated" else None
            keep = Checkpoint(tmp_path / folder, 1, **options)
            chosen = tfdist.strategy("single", seed=7)
            keras.utils.set_random_seed(len(callbacks))
            model = network()
            history = chosen.fit(
                model, data(), epochs=3, steps_per_epoch=steps, verbose=0, callbacks=[keep, *callbacks]
            )
            return values(model), history.history

        unbroken = train("unbroken", Nothing())
        with pytest.raises(KilledError):
            train("broken", Kill(step))
        found = train("broken", resume=True)
        assert_same_bits(found[0], unbroken[0])
        assert found[1] == unbroken[1]

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("name", ["generator", "PyDataset that shuffles itself"])
    def test_data_that_cannot_be_gone_on_with_are_resumed_at_the_start_of_an_epoch(self, name, tmp_path):
        def data():
            return (batch for _ in range(9) for batch in stored()) if name == "generator" else Shuffling()

        def train(*callbacks, **options):
            keep = Checkpoint(tmp_path, 2, **options)
            steps = {"steps_per_epoch": STEPS} if name == "generator" else {}
            chosen = tfdist.strategy("single", seed=7)
            chosen.fit(network(), data(), epochs=3, verbose=0, callbacks=[keep, *callbacks], **steps)
            return keep

        with pytest.warns(match="a resumed run begins with an epoch"), pytest.raises(KilledError):
            train(Kill(2 * STEPS + 3))
        assert [path.name for path in checkpoint_format.paths(tmp_path)] == ["step-00000012.ckpt", "step-00000006.ckpt"]
        with pytest.warns(match="saves at the end of the epoch"):
            keep = train(resume=True)
        assert (keep.resumed_from.name, keep.step) == ("step-00000012.ckpt", 3 * STEPS)

    @pytest.mark.thorough
    def test_a_pydataset_that_follows_from_the_numbers_of_its_batches_in_the_middle_of_an_epoch(self, tmp_path):
        def train(folder, *callbacks, **options):
            keras.utils.set_random_seed(len(callbacks))
            model = network()
            keep = Checkpoint(tmp_path / folder, 2, **options)
            tfdist.strategy("single", seed=7).fit(
                model, InBatches(), epochs=3, shuffle=True, verbose=0, callbacks=[keep, *callbacks]
            )
            return values(model)

        unbroken = train("unbroken", Nothing())
        with pytest.raises(KilledError):
            train("broken", Kill(STEPS + 3))
        assert checkpoint_format.latest(tmp_path / "broken").batch == 2
        assert_same_bits(train("broken", resume=True), unbroken)

    def test_other_data_are_refused_within_an_epoch(self, tmp_path):
        def fit(data, *callbacks, **options):
            keep = Checkpoint(tmp_path, 2, **options)
            tfdist.strategy("single", seed=7).fit(network(), data, epochs=2, verbose=0, callbacks=[keep, *callbacks])

        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
        with pytest.raises(KilledError):
            fit(data, Kill(3))
        with refuses(CheckpointError, "other data"):
            fit(data.shuffle(3), resume=True)

    @pytest.mark.thorough
    def test_under_stock_keras_at_the_end_of_an_epoch(self, tmp_path):
        # Where TensorFlow shuffles, it keeps its position to itself.
        killed(17, None, [Checkpoint(tmp_path, EVERY)], shuffle=False)
        keep = Checkpoint(tmp_path, EVERY, resume=True)
        found = resumed(None, [keep], shuffle=False)
        assert keep.resumed_from == tmp_path / "step-00000012.ckpt"
        weights, history = self.unbroken(None, EVERY, shuffle=False)
        assert_same_bits(values(found.model), weights)
        assert found.history == history

    def test_stock_keras_refuses_to_begin_within_an_epoch(self, tmp_path):
        killed(4, callbacks=[Checkpoint(tmp_path, every_steps=3)])
        with refuses(CheckpointError, "cannot resume within an epoch", "`step-00000003.ckpt` is the newest"):
            run(None, [Checkpoint(tmp_path, resume=True)])

    def test_a_finished_run_trains_no_more(self, folder, trained):
        found = resumed(callbacks=[Checkpoint(folder, resume=True)], epochs=2)
        assert_same_bits(values(found.model), trained[1])
        assert len(found.history["loss"]) == 2
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == trained[0]

    def test_the_random_states_that_belong_to_no_model_go_on(self):
        def draw():
            return [
                random.random(),
                random.gauss(),
                np.random.rand(),
                np.random.randn(),
                float(keras.random.uniform(())),
                float(tf.random.get_global_generator().uniform(())),
            ]

        keras.utils.set_random_seed(0)
        tf.random.set_global_generator(tf.random.Generator.from_seed(0))
        draw()
        state = training_state.random_states()
        expected = draw()
        keras.utils.set_random_seed(1)
        assert draw() != expected
        training_state.restore_random_states(state)
        assert draw() == expected


class Score(keras.callbacks.Callback):
    """A figure that is best in the second epoch."""

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = [5.0, 3.0][epoch] if epoch < 2 else 4.0


class Rates(keras.callbacks.Callback):
    """The learning rate at each step; remembers them as a callback of one's own does."""

    def on_train_begin(self, logs=None):
        self.rates = []

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    def checkpoint_state(self):
        return {"rates": self.rates}

    def restore_checkpoint_state(self, state):
        self.rates = list(state["rates"])


def early_stopping(folder):
    return keras.callbacks.EarlyStopping("score", mode="min", patience=3, restore_best_weights=True)


def reduce_on_plateau(folder):
    return keras.callbacks.ReduceLROnPlateau("score", mode="min", factor=0.5, patience=1, cooldown=2)


def best_weights(folder):
    path = folder / "best-{epoch}.weights.h5"
    return keras.callbacks.ModelCheckpoint(path, "score", mode="min", save_best_only=True, save_weights_only=True)


def warmup(folder):
    return LearningRateWarmup(4, warmup_epochs=2.5)


def remembered(callback):
    """What a callback knows at the end of a training."""
    known = ("wait", "best", "stopped_epoch", "best_epoch", "cooldown_counter")
    return {name: getattr(callback, name) for name in known if hasattr(callback, name)}


def results(folder, strategy, makers, *, train=run, more=()):
    """What a training leaves behind: its history, and what callbacks did, know and wrote."""
    folder.mkdir(exist_ok=True)
    used, rates = [make(folder) for make in makers], Rates()
    data = {"shuffle": False, "validation_data": (X[:9], Y[:9]) if strategy else None}
    found = train(strategy, [Score(), *used, rates, *more], epochs=6, **data)
    return found and {
        "history": found.history,
        "rates": rates.rates,
        "callbacks": [remembered(callback) for callback in used],
        "files": names(folder),
        "weights": [value.tobytes() for value in values(found.model)],
    }


def broken(folder, strategy, makers, step):
    """What a training leaves that is killed at `step` and resumed, and the step that it was resumed from."""
    more = [Checkpoint(folder / "checkpoints", EVERY)]
    results(folder / "files", strategy, makers, train=functools.partial(killed, step), more=more)
    more = [Checkpoint(folder / "checkpoints", EVERY, resume=True)]
    found = results(folder / "files", strategy, makers, train=resumed, more=more)
    return found, int(more[0].resumed_from.stem.removeprefix("step-"))


class TestOtherCallbacks:
    """Their state comes back: a run that is killed leaves what an unbroken one leaves."""

    @pytest.fixture(scope="class", params=["single", None])
    def both(self, request, tmp_path_factory):
        """What an unbroken run leaves, and one that is killed in the fourth epoch."""
        strategy, makers = request.param, (early_stopping, reduce_on_plateau, best_weights, warmup)
        folder = tmp_path_factory.mktemp("callbacks")
        unbroken = results(folder / "unbroken", strategy, makers)
        found, resumed_from = broken(folder, strategy, makers, 23)
        assert resumed_from == (20 if strategy else 18)
        return unbroken, found

    @pytest.mark.thorough
    def test_early_stopping_counts_on(self, both):
        unbroken, found = both
        assert len(unbroken["history"]["loss"]) == 5  # three epochs after the best one
        assert found["callbacks"][0] == unbroken["callbacks"][0]
        assert found["history"] == unbroken["history"]

    def test_reduce_on_plateau_counts_on(self, both):
        unbroken, found = both
        # One epoch after the best one, and not in the epochs of the cooldown, in the first of which the run is killed.
        assert unbroken["rates"][17] == 2 * unbroken["rates"][18] == 2 * unbroken["rates"][-1]
        assert found["callbacks"][1] == unbroken["callbacks"][1]
        assert found["rates"] == unbroken["rates"]

    def test_model_checkpoint_saves_the_best_only(self, both):
        unbroken, found = both
        assert unbroken["files"] == ["best-1.weights.h5", "best-2.weights.h5"]
        assert found["callbacks"][2] == unbroken["callbacks"][2]
        assert found["files"] == unbroken["files"]

    def test_the_weights_are_the_same(self, both):
        unbroken, found = both
        assert found["weights"] == unbroken["weights"]

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(("step", "resumed_from"), [(5, 4), (15, 12), (18, 16)])
    def test_the_warmup_goes_on_wherever_it_was(self, step, resumed_from, tmp_path):
        unbroken = self.warmed_up()
        assert unbroken["rates"][14] < unbroken["rates"][15] == unbroken["rates"][-1]
        assert broken(tmp_path, "single", (warmup,), step) == (unbroken, resumed_from)

    @staticmethod
    @functools.cache
    def warmed_up():
        with tempfile.TemporaryDirectory() as folder:
            return results(Path(folder), "single", (warmup,))

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("strategy", ["single", None])
    def test_a_run_that_a_callback_had_ended_stays_ended(self, strategy, tmp_path):
        more = [Checkpoint(tmp_path / "checkpoints")]
        ended = results(tmp_path / "files", strategy, (early_stopping,), more=more)
        more = [Checkpoint(tmp_path / "checkpoints", resume=True)]
        again = results(tmp_path / "files", strategy, (early_stopping,), train=resumed, more=more)
        assert len(again["history"]["loss"]) == 5
        assert again == ended

    def test_the_last_epoch_of_a_run_that_a_callback_ends_is_saved(self, tmp_path):
        class Ends(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                self.model.stop_training = epoch == 1

        run(callbacks=[Ends(), Checkpoint(tmp_path, every_epochs=4)], epochs=6)
        assert names(tmp_path) == [f"step-{2 * STEPS:08}.ckpt"]

    def test_a_state_that_no_file_can_hold_is_refused_by_name(self, tmp_path):
        class Own(Rates):
            def checkpoint_state(self):
                return {"object": object()}

        with refuses(CheckpointError, "The state of the callback `Own 0` contains `object`"):
            run(callbacks=[Own(), Checkpoint(tmp_path)])
        assert names(tmp_path) == []


class TestNotFinite:
    """Nothing is saved then, and the good files are left alone."""

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(("strategy", "value"), [("single", np.nan), ("custom", np.inf), (None, np.nan)])
    def test_a_weight_at_the_end_of_an_epoch(self, strategy, value, tmp_path):
        run(strategy, [Poison(12, value), Checkpoint(tmp_path, keep=1)])
        assert names(tmp_path) == ["step-00000006.ckpt"]

    def test_a_weight_within_an_epoch(self, tmp_path):
        run(callbacks=[Poison(8, np.nan), Checkpoint(tmp_path, every_steps=1, keep=2)])
        assert names(tmp_path) == ["step-00000006.ckpt", "step-00000007.ckpt"]

    @pytest.mark.parametrize("strategy", ["single", None])
    def test_the_loss_alone(self, strategy, tmp_path):
        def build():
            # No gradient comes from what is not finite.
            return network(metrics=[], loss=lambda y, p: keras.ops.abs(p) + keras.ops.stop_gradient(y))

        y = Y.copy()
        y[3 * 8] = np.nan
        keep = Checkpoint(tmp_path, every_steps=1)
        keras.utils.set_random_seed(0)
        model = build()
        fit = functools.partial(tfdist.strategy("single").fit, model) if strategy else model.fit
        history = fit(X, y, batch_size=8, shuffle=False, verbose=0, callbacks=[keep]).history
        assert np.isnan(history["loss"]).all()
        assert all(np.isfinite(weight).all() for weight in model.get_weights())
        steps = [path.name for path in checkpoint_format.paths(tmp_path)]
        assert steps == (["step-00000003.ckpt", "step-00000002.ckpt", "step-00000001.ckpt"] if strategy else [])

    @pytest.mark.thorough
    def test_what_is_resumed_is_the_last_that_was_finite(self, tmp_path, trained):
        run(callbacks=[Poison(8, np.nan), Checkpoint(tmp_path)], epochs=2)
        found = resumed(callbacks=[Checkpoint(tmp_path, resume=True)], epochs=2)
        assert_same_bits(values(found.model), trained[1])


class TestFolder:
    """What stays in the folder, and what a file may hold."""

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(("strategy", "keep"), [("single", 3), ("custom", 1)])
    def test_only_the_newest_stay(self, strategy, keep, tmp_path):
        run(strategy, [Checkpoint(tmp_path, keep=keep)], epochs=5)
        last = [f"step-{step:08d}.ckpt" for step in (18, 24, 30)]
        assert names(tmp_path) == last[-keep:]

    def test_what_is_no_checkpoint_stays(self, tmp_path):
        for name in ("notes.txt", "step-last.ckpt", ".hidden"):
            (tmp_path / name).write_text("mine")
        run(callbacks=[Checkpoint(tmp_path, keep=1)], epochs=2)
        assert names(tmp_path) == sorted([".hidden", "notes.txt", "step-00000012.ckpt", "step-last.ckpt"])

    def test_the_temporary_of_a_killed_writer_is_removed_when_the_next_run_begins(self, tmp_path):
        run(callbacks=[Checkpoint(tmp_path)], epochs=1)
        program = (
            "import os, signal, sys, pathlib; from tfdist import files\n"
            "def write(path):\n"
            "    path.write_bytes(b'half'); os.kill(os.getpid(), signal.SIGKILL)\n"
            "files.write_atomically(pathlib.Path(sys.argv[1]), write)"
        )
        writer = subprocess.run([sys.executable, "-c", program, tmp_path / "step-00000012.ckpt"], check=False)
        assert writer.returncode == -9
        left = set(names(tmp_path)) - {"step-00000006.ckpt"}
        assert len(left) == 1
        keep = Checkpoint(tmp_path, resume=True)
        resumed(callbacks=[keep], epochs=2)
        assert keep.resumed_from.name == "step-00000006.ckpt"
        assert names(tmp_path) == ["step-00000006.ckpt", "step-00000012.ckpt"]

    def test_a_pickle_is_refused_and_not_run(self, tmp_path):
        class Bomb:
            def __reduce__(self):
                return Path.touch, (tmp_path / "exploded",)

        path = tmp_path / "step-00000001.ckpt"
        for content in (pickle.dumps(Bomb()), crafted(pickle.dumps(Bomb()))):
            path.write_bytes(content)
            with refuses(CheckpointError, f"`{path}` cannot be used"):
                checkpoint_format.read(path)
        assert names(tmp_path) == ["step-00000001.ckpt"]
        pickle.loads(pickle.dumps(Bomb()))  # it would have
        assert "exploded" in names(tmp_path)

    @pytest.mark.parametrize("dtype", ["object", "unknown"])
    def test_arrays_of_objects_are_refused(self, dtype, tmp_path):
        row = {"group": "model", "name": "w", "dtype": dtype, "shape": [1], "by_replica": False, "offset": 0}
        header = {"epoch": 1, "batch": 0, "step": 1, "optimizer": "SGD"}
        path = tmp_path / "step-00000001.ckpt"
        path.write_bytes(crafted(json.dumps({"header": header, "arrays": [row]}).encode(), bytes(64)))
        with refuses(CheckpointError, f"`{path}` cannot be used"):
            checkpoint_format.read(path)
        with pytest.raises(CheckpointError, match="cannot be stored: its dtype is `object`"):
            checkpoint_format.write(tmp_path, Header(**header), [Entry("model", "w", np.array([{}]))])

    def test_no_source_imports_pickle_or_marshal(self):
        sources = [path for room in ("tfdist", "strategies", "models") for path in (ROOT / room).rglob("*.py")]
        assert ROOT / "tfdist" / "checkpointing" / "format.py" in sources
        # It speaks with a process that it has started itself, over a pipe, and reads no file.
        sources.remove(ROOT / "tfdist" / "data" / "input" / "scan.py")
        # It reads a function, and what it returned, from a folder of the user that it has been started with.
        sources.remove(ROOT / "tfdist" / "launcher" / "function.py")
        unsafe = {"pickle", "cloudpickle", "marshal", "dill", "shelve"}
        for path in sources:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not {name.split(".")[0] for name in imported} & unsafe, path
                assert not (isinstance(node, ast.keyword) and node.arg == "allow_pickle"), path

    def test_arguments_out_of_range_are_refused(self, tmp_path):
        for options in ({"every_steps": 0}, {"every_epochs": 0}, {"keep": 0}):
            with refuses(UsageError, f"`{next(iter(options))}` of 1 or more. Received: `0`"):
                Checkpoint(tmp_path, **options)
        with refuses(UnknownNameError, "`maximum`", "`max`, `min`"):
            Checkpoint(tmp_path, mode="maximum")


def crafted(header, arrays=b""):
    """A file with any header and a right checksum."""
    content = b"tfdist checkpoint 1\n" + len(header).to_bytes(8, "little") + header + arrays
    return content + hashlib.sha256(content).digest()
