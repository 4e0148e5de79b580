"""How examples come to the workers of `parameter_server`: who reads which; a step has those that it has elsewhere."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from tests.processes.jobs import RunningJob

pytestmark = pytest.mark.thorough

# A module of the user's with datasets; each process notes what it reads in a file of its role.
DATASETS = """
import json, os
import numpy as np
import tfdist.data
from tfdist.data import DataSpec, IndexedSource, Source

N = 643
ROLE = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {}).get("type")
X = np.random.default_rng(0).random((N, 4)).astype("float32")
Y = np.arange(N) % 7
SPEC = DataSpec("mine", "classification", (4,), 7, {"train": N})


def note(numbers):
    with open(f"read_by_{ROLE}", "a") as file:
        file.write(" ".join(map(str, numbers)) + "\\n")


def indexed(data_dir=None, bad=N):
    def read(split, numbers):
        note(numbers)
        return X[numbers], np.where(numbers == bad, 9, Y[numbers])

    return IndexedSource(SPEC, read)


def arrays(data_dir=None):
    def read(split, count):
        note(range(count))
        return X[:count], Y[:count]

    return Source(SPEC, read)


def other(data_dir=None):
    '''The workers find other examples than the chief.'''
    return Source(SPEC, lambda split, count: (X[:count] + (ROLE == "worker"), Y[:count]))


def other_end(data_dir=None):
    '''The workers find other examples than the chief, but for those of the first batches of a pass in order.'''
    shift = (np.arange(N) >= 600)[:, None] * (ROLE == "worker")
    return IndexedSource(SPEC, lambda split, numbers: ((X + shift)[numbers], Y[numbers]))


def changing(data_dir=None, held=False):
    '''A process that starts once there is a file "changed" finds other examples.'''
    x = X + os.path.exists("changed")
    if held:
        return Source(SPEC, lambda split, count: (x[:count], Y[:count]))
    return IndexedSource(SPEC, lambda split, numbers: (x[numbers], Y[numbers]))


def missing(data_dir=None):
    assert ROLE == "chief"
    return indexed()


def pictures(data_dir=None):
    return tfdist.data.load("image_folder", "pictures", size=(8, 8), cache="off")
"""

SCRIPT = """
import json, sys
import keras, numpy as np, tfdist, tfdist.data

BATCH, EPOCHS = 8, 2
name, options = sys.argv[1], json.loads(sys.argv[2])
strategy = tfdist.strategy("parameter_server", seed=1, staleness=0, **options)
source = tfdist.data.load("datasets:" + name)


