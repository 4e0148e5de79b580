"""Data of several processes: alike in all of them without asking, refused where they differ, or each its own part."""

import json

import numpy as np
import pytest

from tests.processes.jobs import RunningJob, require_horovod

pytestmark = pytest.mark.thorough

# How often each of 32 examples is seen in an epoch, for each kind of data; or the error that all processes raise.
COUNTING = """
import os, sys, json, random, time, numpy as np, tfdist
name, *options = sys.argv[1:]
strategy = tfdist.strategy(name, **json.loads(options[0]) if options else {})
import keras, tensorflow as tf

class Seen(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="seen")
        self.times = self.add_variable((32,), "zeros", name="times")
    def update_state(self, y, y_pred, sample_weight=None):
        self.times.assign_add(tf.reduce_sum(tf.one_hot(tf.cast(y[:, 0], tf.int32), 32), 0))
    def result(self):
        return self.times

x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
y = np.arange(32, dtype="float32")[:, None]
rank, size = strategy.world.rank, strategy.world.world_size

def generator(mix, count=None):
    def batches():
        while True:
            order = np.arange(32)
            if mix:
                np.random.default_rng(rank).shuffle(order)
            for k in order.reshape(-1, 8)[:count]:
                yield x[k], y[k]
            if count:
                return
    return batches()

class Shuffling(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.order = np.arange(32)
        self.on_epoch_end()
    def __len__(self):
        return 4
    def __getitem__(self, k):
        chosen = self.order[k * 8:k * 8 + 8]
        return x[chosen], y[chosen]
    def on_epoch_end(self):
        np.random.default_rng(os.getpid()).shuffle(self.order)

def sliced(*tensors):
    return tf.data.Dataset.from_tensor_slices(tensors)

def ragged():
    return tf.data.Dataset.range(4).map(lambda k: (tf.RaggedTensor.from_row_lengths(
        tf.random.stateless_uniform([8], [rank, 0]), [3, 5]), [[0.0], [1.0]]))

def late(number):
    if rank and number == 0:  # so that other files overtake this one, here alone
        time.sleep(0.05)
    return number

def racing():
    one = lambda k: tf.data.Dataset.range(k * 8, k * 8 + 8).map(lambda n: tf.ensure_shape(
        tf.numpy_function(late, [n], tf.int64), []))
    chosen = tf.data.Dataset.range(4).interleave(one, cycle_length=4, num_parallel_calls=4, deterministic=False)
    return chosen.map(lambda n: (tf.gather(x, n), tf.gather(y, n))).batch(8)
"""

FIT_ALIKE = (
    COUNTING
    + """
cases = {
    "arrays": dict(x=x, y=y, batch_size=8),
    "shuffle": dict(x=sliced(x, y).shuffle(32).batch(8)),
    "interleave": dict(x=tf.data.Dataset.range(4).shuffle(4).interleave(
        lambda k: sliced(x[:8], y[:8]).map(lambda a, b: (a, b + tf.cast(8 * k, tf.float32)))).batch(8)),
    "random map": dict(x=sliced(x, y).map(lambda a, b: (a + tf.random.normal([4]), b)).batch(8)),
    "generator": dict(x=generator(False), steps_per_epoch=4),
    "generator that ends": dict(x=generator(False, 4)),
    "repeated": dict(x=sliced(x, y).shuffle(32).batch(8).repeat(), steps_per_epoch=4),
}
found = {}
for case, data in cases.items():
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Seen()])
    epochs = 1 if "ends" in case else 2
    history = strategy.fit(model, **data, epochs=epochs, verbose=0).history["seen"]
    found[case] = [np.asarray(times).tolist() for times in history]
print(json.dumps(found), flush=True)
"""
)

