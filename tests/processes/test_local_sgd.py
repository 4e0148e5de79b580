"""`local_sgd` on real processes: each rule equals the same rule in NumPy, whatever carries the weights."""

import functools
import json
import signal

import numpy as np
import pytest

from tests.contract.contestants import IN_LOCK_STEP
from tests.processes.jobs import RunningJob, record, require_horovod, require_mpi, signalled, train
from tests.processes.test_contract import EQUALITY, run_together

LEARNING_RATE, MOMENTUM, BATCH, EPOCHS = 0.1, 0.9, 12, 2
# Of each case: the options of the strategy.
CASES = {
    "average": {"sync_every": 2},
    "average each step": {"sync_every": 1},
    "average by epoch": {"sync_every": "epoch"},
    "slowmo": {"outer": "slowmo", "sync_every": 2, "slow_momentum": 0.6, "slow_rate": 0.9},
    "slowmo without momentum": {"outer": "slowmo", "sync_every": 2, "slow_momentum": 0.0},
    "diloco": {"outer": "diloco", "sync_every": 2},
    "fragments": {"outer": "diloco", "sync_every": 2, "fragments": 2},
    "overlap": {"outer": "diloco", "sync_every": 2, "overlap": 1},
    "mixing": {"outer": "diloco", "sync_every": 2, "fragments": 2, "overlap": 1, "mixing": 0.3},
    "easgd": {"outer": "easgd", "sync_every": 2, "moving_rate": 0.3},
    "easgd apart": {"outer": "easgd", "sync_every": 2, "moving_rate": 0.0},
    "own": {"outer": "halfway:rule", "sync_every": 1},
}
OWN_RULE = """
def rule(start, mean, memory, learning_rate):
    return (start + mean) / 2, memory + 1
"""
# The model is linear, so that NumPy can do the same; 31 examples leave a last batch of 7, and one of 3 processes less.
SCRIPT = """
import sys
import keras, numpy as np, tfdist
from tests.processes.test_local_sgd import BATCH, CASES, EPOCHS, LEARNING_RATE, MOMENTUM, data

x, y = data()
for name, options in CASES.items():
    strategy = tfdist.strategy("local_sgd", seed=1, **eval(sys.argv[2]), **options)
    with strategy.scope():
        inputs = keras.Input((4,))
        parts = [keras.layers.Dense(1, use_bias=False)(half) for half in (inputs[:, :2], inputs[:, 2:])]
        model = keras.Model(inputs, keras.layers.add(parts))
        model.compile(keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM), "mse")
    model.set_weights([np.full((2, 1), 0.5, "float32")] * 2)
    shown = []
    see = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: shown.append(np.concatenate(model.get_weights())[:, 0])
    )
    history = strategy.fit(
        model, x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, callbacks=[see], verbose=0
    ).history
    np.savez(f"{sys.argv[1]}/{name}-{strategy.world.rank}.npz", *shown, **{"losses": history["loss"]})


class Weighs(keras.Sequential):
    def train_step(self, data):
        logs = super().train_step(data)
        self.inputs_mean.update_state(keras.ops.mean(data[0]), sample_weight=keras.ops.shape(data[0])[0])
        return logs | {"inputs": self.inputs_mean.result()}


strategy = tfdist.strategy("local_sgd", seed=1, **eval(sys.argv[2]))
with strategy.scope():
    model = Weighs([keras.Input((4,)), keras.layers.Dense(1)])
    model.inputs_mean = keras.metrics.Mean(name="inputs")
    model.compile("sgd", "mse")
history = strategy.fit(model, x, y, batch_size=BATCH, verbose=0).history
np.savez(f"{sys.argv[1]}/weighed-{strategy.world.rank}.npz", np.array(history["inputs"]))
"""


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(31, 4)).astype("float32")
    return x, (x @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")).astype("float32")


class Process:
    """One process in NumPy: SGD with momentum on its part of each batch."""

    def __init__(self, width):
        self.weights, self.slot, self.examples = np.full(width, 0.5), np.zeros(width), 0

    def step(self, x, y):
        if len(x):
            gradient = 2 * x.T @ (x @ self.weights - y) / len(x)
            self.slot = MOMENTUM * self.slot - LEARNING_RATE * gradient
            self.weights = self.weights + self.slot
            self.examples += len(x)


class Average:
    def __init__(self, processes):
        self.processes, self.start = processes, processes[0].weights

    def mean(self, name):
        examples = np.array([one.examples for one in self.processes])
        return sum(
            share * getattr(one, name) for share, one in zip(examples / examples.sum(), self.processes, strict=True)
        )

    def meet(self):
        new, slot = self.new(self.mean("weights")), self.mean("slot")
        for one in self.processes:
            one.weights, one.examples = new, 0
            one.slot = slot if self.averages_slots else one.slot
        self.start = new

    averages_slots = True

    def new(self, mean):
        return mean

    def shown(self):
        return self.start


class SlowMo(Average):
    memory = 0.0

    def __init__(self, processes, momentum, rate):
        super().__init__(processes)
        self.momentum, self.rate = momentum, rate

    def new(self, mean):
        self.memory = self.momentum * self.memory + (self.start - mean) / LEARNING_RATE
        return self.start - self.rate * LEARNING_RATE * self.memory


class DiLoCo(Average):
    averages_slots, velocity = False, 0.0

    def new(self, mean):  # SGD with Nesterov's momentum, as Keras has it
        move = self.start - mean
        self.velocity = 0.9 * self.velocity - 0.7 * move
        return self.start + 0.9 * self.velocity - 0.7 * move


class Streaming:
    """DiLoCo by fragments, each of which is a range of the weights: sent at a step, taken in `overlap` steps later."""

    def __init__(self, processes, every, fragments=1, overlap=0, mixing=0.0):
        self.processes, self.every, self.overlap, self.mixing = processes, every, overlap, mixing
        width = len(processes[0].weights)
        self.parts = [slice(width * one // fragments, width * (one + 1) // fragments) for one in range(fragments)]
        self.start, self.velocity = processes[0].weights.copy(), np.zeros(width)
        self.seen, self.flights = [[0] * len(processes) for _ in self.parts], {}

    def send(self, number, due):
        examples = np.array([one.examples for one in self.processes]) - self.seen[number]
        self.seen[number] = [one.examples for one in self.processes]
        if examples.sum():
            weights = [one.weights[self.parts[number]] for one in self.processes]
            self.flights[number] = due, np.average(weights, axis=0, weights=examples)

    def take_in(self, number):
        if number not in self.flights:
            return
        _, mean = self.flights.pop(number)
        part = self.parts[number]
        move = self.start[part] - mean
        self.velocity[part] = 0.9 * self.velocity[part] - 0.7 * move
        self.start[part] += 0.9 * self.velocity[part] - 0.7 * move
        for one in self.processes:
            one.weights = one.weights.copy()
            one.weights[part] = self.mixing * one.weights[part] + (1 - self.mixing) * self.start[part]

    def at(self, step):
        for number in [one for one, (due, _) in self.flights.items() if due == step]:
            self.take_in(number)
        for number in range(len(self.parts)):
            if (step - (number + 1) * self.every // len(self.parts)) % self.every == 0:
                self.send(number, step + self.overlap)
                if not self.overlap:
                    self.take_in(number)

    def meet(self):
        for number in list(self.flights):
            self.take_in(number)
        for number in range(len(self.parts)):
            self.send(number, 0)
            self.take_in(number)
        for one in self.processes:
            one.weights = self.start.copy()

    def shown(self):
        return self.start.copy()


class Halfway(Average):
    def new(self, mean):
        return (self.start + mean) / 2


class Elastic(Average):
    def __init__(self, processes, rate):
        super().__init__(processes)
        self.rate = rate

    def meet(self):
        moves = [self.rate * (one.weights - self.start) for one in self.processes]
        for one, move in zip(self.processes, moves, strict=True):
            one.weights = one.weights - move
        self.start = self.start + sum(moves)


RULES = {
    "slowmo": lambda processes: SlowMo(processes, 0.6, 0.9),
    "slowmo without momentum": Average,
    "diloco": DiLoCo,
    "fragments": lambda processes: Streaming(processes, 2, fragments=2),
    "overlap": lambda processes: Streaming(processes, 2, overlap=1),
    "mixing": lambda processes: Streaming(processes, 2, fragments=2, overlap=1, mixing=0.3),
    "easgd": lambda processes: Elastic(processes, 0.3),
    "easgd apart": lambda processes: Elastic(processes, 0.0),
    "own": Halfway,
}


def expected(name, size):
    """The weights that are shown at the end of each epoch."""
    x, y = data()
    x, y = x.astype("float64"), y[:, 0].astype("float64")
    processes = [Process(x.shape[1]) for _ in range(size)]
    rule, every, shown = RULES.get(name, Average)(processes), CASES[name]["sync_every"], []
    for _ in range(EPOCHS):
        for step in range(-(-len(x) // BATCH)):
            batch = np.arange(step * BATCH, min((step + 1) * BATCH, len(x)))
            ends = [-(-len(batch) * index // size) for index in range(size + 1)]
            for process, begin, end in zip(processes, ends, ends[1:], strict=False):
                process.step(x[batch[begin:end]], y[batch[begin:end]])
            if isinstance(rule, Streaming):
                rule.at(step + 1)
            elif every != "epoch" and (step + 1) % every == 0:
                rule.meet()
        if any(one.examples for one in processes):
            rule.meet()
        shown.append(rule.shown())
    return shown


def started(folder, size, *launcher, **options):
    (folder / "halfway.py").write_text(OWN_RULE)
    (folder / "script.py").write_text(SCRIPT)
    with RunningJob(*launcher, "--workers", size, "script.py", str(folder), repr(options), cwd=folder) as job:
        code, _, err = job.end()
    assert code == 0, err[-3000:]
    return {path.stem: np.load(path) for path in folder.glob("*.npz")}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    @functools.cache
    def of(size):
        return started(tmp_path_factory.mktemp(f"of-{size}"), size)

    return of


@pytest.mark.parametrize(
    "size", [pytest.param(1, marks=pytest.mark.exhaustive), 2, pytest.param(3, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("name", CASES)
def test_a_rule_makes_the_weights_that_numpy_makes(results, name, size):
    wanted = expected(name, size)
    for rank in range(size):
        found = results(size)[f"{name}-{rank}"]
        for epoch, weights in enumerate(wanted):
            np.testing.assert_allclose(found[f"arr_{epoch}"], weights, rtol=2e-5, atol=2e-6)


def test_a_number_counts_as_much_as_a_step_says_in_whatever_process(results):
    """The means of the parts, each with the number of its examples, of batches of different sizes."""
    x, _ = data()
    for rank in range(2):
        np.testing.assert_allclose(results(2)[f"weighed-{rank}"]["arr_0"], [x.mean()], rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["mpi", pytest.param("horovod", marks=pytest.mark.exhaustive)])
def test_other_engines_carry_the_same(results, tmp_path, engine):
    require_mpi()
    if engine == "horovod":
        require_horovod()
    found = started(tmp_path, 2, *(["--mpi"] if engine == "mpi" else []), engine=engine)
    assert set(found) == set(results(2))
    for case, arrays in found.items():
        for name in arrays:
            np.testing.assert_allclose(arrays[name], results(2)[case][name], rtol=1e-6, err_msg=f"{case}, {name}")


# A model with random layers, moving averages and slots, in two processes.
MODEL = """
import sys
import keras, numpy as np, tfdist
from tests.interruption import InterruptionError, Interrupts

rng = np.random.default_rng(0)
x = rng.normal(size=(62, 6)).astype("float32")
y = (x.sum(1) > 0).astype("int32")


def made(optimizer, random=True):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, "relu"), *([keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)] * random)]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def values(model, own=True):
    optimizer = [v.numpy() for v in model.optimizer.variables] if own else []
    return [*model.get_weights(), *optimizer]


def said(word, value):
    with open(f"{sys.argv[1]}/said", "a") as file:
        file.write(f"{word} {value}\\n")
"""

RESUMED = (
    MODEL
    + """
strategy_of, cases = sys.argv[2], eval(sys.argv[3])
for name, options in cases.items():
    def trained(folder, *more):
        strategy = tfdist.strategy(strategy_of, seed=1, **options)
        with strategy.scope():
            model = made(keras.optimizers.Adam(0.02))
        kept = tfdist.callbacks.Checkpoint(f"{sys.argv[1]}/{name}/{folder}", every_steps=3, resume=True)
        try:
            strategy.fit(model, x, y, batch_size=8, epochs=3, callbacks=[kept, *more], verbose=0)
        except InterruptionError:
            return None
        return values(model)

    class Interrupted(keras.callbacks.Callback):
        "Ends the second epoch after its fifth step."
        epoch = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if self.epoch == 1 and batch == 4:
                raise InterruptionError

    unbroken = trained("unbroken")
    assert trained("resumed", Interrupted()) is None
    resumed = trained("resumed")
    said(name, all((a == b).all() for a, b in zip(unbroken, resumed, strict=True)))
"""
)


def of_two(script, folder, *arguments):
    """What two processes have said: the values by word, one of each process."""
    (folder / "script.py").write_text(script)
    with RunningJob("--workers", 2, "script.py", str(folder), *arguments, cwd=folder) as job:
        code, _, err = job.end()
    assert code == 0, err[-3000:]
    found = {}
    for line in (folder / "said").read_text().splitlines():
        word, _, value = line.partition(" ")
        found.setdefault(word, []).append(value)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "cases"),
    [
        (
            "local_sgd",
            {
                "slowmo": {"outer": "slowmo", "sync_every": 4},
                "easgd": {"outer": "easgd", "sync_every": 4},
                "diloco": {"outer": "diloco", "sync_every": 2, "compression": "int8"},
                "fragments": {"outer": "diloco", "sync_every": 3, "fragments": 2, "overlap": 2, "mixing": 0.5},
            },
        ),
        ("gossip", {"dpsgd": {}, "sgp": {"algorithm": "sgp"}}),
    ],
)
def test_a_run_resumed_within_an_epoch_ends_as_an_unbroken_one_does(tmp_path, strategy, cases):
    assert of_two(RESUMED, tmp_path, strategy, repr(cases)) == {name: ["True"] * 2 for name in cases}


SYNCHRONOUS = (
    MODEL
    + """
strategy = tfdist.strategy("local_sgd", seed=1, local_from=1000)
with strategy.scope():
    model = made(keras.optimizers.Adam(0.02), random=False)
strategy.fit(model, x, y, batch_size=9, epochs=2, shuffle=False, verbose=0)
alone = made(keras.optimizers.Adam(0.02), random=False)
for _ in range(2):
    for begin in range(0, len(x), 9):
        alone.train_on_batch(x[begin : begin + 9], y[begin : begin + 9])
said("APART", max(abs(a - b).max() for a, b in zip(values(model), values(alone), strict=True)))

# From its third step on it trains as one that was given the weights of that step.
late = tfdist.strategy("local_sgd", seed=1, local_from=3, sync_every=2)
with late.scope():
    model = made(keras.optimizers.SGD(0.1), random=False)
history = late.fit(model, x, y, batch_size=9, epochs=1, shuffle=False, validation_data=(x, y), verbose=0).history
said("DRIFTED", history["disagreement"][0] > 1e-4)
said("VALIDATED", abs(history["val_loss"][0] - model.evaluate(x, y, verbose=0)[0]) < 1e-5)
said("STEPS", int(model.optimizer.iterations.numpy()))
"""
)


@pytest.mark.thorough
def test_up_to_local_from_steps_are_those_of_one_device(tmp_path):
    found = of_two(SYNCHRONOUS, tmp_path)
    assert [float(one) < 2e-6 for one in found["APART"]] == [True] * 2
    assert found["DRIFTED"] == found["VALIDATED"] == ["True"] * 2
    assert found["STEPS"] == ["7"] * 2


COMPRESSED = (
    MODEL
    + """
def trained(**options):
    strategy = tfdist.strategy("local_sgd", seed=1, sync_every=2, **options)
    with strategy.scope():
        model = made(keras.optimizers.Adam(0.02), random=False)
    strategy.fit(model, x, y, batch_size=8, epochs=4, shuffle=False, verbose=0)
    return values(model, own=False)

whole = trained()
for name in ("bf16", "fp16", "int8"):
    sent = trained(compression=name)
    said(f"APART-{name}", max(abs(a - b).max() for a, b in zip(whole, sent, strict=True)))
    said(f"SUM-{name}", sum(float(abs(one).sum()) for one in sent))
"""
)


@pytest.mark.thorough
def test_moves_are_sent_in_fewer_bytes_and_all_processes_have_the_same_weights(tmp_path):
    found = of_two(COMPRESSED, tmp_path)
    for name, most in {"bf16": 0.02, "fp16": 0.02, "int8": 0.05}.items():
        apart = [float(one) for one in found[f"APART-{name}"]]
        assert 0 < max(apart) < most, (name, apart)
        assert len(set(found[f"SUM-{name}"])) == 1


DIVERGED = (
    MODEL
    + """
import json

strategy = tfdist.strategy(sys.argv[2], seed=1, timeout_seconds=5, **json.loads(sys.argv[3]))
with strategy.scope():
    model = made("sgd", random=False)


class Spoils(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if strategy.world.rank == 1:
            model.layers[0].kernel.assign(model.layers[0].kernel * np.nan)


try:
    strategy.fit(model, x, y, batch_size=8, callbacks=[Spoils()], verbose=0)
except tfdist.errors.TfdistError as error:
    said(f"ERROR-{strategy.world.rank}", error.sentence)
said(f"FINITE-{strategy.world.rank}", all(np.isfinite(one).all() for one in model.get_weights()))
"""
)


@pytest.mark.thorough
def test_weights_that_are_not_finite_are_not_averaged(tmp_path):
    found = of_two(DIVERGED, tmp_path, "local_sgd", json.dumps({"sync_every": 2}))
    told = "The weights of rank 1 are not finite after step 2, and were not averaged with those of the other processes"
    assert found == {"ERROR-0": [told], "ERROR-1": [told], "FINITE-0": ["True"], "FINITE-1": ["False"]}


# Each case is trained by processes that average after each step of SGD, and by stock Keras with the same batches.
EACH_STEP = (
    MODEL
    + """
import contextlib
from tests.contract.cases import BATCH, CASES
from tests.contract.test_equality import Stock, largest_difference
from tfdist.data.input.division import Division

CHOSEN = [
    "remainder 1", "loss sum", "mask, loss sum", "several inputs and outputs", "own train_step", "own compute_loss",
    "add_loss", "regularizers", "sample weights",
]


def trained(case, by, scope):
    keras.utils.set_random_seed(11)
    with scope:
        model = case.model()
        model.optimizer = keras.optimizers.SGD(0.01)
    data, unseen = case.data(case.examples), case.data(2 * BATCH + 3)
    fit = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0} | case.fit
    history = by.fit(model, **data, **fit).history
    scores = by.evaluate(model, **unseen, batch_size=BATCH, verbose=0, return_dict=True)
    return {"weights": model.get_weights(), "history": history, "scores": scores}


strategy = tfdist.strategy(sys.argv[2], seed=1, sync_every=1)
for name in CHOSEN:
    expected = trained(CASES[name], Stock(), contextlib.nullcontext())
    found = trained(CASES[name], strategy, strategy.scope())
    found["history"] = {key: found["history"][key] for key in expected["history"]}
    for what, wanted in expected.items():
        said(f"{name}, {what}".replace(" ", "_"), largest_difference(found[what], wanted))



class OwnLogs(keras.Model):
    def train_step(self, data):
        logs = super().train_step(data)
        return logs | {"mean": keras.ops.mean(data[0]), "squares": keras.ops.sum(data[0] ** 2)}


def own_logs(by, scope):
    with scope:
        inputs = keras.Input((6,))
        model = OwnLogs(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))
        model.compile(keras.optimizers.SGD(0.01), "mse")
    return by.fit(model, x, x[:, :1], batch_size=9, epochs=2, shuffle=False, verbose=0).history


expected, found = own_logs(Stock(), contextlib.nullcontext()), own_logs(strategy, strategy.scope())
# Whatever a step returns, the logs have the mean of the processes': of a sum, that of the sums of their parts.
last = x[-(len(x) % 9 or 9):]
bounds = [Division(2).part(len(last), rank) for rank in range(2)]
expected["squares"] = 2 * [sum((end - begin) / len(last) * np.sum(last[begin:end] ** 2) for begin, end in bounds)]
said("own_logs", largest_difference({key: found[key] for key in expected}, expected))

with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(synchronized=True, name="norm")])
    model.compile("sgd", "mse")
try:
    strategy.fit(model, x, x, verbose=0)
except tfdist.errors.UsageError as error:
    said("REFUSED", error.sentence)
"""
)


@pytest.mark.thorough
def test_averaging_each_step_trains_and_logs_as_one_device_whatever_the_loss(tmp_path):
    found = of_two(EACH_STEP, tmp_path, "local_sgd")
    told = "The layer `norm` is `synchronized`, and processes of `local_sgd` do not communicate within a step"
    assert found.pop("REFUSED") == [told] * 2
    assert len(found) == 9 * 3 + 1
    apart = {what: max(map(float, differences)) for what, differences in found.items()}
    assert max(apart.values()) < 5e-5, apart


@pytest.mark.exhaustive
def test_in_lock_step_all_cases_of_equality_hold(tmp_path):
    last = run_together(IN_LOCK_STEP, 2, EQUALITY, "-k", "equals", cwd=tmp_path)
    assert last.startswith("62 passed"), last


@pytest.mark.thorough
def test_processes_with_other_options_are_refused_with_the_values_of_both(tmp_path):
    (tmp_path / "script.py").write_text(
        "import json, os, tfdist\n"
        "rank = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
        "tfdist.strategy('local_sgd', sync_every=2 + rank)\n"
    )
    with RunningJob("--workers", 2, "script.py", cwd=tmp_path) as job:
        code, out, err = job.end()
    told = " ".join((out + err).replace("│", " ").split())
    assert code == 2 and "sync_every" in told and "`2`" in told and "`3`" in told, told


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.exhaustive)])
def test_all_end_when_a_rank_is_killed_or_stopped_and_it_is_named(tmp_path, number):
    options = ("--epochs", "2000", "--timeout-seconds", "8", "--sync-every", "5")
    with train(*options, run_dir=tmp_path / "run", strategy="local_sgd") as job:
        code, said = signalled(job, tmp_path / "run", number)
    assert code != 0 and "worker 1" in said


@pytest.mark.thorough
def test_the_command_trains_with_an_outer_rule_and_records_it(tmp_path):
    options = ("--strategy-option", "outer=diloco", "--strategy-option", "outer_optimizer=sgd", "--sync-every", "4")
    with train("--epochs", "2", *options, run_dir=tmp_path / "run", strategy="local_sgd") as job:
        code, _, err = job.end()
    assert code == 0, err
    found = record(tmp_path / "run")["strategy"]["options"]
    assert (found["outer"], found["outer_optimizer"], found["sync_every"]) == ("diloco", "sgd", 4)
