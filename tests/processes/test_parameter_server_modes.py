"""The modes of `parameter_server` on real servers: what equals one device, what stays within a bound, what goes on."""

import json
import re
import signal

import keras
import pytest

import tfdist
from tests.processes.jobs import after_two_epochs, record, train
from tests.processes.test_contract import BY_HAND, STEPS, USERS_STEPS, equality_cases, run_together
from tests.processes.test_parameter_server import run_script
from tfdist.errors import UsageError
from tfdist.parameter_server import modes
from tfdist.relaxed.centre_rules import Eamsgd, Easgd, run_one_worker

SYNCHRONOUS = [
    "remainder 1",
    "remainder batch-1",
    "lamb",
    "ema",
    "gradient accumulation",
    "loss scaling",
    "sparse gradients, adam",
    "several inputs and outputs",
]


SCRIPT = """
import contextlib, json, sys
import keras, numpy as np, tensorflow as tf, tfdist

options = json.loads(sys.argv[1])
strategy = tfdist.strategy("parameter_server", seed=1, **options)
x = np.random.default_rng(0).random((643, 4), "float32")
usual = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def build(make, units=8):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    hidden, again = keras.layers.Dense(units, "tanh")(inputs), keras.layers.Dense(units, "tanh")
    for _ in range(0 if units < 100 else 40):
        hidden = again(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(make(), "mse", metrics=["mae"])
    return model


def apart(model, other):
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def made(make, units=8):
    with strategy.scope():
        return build(make, units)


def optimizers():
    yield "SGD", lambda: keras.optimizers.SGD(0.1, momentum=0.9)
    yield "ADAM", lambda: keras.optimizers.Adam(1e-2)

"""

ALONE = (
    SCRIPT
    + """
for name, make in optimizers():
    one = build(make)
    wanted = one.fit(x, x[:, :1], **usual).history
    model = made(make)
    found = strategy.fit(model, x, x[:, :1], **usual).history
    print(name, apart(model, one), max(abs(a - b) for a, b in zip(found["loss"], wanted["loss"], strict=True)))
    print("STEPS_" + name, int(model.optimizer.iterations.numpy()))
"""
)


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        pytest.param({"mode": "downpour", "push_every": 7, "fetch_every": 3}, 1, marks=pytest.mark.exhaustive),
        pytest.param({"mode": "downpour"}, 1, marks=pytest.mark.exhaustive),
        pytest.param({"mode": "downpour", "push_every": 1, "fetch_every": 1}, 1, marks=pytest.mark.exhaustive),
        ({"mode": "bsp"}, 2),
        pytest.param({"mode": "bsp"}, 3, marks=pytest.mark.exhaustive),
    ],
)
def test_it_equals_one_device(tmp_path, options, workers):
    said = run_script(tmp_path, ALONE, json.dumps(options), workers=workers, ps=2)
    for name in ("SGD", "ADAM"):
        assert max(map(float, said[name].split())) < 2e-5, said
        assert int(said[f"STEPS_{name}"]) == 2 * 81


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [2, 3])
def test_the_cases_of_equality_hold_where_workers_have_parts_of_each_batch(tmp_path, workers):
    tests = equality_cases("parameter_server_bsp", workers, SYNCHRONOUS)
    assert f"{len(tests)} passed" in run_together("parameter_server_bsp", workers, *tests, cwd=tmp_path, ps=2)


@pytest.mark.thorough
def test_the_steps_and_metrics_of_users_are_those_of_one_device_in_rounds(tmp_path):
    steps = "queue or dropout or order or condition or printing or numpy or single_example"
    metrics = "metric_of_the_users_own and (Largest or Means)"
    layers = "normalizes_by_the_batch and not Layer"
    for files, which in (([USERS_STEPS], steps), ([STEPS, BY_HAND], f"({metrics}) or ({layers})")):
        chosen = ("-k", which, "-m", "not exhaustive")
        said = run_together("parameter_server_bsp", 2, *files, *chosen, cwd=tmp_path, ps=1)
        assert "passed" in said and "failed" not in said


