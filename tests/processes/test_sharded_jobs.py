"""`shard`: the processes of a job divide the state of the optimizer, and end with the weights of one device."""

import re
import shutil

import pytest

from tests.processes.jobs import launched, require_horovod, require_mpi, train
from tests.processes.test_contract import EQUALITY, equality_cases, run_together

# One of each kind: by a kernel, by products, several exchanges within an update, sparse rows, own steps.
QUICK = [
    "adam",
    "muon",
    "clipnorm",
    "accumulation and clipping",
    "ema overwriting",
    "mixed float16, inf on one replica",
    "sparse gradients, clipnorm",
    "own train_step",
]

# Trains up to an epoch, perhaps resumed, and compares all that is left with stock Keras on one device.
TRAINS = """
import json, sys
import tfdist

name, folder, epochs, *options = sys.argv[1:]
strategy = tfdist.strategy(name, seed=1, **dict(option.split("=") for option in options))
import keras
import numpy as np
from tfdist.callbacks import Checkpoint
from tfdist.internals import tensorflow_variables

x = np.random.default_rng(0).random((35, 30), "float32")
y = x[:, :7] ** 2


def made(**options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(50, "relu"), keras.layers.Dense(7)])
    model.compile(keras.optimizers.Adam(0.01, **options), "mse")
    return model


arguments = {"batch_size": 8, "epochs": int(epochs), "shuffle": False, "verbose": 0}
with strategy.scope():
    model = made()
saves = keras.callbacks.ModelCheckpoint(f"{folder}-of-chief.keras")
strategy.fit(model, x, y, callbacks=[Checkpoint(folder, resume=True), saves], **arguments)
held = sum(v.nbytes for v in (tensorflow_variables.copies(v)[0].numpy() for v in model.optimizer.variables))
model.save(f"{folder}-{strategy.world.rank}.keras")
model.load_weights(f"{folder}-{strategy.world.rank}.keras")  # each process takes its part

reference = made()
reference.fit(x, y, **arguments)
everything = sum(v.numpy().nbytes for v in reference.optimizer.variables)
loaded = keras.saving.load_model(f"{folder}-{strategy.world.rank}.keras")
by_chief = keras.saving.load_model(f"{folder}-of-chief.keras") if strategy.world.is_chief else loaded
for found in (loaded, by_chief):
    for one, other in zip(found.variables, reference.variables, strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-5, atol=5e-5, err_msg=other.path)
    for one, other in zip(found.optimizer.variables, reference.optimizer.variables, strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-5, atol=5e-5, err_msg=other.path)
# The moving averages become the weights as the training ends.
with strategy.scope():
    averaged = made(use_ema=True, ema_momentum=0.9)
strategy.fit(averaged, x, y, **arguments)
reference = made(use_ema=True, ema_momentum=0.9)
reference.fit(x, y, **arguments)
for one, other in zip(averaged.weights, reference.weights, strict=True):
    np.testing.assert_allclose(one, other, rtol=5e-5, atol=5e-5, err_msg=other.path)
print("HELD", json.dumps([held, everything]))
"""

REFUSED = """
import sys
import tfdist

strategy = tfdist.strategy("multiworker", seed=1, shard="optimizer")
import keras
import numpy as np
from tfdist.errors import UsageError


def refused(optimizer, **fit):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer(), "mse")
    try:
        strategy.fit(model, np.ones((8, 4), "int32"), np.ones((8, 1)), verbose=0, **fit)
    except UsageError as error:
        sys.stdout.write(f"REFUSED {error.sentence}\\n")


swaps = [keras.callbacks.SwapEMAWeights()]
refused(lambda: keras.optimizers.SGD(use_ema=True), callbacks=swaps)
try:
    strategy.prepare(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), verify=True)
except UsageError as error:
    sys.stdout.write(f"REFUSED {error.sentence}\\n")
refused(keras.optimizers.Adam, callbacks=[keras.callbacks.ModelCheckpoint("m.keras", save_freq=1)])
"""

