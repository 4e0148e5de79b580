"""Workers that come and go: nothing is lost but the steps since the last checkpoint, and no example is seen twice."""

import json
import re
import stat
import subprocess
import sys

import keras
import numpy as np
import psutil
import pytest

from tests.processes import counting, horovod_jobs
from tests.processes.jobs import RunningJob, clean_environment, epochs_done, record

pytestmark = horovod_jobs.needs_horovod
BATCH = 32
STEPS = counting.EXAMPLES // BATCH
COMMIT_STEPS = 4
OPTIONS = ["--model", "tests.processes.counting:model", "--dataset", "tests.processes.counting:dataset", "--quiet"]


def elastic(run_dir, *options, strategy="horovod", epochs=8):
    arguments = ["--strategy", strategy, *OPTIONS, "--epochs", epochs, "--batch-size", BATCH, "--run-dir", run_dir]
    steps = {counting.STEPS_FILE: str(run_dir.parent / "steps.txt")}
    return RunningJob(*arguments, "--elastic", *options, module="tfdist.train", cwd=run_dir.parent, environment=steps)


def workers(job):
    """The processes that train, by rank, and how many there are, as they know."""
    found, sizes = {}, set()
    for process in job.everyone():
        try:
            if "tfdist.launcher.script" in process.cmdline():
                known = json.loads(process.environ()["TF_CONFIG"])
                found[known["task"]["index"]] = process
                sizes.add(len(known["cluster"]["worker"]))
        except (psutil.Error, KeyError):
            continue
    return found, sizes


def training(job, run_dir, size, steps_file):
    """Waits until `size` workers have taken some further steps, and are in the middle of an epoch."""

    def steps():
        return len(steps_file.read_text()) if steps_file.exists() else 0

    def all_there():
        found, sizes = workers(job)
        return found if sizes == {size} == {len(found)} else None

    job.wait_for(all_there)
    began = steps()
    job.wait_for(lambda: steps() >= began + COMMIT_STEPS + 2)
    return all_there()


def starts(err):
    return [int(count) for count in re.findall(r"Starting with (\d) workers", err)]


def weights(run_dir):
    custom = {"Counting": counting.Counting}
    return keras.saving.load_model(run_dir / "model.keras", custom_objects=custom, compile=False).get_weights()


def train_alone(run_dir):
    """The same training in one process."""
    arguments = ["--strategy", "single", *OPTIONS, "--epochs", "8", "--batch-size", str(BATCH), "--run-dir", run_dir]
    command = [sys.executable, "-m", "tfdist.train", *arguments]
    subprocess.run(command, cwd=run_dir.parent, env=clean_environment(), check=True, timeout=120)


@pytest.mark.thorough
def test_every_example_is_seen_once_an_epoch_through_two_losses_and_one_gain(tmp_path):
    hosts, run_dir, steps_file = tmp_path / "hosts", tmp_path / "run", tmp_path / "steps.txt"
    hosts.write_text("localhost\n127.0.0.1\n127.0.0.2\n")
    options = ["--min-workers", "1", "--max-workers", "3", "--hostfile", hosts, "--checkpoint-steps", COMMIT_STEPS]
    with elastic(run_dir, *options) as job:
        training(job, run_dir, 3, steps_file)[2].kill()
        training(job, run_dir, 2, steps_file)[0].kill()  # the chief
        training(job, run_dir, 1, steps_file)
        hosts.write_text("localhost\n127.0.0.1\n127.0.0.2\n127.0.0.3\n")
        training(job, run_dir, 2, steps_file)
        code, _, err = job.end()
        assert job.left() == []
    assert code == 0, err
    assert starts(err) == [3, 2, 1, 2]
    assert "without worker 2 on 127.0.0.2" in err
    assert "The hosts have changed" in err

    assert_equal_to_one_process(run_dir, losses=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["multiworker", "horovod", "local_sgd"])