UNUSUAL = (
    SCRIPT
    + """
class Lazy(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.mean = keras.layers.Dense(4, "tanh"), keras.layers.GlobalAveragePooling1D()
        self.outputs_of = keras.layers.Dense(1)

    def call(self, inputs):
        return self.outputs_of(self.mean(self.hidden(inputs)))


def pairs():
    for length in (3, 5, 4):
        yield np.random.default_rng(length).random((4, length, 4), "float32"), np.full((4, 1), length, "float32")


signature = tf.TensorSpec((None, None, 4)), tf.TensorSpec((None, 1))
models = []
for scope in (contextlib.nullcontext(), strategy.scope()):
    keras.utils.set_random_seed(3)
    with scope:
        model = Lazy()
        model.compile(keras.optimizers.Adam(epsilon=0.1), "mse")  # which does not amplify rounding
    # Of data that end unannounced stock Keras counts a step too many.
    data = tf.data.Dataset.from_generator(pairs, output_signature=signature).repeat()
    (strategy.fit if models else keras.Model.fit)(model, data, epochs=2, steps_per_epoch=3, verbose=0)
    models.append(model)
print("APART", apart(*models))
"""
)


@pytest.mark.thorough
def test_a_model_that_is_built_by_data_of_unknown_length_trains_as_on_one_device_in_rounds(tmp_path):
    assert float(run_script(tmp_path, UNUSUAL, json.dumps({"mode": "bsp"}), workers=2)["APART"]) < 2e-6


REPEATED = (
    SCRIPT
    + """
def trained():
    keras.utils.set_random_seed(3)
    with strategy.scope():
        inputs = keras.Input((4,))
        hidden = keras.layers.Dropout(0.3)(keras.layers.Dense(16, "tanh")(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.BatchNormalization()(hidden)))
        model.compile(keras.optimizers.Adam(1e-2), "mse")
    strategy.fit(model, x, x[:, :1], **usual)
    return b"".join(weight.tobytes() for weight in model.get_weights())


print("RUNS", len({trained() for _ in range(3)}))
"""
)


@pytest.mark.exhaustive
def test_workers_with_parts_of_each_batch_repeat_a_run_bit_by_bit(tmp_path):
    assert run_script(tmp_path, REPEATED, json.dumps({"mode": "bsp"}), workers=3)["RUNS"] == "1"


TWO_LOSSES = (
    SCRIPT
    + """
def two(scope, fit):  # Keras weighs the losses of several outputs by static shapes
    keras.utils.set_random_seed(3)
    with scope:
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(8, "tanh")(inputs)
        outputs = {name: keras.layers.Dense(1, name=name)(hidden) for name in ("left", "right")}
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), {"left": "mse", "right": "mae"})
    return fit(model)


def batches():
    for begin in range(0, 27, 8):
        rows = slice(begin, min(begin + 8, 27))
        yield x[rows], {"left": x[rows, :1], "right": x[rows, 1:2]}


class Numbered(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, number):
        return list(batches())[number]


arrays = x[:27], {"left": x[:27, :1], "right": x[:27, 1:2]}
DATA = {
    "ARRAYS": (lambda: arrays, {"batch_size": 8}),
    "DATASET": (lambda: (tf.data.Dataset.from_tensor_slices(arrays).batch(8),), {}),
    "GENERATOR": (lambda: (batches(),), {"steps_per_epoch": 4}),
    "NUMBERED": (lambda: (Numbered(),), {}),
}
for name, (make, more) in DATA.items():
    more = {"epochs": 1, "shuffle": False, "verbose": 0, **more}
    wanted = two(contextlib.nullcontext(), lambda model: model.fit(*make(), **more)).history
    found = two(strategy.scope(), lambda model: strategy.fit(model, *make(), **more)).history
    print(name, max(abs(found[key][0] - value[0]) for key, value in wanted.items()))
"""
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options", [{"mode": "bsp"}, pytest.param({"staleness": 0}, marks=pytest.mark.exhaustive)], ids=["bsp", "rounds"]
)
def test_the_losses_of_several_outputs_are_those_of_one_device_however_the_data_come(tmp_path, options):
    said = run_script(tmp_path, TWO_LOSSES, json.dumps(options), workers=2)
    assert all(float(said[name]) < 1e-6 for name in ("ARRAYS", "DATASET", "GENERATOR", "NUMBERED")), said


