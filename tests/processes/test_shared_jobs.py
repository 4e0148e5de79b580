"""What two processes promise over any engine: scripts that share one started job for each strategy."""

import json

import pytest

from tests.processes import test_any_model, test_data, test_groups
from tests.processes.jobs import Several, require_horovod

# Both processes pass what is equal, and both end with the same sentence on what is not.
VERIFIES = """
import dataclasses
import sys
import tfdist

strategy = tfdist.strategy(sys.argv[1], seed=0)
import keras
import numpy as np
from tfdist.errors import VerificationError
from tfdist.spmd.rules import registry

rng = np.random.default_rng(0)
x, y = rng.normal(size=(19, 4)).astype("float32"), rng.normal(size=(19, 1)).astype("float32")


def made(synchronized):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        inside = [keras.layers.Dropout(0.3), keras.layers.BatchNormalization(name="norm", synchronized=synchronized)]
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6), *inside, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def trained(verify):
    model = strategy.prepare(made(True), verify=verify)
    model.fit(x, y, batch_size=10, epochs=2, verbose=0)
    return [value.tolist() for value in model.get_weights()]


for synchronized in (True, False):
    report = strategy.verify(made(synchronized), x, y, batch_size=10)
    assert report.first is None and len(report) > 20, report
assert trained(True) == trained(False)

rule, attributes = registry.RULES["Mean"]
registry.RULES["Mean"] = lambda *given: dataclasses.replace(rule(*given), mean=False), attributes  # a fault of tfdist
try:
    strategy.verify(made(False), x, y, batch_size=10)
except VerificationError as error:
    assert len(set(strategy.exchange(str(error).encode()))) == 1
    print("NAMED", error.sentence)
registry.RULES["Mean"] = rule, attributes  # for the scripts that follow in this process
"""

DRIFTS = """
import sys
import warnings
import tfdist

strategy = tfdist.strategy(sys.argv[1], seed=0)
import keras
import numpy as np
from tfdist.errors import DifferenceWarning

rng = np.random.default_rng(0)
x, y = rng.normal(size=(19, 4)).astype("float32"), rng.normal(size=(19, 1)).astype("float32")


class SetsRate(keras.callbacks.Callback):
    def __init__(self, ranks):
        super().__init__()
        self.ranks = ranks

    def on_train_batch_begin(self, batch, logs=None):
        if strategy.world.rank in self.ranks and batch == 1:
            self.model.optimizer.learning_rate = 0.2


for ranks in [(0, 1), (0,), (1,)]:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.fit(model, x, y, batch_size=10, epochs=2, verbose=0, callbacks=[SetsRate(ranks)])
    values = b"".join(weight.tobytes() for weight in model.get_weights())
    assert len(set(strategy.exchange(values))) == 1
    said = [str(one.message) for one in caught if issubclass(one.category, DifferenceWarning)]
    if ranks == (0, 1) or strategy.world.rank == 1:
        assert not said, said
    else:
        assert len(said) == (2 if ranks == (1,) else 1), said
        assert "ended epoch 1 with different values of `sequential" in said[0], said
        assert "and 4 more" in said[0] and "in every process" in said[0], said
print("ALL RIGHT")
"""

# Nobody sets a seed: each process begins with a generator of its own.
UNSEEDED = """
import random
import sys
import warnings
import tfdist

strategy = tfdist.strategy(sys.argv[1], seed=0)
import keras
import numpy as np
import tensorflow as tf
from tfdist.errors import DifferenceWarning

warnings.simplefilter("error", DifferenceWarning)
random.seed(strategy.world.rank)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(19, 4)).astype("float32"), rng.normal(size=(19, 1)).astype("float32")


class NoisyWeights(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(4,), initializer="ones")

    def call(self, x):
        return x * (self.scale + keras.random.normal((4,)))


class OfTensorFlow(keras.layers.Layer):
    # Its variable and its generator are none of Keras'.

    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_non_deterministic_state()
        self.shift = tf.Variable(rng_of_process.normal(size=4), dtype=tf.float32)

    def call(self, x):
        mean = tf.reduce_mean(x, 0)
        self.shift.assign(0.9 * self.shift + 0.1 * mean + ANCHOR)
        NOTE.assign(tf.strings.join([NOTE, "!"]))
        shift = self.shift * tf.cast(FACTOR, tf.float32) * tf.cast(tf.strings.length(NOTE), tf.float32)
        drawn = self.generator.normal([4]) + tf.random.get_global_generator().normal([4])
        return x + 0.1 * shift + drawn


rng_of_process = np.random.default_rng(strategy.world.rank)
FACTOR, NOTE = tf.Variable(strategy.world.rank + 1, dtype=tf.bfloat16), tf.Variable("." * strategy.world.rank)
with strategy.scope():
    ANCHOR = tf.Variable(rng_of_process.normal(size=4), dtype=tf.float32)


class NoisyInTraining(NoisyWeights):
    def call(self, x, training=False):
        return super().call(x) if training else x


CASES = [
    (NoisyInTraining, ()), (NoisyWeights, (0, 1)), (NoisyWeights, (0,)), (NoisyInTraining, (1,)), (OfTensorFlow, (0,)),
]
for layer, ranks_that_draw in CASES:
    keras.backend.clear_session(free_memory=False)  # Keras makes another generator
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), layer(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    for _ in range(2):
        if strategy.world.rank in ranks_that_draw:  # before a training, and between two
            keras.random.normal((1,))
            tf.random.get_global_generator().normal([1])
        strategy.fit(model, x, y, batch_size=10, epochs=2, verbose=0)
        values = b"".join(weight.tobytes() for weight in model.get_weights())
        assert len(set(strategy.exchange(values))) == 1
    assert strategy.verify(model, x, y, batch_size=10, steps=1).first is None
print("ALL RIGHT")
"""

