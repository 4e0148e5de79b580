"""The simulator: its workers take real steps, in simulated time, and the same seed gives the same run."""

import doctest
import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from tfdist import simulate
from tfdist.advisor.costs import Link
from tfdist.data.input import adapters
from tfdist.errors import UsageError
from tfdist.relaxed.centre_rules import MOMENTUM, Eamsgd, Easgd, run_one_worker
from tfdist.simulator import __main__ as simulator
from tfdist.simulator import algorithms, clock, lines, matrix, simulation
from tfdist.simulator.links import Links
from tfdist.simulator.replicas import Replicas
from tfdist.simulator.simulation import NAMES, Settings

ROOT = Path(__file__).parent.parent
LINK = Link(latency_seconds=1e-3, bytes_per_second=1e6)
BATCH = 8
X = np.random.default_rng(0).normal(size=(30, 4)).astype("float32")  # with a last batch of 6
Y = (X.sum(1, keepdims=True) + 0.1 * X[:, :1] ** 2).astype("float32")


SLACKS = {"ssp": {"slack": 1}, "asp": {}}


def made(optimizer=None):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def replicas(size, optimizer=None):
    return Replicas(made(optimizer), adapters.make(adapters.request(X, Y, batch_size=BATCH, shuffle=False), 0), size)


def settings(algorithm, *speeds, **options):
    return Settings(algorithm, speeds, 0.01, Links.of(len(speeds), LINK), **options)


def trained(algorithm, *speeds, epochs=2, optimizer=None, **options):
    """The algorithm after its run."""
    steps = replicas(len(speeds), optimizer)
    found = simulation.make_algorithm(steps, settings(algorithm, *speeds, **options))
    for _ in range(epochs):
        found.run(steps.steps_per_epoch)
    return found


def flat(weights):
    return np.concatenate([one.reshape(-1) for one in weights])


def by_keras(epochs=2, optimizer=None):
    model = made(optimizer)
    for _ in range(epochs):
        for begin in range(0, len(X), BATCH):
            model.train_on_batch(X[begin : begin + BATCH], Y[begin : begin + BATCH])
    return flat(model.get_weights())


def test_the_synopsis_runs():
    assert doctest.testmod(clock).failed == doctest.testmod(lines).failed == 0


def test_the_command_knows_the_algorithms():
    assert tuple(simulate.ALGORITHMS) == NAMES


# A worker alone does not end where one device does: the rule goes on from the mean, or a centre follows the worker.
CENTRED = ("asp", "ssp", "downpour", "aeasgd", "eamsgd")
ELSEWHERE = ("slowmo", "diloco", "easgd", "aeasgd", "eamsgd")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ELSEWHERE])
def test_one_worker_trains_as_keras_does(name):
    weights, _ = trained(name, 1.0).global_model()
    np.testing.assert_allclose(weights, by_keras(), rtol=2e-5, atol=2e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["allreduce", "bsp"])
