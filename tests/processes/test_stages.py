"""`pipeline` in several processes: one stage of the model in each, and the weights of one device at the end."""

import json
import re
import signal
import time

import pytest

from tests.processes.jobs import Several, by_hand, record, wait_for_epochs
from tests.processes.test_contract import equality_cases, run_together

BEGINS = """
import sys
import tfdist

strategy = tfdist.strategy("pipeline", seed=1, balance="memory", micro_batches=3)
import keras
import numpy as np
from keras import layers
import shutil
from tfdist.callbacks import Checkpoint
from tfdist.errors import UsageError
from tfdist.internals import tensorflow_variables

rank, size = strategy.world.rank, strategy.world.world_size
x = np.random.default_rng(0).random((35, 30), "float32")
y = x[:, :7] ** 2
data = {"batch_size": 8, "shuffle": False, "verbose": 0}


def residual(optimizer=None, **compiled):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((30,))
    first = layers.Dense(40, "relu", kernel_regularizer="l2", name="first")(inputs)
    second = layers.Dense(40, "tanh", name="second")(first)
    both = layers.Add(name="both")([first, layers.Dense(40, name="third")(second)])
    middle = layers.BatchNormalization(name="middle")(both)
    model = keras.Model(inputs, layers.Dense(7, name="last")(layers.Concatenate(name="all")([middle, first])))
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **compiled)
    return model


def held(variables):
    return sum(tensorflow_variables.copies(v)[0].read_value().numpy().nbytes for v in variables)


def say(**what):
    import json

    sys.stdout.write("FOUND " + json.dumps(what) + "\\n")
"""

# The first layer is used in each later stage. Unsynchronized batch statistics differ, so its rate is 0 in the tests
# of equality: `training=False` is what an evaluation computes.
TRAINS = (
    BEGINS
    + """
sgd = lambda: keras.optimizers.SGD(0.1)
adam = lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05, use_ema=True, ema_momentum=0.9)
for schedule, makes in {"gpipe": [adam], "1f1b": [sgd, adam]}.items():
    own = tfdist.strategy("pipeline", seed=1, balance="memory", micro_batches=4, schedule=schedule)
    for make in makes:
        model, stock = residual(make()), residual(make())
        for one in (model, stock):
            one.get_layer("middle").trainable = False
        history = own.fit(model, x, y, epochs=2, validation_data=(x[:9], y[:9]), **data).history
        expected = stock.fit(x, y, epochs=2, validation_data=(x[:9], y[:9]), **data).history
        assert list(history) == list(expected)
        for name in expected:
            np.testing.assert_allclose(history[name], expected[name], rtol=5e-5, atol=5e-6, err_msg=name)
        np.testing.assert_allclose(
            own.predict(model, x, batch_size=8, verbose=0), stock.predict(x, verbose=0), atol=5e-5
        )
        np.testing.assert_allclose(
            own.evaluate(model, x, y, batch_size=8, verbose=0), stock.evaluate(x, y, batch_size=8, verbose=0), atol=5e-5
        )
        np.testing.assert_allclose(own.predict_on_batch(model, x[:5]), stock.predict_on_batch(x[:5]), atol=5e-5)
        np.testing.assert_allclose(own.train_on_batch(model, x, y), stock.train_on_batch(x, y), atol=5e-5)
        parts = held(model.variables), held(model.optimizer.variables)
        wholes = held(stock.variables), held(stock.optimizer.variables)
        with own.whole_state(model):
            if own.world.is_chief:
                for found, wanted in zip(model.get_weights(), stock.get_weights(), strict=True):
                    np.testing.assert_allclose(found, wanted, atol=5e-5)
        assert (held(model.variables), held(model.optimizer.variables)) == parts
        say(rank=rank, parts=parts, wholes=wholes, stages=own.stages_of(model))
"""
)

