"""Data of Hugging Face `datasets`, Grain and ArrayRecord, as they are: what a model trained on them ends with."""

import pickle
import re
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import tfdist
from tests.test_checkpoint import Kill, KilledError
from tfdist.callbacks import Checkpoint
from tfdist.data import examples
from tfdist.data.input import adapters, device_feed
from tfdist.data.input.division import WHOLE, Division
from tfdist.data.input.examples import of_columns
from tfdist.errors import CheckpointError, DataError, UsageError
from tfdist.jobs.world import World

PAGE = Path(__file__).parent.parent / "docs" / "data.md"
ROWS, BATCH, SEED = 43, 8, 5  # the last batch is not full
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, ROWS)


def rows():
    return list(zip(X, Y, strict=True))


def hugging_face(**columns):
    return pytest.importorskip("datasets").Dataset.from_dict(columns or {"values": X, "label": Y})


def array_record(tmp_path):
    module = pytest.importorskip("array_record.python.array_record_module")
    source = pytest.importorskip("array_record.python.array_record_data_source")
    writer = module.ArrayRecordWriter(str(tmp_path / "train.array_record"), "group_size:1")
    for row in rows():
        writer.write(pickle.dumps(row))
    writer.close()
    return source.ArrayRecordDataSource(str(tmp_path / "train.array_record"))


def grain_map():
    return pytest.importorskip("grain").MapDataset.source(rows())


def grain_loader(rank=0, count=1, seed=3, source=None, **options):
    grain = pytest.importorskip("grain")
    shards = grain.sharding.ShardOptions(rank, count)
    sampler = grain.samplers.IndexSampler(ROWS, shuffle=True, seed=seed, num_epochs=1)
    return grain.DataLoader(
        data_source=Rows() if source is None else source,
        sampler=sampler,
        shard_options=shards,
        operations=[grain.transforms.Batch(BATCH)],
        **options,
    )


class Rows:
    """A source as users write it; its `repr` has an address, which differs between two runs."""

    def __init__(self, read=None):
        self.read = [] if read is None else read

    def __len__(self):
        return ROWS

    def __getitem__(self, number):
        self.read.append(number)
        return X[number], Y[number]


NUMBERED = {
    "a class": lambda path: examples(Rows()),
    "dicts": lambda path: examples([{"a": x, "b": y} for x, y in rows()], x="a", y="b"),
    "Hugging Face": lambda path: examples(hugging_face(), x="values", y="label"),
    "Hugging Face, other columns": lambda path: examples(hugging_face(), y="label"),
    "Hugging Face in a format": lambda path: examples(hugging_face().with_format("tensorflow"), y="label"),
    "Hugging Face with a transform": lambda path: examples(
        hugging_face().with_transform(lambda batch: {"x": batch["values"], "y": batch["label"]}), x="x", y="y"
    ),
    "Hugging Face, transformed": lambda path: examples(hugging_face(), lambda row: (row["values"], row["label"])),
    "ArrayRecord": lambda path: examples(array_record(path), pickle.loads),
    "Grain": lambda path: examples(grain_map()),
}
BATCHED = {
    "MapDataset": lambda: grain_map().shuffle(3).batch(BATCH),
    "IterDataset": lambda: grain_map().shuffle(3).to_iter_dataset().batch(BATCH),
    "DataLoader": grain_loader,
}
STRATEGIES = {"single": {}, "mirrored": {"devices": 2}, "custom": {"devices": 2}}


def network():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def made(name="single"):
    strategy = tfdist.strategy(name, seed=SEED, **STRATEGIES[name])
    with strategy.scope():
        return strategy.prepare(network())


def weights_after(model, *data, epochs=2, **options):
    model.fit(*data, epochs=epochs, verbose=0, **options)
    return np.concatenate([weight.reshape(-1) for weight in model.get_weights()])