MOVED = (
    SCRIPT
    + """
class Line(keras.Model):  # whose gradient is -1 everywhere
    def __init__(self):
        super().__init__()
        self.at = self.add_weight(shape=(), initializer="zeros", name="at")

    def call(self, inputs):
        return self.at + 0.0 * inputs


def minus(y_true, y_pred):
    return -y_pred


with strategy.scope():
    model = Line()
    model.compile(keras.optimizers.SGD(1.0), minus)
for epoch in range(3):
    strategy.fit(model, np.zeros((9, 1), "float32"), np.zeros((9, 1), "float32"), batch_size=1, verbose=0)
    print(f"CENTRE_{epoch}", float(model.at.numpy()))
model.at.assign(100.0)  # workers start from there
strategy.fit(model, np.zeros((3, 1), "float32"), np.zeros((3, 1), "float32"), batch_size=1, verbose=0)
print("SET", float(model.at.numpy()))
"""
)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"mode": "easgd", "sync_every": 2, "moving_rate": 1.0}, Easgd(2, 1.0)),
        pytest.param(
            {"mode": "easgd", "sync_every": 4, "moving_rate": 0.3}, Easgd(4, 0.3), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            {"mode": "eamsgd", "sync_every": 3, "moving_rate": 0.5, "momentum": 0.5},
            Eamsgd(3, 0.5, 0.5),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=lambda one: one["mode"] if isinstance(one, dict) else "",
)
def test_the_centre_moves_as_published_over_epochs_too(tmp_path, options, rule):
    said = run_script(tmp_path, MOVED, json.dumps(options), workers=1)
    _, centres = run_one_worker(rule, lambda own: own + 1.0, 27)
    assert [float(said[f"CENTRE_{epoch}"]) for epoch in range(3)] == pytest.approx(
        [centres[8], centres[17], centres[26]]
    )
    _, centres = run_one_worker(rule, lambda own: own + 1.0, 3, centre=100.0)
    assert float(said["SET"]) == pytest.approx(centres[-1])


TRAINED = (
    SCRIPT
    + """
bounded = "staleness" in options  # then steps take long enough to be under way at the same time
model = made(lambda: keras.optimizers.SGD(0.01 if bounded else 0.05), 256 if bounded else 8)
epochs = {"epochs": 2 if bounded else 5}
history = strategy.fit(model, x, x[:, :1], validation_data=(x, x[:, :1]), **usual | epochs).history
print("HISTORY", json.dumps(history))
print("STEPS", int(model.optimizer.iterations.numpy()))
"""
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mode", ["downpour", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("easgd", "eamsgd"))]
)
def test_two_workers_with_copies_bring_the_centre_to_what_is_sought(tmp_path, mode):
    momentum = {"momentum": 0.8} if mode == "eamsgd" else {}
    said = run_script(tmp_path, TRAINED, json.dumps({"mode": mode, **momentum}), workers=2, ps=2)
    history = json.loads(said["HISTORY"])
    assert int(said["STEPS"]) == 5 * 81
    assert history["val_loss"][-1] < 0.2 * history["val_loss"][0] or history["val_loss"][-1] < 0.01


@pytest.mark.parametrize("slack", [0, 2, 5])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_no_worker_begins_a_step_that_is_more_than_the_slack_ahead_of_the_slowest(slack, steps):
    slowest, ahead = modes.Clock(done=10, running="a closure"), modes.Clock(done=10)
    while modes.next_clock([slowest, ahead], steps, slack) is ahead:
        ahead.done += steps
    # The last step that it took began when it had done `slack` steps more than the slowest, at most.
    assert ahead.done - 1 - slowest.done <= slack < ahead.done + steps - 1 - slowest.done


@pytest.mark.thorough
@pytest.mark.parametrize("slack", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
def test_clocks_keep_within_their_bound(tmp_path, slack):
    said = run_script(tmp_path, TRAINED, json.dumps({"mode": "ssp", "staleness": slack}), workers=2)
    history = json.loads(said["HISTORY"])
    assert int(said["STEPS"]) == 2 * 81
    assert max(history["staleness_max"]) <= 2 * slack + 1
    assert history["staleness_mean"][-1] > 0.1  # both are under way at most times


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [pytest.param("ssp", marks=pytest.mark.exhaustive), "easgd"])
def test_training_goes_on_without_a_killed_worker_which_comes_back(tmp_path, mode):
    run_dir = tmp_path / "run"
    options = ("--epochs", "40", "--ps", "1", "--timeout-seconds", "5", "--strategy-option", f"mode={mode}")
    with train(*options, run_dir=run_dir, strategy="parameter_server") as job:
        code, _, err = after_two_epochs(job, run_dir, "worker", 0, signal.SIGKILL)
        assert job.left() == []
    assert code == 0, err
    assert "worker 0 was ended by SIGKILL; it is started again." in err
    epochs = record(run_dir)["epochs"]
    assert len(epochs) == 40 and epochs[-1]["metrics"]["loss"] < epochs[0]["metrics"]["loss"]