# Optimizers and layers of which tfdist knows nothing: rules of users' own, rows of a table, one small variable.
OF_ONES_OWN = """
import tfdist

strategy = tfdist.strategy("multiworker", seed=1, shard="optimizer")
import keras
import numpy as np
import tensorflow as tf


class Normalized(keras.optimizers.Optimizer):
    def build(self, variables):
        super().build(variables)
        self.averages = [self.add_variable_from_reference(one, "average") for one in variables]
        self.largest = self.add_variable((len(variables), 3), name="largest")  # of no one variable

    def update_step(self, gradient, variable, learning_rate):
        gradient = tf.convert_to_tensor(gradient)
        index = self._get_variable_index(variable)
        average, row = self.averages[index], tf.one_hot(index, self.largest.shape[0])[:, None]
        average.assign(0.9 * average + gradient / (tf.norm(gradient) + 1.0))
        self.largest.assign(tf.maximum(self.largest, row * tf.reduce_max(tf.abs(average))))
        variable.assign_sub(learning_rate * average / (1.0 + tf.reduce_max(self.largest)))


class OfRows(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        slot = self.momentums[self._get_variable_index(variable)]
        first = tf.convert_to_tensor(gradient)[:1]
        slot.value.scatter_add(tf.IndexedSlices(first, [0]))  # has no rule for parts
        variable.assign_sub(learning_rate * slot)


class Table(keras.layers.Layer):
    def build(self, shape):
        self.rows = self.add_weight(shape=(100, 3), name="rows")

    def call(self, x):
        return keras.ops.take(self.rows, x, axis=0)


class InAFunction(keras.Sequential):
    train_step = tf.function(keras.Sequential.train_step)


layers = keras.layers
DENSE = lambda: [keras.Input((4,)), layers.Dense(6, "tanh"), layers.Dense(1)]
ONE = lambda: [keras.Input((4,)), layers.Dense(1, use_bias=False)]
TABLE = lambda: [keras.Input((4,), dtype="int32"), Table(), layers.Flatten(), layers.Dense(1)]
CASES = {
    "own": (DENSE, lambda: Normalized(0.1), False),
    "own, of rows": (DENSE, lambda: OfRows(0.1, momentum=0.9), False),
    "rows of a table": (TABLE, lambda: keras.optimizers.Adam(0.01), False),
    "one variable": (ONE, lambda: keras.optimizers.Lamb(0.1), False),
    "a constraint": (
        lambda: [keras.Input((4,)), layers.Dense(6, kernel_constraint="unit_norm"), layers.Dense(1)],
        lambda: keras.optimizers.Adam(0.01),
        False,
    ),
    "eager": (DENSE, lambda: keras.optimizers.Adam(0.01), True),
    "a step in a function": (DENSE, lambda: keras.optimizers.Adam(0.01), False),
}
random = np.random.default_rng(0)
x, y = random.integers(0, 100, (15, 4)), random.random((15, 1), "float32")


def trained(case, fit):
    made_layers, optimizer, eager = CASES[case]
    keras.utils.set_random_seed(1)
    model = (InAFunction if "function" in case else keras.Sequential)(made_layers())
    model.compile(optimizer(), "mse", run_eagerly=eager)
    fit(model)(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model


for case in CASES:
    with strategy.scope():
        found = trained(case, lambda model: lambda *data, **how: strategy.fit(model, *data, **how))
    with strategy.whole_state(found):
        found.save(f"{strategy.world.rank}.keras")  # the chief alone, or all of them
    expected = trained(case, lambda model: model.fit)
    for one, other in zip(found.variables, expected.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6, err_msg=f"{case} {other.path}")
    print("EQUAL", case)
"""


REQUIRED = {"horovod": require_horovod, "mpi": require_mpi}