class TestExamplesByNumber:
    @pytest.mark.parametrize("name", NUMBERED)
    def test_the_batches_of_each_epoch_are_those_of_arrays(self, name, tmp_path):
        found, expected = feed_of(NUMBERED[name](tmp_path)), feed_of((X, Y))
        for epoch in range(2):
            batches = list(found.start(epoch, 0))
            state = expected.start(epoch, 0)
            for (x, y), batch in zip(batches, expected.batches.take(state, 0, expected.num_batches), strict=True):
                x_of_arrays, y_of_arrays = expected.batches.part(state, batch, 0, WHOLE)[0][:2]
                np.testing.assert_array_equal(x, x_of_arrays)
                np.testing.assert_array_equal(y, y_of_arrays)

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_the_weights_and_answers_are_those_of_arrays(self, strategy):
        reference, model = made(), made(strategy)
        data, validation = examples(hugging_face(), y="label"), examples(rows()[:9])
        expected = weights_after(reference, X, Y, batch_size=BATCH, validation_data=(X[:9], Y[:9]))
        found = weights_after(model, data, batch_size=BATCH, validation_data=validation)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        for key, values in reference.history.history.items():
            np.testing.assert_allclose(model.history.history[key], values, rtol=1e-5, err_msg=key)
        np.testing.assert_allclose(model.evaluate(data, verbose=0), reference.evaluate(X, Y, verbose=0), rtol=1e-5)
        np.testing.assert_allclose(model.predict(data, verbose=0), reference.predict(X, verbose=0), atol=1e-5)

    def test_columns_of_a_dataset_are_passed_like_arrays(self):
        data = hugging_face(a=X[:, :1], b=X[:, 1:], label=Y, weight=np.arange(ROWS, dtype="float32"))

        def model():
            with (strategy := tfdist.strategy("single", seed=SEED)).scope():
                keras.utils.set_random_seed(1)
                inputs = {"a": keras.Input((1,), name="a"), "b": keras.Input((3,), name="b")}
                outputs = keras.layers.Dense(3, "softmax")(keras.layers.Concatenate()(list(inputs.values())))
                model = keras.Model(inputs, outputs)
                model.compile("sgd", "sparse_categorical_crossentropy")
            return strategy.prepare(model)

        weight = np.arange(ROWS, dtype="float32")
        expected = weights_after(model(), {"a": X[:, :1], "b": X[:, 1:]}, Y, BATCH, sample_weight=weight)
        for found in (
            weights_after(
                model(), {"a": data["a"], "b": data["b"]}, data["label"], BATCH, sample_weight=data["weight"]
            ),
            weights_after(model(), examples(data, x=["a", "b"], y="label", sample_weight="weight"), None, BATCH),
        ):
            np.testing.assert_array_equal(found, expected)

    def test_class_weights_and_steps_mean_what_they_mean_for_arrays(self):
        options = {"batch_size": BATCH, "class_weight": {0: 2.0, 2: 0.5}, "steps_per_epoch": 3, "epochs": 4}
        np.testing.assert_array_equal(
            weights_after(made(), examples(Rows()), **options), weights_after(made(), X, Y, **options)
        )

    def test_texts_and_bytes_keep_all_of_their_characters(self):
        texts = [{"text": text, "y": 0.0} for text in ("a\0", "bcd\0\0", "é")]
        ((x, y),) = feed_of(examples(texts, y="y")).first(1)
        assert sorted(x.numpy().tolist()) == [b"a\0", b"bcd\0\0", "é".encode()] and y.dtype == "float32"

    def test_texts_stay_on_the_host_and_numbers_are_prefetched_to_devices(self):
        texts = feed_of(examples([{"text": "a", "y": 0.0}] * 3, y="y"))
        devices = ["CPU:0", "CPU:1"], 0, Division(2), 0
        assert device_feed.placed(texts, *devices) is texts
        assert isinstance(device_feed.placed(feed_of(examples(Rows())), *devices), device_feed.PrefetchedFeed)

    def test_each_process_reads_only_its_part_of_each_batch(self):
        read = [], []
        for rank in range(2):
            feed = feed_of(examples(Rows(read[rank])), World(rank, 2))
            read[rank].clear()  # what it read to learn the shapes
            list(feed.start(0, 0))
        assert sorted(read[0] + read[1]) == list(range(ROWS)) and abs(len(read[0]) - len(read[1])) <= 6

    def test_the_remaining_examples_of_an_epoch_are_read_without_the_earlier_ones(self):
        read = []
        feed = feed_of(examples(Rows(read)))
        # Not the order of reading: several threads read.
        rest = [x for x, _ in list(feed.start(1, 0))[3:]]
        read.clear()
        list(feed.start(1, 3))
        np.testing.assert_array_equal(np.sort(X[read], axis=0), np.sort(np.concatenate(rest), axis=0))

    def test_only_the_columns_that_are_named_are_decoded(self):
        datasets = pytest.importorskip("datasets")
        number, picture, label = datasets.Value("float32"), datasets.Image(), datasets.Value("int64")
        features = datasets.Features({"x": number, "picture": picture, "y": label})
        broken = [{"bytes": b"no picture", "path": None}] * 4
        data = datasets.Dataset.from_dict({"x": X[:4, 0], "picture": broken, "y": Y[:4]}, features)
        x, _ = examples(data, x="x", y="y").read([2, 3])
        np.testing.assert_array_equal(x, X[2:4, 0])
        with pytest.raises(DataError, match=r"Example 0 of the `Dataset` cannot be read"):
            examples(data, x="picture", y="y").read([0])

    @pytest.mark.parametrize("missing", [None, [1.0, None]])
    def test_a_value_that_a_dataset_lacks_is_named_and_does_not_become_nan(self, missing):
        present = 1 if missing is None else [1.0, 2.0]
        data = hugging_face(a=[present, missing, present], b=[0.5, 1.5, 2.5]).select([2, 0, 1])
        with pytest.raises(DataError, match="Example 2 of the `Dataset` lacks a value: `a` has `None`"):
            examples(data, x="a", y="b").read([0, 2])
        with pytest.raises(DataError, match="Example 2 of the `Dataset` lacks a value"):
            of_columns(data["a"], data["b"], None).read([0, 2])
        assert examples(data, x="b").read([2])[0] == 1.5

    def test_a_transform_gets_none_for_a_value_that_a_dataset_lacks(self):
        data = hugging_face(a=[1, None, 3], b=[[1.0, None], [2.0, 3.0], [4.0, 5.0]])
        x, y = examples(data, lambda row: (row["b"][0], row["a"] or 0)).read([0, 1, 2])
        assert (x.tolist(), y.tolist(), y.dtype) == ([1.0, 2.0, 4.0], [1, 0, 3], "int64")


