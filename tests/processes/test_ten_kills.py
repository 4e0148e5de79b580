"""A job that is killed at ten random moments, each time in another process, ends where an unbroken one ends."""

import random
import signal
import time

import keras
import numpy as np
import pytest

from tests.processes.jobs import record, train, weights

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


def _not_of(killed, process):
    return None if process.pid in killed else process
