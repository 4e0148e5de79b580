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
from tfdist.simulator.replicas import Replicas
from tfdist.simulator.simulation import NAMES, Settings

ROOT = Path(__file__).parent.parent
LINK = Link(latency_seconds=1e-3, bytes_per_second=1e6)
BATCH = 8
X = np.random.default_rng(0).normal(size=(30, 4)).astype("float32")  # with a last batch of 6
Y = (X.sum(1, keepdims=True) + 0.1 * X[:, :1] ** 2).astype("float32")


def made(optimizer=None):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def replicas(size, optimizer=None):
    return Replicas(made(optimizer), adapters.make(adapters.request(X, Y, batch_size=BATCH, shuffle=False), 0), size)


def settings(algorithm, *speeds, **options):
    return Settings(algorithm, speeds, 0.01, LINK, **options)


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
    assert one.done == [8, 8, 8]


@pytest.mark.parametrize(("name", "rule"), [("aeasgd", Easgd(3, 0.9)), ("eamsgd", Eamsgd(3, 0.9, MOMENTUM))])
def test_one_worker_and_the_centre_move_as_published(name, rule):
    """The steps of the worker are Keras' SGD; what the rule makes of them is held by tests/test_centre_rules.py."""
    worker = replicas(1)
    steps, rest = iter(range(8)), [worker.initial_state]

    def step(weights):
        new, rest[0] = worker.train(0, next(steps), np.asarray(weights, np.float32), rest[0])
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


def test_who_waits_takes_the_time_of_the_slowest_and_who_does_not_goes_on():
    """A fast worker of `asp` is done before a slow one; updates between its reads and its own are its staleness."""
    seconds = {name: trained(name, 1.0, 0.25).clock.now for name in ("bsp", "asp", "ssp")}
    slowest = 8 * 0.01 / 0.25
    assert all(found > slowest for found in seconds.values())
    assert seconds["asp"] <= seconds["ssp"] <= seconds["bsp"]
    assert max(trained("asp", 1.0, 0.1).staleness) > max(trained("ssp", 1.0, 0.1, slack=1).staleness)


def test_a_worker_is_at_most_the_slack_ahead_of_the_slowest(monkeypatch):
    ahead = []
    compute = algorithms.ParameterServer._compute

    def recorded(self, rank):
        ahead.append(self.done[rank] - min(self.done))
        compute(self, rank)

    monkeypatch.setattr(algorithms.ParameterServer, "_compute", recorded)
    trained("ssp", 1.0, 0.1, 0.1, slack=2)
    assert max(ahead) == 2


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
    for number, text in enumerate((one, "speeds = [1.0, 0.5]\n" + one, divided, divided)):
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
    assert len(found.algorithms) >= 11 and found.workers == [4, 8, 16, 24] and found.seeds == 3