def build():
    keras.utils.set_random_seed(3)
    layers = [keras.Input(source.spec.input_shape), keras.layers.Flatten(), keras.layers.Dense(source.spec.classes)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


with strategy.scope():
    model = build()
feed = source.feed("train", BATCH, seed=1)
strategy.fit(model, feed, epochs=EPOCHS, verbose=0)
predicted = strategy.predict(model, source.feed("train", BATCH, shuffle=False), verbose=0)
one, ordered = build(), []
for epoch in range(EPOCHS):
    for batch in source.pipeline("train", BATCH, seed=1, epoch=epoch):
        one.train_on_batch(*batch)
for x, _ in source.pipeline("train", BATCH, shuffle=False):
    ordered.append(one(x).numpy())
print("APART", max(float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), one.get_weights(), strict=True)))
print("PREDICTED", float(np.abs(predicted - np.concatenate(ordered)).max()))
"""


def job(tmp_path, name, **options):
    (tmp_path / "datasets.py").write_text(DATASETS)
    (tmp_path / "script.py").write_text(SCRIPT)
    with RunningJob("--workers", 2, "--ps", 1, "script.py", name, json.dumps(options), cwd=tmp_path) as running:
        return running.end()


def equals_one_device(tmp_path, name, **options):
    """Trains and predicts; what the chief wrote to the terminal."""
    code, out, err = job(tmp_path, name, **options)
    assert code == 0, err
    found = dict(line.split(" ", 1) for line in out.splitlines() if line.split(" ", 1)[0].isupper())
    assert float(found["APART"]) < 2e-6 and float(found["PREDICTED"]) < 1e-5
    return err


def read_by(tmp_path, role):
    """The numbers of the examples of each reading of the processes of a role."""
    return [list(map(int, line.split())) for line in (tmp_path / f"read_by_{role}").read_text().splitlines()]


def test_the_workers_read_the_batches_of_their_steps_and_no_others(tmp_path):
    equals_one_device(tmp_path, "indexed")
    times = Counter(number for numbers in read_by(tmp_path, "worker") for number in numbers)
    once_per_pass = 643 * (2 + 1)  # two epochs, and the prediction
    looked_at = 2 * 2 * 3 * 8  # three batches of each feed by each worker, for comparison
    assert set(times) == set(range(643)) and min(times.values()) == 3
    assert once_per_pass <= times.total() <= once_per_pass + looked_at


def test_each_worker_loads_the_arrays_once_and_again_only_for_another_feed(tmp_path):
    equals_one_device(tmp_path, "arrays")
    assert [len(numbers) for numbers in read_by(tmp_path, "worker")] == [643] * (2 * 2 * 1)


def test_the_workers_decode_pictures(tmp_path):
    import keras
    import numpy as np

    for label in ("cat", "dog"):
        folder = tmp_path / "pictures" / "train" / label
        folder.mkdir(parents=True)
        for number in range(11):
            picture = np.random.default_rng([number, len(label)]).integers(0, 255, (8, 8, 3))
            keras.utils.save_img(folder / f"{number}.png", picture, scale=False)
    err = equals_one_device(tmp_path, "pictures")
    assert "The chief sends" not in err


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("other", "643 examples in 81 batches, arrays "),
        pytest.param("missing", "nothing, because of AssertionError:", marks=pytest.mark.exhaustive),
    ],
)
def test_where_the_workers_do_not_find_the_same_the_chief_sends_the_examples(tmp_path, name, found):
    error = equals_one_device(tmp_path, name)
    assert f"The chief sends the examples of `datasets:{name}`. The processes of the job disagree on" in error
    at = r"\(localhost:\d+\)"
    assert re.search(rf"chief 0 {at} has `.*, worker 0 {at} and worker 1 {at} have `{found}", error), error


@pytest.mark.exhaustive
def test_workers_whose_last_examples_differ_read_none(tmp_path):
    assert "The chief sends the examples of `datasets:other_end`" in equals_one_device(tmp_path, "other_end")


ENDLESS = """
import sys
import keras, tfdist, tfdist.data

strategy = tfdist.strategy("parameter_server", seed=1, timeout_seconds=5)
source = tfdist.data.load("datasets:changing", held=sys.argv[1] == "held")
with strategy.scope():
    model = keras.Sequential([keras.Input(source.spec.input_shape), keras.layers.Dense(source.spec.classes)])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))


class Told(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        open("epochs", "w").write(str(epoch + 1))


strategy.fit(model, source.feed("train", 8, seed=1), epochs=100_000, callbacks=[Told()], verbose=0)
"""


@pytest.mark.parametrize("kind", [pytest.param("held", marks=pytest.mark.exhaustive), "read"])
def test_a_worker_that_comes_back_with_other_data_ends_the_job(tmp_path, kind):
    (tmp_path / "datasets.py").write_text(DATASETS)
    (tmp_path / "script.py").write_text(ENDLESS)
    with RunningJob("--workers", 2, "--ps", 1, "script.py", kind, cwd=tmp_path) as running:
        running.wait_for((tmp_path / "epochs").exists)
        (tmp_path / "changed").touch()
        running.process("worker", 1).kill()
        code, _, err = running.end()
        assert running.left() == []
    assert code == 2, err
    assert "disagree on `data of datasets:changing`: chief 0 (localhost:" in err
    assert "has `643 examples in 81 batches, " in err and ", worker 1 (localhost:" in err
    assert "Traceback" not in err and err.count("disagree on") <= 2  # once, and in the launcher's summary


def test_arrays_above_the_bound_are_sent_with_the_steps_that_use_them(tmp_path):
    equals_one_device(tmp_path, "other", device_data_bytes=1000)


def test_an_example_that_a_worker_cannot_use_ends_the_run_with_its_name(tmp_path):
    (tmp_path / "bad.py").write_text(
        "import datasets\n\n\ndef load(data_dir=None):\n    return datasets.indexed(bad=5)\n"
    )
    (tmp_path / "datasets.py").write_text(DATASETS)
    arguments = ("--strategy", "parameter_server", "--workers", 2, "--ps", 1, "--batch-size", 8, "--run-dir", "run")
    command = ("--model", "mlp", "--dataset", "bad:load", *arguments)
    with RunningJob(*command, cwd=tmp_path, module="tfdist.train") as running:
        code, _, err = running.end()
    assert code == 2, err
    assert "dataset `mine`" in err.lower() and "`9`" in err
    assert "Traceback" not in err