REFUSED = (
    SCRIPT
    + """
def refused(name, make_model, make_optimizer):
    with strategy.scope():
        model = make_model()
        model.compile(make_optimizer(), "mse")
    try:
        strategy.fit(model, x, x, **usual)
    except tfdist.errors.UsageError as error:
        print(name, " ".join(str(error).split()))


def dense():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])


if options["mode"] in ("asp", "ssp"):
    refused("ACCUMULATED", dense, lambda: keras.optimizers.SGD(gradient_accumulation_steps=2))
else:
    refused("SCALED", dense, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    refused("EMA", dense, lambda: keras.optimizers.SGD(use_ema=True))
    refused("ACCUMULATED", dense, lambda: keras.optimizers.SGD(gradient_accumulation_steps=2))
    refused("MOMENTUM", dense, lambda: keras.optimizers.SGD(momentum=0.9))
"""
)


@pytest.mark.thorough
def test_what_a_mode_cannot_train_is_refused_in_a_sentence(tmp_path):
    said = run_script(tmp_path, REFUSED, json.dumps({"mode": "eamsgd"}), workers=1)
    assert "scales the loss" in said["SCALED"]
    assert "`use_ema`" in said["EMA"]
    assert "accumulates gradients" in said["ACCUMULATED"]
    assert "`mode=eamsgd` has its own momentum" in said["MOMENTUM"] and "of 0.9" in said["MOMENTUM"]
    said = run_script(tmp_path, REFUSED, json.dumps({"mode": "asp"}), workers=2)
    assert "with `mode=asp` one update would combine steps of several workers" in said["ACCUMULATED"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mode": "esgd"}, "Unknown mode `esgd`"),
        ({"mode": "bsp", "staleness": 2}, "`staleness` is an option of `rounds` and `ssp`, and `mode` is `bsp`"),
        ({"push_every": 3}, "`push_every` is an option of `downpour`, and `mode` is `asp`"),
        ({"mode": "easgd", "momentum": 0.5}, "`momentum` is an option of `eamsgd`, and `mode` is `easgd`"),
        ({"mode": "easgd", "moving_rate": 1.5}, "cannot have `1.5` as `moving_rate`"),
        ({"mode": "downpour", "push_every": 0}, "cannot have `0` as `push_every`"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(options, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        tfdist.strategy("parameter_server", **options)


@pytest.mark.parametrize("name", ["asp", "ssp", "easgd"])
def test_accumulated_gradients_are_refused_where_steps_of_two_workers_overlap(name):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    mode = modes.Mode(name, {})
    mode.settle(workers=2)
    with pytest.raises(UsageError, match="accumulat"):
        mode.check(model)


NOT_FINITE = (
    SCRIPT
    + """
x[300 if options["mode"] == "easgd" else 640] = np.nan  # so that one worker's weights are no numbers any more
model = made(lambda: keras.optimizers.SGD(0.05))
try:
    strategy.fit(model, x, x[:, :1], **usual)
except tfdist.errors.NonFiniteLossError as error:
    print("ERROR", " ".join(str(error).split()))
print("CENTRE", bool(np.all([np.isfinite(weight).all() for weight in model.get_weights()])))
"""
)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [pytest.param("downpour", marks=pytest.mark.exhaustive), "easgd"])
def test_weights_that_are_no_numbers_do_not_come_to_the_centre(tmp_path, mode):
    said = run_script(tmp_path, NOT_FINITE, json.dumps({"mode": mode}), workers=2)
    assert re.search(
        r"The weights of a worker are not finite( after \d+ of its steps)?, and were not sent", said["ERROR"]
    )
    assert said["CENTRE"] == "True"
