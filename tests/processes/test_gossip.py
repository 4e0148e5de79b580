"""`gossip` on real processes: the synchronous rules equal NumPy's, and the others lose nothing on the way."""

import json
import signal

import numpy as np
import pytest

from tests.processes.jobs import RunningJob, record, require_mpi, signalled, train
from tests.processes.test_local_sgd import BATCH, DIVERGED, EPOCHS, MODEL, Process, data, of_two
from tfdist.relaxed import topologies

pytestmark = pytest.mark.thorough

UNEVEN = [[0.5, 0.25, 0.25], [0.25, 0.75, 0.0], [0.25, 0.0, 0.75]]
# Of each case: the options of the strategy, and for how many processes it is.
CASES = {
    "ring": {"topology": "ring"},
    "full": {"topology": "full"},
    "exponential": {"topology": "exponential"},
    "grid": {"topology": "grid"},
    "matrix": {"topology": UNEVEN},
    "sgp": {"algorithm": "sgp"},
    "gosgd": {"algorithm": "gosgd", "probability": 0.5},
    "gosgd that sends nothing": {"algorithm": "gosgd", "probability": 0.0},
    "adpsgd": {"algorithm": "adpsgd"},
}
SCRIPT = """
import sys
import keras, numpy as np, tfdist
from tests.processes.test_gossip import CASES
from tests.processes.test_local_sgd import BATCH, EPOCHS, LEARNING_RATE, MOMENTUM, data

x, y = data()
for name, options in CASES.items():
    if name == "matrix" and sys.argv[2] != "3":
        continue
    strategy = tfdist.strategy("gossip", seed=1, **eval(sys.argv[3]), **options)
    with strategy.scope():
        model = keras.Sequential([keras.Input((x.shape[1],)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM), "mse")
    model.layers[-1].kernel.assign(np.full((x.shape[1], 1), 0.5, "float32"))
    shown = []
    see = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: shown.append(model.get_weights()[0][:, 0]))
    history = strategy.fit(
        model, x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, callbacks=[see], verbose=0
    ).history
    evaluated = model.evaluate(x, y, verbose=0)
    figures = {name: history[name] for name in ("loss", "disagreement", "messages")}
    np.savez(f"{sys.argv[1]}/{name}-{strategy.world.rank}.npz", *shown, evaluated=evaluated, **figures)
"""


def started(folder, size, *launcher, **options):
    (folder / "script.py").write_text(SCRIPT)
    with RunningJob(
        *launcher, "--workers", size, "script.py", str(folder), str(size), repr(options), cwd=folder
    ) as job:
        code, _, err = job.end()
    assert code == 0, err[-3000:]
    return {path.stem: np.load(path) for path in folder.glob("*.npz")}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return {size: started(tmp_path_factory.mktemp(f"of-{size}"), size) for size in (2, 3)}