# Each dtype holds a number that is another one in the next smaller dtype, and in float32.
VARIABLES = """
import sys
import tfdist

name, *options = sys.argv[1:]
strategy = tfdist.strategy(name, **dict(option.split("=") for option in options))
import keras
import numpy as np
import tensorflow as tf

TOLD = {
    "bool": True, "int8": -7, "uint8": 255, "int16": -(2**15), "int32": 2**30 + 1, "uint32": 2**31 + 1,
    "int64": 2**53 + 1, "uint64": 2**63 + 1, "float16": 1 / 3, "bfloat16": 3.0, "float32": 0.1, "float64": 1 / 3,
}
here = {dtype: tf.Variable(tf.zeros([2, 3], dtype)) for dtype in TOLD}
with strategy.scope():
    shared = {dtype: keras.Variable(np.zeros([2, 3]), dtype=dtype) for dtype in ("float32", "int32", "int64")}
variables = [*here.items(), *shared.items()]
for dtype, variable in variables:
    if strategy.world.is_chief:
        variable.assign(tf.fill([2, 3], tf.constant(TOLD[dtype], dtype)))
strategy.broadcast_variables([variable for _, variable in variables])
for dtype, variable in variables:
    found = np.asarray(tf.convert_to_tensor(variable)).tobytes()
    assert found == np.asarray(tf.fill([2, 3], tf.constant(TOLD[dtype], dtype))).tobytes(), dtype
print("ALL RIGHT")
"""

# How often the state of a model travels, and whether all processes have the same at the end: at a start, at a resume at
# the end of an epoch, at one within an epoch, and where the processes made different models.
STATES = """
import sys
import tfdist

strategy = tfdist.strategy(sys.argv[1], seed=1)
import keras
import numpy as np
from tfdist.callbacks import Checkpoint

sent, broadcast = [], strategy.broadcast
strategy.broadcast = lambda values: sent.append(len(values)) or broadcast(values)
x = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")


class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == stop_after:
            raise KeyboardInterrupt


def times(seed, epochs, resume=True):
    with strategy.scope():
        hidden = keras.layers.Dense(2000, kernel_initializer=keras.initializers.GlorotUniform(seed))
        model = keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    sent.clear()
    try:
        keep = Checkpoint("states", every_steps=2, resume=resume)
        strategy.fit(model, x, x[:, :1], batch_size=12, epochs=epochs, verbose=0, callbacks=[Stops(), keep])
    except KeyboardInterrupt:
        pass
    state = [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]
    assert len(set(strategy.exchange(b"".join(value.tobytes() for value in state)))) == 1
    return round(sum(sent) / sum(value.nbytes for value in state))


stop_after = None
found = [times(3, epochs=1, resume=False), times(3, epochs=2)]
stop_after = 11
times(3, epochs=3)
stop_after = None
found.append(times(3, epochs=3))
found.append(times(strategy.world.rank, epochs=4))
print("TIMES", *found)
"""

ENGINES = {"multiworker": "sockets", "horovod": "Gloo"}