def feed_of(data, world=None):
    data = data if isinstance(data, tuple) else (data,)
    return adapters.make(adapters.request(*data, batch_size=BATCH, shuffle=True), SEED, world or World())


REFUSED = {
    "a Dataset without a target": (lambda path: hugging_face(), "nothing says which", 'y="label"'),
    "a DatasetDict": (
        lambda path: pytest.importorskip("datasets").DatasetDict(train=hugging_face()),
        "a dataset per split: `train`",
        'dataset["train"]',
    ),
    "a stream": (lambda path: hugging_face().to_iterable_dataset(), "only be read from its start", "streaming"),
    "records": (array_record, "is bytes", "decode"),
    "examples of Grain as batches": (lambda path: grain_map(), "no batch", "examples(dataset)"),
}


class TestMistakes:
    @pytest.mark.parametrize("name", REFUSED)
    def test_what_cannot_be_read_as_it_is_is_refused_with_what_to_do(self, name, tmp_path):
        make, sentence, hint = REFUSED[name]
        with pytest.raises(UsageError) as caught:
            made().fit(make(tmp_path), batch_size=BATCH)
        assert sentence in caught.value.sentence and hint in caught.value.hint

    @pytest.mark.parametrize(
        ("call", "sentence"),
        [
            (lambda: examples(hugging_face(), y="target"), "no `target`: they have `values`, `label`"),
            (lambda: examples(hugging_face(), sample_weight="label"), "`y` names no target"),
            (lambda: examples(hugging_face(), x=0, y=1), "`x` of `tfdist.data.examples` is 0, which is no name"),
            (
                lambda: examples(hugging_face(), x="values", y=["label", 1]),
                r"`y` .* is \['label', 1\], which is no name",
            ),
            (lambda: examples(Rows(), "values"), "`transform` .* is 'values', which is no function"),
            (lambda: examples(iter(rows())), "lacks `__len__` or `__getitem__`"),
            (lambda: examples(Rows(), y="b").read([0]), "is the name of a value, but an example"),
            (lambda: examples([(1, 2, 3, 4)]).read([0]), "a tuple of 4 parts"),
            (lambda: made().fit(examples(Rows()), Y), "`y` was passed beside a `Examples`"),
            (lambda: made().fit(hugging_face()["values"], Y), "beside a column"),
            (lambda: made().fit(BATCHED["MapDataset"](), class_weight={0: 1.0}), "`class_weight` was passed beside"),
        ],
    )
    def test_a_wrong_call_is_refused_before_anything_is_read(self, call, sentence):
        with pytest.raises(UsageError, match=sentence):
            call()

    @pytest.mark.parametrize(
        ("wrong", "sentence"),
        [
            ((np.zeros(5, "float32"), 1), r"`x` of example 17 has the shape `\(5,\)`"),
            ((X[17], 1.5), "`y` of example 17 has .* the type `float32`"),
            ((X[17], None), "Example 17 .* `NoneType` cannot become a tensor"),
            (None, "Example 17 .* no example with this number"),
            (ZeroDivisionError("a bad file"), "Example 17 .* ZeroDivisionError: a bad file"),
        ],
    )
    def test_an_example_that_cannot_be_used_is_named_when_training_meets_it(self, wrong, sentence):
        class Wrong(Rows):
            def __getitem__(self, number):
                if number == 17 and isinstance(wrong, Exception):
                    raise wrong
                return wrong if number == 17 else super().__getitem__(number)

        with pytest.raises(DataError, match=sentence):
            made().fit(examples(Wrong()), batch_size=BATCH, verbose=0)