def expected(size, mix):
    """The mean of the weights at the end of each epoch, where `mix(step, before, after)` is what all make of theirs."""
    x, y = data()
    x, y = x.astype("float64"), y[:, 0].astype("float64")
    processes, shown, number = [Process(x.shape[1]) for _ in range(size)], [], 0
    for _ in range(EPOCHS):
        for begin in range(0, len(x), BATCH):
            batch = np.arange(begin, min(begin + BATCH, len(x)))
            ends = [-(-len(batch) * index // size) for index in range(size + 1)]
            before = np.array([one.weights for one in processes])
            for process, first, last in zip(processes, ends, ends[1:], strict=False):
                process.step(x[batch[first:last]], y[batch[first:last]])
            after = mix(number, before, np.array([one.weights for one in processes]))
            for process, weights in zip(processes, after, strict=True):
                process.weights = weights
            number += 1
        shown.append(np.mean([one.weights for one in processes], axis=0))
    return shown


def pushed(size):
    def mix(step, before, after):
        del before
        kept = after / 2
        for rank in range(size):
            kept[topologies.sends_to(step, rank, size)] += after[rank] / 2
        return kept

    return mix


def require_shown(found, wanted, size, name):
    for rank in range(size):
        for epoch, weights in enumerate(wanted):
            shown = found[f"{name}-{rank}"][f"arr_{epoch}"]
            np.testing.assert_allclose(shown, weights, rtol=2e-5, atol=2e-6, err_msg=f"{name} on {rank}")


@pytest.mark.parametrize("size", [2, 3])
def test_synchronous_gossip_makes_the_weights_that_numpy_makes(results, size):
    for name in ("ring", "full", "exponential", "grid", *(["matrix"] if size == 3 else [])):
        mixing = topologies.matrix(CASES[name]["topology"], size)
        wanted = expected(size, lambda step, before, after, mixing=mixing: mixing @ before + (after - before))
        require_shown(results[size], wanted, size, name)
    require_shown(results[size], expected(size, pushed(size)), size, "sgp")
    require_shown(results[size], expected(size, lambda step, before, after: after), size, "gosgd that sends nothing")


@pytest.mark.parametrize("size", [2, 3])
def test_asynchronous_gossip_learns_and_all_processes_show_the_same(results, size):
    for name in ("gosgd", "adpsgd"):
        found = [results[size][f"{name}-{rank}"] for rank in range(size)]
        assert found[0]["loss"][-1] < found[0]["loss"][0]
        assert min(found[0]["messages"]) > 0
        assert max(found[0]["disagreement"]) > 0  # of two that have just exchanged, it is 0
        for other in found[1:]:
            for array in other:
                np.testing.assert_array_equal(other[array], found[0][array])


def test_mpi_carries_the_same(results, tmp_path):
    require_mpi()
    found = started(tmp_path, 2, "--mpi", engine="mpi")
    for name in ("ring", "sgp", "gosgd that sends nothing"):
        for rank in range(2):
            for array, values in results[2][f"{name}-{rank}"].items():
                np.testing.assert_allclose(found[f"{name}-{rank}"][array], values, rtol=1e-6)


@pytest.mark.parametrize("algorithm", ["dpsgd", "adpsgd"])
def test_all_end_when_a_rank_is_killed_and_it_is_named(tmp_path, algorithm):
    options = ("--epochs", "2000", "--timeout-seconds", "8", "--strategy-option", f"algorithm={algorithm}")
    with train(*options, run_dir=tmp_path / "run", strategy="gossip") as job:
        code, said = signalled(job, tmp_path / "run", signal.SIGKILL)
    assert code != 0 and "worker 1" in said
    assert record(tmp_path / "run")["strategy"]["options"]["algorithm"] == algorithm


@pytest.mark.parametrize("options", [{}, {"algorithm": "gosgd", "probability": 1.0}], ids=["dpsgd", "gosgd"])
def test_weights_that_are_not_finite_are_not_sent(tmp_path, options):
    found = of_two(DIVERGED, tmp_path, "gossip", json.dumps(options))
    assert found["ERROR-1"] == ["The weights of rank 1 are not finite after step 2, and were not sent to others"]
    assert found["FINITE-0"] == ["True"] and "ERROR-0" in found


# The chief is done with its steps, and gets no time while the others' last messages come.
STALLED = (
    MODEL
    + """
import time
import tensorflow as tf
from tfdist.relaxed import gossip

rank = tfdist.jobs.world.World.detect().rank
end_messages = gossip.Gossip._end_messages


def stalled(averages):
    time.sleep(3 * (rank == 0))
    end_messages(averages)


gossip.Gossip._end_messages = stalled


class Slow(keras.layers.Layer):
    def call(self, x):
        with tf.control_dependencies([tf.numpy_function(lambda: time.sleep(0.1 * rank), [], [])]):
            return tf.identity(x)


strategy = tfdist.strategy("gossip", algorithm="gosgd", probability=1.0, seed=1)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), Slow(), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
strategy.fit(model, x, x[:, :2], batch_size=8, verbose=0)
strategy.group.barrier()
said("LEFT", strategy.group.probe(gossip.WEIGHTS))
"""
)


def test_no_message_is_left_for_the_next_training_by_a_process_that_gets_no_time(tmp_path):
    assert of_two(STALLED, tmp_path)["LEFT"] == ["[]", "[]"]