def test_gradients_that_are_added_give_the_weights_of_one_device(name):
    found = trained(name, 1.0, 0.5, 2.0, optimizer=keras.optimizers.Adam(0.05))
    np.testing.assert_allclose(
        found.global_model()[0], by_keras(optimizer=keras.optimizers.Adam(0.05)), rtol=2e-5, atol=2e-6
    )
    assert set(found.staleness) == {0}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_run_bit_by_bit(name):
    options = {"probability": 0.5} if name == "gosgd" else {}
    one, other = (trained(name, 1.0, 0.7, 0.4, seed=3, **options) for _ in range(2))
    for mine, theirs in zip(
        [one.global_model()[0], *one.weights], [other.global_model()[0], *other.weights], strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    assert (one.clock.now, one.sent_bytes, one.staleness) == (other.clock.now, other.sent_bytes, other.staleness)
    assert sum(one.done) == 24 and (name in CENTRED or one.done == [8, 8, 8])


@pytest.mark.parametrize(("name", "rule"), [("aeasgd", Easgd(3, 0.9)), ("eamsgd", Eamsgd(3, 0.9, MOMENTUM))])
def test_one_worker_and_the_centre_move_as_published(name, rule):
    """The steps of the worker are Keras' SGD; what the rule makes of them is held by tests/test_centre_rules.py."""
    worker = replicas(1)
    steps, rest = iter(range(8)), [worker.initial_state]

    def step(weights):
        begun = worker.begin("train", 0, next(steps), np.asarray(weights, np.float32), rest[0])
        new, rest[0] = worker.result(begun)
        return new

    _, centres = run_one_worker(rule, step, 8, worker.initial_weights)
    found = trained(name, 1.0, sync_every=3).global_model()[0]
    np.testing.assert_allclose(found, centres[-1], rtol=1e-5, atol=1e-6)


def test_what_workers_exchange_with_a_centre_passes_its_link_one_after_the_other():
    found = trained("downpour", 1.0, 1.0, sync_every=1)
    bytes_ = found.replicas.initial_weights.nbytes
    assert found.sent_bytes == bytes_ * (
        2 * 8 * 2 + 2 * 2
    )  # a push and a fetch before each step, and what is left after an epoch
    assert found.clock.now > 8 * 0.01


def test_workers_of_a_centre_that_do_not_wait_are_faster_than_those_that_do():
    """With speeds of 1, 1, 1 and 0.25, `bsp` takes the steps of the slowest, and `asp` those of 3.25 workers."""
    links, speeds = Links.of(4, Link(0.0, 1e15)), (1.0, 1.0, 1.0, 0.25)
    seconds, done, steps = {}, {}, replicas(4)
    for name in ("bsp", *CENTRED):
        found = simulation.make_algorithm(steps, Settings(name, speeds, 0.01, links))
        found.run(found.replicas.steps_per_epoch * 3)
        seconds[name], done[name] = found.clock.now, found.done
    assert seconds["bsp"] == pytest.approx(12 * 0.04)
    assert seconds["ssp"] < seconds["bsp"] / 2
    for name in set(CENTRED) - {"ssp"}:  # 48 parts: 45 are done after 0.14 s, and the slow worker has begun its fourth
        assert seconds[name] == pytest.approx(0.16) and done[name][3] == 4, name


def test_adpsgd_averages_at_each_iteration_of_an_active_worker():
    found = trained("adpsgd", 1.0, 0.7, 0.4, 1.0, epochs=3)
    assert found.sent_bytes == 2 * (2 * 12) * found.replicas.initial_weights.nbytes  # there and back


def test_adpsgd_is_the_published_algorithm():
    """Algorithm 1 of Lian et al.: x <- x W - rate g(x), for an active worker and a passive one of the same speed."""
    steps, fast = replicas(2), Links.of(2, Link(1e-4, 1e9))
    found = simulation.make_algorithm(steps, Settings("adpsgd", (1.0, 1.0), 0.01, fast))
    found.run(8)
    weights, states = [steps.initial_weights] * 2, [steps.initial_state] * 2
    for number in range(8):
        begun = [steps.begin("train", rank, number, weights[rank], states[rank]) for rank in range(2)]
        trained_, states = zip(*map(steps.result, begun), strict=True)
        middle = (weights[0] + weights[1]) / 2
        weights = [middle + (new - old) for new, old in zip(trained_, weights, strict=True)]
    for rank in range(2):
        np.testing.assert_allclose(found.weights[rank], weights[rank], rtol=1e-5, atol=1e-6)


def test_adpsgd_refuses_a_graph_in_which_a_worker_has_no_partner():
    with pytest.raises(UsageError, match="rank 3 has no neighbour whose rank is even"):
        trained("adpsgd", *[1.0] * 7, topology="tree")


def test_losses_of_layers_and_regularizers_count():
    class Penalty(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
            return x

    def penalized():
        keras.utils.set_random_seed(1)
        dense = keras.layers.Dense(5, kernel_regularizer=keras.regularizers.L2(0.1))
        normalized = keras.layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([keras.Input((4,)), dense, Penalty(), normalized, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    alone, model = penalized(), penalized()
    feed = adapters.make(adapters.request(X, Y, batch_size=BATCH, shuffle=False), 0)
    found = simulation.make_algorithm(Replicas(model, feed, 1), settings("average", 1.0))
    found.run(4)
    for begin in range(0, len(X), BATCH):
        alone.train_on_batch(X[begin : begin + BATCH], Y[begin : begin + BATCH])
    weights, state = found.global_model()
    np.testing.assert_allclose(weights, flat([v.numpy() for v in alone.trainable_variables]), rtol=1e-4, atol=1e-5)
    moving = flat([variable.numpy() for variable in alone.non_trainable_variables if "moving" in variable.path])
    np.testing.assert_allclose(state.averages["float32"], moving, rtol=1e-4, atol=1e-5)


def test_the_staleness_of_ssp_has_the_bound_of_parameter_server():
    stale = {name: max(trained(name, 1.0, 0.1, 0.1, **options).staleness) for name, options in SLACKS.items()}
    assert stale["ssp"] <= (2 * 1 + 1) * (3 - 1) and stale["asp"] >= 4


def test_a_clock_is_at_most_the_slack_ahead_of_the_slowest(monkeypatch):
    ahead = []
    end = algorithms.Centred._end_part

    def recorded(self, clock):
        end(self, clock)
        done = [clock.done for clock in self._clocks]
        ahead.append(max(done) - min(done))

    monkeypatch.setattr(algorithms.Centred, "_end_part", recorded)
    trained("ssp", 1.0, 1.0, 0.01, slack=2)
    assert max(ahead) == 3  # the last step was begun when its clock was 2 ahead


def test_a_ring_sends_what_rings_send_and_slower_links_take_longer():
    found = trained("allreduce", 1.0, 1.0, epochs=1)
    bytes_ = 4 * found.replicas.parameters
    assert found.sent_bytes == 4 * 2 * bytes_
    assert found.clock.now == pytest.approx(4 * (0.01 + LINK.all_reduce_seconds(bytes_, 2)))


def test_a_model_with_steps_of_its_own_is_refused():
    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    model = Own([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    feed = adapters.make(adapters.request(X, Y, batch_size=BATCH, shuffle=False), 0)
    with pytest.raises(UsageError, match="overrides `train_step`, and simulated workers take the steps of Keras"):
        Replicas(model, feed, 2)


def test_a_loss_that_the_optimizer_scales_gives_the_same_weights():
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    np.testing.assert_allclose(
        trained("allreduce", 1.0, 1.0, optimizer=scaled).global_model()[0], by_keras(), rtol=1e-3
    )


def test_epochs_tell_what_was_reached_and_when():
    steps, test = replicas(3, keras.optimizers.SGD(0.02)), tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    first, second = simulation.epochs(steps, settings("gosgd", 1.0, 1.0, 1.0, probability=0.3), 2, test)
    assert 0 < first.seconds < second.seconds and second.loss < first.loss
    assert first.disagreement > 0 and first.staleness is None and second.sent_bytes > first.sent_bytes > 0
    assert second.metrics["loss"] < first.metrics["loss"]


ARGUMENTS = ("--model", "mlp", "--dataset", "digits", "--algorithm")


def test_the_command_prints_a_line_for_each_epoch_and_writes_them(tmp_path):
    out = tmp_path / "found.json"
    options = ("--workers", "3", "--epochs", "2", "--speeds", "1,0.5", "--out", str(out))
    done = CliRunner().invoke(simulate.command, [*ARGUMENTS, "adpsgd", *options])
    assert done.exit_code == 0, done.output
    written = json.loads(out.read_text())
    assert written["settings"]["speeds"] == [1.0, 0.5, 1.0]
    accuracies = [f"{epoch['metrics']['accuracy']:.4f}" for epoch in written["epochs"]]
    assert len(accuracies) == 2 and all(one in done.output for one in accuracies)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["adpsdg"], "Unknown algorithm `adpsdg`"),
        (
            ["asp", "--topology", "ring"],
            "`--topology` is an option of `dpsgd` and `adpsgd`, and `--algorithm` is `asp`",
        ),
        (["asp", "--batch-size", "3", "--workers", "4"], "`--batch-size` is 3, and `--workers` is 4"),
        (["asp", "--speeds", "1,0"], "`--speeds` is `1,0`"),
        (["asp", "--speeds", "1,1,1", "--workers", "2"], "there are 2 workers"),
        (["asp", "--bandwidth", "fast"], "`--bandwidth` is `fast`"),
        (["dpsgd", "--topology", "star"], "Unknown topology `star`"),
        (["asp", "--speeds", "3"], "`--speeds` is `3`, one speed for 4 workers"),
        (["asp", "--link", "4=1Gbit"], "`--link` is `4=1Gbit`, and `4` is no link of 4 workers"),
        (["asp", "--link", "0.up=quick"], "`quick` is no rate"),
        (["dpsgd", "--link", "centre=1Gbit"], "`dpsgd` has no centre"),
    ],
)
def test_what_cannot_be_simulated_is_told_in_a_sentence(arguments, told):
    done = CliRunner().invoke(simulate.command, [*ARGUMENTS, *arguments])
    assert done.exit_code == 2 and told in " ".join(done.output.split()) and "hint" in done.output


STUDY = """
workers = [1, 2]
seeds = 2
[[cases]]
model = "mlp"
dataset = "digits"
batch_size = 64
examples = 128
epochs = 1
[[algorithms]]
algorithm = "asp"
label = "ASP"
published = 0.7459
[[algorithms]]
algorithm = "gosgd"
label = "GoSGD 1"
probability = 1.0
"""


def test_each_seed_of_a_study_has_weights_and_an_order_of_its_own():
    case = matrix.Case(model="mlp", dataset="digits", batch_size=64, examples=64, epochs=1)
    entry, runner = matrix.Entry(algorithm="asp", label="ASP"), simulation.Runner()
    losses = [runner.last_epoch(matrix.Run(matrix.Machine(), case, entry, 1, seed)).loss for seed in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.thorough
def test_a_study_runs_everything_once_and_writes_a_table_and_a_picture(tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)
    arguments = [str(tmp_path / "study.toml"), "--out", str(tmp_path / "found")]
    done = CliRunner().invoke(simulator.command, arguments)
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "found" / "results.json").read_text())
    assert len(results) == 2 * 2 * 2
    table = (tmp_path / "found" / "table.md").read_text()
    assert "| mlp on digits | 1 workers | 2 workers |" in table and "| 0.7459 |" in table and " ± " in table
    assert (tmp_path / "found" / "accuracy.svg").read_text().count("GoSGD 1") >= 1
    again = CliRunner().invoke(simulator.command, arguments)
    assert again.exit_code == 0 and "minutes are left" not in again.output
    assert (tmp_path / "found" / "table.md").read_text() == table


@pytest.mark.thorough
def test_a_study_of_another_machine_or_rate_is_run_anew(tmp_path):
    one = STUDY.partition('[[algorithms]]\nalgorithm = "gosgd')[0].replace("seeds = 2", "seeds = 1")
    one = one.replace("workers = [1, 2]", "workers = [2]").replace("epochs = 1", "epochs = 1\nlearning_rate = 0.01")
    divided = one.replace('label = "ASP"', 'label = "ASP"\ndivide_rate = true')
    results = tmp_path / "found" / "results.json"
    for number, text in enumerate((one, "speeds = [1.0, 0.25]\n" + one, divided, divided)):
        (tmp_path / "study.toml").write_text(text)
        done = CliRunner().invoke(simulator.command, [str(tmp_path / "study.toml"), "--out", str(results.parent)])
        assert done.exit_code == 0, done.output
        assert len(json.loads(results.read_text())) == min(number + 1, 3)
    same_rate, slower_worker, half_rate = (found["loss"] for found in json.loads(results.read_text()).values())
    assert len({same_rate, slower_worker, half_rate}) == 3


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ("seeds = 2", "seeds = 0"),
        ('algorithm = "asp"', 'algorithm = "aps"'),
        ("examples = 128", "example = 128"),
        ("workers = [1, 2]", "workers = [1, "),
        ('label = "ASP"', 'label = "ASP"\ndivide_rate = true'),
    ],
)
def test_a_study_that_says_what_cannot_be_is_refused_in_a_sentence(tmp_path, changed, told):
    (tmp_path / "study.toml").write_text(STUDY.replace(changed, told))
    done = CliRunner().invoke(simulator.command, [str(tmp_path / "study.toml"), "--out", str(tmp_path / "found")])
    assert done.exit_code == 2 and "hint" in done.output and "Traceback" not in done.output, done.output


def test_the_studies_of_the_repository_can_be_read():
    found = matrix.read(ROOT / "studies" / "synchronous_or_not.toml")
    assert len(found.algorithms) >= 11 and found.workers == [4, 24] and found.seeds == 1


def test_an_accuracy_that_may_be_chance_is_called_so():
    labels = np.arange(400) % 4
    test = adapters.make(adapters.request(np.zeros((400, 2), "float32"), labels, batch_size=BATCH, shuffle=False), 0)
    chance = simulation.chance_of(test)
    assert chance == pytest.approx(0.25 + 2 * np.sqrt(0.25 * 0.75 / 400))
    assert [matrix.shown(accuracy, chance, ".3f") for accuracy in (0.25, 0.29, 0.31, None)] == [
        "0.250 (chance)",
        "0.290 (chance)",
        "0.310",
        "",
    ]
    assert simulation.chance_of(tf.data.Dataset.from_tensor_slices((X, Y))) is None