class TestBatchesOfGrain:
    @pytest.mark.parametrize("name", BATCHED)
    def test_the_state_that_is_saved_is_not_ahead_of_the_batches(self, name):
        feed = feed_of(BATCHED[name]())
        iterator = feed.start(0, 0)
        for _ in range(2):
            next(iterator)
        time.sleep(0.2)  # enough to read ahead
        (remaining, *_) = feed.resume(feed.save(), 0, 2)
        np.testing.assert_array_equal(remaining[0], next(iterator)[0])

    def test_a_loader_says_which_shard_it_reads(self):
        assert feed_of(grain_loader(1, 3)).shard == (1, 3)
        assert feed_of(BATCHED["MapDataset"]()).shard is None

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("name", BATCHED)
    @pytest.mark.filterwarnings("ignore:.*shuffle=True|.*ran out of data")
    def test_the_weights_are_those_of_stock_keras(self, name, strategy):
        expected = weights_after(network(), BATCHED[name]())
        np.testing.assert_allclose(weights_after(made(strategy), BATCHED[name]()), expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.thorough
    def test_a_repeated_dataset_with_steps_has_another_order_in_each_epoch(self):
        data, steps = grain_map().shuffle(3).batch(BATCH, drop_remainder=True), ROWS // BATCH
        model = network()
        for number in range(2 * steps):
            model.train_on_batch(*data[number])
        found = weights_after(made(), data.repeat(), steps_per_epoch=steps)
        expected = np.concatenate([weight.reshape(-1) for weight in model.get_weights()])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


RESUMED = {
    **{name: lambda path, make=make: make(path) for name, make in NUMBERED.items()},
    **{name: lambda path, make=make: make() for name, make in BATCHED.items()},
}


class TestResume:
    @pytest.mark.sampled(5)
    @pytest.mark.parametrize("name", RESUMED)
    def test_a_run_that_was_killed_within_an_epoch_ends_with_the_same_weights(self, name, tmp_path):
        def train(folder, *callbacks, **options):
            keep = Checkpoint(tmp_path / folder, every_steps=2, **options)
            (tmp_path / folder).mkdir(exist_ok=True)
            made_data = RESUMED[name](tmp_path)
            return weights_after(made(), made_data, batch_size=BATCH, epochs=3, callbacks=[keep, *callbacks])

        unbroken = train("unbroken")
        with pytest.raises(KilledError):
            train("broken", Kill(9))
        np.testing.assert_array_equal(train("broken", resume=True), unbroken)

    def test_a_loader_reads_no_batch_again(self, tmp_path):
        read = []

        def train(source, *callbacks, **options):
            keep = Checkpoint(tmp_path, every_steps=2, **options)
            loader = grain_loader(source=source)
            made().fit(loader, epochs=1, verbose=0, callbacks=[keep, *callbacks])

        with pytest.raises(KilledError):
            train(Rows(), Kill(5))
        train(Rows(read), resume=True)
        # Grain reads ahead, here all rows, while tfdist learns the shapes; then only what remains is read.
        assert len(read) <= ROWS + (ROWS - 4 * BATCH)

    def test_another_loader_is_refused_within_an_epoch(self, tmp_path):
        def train(seed, *callbacks, **options):
            keep = Checkpoint(tmp_path, every_steps=2, **options)
            made().fit(grain_loader(seed=seed), verbose=0, callbacks=[keep, *callbacks])

        with pytest.raises(KilledError):
            train(3, Kill(3))
        with pytest.raises(CheckpointError, match="another Grain `DataLoader`: its `sampler`"):
            train(4, resume=True)


@pytest.mark.thorough
def test_the_scripts_of_the_page_run(tmp_path):
    data = hugging_face(pixels=np.random.default_rng(0).random((60, 8), "float32"), label=np.arange(60) % 2)
    for split in ("train", "test"):
        data.to_parquet(tmp_path / f"{split}.parquet")
    script, source = re.findall(r"```python\n(import datasets.*?|# mine.py.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "mine.py").write_text(source)
    command = [
        "-m",
        "tfdist",
        "train",
        "--strategy",
        "single",
        "--model",
        "mlp",
        "--dataset",
        "mine:load",
        "--epochs",
        "1",
        "--run-dir",
        "run",
    ]
    for arguments in (["script.py"], command):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_data_show_themselves():
    assert repr(examples(Rows())) == "<tfdist.data.examples: 43 of a `Rows`>"