REFUSED = (
    COUNTING
    + """
own = np.random.default_rng(rank).normal(size=(32, 4)).astype("float32")
far = np.concatenate([x[:24], own[24:]])
half = slice(rank, None, size)
def fit(**data):
    return lambda model: strategy.fit(model, **data, epochs=2, verbose=0)
def evaluate(**data):
    return lambda model: strategy.evaluate(model, **data, verbose=0)
def predict(**data):
    return lambda model: strategy.predict(model, **data, verbose=0)
cases = {
    "arrays": fit(x=own, y=y, batch_size=8),
    "targets": fit(x=x, y=own[:, :1], batch_size=8),
    "sample weights": fit(x=x, y=y, sample_weight=own[:, 0] ** 2, batch_size=8),
    "shards of arrays": fit(x=x[half], y=y[half], batch_size=8),
    "shards": fit(x=sliced(x, y).shard(size, rank).batch(8)),
    "shards of other lengths": fit(x=sliced(x[:31], y[:31]).shard(size, rank).batch(4)),
    "shuffle of other seeds": fit(x=sliced(x, y).shuffle(32, seed=rank).batch(8)),
    "generator": fit(x=generator(True), steps_per_epoch=4),
    "generator that ends earlier": fit(x=generator(False, 3 + rank)),
    "generator that ends within a call": lambda model: strategy.fit(model, generator(True, 3), verbose=0),
    "PyDataset": fit(x=Shuffling()),
    "race": fit(x=racing().repeat(50)),
    "ragged": predict(x=ragged().map(lambda a, b: a)),
    "validation arrays": fit(x=x, y=y, validation_data=(own, y)),
    "validation dataset": fit(x=x, y=y, validation_data=sliced(own, y).batch(8)),
    "evaluate arrays": evaluate(x=own, y=y),
    "evaluate dataset": evaluate(x=sliced(own, y).batch(8)),
    "evaluate generator that ends": evaluate(x=generator(True, 3)),
    "evaluate generator that ends earlier": evaluate(x=generator(False, 3 + rank)),
    "predict arrays": predict(x=own),
    "predict dataset": predict(x=tf.data.Dataset.from_tensor_slices(far).batch(8)),
}
found = {}
for case, call in cases.items():
    with strategy.scope():
        model = keras.Sequential([keras.Input((None if case == "ragged" else 4,)), keras.layers.Lambda(
            lambda a: keras.ops.sum(a, -1, keepdims=True)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    started = time.monotonic()
    try:
        call(model)
        found[case] = ["", ""]
    except tfdist.errors.DisagreementError as error:
        found[case] = [error.sentence, error.hint]
    found[case].append(time.monotonic() - started)
print(json.dumps(found), flush=True)
"""
)

ENGINES = [
    pytest.param("multiworker", {}, id="sockets"),
    pytest.param("multiworker", {"communication": "ring"}, id="ring", marks=pytest.mark.exhaustive),
    pytest.param("horovod", {}, id="gloo", marks=pytest.mark.exhaustive),
]


def printed(script, text, *arguments, cwd, workers=2):
    """What the chief of a job of this script has printed, as JSON."""
    if "horovod" in arguments:
        require_horovod()
    options = ["--workers", workers, "--log-dir", "logs", script(text), *arguments]
    with RunningJob(*options, cwd=cwd) as job:
        code, out, err = job.end()
    assert code == 0, out[-4000:] + err[-4000:]
    return json.loads(next(line for line in reversed(out.splitlines()) if line.startswith(("{", "["))))


@pytest.mark.exhaustive  # over sockets `test_shared_jobs.py` runs it
@pytest.mark.parametrize(("strategy", "options"), ENGINES[1:])
def test_what_draws_without_a_seed_gives_every_process_the_same_batches(tmp_path, script, strategy, options):
    check_alike(printed(script, FIT_ALIKE, strategy, json.dumps(options), cwd=tmp_path))


def check_alike(found):
    """Each process has seen each example once in an epoch, whatever drew the batches."""
    assert set(found) >= {"shuffle", "interleave", "random map", "generator", "repeated"}
    for case, epochs in found.items():
        assert epochs == [[1.0] * 32] * len(epochs), case


@pytest.mark.parametrize(("strategy", "options"), ENGINES)
def test_different_data_are_refused_by_name_in_the_first_moment(tmp_path, script, strategy, options):
    found = printed(script, REFUSED, strategy, json.dumps(options), cwd=tmp_path)
    for case, (sentence, hint, seconds) in found.items():
        assert "were given different" in sentence or "disagree on `the examples`" in sentence, (case, sentence)
        assert "worker 0" in sentence and "worker 1" in sentence, case
        assert "per_process" in hint or "disagree on" in sentence, case
        assert seconds < 10, (case, seconds)  # tracing included