def test_a_job_goes_on_through_three_losses_and_three_gains(tmp_path, strategy):
    hosts, run_dir, steps_file = tmp_path / "hosts", tmp_path / "run", tmp_path / "steps.txt"
    listed = ["localhost", "127.0.0.1"]
    hosts.write_text("\n".join(listed))
    options = ["--min-workers", "1", "--hostfile", hosts, "--checkpoint-steps", COMMIT_STEPS]
    with elastic(run_dir, *options, strategy=strategy) as job:
        for number in range(3):
            training(job, run_dir, 2, steps_file)[1 - number % 2].kill()  # in turns a worker and the chief
            training(job, run_dir, 1, steps_file)
            listed.append(f"127.0.0.{number + 2}")  # a host whose process died is not used again
            hosts.write_text("\n".join(listed))
        training(job, run_dir, 2, steps_file)
        code, _, err = job.end()
        assert job.left() == []
    assert code == 0, err
    assert starts(err) == [2, 1, 2, 1, 2, 1, 2]
    if strategy == "local_sgd":
        assert record(run_dir)["epochs"][-1]["epoch"] == 8
    else:
        assert_equal_to_one_process(run_dir, losses=3)


def assert_equal_to_one_process(run_dir, losses):
    """The job has seen each example once an epoch, and its weights are those of a training in one process."""
    epochs = record(run_dir)["epochs"]
    assert [epoch["epoch"] for epoch in epochs] == list(range(1, 9))
    assert {epoch["metrics"]["seen_once"] for epoch in epochs} == {counting.EXAMPLES}
    assert {epoch["metrics"]["seen_at_most"] for epoch in epochs} == {1.0}
    # A loss costs the steps since the last checkpoint; a gain costs none. One evaluation of one step ends the run.
    repeated = len((run_dir.parent / "steps.txt").read_text()) - len(epochs) * STEPS - 1
    assert 0 <= repeated <= losses * COMMIT_STEPS
    train_alone(run_dir.parent / "alone")
    for found, expected in zip(weights(run_dir), weights(run_dir.parent / "alone"), strict=True):
        np.testing.assert_allclose(found, expected, atol=5e-5)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param("gossip", ["algorithm=adpsgd"], marks=pytest.mark.exhaustive),
        pytest.param("gossip", ["algorithm=dpsgd"], marks=pytest.mark.exhaustive),
        pytest.param("gossip", ["algorithm=sgp"], marks=pytest.mark.exhaustive),
        pytest.param("gossip", ["algorithm=gosgd"], marks=pytest.mark.exhaustive),
        pytest.param("local_sgd", ["outer=diloco", "sync_every=3"], marks=pytest.mark.exhaustive),
    ],
)
def test_processes_that_train_apart_go_on_without_one_and_take_it_back(tmp_path, strategy, options):
    hosts, run_dir, steps_file = tmp_path / "hosts", tmp_path / "run", tmp_path / "steps.txt"
    hosts.write_text("localhost\n127.0.0.1\n127.0.0.2\n")
    chosen = [argument for option in options for argument in ("--strategy-option", option)]
    job = elastic(
        run_dir, *chosen, "--hostfile", hosts, "--checkpoint-steps", COMMIT_STEPS, strategy=strategy, epochs=5
    )
    with job:
        training(job, run_dir, 3, steps_file)[1].kill()
        training(job, run_dir, 2, steps_file)
        hosts.write_text("localhost\n127.0.0.2\n127.0.0.3\n")
        training(job, run_dir, 3, steps_file)
        code, _, err = job.end()
        assert job.left() == []
    assert code == 0, err
    assert starts(err) == [3, 2, 3]
    assert "without worker 1 on 127.0.0.1" in err
    epochs = record(run_dir)["epochs"]
    assert [epoch["epoch"] for epoch in epochs] == list(range(1, 6))
    assert {epoch["metrics"]["seen_once"] for epoch in epochs} == {counting.EXAMPLES}
    assert {epoch["metrics"]["seen_at_most"] for epoch in epochs} == {1.0}
    assert epochs[-1]["metrics"]["loss"] < epochs[0]["metrics"]["loss"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["horovod", "multiworker"])