# More steps than are ordered together, and a rest; a run that is saved within an epoch, and resumed there.
DELAYED = (
    BEGINS
    + """
from tests import delayed_gradients
from tests.interruption import InterruptionError, Interrupts

folder = sys.argv[1]
own = tfdist.strategy("pipeline", seed=1, balance="memory", micro_batches=2, schedule="2bw")
data = {"batch_size": 4, "shuffle": False, "verbose": 0}


def made(make):
    model = residual(make())
    model.get_layer("middle").trainable = False
    return model


def require_same(model, by_hand):
    with own.whole_state(model):
        if own.world.is_chief:
            for found, wanted in zip(model.get_weights(), by_hand.get_weights(), strict=True):
                np.testing.assert_allclose(found, wanted, atol=5e-5)


for make in (
    lambda: keras.optimizers.SGD(0.1),
    lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2),
    lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05),  # whose updates exchange a norm
):
    model, by_hand = made(make), made(make)
    delayed_gradients.train(by_hand, x, y, 4, 2)
    own.fit(model, x, y, epochs=2, **data)
    require_same(model, by_hand)
    np.testing.assert_allclose(
        own.evaluate(model, x, y, batch_size=8, verbose=0), by_hand.evaluate(x, y, batch_size=8, verbose=0), atol=5e-5
    )

adam = lambda: keras.optimizers.Adam(0.01)
unbroken, broken, resumed = made(adam), made(adam), made(adam)
own.fit(unbroken, x, y, epochs=2, callbacks=[Checkpoint(f"{folder}/unbroken", every_steps=2)], **data)
try:
    own.fit(broken, x, y, epochs=2, callbacks=[Checkpoint(f"{folder}/broken", every_steps=2), Interrupts()], **data)
except InterruptionError:
    pass
own.fit(resumed, x, y, epochs=2, callbacks=[Checkpoint(f"{folder}/broken", every_steps=2, resume=True)], **data)
with own.whole_state(unbroken):
    expected = unbroken.get_weights() if own.world.is_chief else None
with own.whole_state(resumed):
    if own.world.is_chief:
        for found, wanted in zip(resumed.get_weights(), expected, strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-6)
say(done=True)
"""
)

CHECKPOINTS = (
    BEGINS
    + """
folder = sys.argv[1]


def frozen():
    model = residual()
    model.get_layer("middle").trainable = False
    return model


def same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-5)


expected = frozen()
expected.fit(x, y, epochs=4, **data)

model = frozen()
saves = keras.callbacks.ModelCheckpoint(f"{folder}/saved.keras")
strategy.fit(model, x, y, epochs=2, callbacks=[Checkpoint(f"{folder}/kept"), saves], **data)
with strategy.whole_state(model):
    if strategy.world.is_chief:
        model.save(f"{folder}/by_hand.keras")
strategy.group.barrier()
if strategy.world.is_chief:
    shutil.copytree(f"{folder}/kept", f"{folder}/again")
again = frozen()
strategy.fit(again, x, y, epochs=4, callbacks=[Checkpoint(f"{folder}/again", resume=True)], **data)
with strategy.whole_state(again):
    if strategy.world.is_chief:
        same(again.get_weights(), expected.get_weights())
two = frozen()
two.fit(x, y, epochs=2, **data)
if strategy.world.is_chief:
    for name in ("saved", "by_hand"):
        loaded = keras.saving.load_model(f"{folder}/{name}.keras")
        same(loaded.get_weights(), two.get_weights())
        same([v.numpy() for v in loaded.optimizer.variables], [v.numpy() for v in two.optimizer.variables])
single = tfdist.strategy("single", seed=1)
for begins, goes_on, name in ((strategy, single, "kept"), (single, strategy, "of_one")):
    alone = goes_on is single
    model = frozen()
    if begins is single and rank == 0:
        single.fit(model, x, y, epochs=2, callbacks=[Checkpoint(f"{folder}/{name}")], **data)
    strategy.group.barrier()
    model = frozen()
    if not alone or rank == 0:
        goes_on.fit(model, x, y, epochs=4, callbacks=[Checkpoint(f"{folder}/{name}", resume=True)], **data)
    if not alone:
        with strategy.whole_state(model):
            if rank == 0:
                same(model.get_weights(), expected.get_weights())
    elif rank == 0:
        same(model.get_weights(), expected.get_weights())
say(done=True)
"""
)

# The number of batches is not known, so that a step is in a branch of the graph; what the update exchanges, in another.
STREAMS = (
    BEGINS
    + """
import tensorflow as tf


def stream():
    spec = tf.TensorSpec((30,)), tf.TensorSpec((7,))
    return tf.data.Dataset.from_generator(lambda: zip(x, y), output_signature=spec).batch(8)


def made():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((30,)), layers.Dense(20, "tanh"), layers.Dense(7)])
    inner = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.05)
    model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse", metrics=["mae"])
    return model


model, stock = made(), made()
history = strategy.fit(model, stream(), epochs=2, verbose=0).history
expected = stock.fit(stream(), epochs=2, verbose=0).history
for name in expected:
    np.testing.assert_allclose(history[name], expected[name], rtol=5e-5, atol=5e-6)
with strategy.whole_state(model):
    if strategy.world.is_chief:
        for found, wanted in zip(model.get_weights(), stock.get_weights(), strict=True):
            np.testing.assert_allclose(found, wanted, atol=5e-5)
say(done=True)
"""
)