# Each process brings its own part, of another length; against stock Keras on the batches that they make together.
OWN_PARTS = """
import sys, json, numpy as np, tfdist
name, *options = sys.argv[1:]
strategy = tfdist.strategy(name, **json.loads(options[0]) if options else {})
import keras, tensorflow as tf

rank, size, per_process = strategy.world.rank, strategy.world.world_size, tfdist.data.per_process
generator = np.random.default_rng(0)
BATCH = 4
parts = []
for number in range(size):
    x = generator.normal(size=(9 + 7 * number, 5)).astype("float32")
    parts.append((x, x.sum(1, keepdims=True) + 0.1, generator.uniform(0.5, 2, len(x)).astype("float32")))
mine = parts[rank]

def batches(part):
    return [tuple(array[k:k + BATCH] for array in part) for k in range(0, len(part[0]), BATCH)]

steps = max(len(batches(part)) for part in parts)
together = [
    tuple(map(np.concatenate, zip(*[batches(part)[k] for part in parts if k < len(batches(part))])))
    for k in range(steps)
]
joined = tf.data.Dataset.from_generator(
    lambda: iter(together), output_signature=tuple(tf.TensorSpec([None, *array.shape[1:]]) for array in mine)
)

def compiled():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,))
    outputs = keras.layers.Dense(1)(keras.layers.BatchNormalization(synchronized=True)(keras.layers.Dense(3)(inputs)))
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"], weighted_metrics=["mse"], jit_compile=False)
    return model

class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return len(batches(mine))
    def __getitem__(self, k):
        return batches(mine)[k]

dataset = tf.data.Dataset.from_tensor_slices(mine).batch(BATCH)
data = {
    "arrays": dict(x=per_process(mine), batch_size=BATCH, shuffle=False),
    "dataset": dict(x=per_process(dataset)),
    "dataset of unknown length": dict(x=per_process(dataset.filter(lambda *batch: True))),
    "generator": dict(x=per_process(batch for batch in batches(mine))),
    "PyDataset": dict(x=per_process(Sequence()), shuffle=False),
}
if "quick" in options:
    data = {case: data[case] for case in ("arrays", "dataset of unknown length", "generator")}
expected, found = {}, {}
for case, arguments in data.items():
    epochs = 1 if case == "generator" else 2
    reference = compiled()
    with strategy.scope():
        model = compiled()
    history = strategy.fit(model, **arguments, epochs=epochs, verbose=0,
                           validation_data=per_process(mine), validation_batch_size=BATCH).history
    x, y, weight = map(np.concatenate, zip(*parts))
    logs = reference.fit(joined, epochs=epochs, verbose=0, validation_data=(x, y, weight)).history
    answers = strategy.predict(model, per_process(mine[0]), batch_size=BATCH, verbose=0)
    found[case] = [float(history[key][-1]) for key in sorted(logs)]
    expected[case] = [float(logs[key][-1]) for key in sorted(logs)]
    for array, other in zip([*model.get_weights(), answers],
                            [*reference.get_weights(), reference.predict(mine[0], verbose=0)], strict=True):
        found[case].append(array.tolist())
        expected[case].append(other.tolist())
print(json.dumps([found, expected]), flush=True)
"""


@pytest.mark.parametrize(
    ("workers", "which"), [(2, ["quick"]), *(pytest.param(n, [], marks=pytest.mark.exhaustive) for n in (2, 3))]
)
@pytest.mark.parametrize(("strategy", "options"), ENGINES)
def test_parts_of_each_process_give_what_one_device_makes_of_them_together(
    tmp_path, script, strategy, options, workers, which
):
    arguments = (strategy, json.dumps(options), *which)
    found, expected = printed(script, OWN_PARTS, *arguments, cwd=tmp_path, workers=workers)
    for case, values in expected.items():
        for value, wanted in zip(found[case], values, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=5e-5, atol=5e-5, err_msg=case)


RESUMED = """
import json, pathlib, numpy as np, tfdist
strategy = tfdist.strategy("multiworker", seed=1)
import keras, tensorflow as tf, tfdist.callbacks

rank = strategy.world.rank
x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")

class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations.numpy() == 6:
            raise KeyboardInterrupt

def train(own, folder, *callbacks, **options):
    tf.random.set_seed(5)
    keras.utils.set_random_seed(5)
    rows = x[: 20 + 8 * rank] + rank if own else x
    dataset = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).shuffle(20, seed=2).batch(8)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    keep = tfdist.callbacks.Checkpoint(folder, every_steps=2, **options)
    data = tfdist.data.per_process(dataset) if own else dataset
    try:
        strategy.fit(model, data, epochs=3, verbose=0, callbacks=[keep, *callbacks])
    except KeyboardInterrupt:
        pass
    return [array.tolist() for array in model.get_weights()]

found = []
for own in (False, True):
    unbroken = train(own, f"unbroken {own}")
    train(own, f"broken {own}", Kill())
    found.append([unbroken, train(own, f"broken {own}", resume=True)])
print(json.dumps(found), flush=True)
"""


def test_a_dataset_is_gone_on_with_within_an_epoch_in_each_process(tmp_path, script):
    for unbroken, resumed in printed(script, RESUMED, cwd=tmp_path):
        assert resumed == unbroken
