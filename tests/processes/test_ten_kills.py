"""A job that is killed at random moments, in one process or several, ends where an unbroken one ends."""

import contextlib
import random
import signal
import time

import keras
import numpy as np
import psutil
import pytest

from tests.processes.jobs import RunningJob, epochs_done, record, train, weights

KILLS, EPOCHS, STEPS_OF_AN_EPOCH = 10, 150, 43
CASES = {
    "multiworker": ("multiworker", {}),
    "average": ("local_sgd", {"sync_every": 5}),
    "slowmo": ("local_sgd", {"outer": "slowmo", "sync_every": 7}),
    "diloco in fragments": ("local_sgd", {"outer": "diloco", "sync_every": 6, "fragments": 2, "overlap": 2}),
    "dpsgd": ("gossip", {}),
    "adpsgd": ("gossip", {"algorithm": "adpsgd"}),
}


def trained(strategy, options, run_dir, *more):
    given = [part for name, value in options.items() for part in ("--strategy-option", f"{name}={value}")]
    return train("--epochs", EPOCHS, "--batch-size", "32", *given, *more, run_dir=run_dir, strategy=strategy)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_a_job_that_is_killed_at_ten_random_moments_ends_where_an_unbroken_one_ends(tmp_path, name):
    strategy, options = CASES[name]
    moments = random.Random(name)
    with trained(strategy, options, tmp_path / "broken", "--checkpoint-steps", "20", "--restarts", str(KILLS)) as job:
        killed = set()
        for number in range(KILLS):
            rank = moments.randrange(2)
            process = job.wait_for(lambda rank=rank, killed=killed: _not_of(killed, job.process("worker", rank)))
            # The first one trains for a while, so that there is something to go on from.
            time.sleep(12.0 if number == 0 else moments.uniform(0.0, 10.0))
            process.send_signal(signal.SIGKILL)
            killed |= {one.pid for one in job.everyone()}  # the launcher ends the others too, and starts all again
        code, _, err = job.end(300)
    assert code == 0, err
    assert f"Starting the job again, {KILLS} of {KILLS}" in err
    assert [epoch["epoch"] for epoch in record(tmp_path / "broken")["epochs"]] == list(range(1, EPOCHS + 1))
    model = keras.models.load_model(tmp_path / "broken" / "model.keras")
    assert int(model.optimizer.iterations.numpy()) == EPOCHS * STEPS_OF_AN_EPOCH
    if name == "adpsgd":  # whose weights depend on the moment
        return
    with trained(strategy, options, tmp_path / "unbroken", "--checkpoint-steps", "20") as job:
        code, _, err = job.end(300)
    assert code == 0, err
    for found, wanted in zip(weights(tmp_path / "broken"), weights(tmp_path / "unbroken"), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_checkpoint_of_four_workers_is_resumed_on_two_and_on_three(tmp_path):
    """Several processes of each job are killed at random moments; the weights are those of one device."""
    moments = random.Random(46)
    options = ["--epochs", "8", "--checkpoint-steps", "5"]
    for workers in (4, 2, 3):
        more = ["--resume", "--workers", str(workers)] if workers != 4 else ["--workers", "4"]
        _killed_in_two_processes(tmp_path / "broken", [*options, *more], workers, moments)
    with train(*options, "--resume", "--workers", "2", run_dir=tmp_path / "broken") as job:
        code, _, err = job.end(300)
    assert code == 0, err
    assert [epoch["epoch"] for epoch in record(tmp_path / "broken")["epochs"]] == list(range(1, 9))
    single = ["--strategy", "single", "--model", "mlp", "--dataset", "digits", *options, "--run-dir", tmp_path / "one"]
    with RunningJob(*single, module="tfdist.train", cwd=tmp_path) as job:
        code, _, err = job.end(300)
    assert code == 0, err
    for left, right in zip(weights(tmp_path / "broken"), weights(tmp_path / "one"), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-3)


def _killed_in_two_processes(run_dir, options, workers, moments):
    before = epochs_done(run_dir)
    with train(*options, run_dir=run_dir) as job:
        job.wait_for(lambda: epochs_done(run_dir) > before)
        killed = [job.process("worker", rank) for rank in moments.sample(range(workers), 2)]
        time.sleep(moments.uniform(0.0, 0.5))
        for process in killed:
            with contextlib.suppress(psutil.NoSuchProcess):  # the launcher ends the others when the first has died
                process.send_signal(signal.SIGKILL)
        code, _, err = job.end()
    assert code in (3, 128 + signal.SIGKILL), err


def _not_of(killed, process):
    return None if process.pid in killed else process