# Steps, losses and metrics of the user's own, in whatever stage they are.
OWN_STEPS = (
    BEGINS
    + """
import tensorflow as tf


class Sharpness(keras.Model):
    def train_step(self, data):  # sharpness-aware minimization, whose norm is that of the gradients of all stages
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        norm = tf.linalg.global_norm(gradients)
        moves = [0.05 * one / (norm + 1e-12) for one in gradients]
        for weight, move in zip(weights, moves):
            weight.assign_add(move)
        with tf.GradientTape() as tape:
            again = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(again, weights)
        for weight, move in zip(weights, moves):
            weight.assign_sub(move)
        self.optimizer.apply_gradients(zip(gradients, weights))
        return {"loss": loss, "norm": norm}


class Norms(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        size = tf.reduce_mean(tf.abs(self.layers[1].kernel))  # of the first stage; the rest is computed in the last one
        return tf.reduce_max((y - y_pred) ** 2) * tf.exp(sum(self.losses)) + size


class Standardized(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        mean, variance = tf.nn.moments(y_pred, [0])
        return tf.reduce_mean((y_pred - mean) * tf.math.rsqrt(variance + 0.1) * y)


class Counts(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, inputs):
        self.seen.update_state(keras.ops.mean(inputs))
        return inputs


class Follows(layers.Layer):
    def __init__(self):  # its variable, which Keras does not know, begins with another value in each process
        super().__init__()
        self.mean = tf.Variable(tf.fill([20], begins))

    def call(self, inputs):
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(inputs, 0))
        return inputs - self.mean


def of(kind, *middle, **compiled):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((30,))
    outputs = layers.Dense(20, "tanh", kernel_regularizer="l2")(inputs)
    for layer in middle:
        outputs = layer()(outputs)
    model = kind(inputs, layers.Dense(7)(outputs))
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"} | compiled)
    return model


class OnlyStep(keras.Model):
    def test_step(self, data):
        x, y = data
        return {"largest": tf.reduce_max(tf.abs(self(x, training=False) - y))}

    def predict_step(self, data):
        return {"twice": 2 * self(data, training=False), "first": data[:, 0]}


norm = lambda: layers.BatchNormalization(momentum=0.5)
made = {
    "sharpness": lambda: of(Sharpness),
    "norms": lambda: of(Norms),
    # Some of their gradients are zero but for rounding, of which Adam would make whole steps.
    "the whole batch": lambda: of(Standardized, optimizer="sgd"),
    "batch norm": lambda: of(keras.Model, norm, norm, optimizer="sgd"),
    "synchronized": lambda: of(keras.Model, lambda: layers.BatchNormalization(synchronized=True), optimizer="sgd"),
    "dropout": lambda: of(keras.Model, lambda: layers.Dropout(0.3, seed=3), lambda: layers.Dropout(0.5, seed=4)),
    "metrics in layers": lambda: of(keras.Model, Counts, lambda: layers.Dense(20), Counts, metrics=["mae"]),
    "steps": lambda: of(OnlyStep),
    "variables of TensorFlow": lambda: of(keras.Model, Follows, lambda: layers.Dense(20), Follows),
}
for schedule in ("gpipe", "1f1b"):
    own = tfdist.strategy("pipeline", seed=1, balance="memory", micro_batches=3, schedule=schedule)
    for name in made if schedule == "gpipe" else ["sharpness", "batch norm"]:
        begins = 0.1 * (1 + rank)
        model = made[name]()
        begins = 0.1  # the chief's
        stock = made[name]()
        history = own.fit(model, x, y, epochs=2, validation_data=(x[:9], y[:9]), **data).history
        expected = stock.fit(x, y, epochs=2, validation_data=(x[:9], y[:9]), **data).history
        assert list(history) == list(expected), (name, list(history), list(expected))
        for key in expected:
            np.testing.assert_allclose(history[key], expected[key], rtol=1e-4, atol=1e-5, err_msg=f"{name} {key}")
        found = own.predict(model, x, batch_size=8, verbose=0)
        wanted = stock.predict(x, batch_size=8, verbose=0)
        keras.tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-5, err_msg=name), found, wanted)
        with own.whole_state(model):
            if own.world.is_chief:
                for one, other in zip(model.get_weights(), stock.get_weights(), strict=True):
                    np.testing.assert_allclose(one, other, atol=5e-5, err_msg=name)
say(done=True)
"""
)

