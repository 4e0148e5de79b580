"""Data of Hugging Face `datasets` and Grain in two processes: each reads its part, and different data are refused."""

import numpy as np
import pytest

from tests.processes.test_data import printed

pytestmark = pytest.mark.thorough

# Trains on each kind of data, against stock Keras on one device; then what the processes must not be given.
LIBRARIES = """
import json, numpy as np, tfdist
strategy = tfdist.strategy("multiworker", seed=5)
import datasets, grain, keras
from tfdist.data import examples, per_process

rank, size, ROWS, BATCH = strategy.world.rank, strategy.world.world_size, 43, 8
x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
y = np.random.default_rng(1).integers(0, 3, ROWS)
rows = list(zip(x, y))

class Rows:
    def __init__(self):
        self.read = set()
    def __len__(self):
        return ROWS
    def __getitem__(self, number):
        self.read.add(int(number))
        return rows[number]

def loader(index=0, count=1):
    return grain.DataLoader(
        data_source=rows,
        sampler=grain.samplers.IndexSampler(ROWS, shuffle=True, seed=3, num_epochs=1),
        shard_options=grain.sharding.ShardOptions(index, count),
        operations=[grain.transforms.Batch(BATCH // 2 if count > 1 else BATCH)],
    )

def network():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model

def made():
    with strategy.scope():
        return strategy.prepare(network())

def weights(model):
    return np.concatenate([weight.reshape(-1) for weight in model.get_weights()]).tolist()

source = Rows()
stored = datasets.Dataset.from_dict({"values": x, "label": y})
batches = lambda: grain.MapDataset.source(rows).shuffle(3).batch(BATCH)
equal = {
    "arrays": (x, y),
    "Hugging Face": (examples(stored, y="label"),),
    "columns": (stored["values"], stored["label"]),
    "a class": (examples(source),),
    "Grain": (examples(grain.MapDataset.source(rows)),),
    "MapDataset": (batches(),),
    "IterDataset": (batches().to_iter_dataset(),),
    "DataLoader": (loader(),),
    "shards of a DataLoader": (per_process(loader(rank, size)),),
    "shards of examples": (per_process(examples(rows[rank::size])),),
}
found = {}
for name, data in equal.items():
    model = made()
    model.fit(*data, batch_size=BATCH // (2 if "shards" in name else 1), epochs=2, verbose=0,
              shuffle="shards" not in name)
    found[name] = weights(model)
    if name == "a class":
        found["read"] = sorted(source.read - {0})
found["predicted"] = made().predict(examples(stored, x="values"), verbose=0).tolist()

reference = network()
reference.fit(loader(), epochs=2, verbose=0)
found["stock"] = weights(reference)
# The global batches of shards: the next rows of each process.
reference, parts = network(), [rows[number::2] for number in range(2)]
for _ in range(2):
    for first in range(0, len(parts[0]), BATCH // 2):
        joined = [row for part in parts for row in part[first : first + BATCH // 2]]
        reference.train_on_batch(np.stack([row[0] for row in joined]), np.stack([row[1] for row in joined]))
found["stock, shards of examples"] = weights(reference)
reference, pieces = network(), [list(loader(number, 2)) for number in range(2)]
for _ in range(2):
    for batch in zip(*pieces):
        reference.train_on_batch(*map(np.concatenate, zip(*batch)))
found["stock, shards of a DataLoader"] = weights(reference)

refused = {
    "rows in another order": examples(stored.shuffle(seed=rank), y="label"),
    "other rows": examples(rows[rank:]),
    "a loader's shard": loader(rank, size),
    "no shard, but marked": per_process(loader()),
    "one shard twice": per_process(loader(0, size)),
    "the same rows, but marked": per_process(examples(stored, y="label")),
    "batches in another order": grain.MapDataset.source(rows).shuffle(rank).batch(BATCH),
}
for name, data in refused.items():
    try:
        made().fit(data, batch_size=BATCH, verbose=0)
        found[name] = "trained"
    except tfdist.errors.TfdistError as error:
        found[name] = str(error)
found["read by all"] = [json.loads(message) for message in strategy.exchange(json.dumps(found["read"]).encode())]
print(json.dumps(found), flush=True)
"""

REFUSED = {
    "rows in another order": "were given different examples",
    "other rows": "disagree on `the examples`",
    "a loader's shard": "all processes must be given the same data",
    "no shard, but marked": "all processes begin with the same examples",
    "one shard twice": "do not read all shards: worker 0: 0 of 2, worker 1: 0 of 2",
    "the same rows, but marked": "all processes begin with the same examples",
    "batches in another order": "were given different batches",
}


def test_two_processes_train_as_one_device_and_refuse_what_would_differ(tmp_path, script):
    pytest.importorskip("datasets")
    pytest.importorskip("grain")
    found = printed(script, LIBRARIES, cwd=tmp_path)
    for name in ("Hugging Face", "columns", "a class", "Grain"):
        np.testing.assert_allclose(found[name], found["arrays"], rtol=1e-5, atol=1e-6, err_msg=name)
    for name in ("MapDataset", "IterDataset", "DataLoader"):
        np.testing.assert_allclose(found[name], found["stock"], rtol=1e-5, atol=1e-6, err_msg=name)
    for name in ("shards of a DataLoader", "shards of examples"):
        np.testing.assert_allclose(found[name], found[f"stock, {name}"], rtol=1e-5, atol=1e-6, err_msg=name)
    assert len(found["predicted"]) == 43
    first, second = map(set, found["read by all"])
    assert len(first) < 43 and len(second) < 43 and first | second >= set(range(1, 43))
    for name, sentence in REFUSED.items():
        assert sentence in found[name], (name, found[name])


RESUMED = """
import json, numpy as np, tfdist
strategy = tfdist.strategy("multiworker", seed=5)
import grain, keras
from tfdist.data import examples, per_process

rank, size = strategy.world.rank, strategy.world.world_size
x = np.random.default_rng(0).normal(size=(43, 3)).astype("float32")
rows = [(row, row[:1]) for row in x]

class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations.numpy() == 9:
            raise KeyboardInterrupt

def loader():
    return per_process(grain.DataLoader(
        data_source=rows, sampler=grain.samplers.IndexSampler(43, shuffle=True, seed=3, num_epochs=1),
        shard_options=grain.sharding.ShardOptions(rank, size), operations=[grain.transforms.Batch(4)]))

def train(data, folder, *callbacks, **options):
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    keep = tfdist.callbacks.Checkpoint(folder, every_steps=2, **options)
    try:
        strategy.fit(model, data(), batch_size=8, epochs=3, verbose=0, callbacks=[keep, *callbacks])
    except KeyboardInterrupt:
        pass
    return [array.tolist() for array in model.get_weights()]

found = []
for number, data in enumerate((lambda: examples(rows), loader)):
    unbroken = train(data, f"unbroken {number}")
    train(data, f"broken {number}", Kill())
    found.append([unbroken, train(data, f"broken {number}", resume=True)])
print(json.dumps(found), flush=True)
"""


def test_each_process_goes_on_within_an_epoch_where_it_was(tmp_path, script):
    pytest.importorskip("grain")
    for unbroken, resumed in printed(script, RESUMED, cwd=tmp_path):
        assert resumed == unbroken