# What they promise is written once, over a process group, so that one of them shows it.
@pytest.fixture(scope="module", params=["horovod", pytest.param("multiworker", marks=pytest.mark.exhaustive)])
def job(request, tmp_path_factory):
    strategy = request.param
    if strategy == "horovod":
        require_horovod()
    scripts = {
        "predictions": (test_any_model.OUTPUTS, [strategy, "{}"]),
        "single batches": (test_any_model.ON_BATCH, [strategy]),
        "verify": (VERIFIES, [strategy]),
        "drift": (DRIFTS, [strategy]),
        "variables": (VARIABLES, [strategy]),
        "states": (STATES, [strategy]),
        "unseeded": (UNSEEDED, [strategy]),
    }
    if strategy == "multiworker":
        scripts["alike"] = (test_data.FIT_ALIKE, [strategy])
    # The last one, since it changes constants.
    scripts["operations"] = (test_groups.SCRIPT, [ENGINES[strategy]])
    return Several(tmp_path_factory.mktemp(strategy), scripts)


@pytest.mark.thorough
def test_predictions_of_any_type_are_those_of_one_device(job):
    assert job.printed("predictions") == ["ALL RIGHT\n"] * 2


@pytest.mark.thorough
def test_single_batches_are_those_of_one_device(job):
    assert job.printed("single batches") == ["ALL RIGHT\n"] * 2


@pytest.mark.thorough
def test_variables_of_every_dtype_get_the_chiefs_values_bit_by_bit(job):
    assert job.printed("variables") == ["ALL RIGHT\n"] * 2


@pytest.mark.thorough
def test_weights_that_one_process_changes_alone_are_told_and_become_those_of_the_chief(job):
    assert job.printed("drift") == ["ALL RIGHT\n"] * 2


@pytest.mark.thorough
def test_draws_without_a_seed_are_the_same_in_all_processes(job):
    assert job.printed("unseeded") == ["ALL RIGHT\n"] * 2


@pytest.mark.thorough
def test_the_state_of_a_model_travels_once_at_a_start_and_at_a_resume(job):
    """Once more within an epoch, since callbacks begin it a second time; and where the models differ."""
    printed = job.printed("states")
    assert printed[0] == printed[1]
    # TensorFlow makes variables alike under `MultiWorkerMirroredStrategy`.
    assert printed[0] in ("TIMES 1 1 2 2\n", "TIMES 1 1 2 1\n")


# Gradients travel as bfloat16, of three digits. The metric begins at another number than zero, which counts once.
METRICS = """
class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.total = self.add_weight(initializer="zeros", name="total")

    def reset_state(self):
        self.total.assign(5.0)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(tf.maximum(self.total, tf.reduce_max(tf.abs(y_true - y_pred))))

    def result(self):
        return self.total


x = np.linspace(0.1, 0.9, 8, dtype="float32")[:, np.newaxis] ** 3
with strategy.scope():
    centred = keras.layers.Lambda(lambda values: values - tf.reduce_mean(values, axis=0))
    model = keras.Sequential([keras.Input((1,)), centred, keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mse", Largest()], jit_compile=False)
found = strategy.fit(model, x, 0 * x - 1, batch_size=8, verbose=0).history
expected = np.mean((x - x.mean() + 1) ** 2)
assert abs(found["loss"][0] - expected) < 1e-6 and abs(found["mse"][0] - expected) < 1e-6, (found, expected)
assert found["largest"] == [5.0], found
print("METRICS RIGHT")
"""


@pytest.fixture(scope="module", params=[["multiworker", "communication=ring"], ["horovod"]], ids=["ring", "horovod"])
def compressed(request, tmp_path_factory):
    if request.param == ["horovod"]:
        require_horovod()
    scripts = {"all": (VARIABLES + METRICS, [*request.param, "compression=bf16"])}
    return Several(tmp_path_factory.mktemp("compressed"), scripts).printed("all")


def test_variables_of_every_dtype_get_the_chiefs_values_where_gradients_are_narrowed(compressed):
    assert ["ALL RIGHT" in printed for printed in compressed] == [True] * 2


def test_gradients_alone_are_narrowed_and_what_a_metric_begins_with_counts_once(compressed):
    assert ["METRICS RIGHT" in printed for printed in compressed] == [True] * 2


@pytest.mark.thorough
def test_all_operations_give_every_process_what_they_promise(job):
    assert job.printed("operations") == ["ALL RIGHT\n"] * 2


@pytest.mark.thorough
def test_two_processes_verify_together(job):
    for printed in job.printed("verify"):
        assert "NAMED The output of the layer `norm`" in printed


@pytest.mark.exhaustive  # a job of its own
@pytest.mark.parametrize("job", ["multiworker"], indirect=True)
def test_what_draws_without_a_seed_gives_every_process_the_same_batches(job):
    for printed in job.printed("alike"):
        test_data.check_alike(json.loads(printed))
