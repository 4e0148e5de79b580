"""What goes wrong in a job of the commands is named, and ends it in time; `--restarts` goes on from a checkpoint.

`tests/faults` has the matrix of processes, faults, moments and strategies.
"""

import signal
import time

import numpy as np
import pytest

from tests.processes.jobs import (
    RunningJob,
    after_two_epochs,
    by_hand,
    epochs_done,
    free_addresses,
    record,
    start_by_hand,
    train,
    wait_for_epochs,
    weights,
)

LONG = ("--epochs", "2000", "--timeout-seconds", "10")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The folder of a run of six epochs that nothing happened to."""
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    with train("--epochs", "6", run_dir=run_dir) as job:
        code, out, err = job.end()
    assert code == 0, err
    assert "test accuracy" in out
    return run_dir


@pytest.mark.thorough
def test_a_run_leaves_the_chiefs_files_with_the_figures_of_every_rank(unbroken):
    chief = record(unbroken)
    assert chief["world"]["world_size"] == 2
    assert [process["differing_metrics"] for process in chief["processes"]] == [None, None]
    assert all(process["peak_memory_bytes"] > 1e8 for process in chief["processes"])
    assert sorted(path.name for path in (unbroken / "rank-1").iterdir()) == ["log.txt"]


def test_all_end_when_a_worker_is_killed_and_the_error_names_it(tmp_path):
    run_dir = tmp_path / "run"
    with train(*LONG, run_dir=run_dir) as job:
        job.wait_for(lambda: epochs_done(run_dir) >= 2)
        job.process("worker", 0).kill()
        began = time.monotonic()
        code, _, err = job.end()
        assert time.monotonic() - began < 30
        assert job.left() == []
    assert code == 128 + signal.SIGKILL
    assert "worker 0 was ended by SIGKILL" in err


@pytest.mark.thorough
def test_the_others_name_the_ended_worker_and_close_their_run(tmp_path):
    """Without a launcher, as on several machines."""
    run_dir = tmp_path / "run"
    with by_hand(run_dir, *LONG) as (chief, worker):
        wait_for_epochs(run_dir, 2, [chief, worker])
        worker.terminate()
        code = worker.wait(timeout=5)
        _, err = chief.communicate(timeout=30)
    assert code == 128 + signal.SIGTERM
    assert chief.returncode == 3
    assert record(run_dir)["status"] == "failed"
    assert "worker 1 (localhost:" in err and "Gone" in err


@pytest.mark.thorough
def test_a_killed_run_goes_on_from_its_checkpoint_and_equals_an_unbroken_one(tmp_path, unbroken):
    run_dir = tmp_path / "run"
    with train("--epochs", "6", "--restarts", "1", run_dir=run_dir) as job:
        code, _, err = after_two_epochs(job, run_dir, "worker", 1, signal.SIGKILL)
    assert code == 0, err
    assert "Starting the job again, 1 of 1" in err
    for found, wanted in zip(weights(run_dir), weights(unbroken), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert [epoch["epoch"] for epoch in record(run_dir)["epochs"]] == [1, 2, 3, 4, 5, 6]


def test_ctrl_c_ends_all_within_ten_seconds(tmp_path):
    run_dir = tmp_path / "run"
    with train(*LONG, run_dir=run_dir) as job:
        job.wait_for(lambda: epochs_done(run_dir) >= 1)
        began = time.monotonic()
        job.signal(signal.SIGINT)
        code, _, err = job.end()
        assert time.monotonic() - began < 10
        assert job.left() == []
    assert code == 130, err
    assert record(run_dir)["status"] == "interrupted"


def test_a_worker_that_never_starts_is_named(tmp_path):
    config = {"cluster": {"worker": free_addresses(2)}, "task": {"type": "worker", "index": 0}}
    done = start_by_hand(tmp_path / "run", config, environment={"TFDIST_START_SECONDS": "3"})
    _, err = done.communicate(timeout=60)
    assert done.returncode == 3
    assert f"worker 1 ({config['cluster']['worker'][1]}) did not start within 3 s" in err


@pytest.mark.parametrize(
    ("chief", "other", "shown"),
    [
        (("--batch-size", "64"), ("--batch-size", "32"), ("--batch-size", "64", "32")),
        pytest.param(("--model", "mlp"), ("--model", "cnn"), ("--model", "mlp", "cnn"), marks=pytest.mark.exhaustive),
        pytest.param(("--limit", "100"), ("--limit", "200"), ("--limit", "100", "200"), marks=pytest.mark.exhaustive),
    ],
)
def test_processes_that_disagree_are_refused_with_both_values(tmp_path, chief, other, shown):
    with by_hand(tmp_path / "run", own=(chief, other)) as processes:
        errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    for err in errors:
        assert "disagree on" in err
        assert all(part in err for part in shown)


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        pytest.param("model", ["disagree on the model", "[4,3]", "[4,4]"], marks=pytest.mark.exhaustive),
        pytest.param("activation", ["disagree on `the layers`", "worker 0", "worker 1"], marks=pytest.mark.exhaustive),
        ("data", ["disagree on", "10", "11", "worker 1"]),
    ],
)
def test_processes_of_a_script_that_disagree_are_refused_before_the_first_step(tmp_path, what, shown):
    script = """