EFFECTS = (
    BEGINS
    + """
import tensorflow as tf

seen = []


class Tells(keras.Model):
    def train_step(self, data):
        def tell():
            return tf.py_function(lambda: seen.append(1) or 0, [], tf.int32)

        tf.cond(self.optimizer.iterations.value >= 0, tell, lambda: tf.constant(0))
        return super().train_step(data)


inputs = keras.Input((30,))
model = Tells(inputs, layers.Dense(7)(layers.Dense(16)(inputs)))
model.compile("sgd", "mse")
strategy.fit(model, x[:32], y[:32], epochs=2, **data)
say(seen=len(seen))
"""
)

REFUSED = (
    BEGINS
    + """
import tensorflow as tf


class Loops(keras.Model):
    def train_step(self, data):
        def body(turn):
            for weight in self.trainable_variables:
                weight.assign(0.9 * weight)
            return turn + 1

        tf.while_loop(lambda turn: turn < 3, body, [tf.constant(0)])
        return {"loss": tf.reduce_mean(self(data[0]))}


def of(*found, **compiled):
    model = keras.Sequential([keras.Input((30,)), *found])
    model.compile(**{"optimizer": "sgd", "loss": "mse"} | compiled)
    return model


def loops():
    inputs = keras.Input((30,))
    model = Loops(inputs, layers.Dense(7)(layers.Dense(5)(inputs)))
    model.compile("sgd", "mse")
    return model


def shared():
    inputs = keras.Input((30,))
    twice = layers.Dense(30, name="twice")
    model = keras.Model(inputs, layers.Dense(7)(twice(layers.Dense(30)(twice(inputs)))))
    model.compile("sgd", "mse")
    return model


def refused(model, **fit):
    try:
        strategy.fit(model, x, y, **data | fit)
    except UsageError as error:
        say(refused=error.sentence, hint=error.hint)


refused(of(layers.Dense(5), layers.Dense(7), run_eagerly=True))
refused(loops())
refused(shared())
refused(of(layers.Flatten(), layers.Rescaling(1.0), layers.Dense(7)))
best = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
refused(of(layers.Dense(5), layers.Dense(7)), callbacks=[best])
refused(of(layers.Dense(5), layers.Dense(7)), callbacks=[keras.callbacks.ModelCheckpoint("a.keras", save_freq=2)])
refused(of(layers.Dense(5), layers.Dense(7)), batch_size=1)
strategy.recompute = "blocks"
refused(of(layers.Dense(5), layers.Dense(7)))
strategy.recompute = None
model = residual()
strategy.fit(model, x, y, epochs=1, **data)
for use in (model.get_weights, lambda: model.save("a.keras"), lambda: strategy.verify(model, x, y)):
    try:
        use()
    except UsageError as error:
        say(refused=error.sentence, hint=error.hint)
"""
)