def test_a_host_that_leaves_the_list_is_given_up_at_a_checkpoint(tmp_path, strategy):
    script, listed, run_dir = tmp_path / "discover", tmp_path / "listed", tmp_path / "run"
    listed.write_text("localhost:1\n127.0.0.1:1\n")
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    options = ["--host-discovery-script", script, "--checkpoint-steps", COMMIT_STEPS]
    with elastic(run_dir, *options, epochs=4, strategy=strategy) as job:
        training(job, run_dir, 2, tmp_path / "steps.txt")
        listed.write_text("localhost:1\n")
        code, _, err = job.end()
    assert code == 0, err
    assert starts(err) == [2, 1]
    assert "without worker" not in err
    assert [epoch["metrics"]["seen_at_most"] for epoch in record(run_dir)["epochs"]] == [1.0] * 4


SCRIPT = """
import time

import keras

import tfdist
from tfdist import callbacks, data

strategy = tfdist.strategy("horovod", seed=0)
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
strategy.prepare(model)

class Note(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        time.sleep(0.5)
        if strategy.world.is_chief:
            with open("rates.txt", "a") as file:
                print(epoch, strategy.num_replicas, float(model.optimizer.learning_rate), file=file)

x, y = data.load("digits").limit(64).arrays("train")
warmup = callbacks.LearningRateWarmup(strategy.num_replicas, warmup_epochs=1)
keep = callbacks.Checkpoint("checkpoints", resume=True)
model.fit(x.reshape(64, 64), y, epochs=12, batch_size=16, callbacks=[warmup, Note(), keep], verbose=0)
"""


@pytest.mark.exhaustive
def test_a_script_goes_on_and_its_learning_rate_rule_knows_the_new_size(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    rates = tmp_path / "rates.txt"
    with RunningJob("--elastic", "--max-workers", "2", "script.py", cwd=tmp_path) as job:
        job.wait_for(lambda: rates.exists() and len(rates.read_text().splitlines()) >= 3)
        workers(job)[0][1].kill()
        code, _, err = job.end()
    assert code == 0, err
    found = [line.split() for line in rates.read_text().splitlines()]
    epochs = [int(epoch) for epoch, _, _ in found]
    assert sorted(set(epochs)) == list(range(12))
    assert len(epochs) <= 13  # one may have ended without its checkpoint
    assert {(int(size), round(float(rate), 6)) for _, size, rate in found[1:]} == {(2, 0.2), (1, 0.1)}


@pytest.mark.exhaustive
def test_a_worker_that_is_stopped_is_given_up_after_the_timeout(tmp_path):
    run_dir = tmp_path / "run"
    options = ["--max-workers", "2", "--checkpoint-steps", COMMIT_STEPS, "--timeout-seconds", "5"]
    with elastic(run_dir, *options, epochs=4) as job:
        training(job, run_dir, 2, tmp_path / "steps.txt")[1].suspend()
        code, _, err = job.end()
        assert job.left() == []
    assert code == 0, err
    assert starts(err) == [2, 1]
    assert "without worker 1 on localhost" in err
    assert [epoch["metrics"]["seen_at_most"] for epoch in record(run_dir)["epochs"]] == [1.0] * 4


@pytest.mark.exhaustive
def test_a_job_with_too_few_workers_ends_and_says_so(tmp_path):
    run_dir = tmp_path / "run"
    with elastic(run_dir, "--min-workers", "2", "--max-workers", "2", epochs=50) as job:
        training(job, run_dir, 2, tmp_path / "steps.txt")[1].kill()
        code, _, err = job.end()
    assert code == 3
    assert "There are slots for 1 workers, and the job needs 2" in err
    assert epochs_done(run_dir) < 50