import sys, numpy, keras, tfdist
strategy = tfdist.strategy("multiworker")
more = {what: strategy.world.rank * (what == sys.argv[1]) for what in ("model", "activation", "data")}
with strategy.scope():
    activation = ["relu", "tanh"][more["activation"]]
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3 + more["model"], activation)])
    model.compile("sgd", "mse")
x, y = numpy.ones((10 + more["data"], 4)), numpy.ones((10 + more["data"], 1))
strategy.fit(model, x, y, batch_size=5, verbose=0)
"""
    (tmp_path / "script.py").write_text(script)
    with RunningJob("--log-dir", "logs", "script.py", what, cwd=tmp_path) as job:
        code, _, err = job.end()
    assert code == 2, err
    assert all(part in err for part in shown) and "hint:" in err and "Traceback" not in err


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["everywhere", "chief"])
def test_a_callback_uses_the_model_in_all_processes_or_is_told_to(tmp_path, where):
    script = """
import sys, keras, numpy, tfdist
strategy = tfdist.strategy("multiworker", seed=1)
x, y = numpy.arange(20.0).reshape(10, 2), numpy.arange(10.0)
class Looks(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if sys.argv[1] == "everywhere" or strategy.world.is_chief:
            found = self.model.evaluate(x[:7], y[:7], batch_size=4, verbose=0)
            print("FOUND", found, numpy.mean((self.model.predict(x[:7], verbose=0)[:, 0] - y[:7]) ** 2))
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.001), "mse")
strategy.fit(model, x, y, batch_size=5, verbose=0, callbacks=[Looks()])
"""
    (tmp_path / "script.py").write_text(script)
    with RunningJob("--log-dir", "logs", "script.py", where, cwd=tmp_path) as job:
        code, out, err = job.end()
    if where == "chief":
        assert code == 2 and "Traceback" not in err
        assert "The processes of the job do different things at the same moment: worker 0" in err
    else:
        assert code == 0, err
        _, evaluated, predicted = out.split()
        assert float(evaluated) == pytest.approx(float(predicted), rel=1e-4)


@pytest.mark.thorough
def test_a_metric_made_outside_the_scope_is_refused(tmp_path):
    script = """
import numpy, keras, tfdist
strategy = tfdist.strategy("multiworker")
metric = keras.metrics.FalsePositives()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[metric])
strategy.fit(model, numpy.ones((10, 4)), numpy.ones((10, 1)), batch_size=5, verbose=0)
"""
    (tmp_path / "script.py").write_text(script)
    with RunningJob("--log-dir", "logs", "script.py", cwd=tmp_path) as job:
        code, _, err = job.end()
    assert code == 2, err
    assert "of a metric was made outside the scope of the strategy `multiworker`" in err and "Traceback" not in err


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("config", "field"),
    [
        ("{", "not JSON"),
        ({"cluster": {"worker": ["localhost:1001", "localhost:1002"]}}, "lacks `task`"),
        ({"cluster": {"worker": ["localhost:1001"]}, "task": {"type": "worker", "index": 1}}, "`worker 1`"),
        (
            {"cluster": {"worker": ["localhost:1001", "localhost:1001"]}, "task": {"type": "worker", "index": 0}},
            "for worker 0 and for worker 1",
        ),
        (
            {"cluster": {"worker": ["localhost:1001", "localhost:0"]}, "task": {"type": "worker", "index": 0}},
            "`localhost:0` for worker 1",
        ),
        (
            {"cluster": {"worker": ["localhost:1001", "10.0.0.2:1001"]}, "task": {"type": "worker", "index": 0}},
            "beside `10.0.0.2:1001`",
        ),
    ],
)
def test_a_malformed_tf_config_is_refused_by_its_field(tmp_path, config, field):
    done = start_by_hand(tmp_path / "run", config)
    _, err = done.communicate(timeout=60)
    assert done.returncode == 2
    assert field in err and "hint:" in err and "Traceback" not in err