def together(strategy, shard, workers, *tests, cwd):
    """What the contract's `tests` say in a job of this strategy."""
    REQUIRED.get(strategy, lambda: None)()
    by = ("--mpi",) if strategy == "mpi" else ()
    return run_together(f"{strategy}_shard_{shard}", workers, *tests, cwd=cwd, options=by)


# Of the other pairs, gradients are divided in the next tests; all are among `test_all_cases_of_equality`.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "shard"),
    [
        pytest.param("multiworker", "gradients", marks=pytest.mark.exhaustive),
        ("horovod", "optimizer"),
        pytest.param("mpi", "gradients", marks=pytest.mark.exhaustive),
    ],
)
def test_its_weights_are_those_of_one_device(tmp_path, strategy, shard):
    tests = equality_cases(f"{strategy}_shard_{shard}", 2, QUICK)
    assert f"{len(QUICK)} passed" in together(strategy, shard, 2, *tests, cwd=tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize("strategy", ["multiworker", "horovod", "mpi"])
def test_all_cases_of_equality(tmp_path, strategy, shard, workers):
    last = together(strategy, shard, workers, EQUALITY, "-k", "equals", cwd=tmp_path)
    assert re.search(r"^\d+ passed", last), last


def trained(folder, workers, *arguments):
    """The bytes of the optimizer that each process holds, and those of the whole."""
    (folder / "script.py").write_text(TRAINS)
    done = launched("--workers", str(workers), "--verbose", "script.py", *arguments, cwd=folder, timeout=240)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = re.findall(r"HELD \[(\d+), (\d+)\]", done.stdout)
    assert len(found) == workers, done.stdout
    return [int(held) for held, _ in found], int(found[0][1])


def test_each_process_holds_its_share_and_a_run_of_two_is_continued_by_three_and_by_one(tmp_path):
    rest = (30 + 1 + 50 + 1) * 2 * 4 + 64  # a row of each slot of the four variables, and the optimizer's numbers
    held, everything = trained(tmp_path, 2, "multiworker", "kept", "2", "shard=optimizer")
    assert everything <= sum(held) <= everything + 64
    assert max(held) <= everything / 2 + rest
    shutil.copytree(tmp_path / "kept", tmp_path / "also kept")
    held, everything = trained(tmp_path, 3, "multiworker", "kept", "4", "shard=gradients")
    assert max(held) <= everything / 3 + rest
    assert trained(tmp_path, 1, "single", "also kept", "4") == ([everything], everything)


@pytest.mark.thorough
def test_what_cannot_be_divided_is_refused_with_a_sentence(tmp_path):
    (tmp_path / "script.py").write_text(REFUSED)
    done = launched("--workers", "2", "--verbose", "script.py", cwd=tmp_path, timeout=240)
    told = sorted(set(re.findall(r"REFUSED (.*)", done.stdout)))
    assert len(told) == 3, done.stdout + done.stderr
    for part in ("SwapEMAWeights", "ModelCheckpoint", "verification"):
        assert any(part in sentence for sentence in told), told


@pytest.mark.thorough
def test_optimizers_and_layers_of_ones_own_are_those_of_one_device(tmp_path):
    (tmp_path / "script.py").write_text(OF_ONES_OWN)
    done = launched("--workers", "2", "--verbose", "script.py", cwd=tmp_path, timeout=240)
    assert len(re.findall("EQUAL", done.stdout)) == 2 * 7, (done.stdout + done.stderr)[-4000:]


@pytest.mark.thorough
def test_an_unknown_kind_and_collectives_of_tensorflow_are_refused_with_a_sentence(tmp_path):
    ring = ["--shard", "optimizer", "--communication", "ring"]
    for options, part in ((["--shard", "weights"], "weights"), (ring, "collectives")):
        with train(*options, run_dir=tmp_path / part) as job:
            code, out, err = job.end()
        assert code == 2, out + err
        assert part in out + err
        assert "Traceback" not in out + err