REASONS = [
    "is compiled with `run_eagerly=True`",
    "uses variables of several stages of the pipeline",
    "The layer `twice` is in stage 0 and in stage 1",
    "has nothing to train",
    "`EarlyStopping` with `restore_best_weights` needs all weights in one process",
    "`ModelCheckpoint` within epochs needs all weights in one process",
    "and a batch has 1 examples",
    "`recompute` is set, and the stages of the pipeline are in several processes",
    "is in stage",
    "is in stage",
    "A verification compares the whole model",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    scripts = {"trains": (TRAINS, []), "checkpoints": (CHECKPOINTS, [str(folder)]), "streams": (STREAMS, [])}
    scripts |= {"effects": (EFFECTS, [])}
    scripts |= {"own_steps": (OWN_STEPS, []), "refused": (REFUSED, []), "delayed": (DELAYED, [str(folder)])}
    return Several(folder, scripts, workers=2)


def found(printed):
    return [json.loads(line.removeprefix("FOUND ")) for line in printed.splitlines() if line.startswith("FOUND ")]


def require_parts(of_ranks):
    """Each rank reports the same trainings, and what it holds of each."""
    for of_training in zip(*map(found, of_ranks), strict=True):
        wholes = of_training[0]["wholes"]
        for kind in (0, 1):
            sizes = [one["parts"][kind] for one in of_training]
            assert sum(sizes) == pytest.approx(wholes[kind], abs=64)  # counters are in each
            assert max(sizes) < 0.8 * wholes[kind] or wholes[kind] < 64
        assert of_training[0]["stages"] == of_training[1]["stages"]


@pytest.mark.thorough
def test_two_stages_train_evaluate_and_predict_as_one_device_and_each_has_its_own_variables_alone(results):
    require_parts(results.printed("trains"))


@pytest.mark.thorough
def test_2bw_gives_in_two_processes_what_a_loop_by_hand_gives_and_is_resumed_within_an_epoch(results):
    assert all(found(printed) == [{"done": True}] for printed in results.printed("delayed"))


@pytest.mark.thorough
def test_checkpoints_and_saved_models_are_whole(results):
    assert all(found(printed) == [{"done": True}] for printed in results.printed("checkpoints"))


@pytest.mark.thorough
def test_a_stream_of_unknown_length_with_an_update_in_a_branch_trains_as_one_device(results):
    assert all(found(printed) == [{"done": True}] for printed in results.printed("streams"))


@pytest.mark.thorough
def test_steps_losses_and_metrics_of_the_users_own_train_as_one_device(results):
    assert all(found(printed) == [{"done": True}] for printed in results.printed("own_steps"))


@pytest.mark.thorough
def test_the_effects_of_a_condition_are_those_of_one_device(results):
    assert [found(printed)[0]["seen"] for printed in results.printed("effects")] == [8, 0]


@pytest.mark.thorough
def test_what_cannot_be_exact_is_refused_by_a_sentence_in_every_process(results):
    for printed in results.printed("refused"):
        said = found(printed)
        assert [reason in one["refused"] for reason, one in zip(REASONS, said, strict=True)] == [True] * len(REASONS)
        assert all(one["hint"] for one in said)


@pytest.mark.exhaustive
def test_skip_connections_reach_the_third_stage(tmp_path):
    require_parts(Several(tmp_path, {"trains": (TRAINS, [])}, workers=3).printed("trains"))


QUICK = [
    "remainder 1",
    "accumulation and clipping",
    "ema overwriting",
    "mixed float16, inf on one replica",
    "mask, mean_with_sample_weight",
    "activity regularizer",
    "sparse gradients, clipnorm",
    "several inputs and outputs",
]


@pytest.mark.parametrize("names", [QUICK[1::3], pytest.param(QUICK, marks=pytest.mark.thorough)], ids=["few", "all"])
def test_cases_of_the_contract_that_need_most_of_it(tmp_path, names):
    last = run_together("pipeline", 2, *equality_cases("pipeline", 3, names), cwd=tmp_path)
    assert f"{len(names)} passed" in last


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [2, 3])
def test_the_contract_of_equality(tmp_path, workers):
    assert "passed" in run_together("pipeline", workers, "tests/contract/test_equality.py", cwd=tmp_path)


MEMORY = ("--strategy-option", "balance=memory")


@pytest.mark.thorough
def test_a_killed_stage_ends_all_and_the_error_names_its_rank_stage_and_layers(tmp_path):
    """Without a launcher, as on several machines."""
    run_dir = tmp_path / "run"
    options = ("--epochs", "2000", *MEMORY, "--strategy-option", "timeout_seconds=10")
    with by_hand(run_dir, *options, strategy="pipeline") as (chief, worker):
        wait_for_epochs(run_dir, 2, [chief, worker])
        worker.kill()
        worker.wait(timeout=5)
        began = time.monotonic()
        _, err = chief.communicate(timeout=60)
        assert time.monotonic() - began < 30
    assert chief.returncode == 3
    assert re.search(r"worker 1 \(localhost:\d+\).*: stage 1 \(.*logits\) of the pipeline", err), err
    assert record(run_dir)["status"] == "failed"


@pytest.mark.thorough
def test_a_stopped_stage_is_named_after_the_timeout(tmp_path):
    run_dir = tmp_path / "run"
    options = ("--epochs", "2000", *MEMORY, "--strategy-option", "timeout_seconds=5")
    with by_hand(run_dir, *options, strategy="pipeline") as (chief, worker):
        wait_for_epochs(run_dir, 2, [chief, worker])
        chief.send_signal(signal.SIGSTOP)
        _, err = worker.communicate(timeout=30)
    assert worker.returncode == 3
    assert re.search(r"silent for 5 s: worker 0 \(localhost:\d+\).*: stage 0 \(flatten", err), err


def test_stages_with_other_options_are_refused_with_both_values(tmp_path):
    own = [(*MEMORY, "--strategy-option", f"micro_batches={count}") for count in (2, 5)]
    with by_hand(tmp_path / "run", own=own, strategy="pipeline") as processes:
        errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    for err in errors:
        assert "disagree on" in err and "micro_batches" in err and "`2`" in err and "`5`" in err, err
