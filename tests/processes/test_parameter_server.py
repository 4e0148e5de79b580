"""What `parameter_server` promises, on real servers: exact counts however the workers race, and a job that goes on."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import psutil
import pytest

import tfdist
from tests.processes.jobs import (
    RunningJob,
    after_two_epochs,
    by_hand,
    epochs_done,
    record,
    start_by_hand,
    train,
    wait_for_epochs,
    weights,
)
from tests.processes.test_contract import CALLBACKS, EQUALITY, ORDER, equality_cases, own_optimizers, run_together
from tfdist.errors import UsageError

# What is done otherwise to a variable in parts; with several servers, the contract's variables all are.
SHARDED = ["lamb", "ema", "gradient accumulation", "sparse gradients, adam"]
WHOLE = ["remainder 1", "mixed float16, inf on one replica", "own train_step"]

SCRIPT = """
import json, sys
import keras, numpy as np, tensorflow as tf, tfdist

strategy = tfdist.strategy("parameter_server", seed=1, **json.loads(sys.argv[1]))
keras.utils.set_random_seed(3)


class Total(keras.metrics.Metric):  # of the numbers of the examples that were seen
    additive = True

    def __init__(self):
        super().__init__(name="total")
        self.seen = self.add_weight(shape=(), initializer="zeros", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.assign_add(keras.ops.sum(keras.ops.cast(y_true, "float32")))

    def result(self):
        return self.seen


with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(1e-4), "mse", metrics=[Total()])
numbers = np.arange(643)
x = np.random.default_rng(0).random((643, 4), "float32")
history = strategy.fit(model, x, numbers, batch_size=8, epochs=3, validation_data=(x, numbers), verbose=0).history
print("HISTORY", json.dumps(history))
print("STEPS", int(model.optimizer.iterations.numpy()))
print("EVALUATE", json.dumps(strategy.evaluate(model, x, numbers, batch_size=8, verbose=0, return_dict=True)))
print("LOCAL", float(np.mean((model(x).numpy()[:, 0] - numbers) ** 2)))
predictions = strategy.predict(model, x, batch_size=50, verbose=0)
print("PREDICT", float(np.abs(predictions - model(x).numpy()).max()), predictions.shape)
print("BATCH", strategy.predict(model, x[:5], verbose=0).shape)
data = tf.data.Dataset.from_tensor_slices((x[:100], numbers[:100])).batch(8)
print("DATASET", strategy.fit(model, data, epochs=1, verbose=0).history["total"][0], int(model.optimizer.iterations))
"""


def run_script(tmp_path, script, *arguments, workers, ps=1):
    """What the script said in the chief, by its first word."""
    (tmp_path / "script.py").write_text(script)
    with RunningJob("--workers", workers, "--ps", ps, "script.py", *arguments, cwd=tmp_path) as job:
        code, out, err = job.end()
    assert code == 0, err
    return dict(line.split(" ", 1) for line in out.splitlines() if line.split(" ", 1)[0].isupper())


@pytest.mark.thorough
@pytest.mark.parametrize("staleness", [pytest.param(None, marks=pytest.mark.exhaustive), 2])
def test_steps_examples_and_metrics_are_counted_exactly_however_the_workers_race(tmp_path, staleness):
    said = run_script(tmp_path, SCRIPT, json.dumps({"staleness": staleness}), workers=2, ps=2)
    history = json.loads(said["HISTORY"])
    every_number_once = sum(range(643))
    assert int(said["STEPS"]) == 3 * 81
    assert history["total"] == [every_number_once] * 3
    assert history["val_total"] == [every_number_once] * 3
    evaluated = json.loads(said["EVALUATE"])
    assert evaluated["total"] == every_number_once
    assert evaluated["loss"] == pytest.approx(float(said["LOCAL"]), rel=1e-5)
    difference, shape = said["PREDICT"].split(" ", 1)
    assert float(difference) < 1e-4 and shape == "(643, 1)"
    assert said["BATCH"] == "(5, 1)"
    assert said["DATASET"].split() == [str(float(sum(range(100)))), str(3 * 81 + 13)]
    assert all(
        0 <= mean <= largest for mean, largest in zip(history["staleness_mean"], history["staleness_max"], strict=True)
    )
    if staleness is not None:
        assert max(history["staleness_max"]) <= staleness


ALONE = """
import keras, numpy as np, tfdist

strategy = tfdist.strategy("parameter_server", seed=1)
x = np.random.default_rng(0).random((1285, 4), "float32")
options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def build():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(1e-3), "mse", metrics=["mae"])
    return model


one = build()
one.fit(x, x[:, :1], **options)
with strategy.scope():
    model = build()
strategy.fit(model, x, x[:, :1], **options)
programs = vars(model)["_tfdist"]["programs"]["train"].programs.values()
print("UNROLLED", *(program._unrolled.experimental_get_tracing_count() for program in programs))
print("APART", max(float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), one.get_weights(), strict=True)))
"""


@pytest.mark.exhaustive
def test_a_worker_alone_equals_one_device_where_its_steps_are_unrolled(tmp_path):
    said = run_script(tmp_path, ALONE, workers=1, ps=1)
    assert said["UNROLLED"] == "1"
    assert float(said["APART"]) < 2e-6


TABLE = """
import collections, json, sys
import keras, numpy as np, psutil, tensorflow as tf, tfdist

strategy = tfdist.strategy("parameter_server", seed=1, staleness=0)
ROWS, STEPS, BATCH = 1_000_000, 10, 32
x = np.random.default_rng(0).integers(0, ROWS, (STEPS * BATCH, 4)).astype("int32")
y = x[:, 0] / ROWS


def build():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(ROWS, 32),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model


def sent():  # by all processes: they are on this machine
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
with strategy.scope():
    model = build()
strategy.fit(model, x, y, **options)
before = sent()
strategy.fit(model, x, y, **options)
print("SENT", sent() - before)

held = collections.Counter()
table = model.layers[0].embeddings
for variable in (table, *model.optimizer.variables):
    for part in getattr(variable.value, "variables", []):
        held[part.device] += part.shape.num_elements() * part.dtype.size
print("HELD", json.dumps(held))
with tf.GradientTape() as tape:
    loss = keras.ops.sum(model(x[:BATCH]))
print("GRADIENT", type(tape.gradient(loss, table)).__name__)

one = build()
one.fit(x, y, epochs=2, **options)
model.save("table.keras")
loaded = keras.saving.load_model("table.keras")
found = {"weights": model.get_weights(), "loaded": loaded.get_weights()}
for name, found in found.items():
    print(name.upper(), max(float(np.abs(a - b).max()) for a, b in zip(found, one.get_weights(), strict=True)))
slots = zip(loaded.optimizer.variables, one.optimizer.variables, strict=True)
print("SLOTS", max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in slots))
print("PREDICT", float(np.abs(strategy.predict(model, x, verbose=0) - one.predict(x, verbose=0)).max()))
"""


@pytest.mark.thorough
def test_the_rows_of_a_large_table_lie_on_all_servers_and_only_those_that_are_needed_travel(tmp_path):
    said = run_script(tmp_path, TABLE, workers=1, ps=2)
    half = 500_000 * 32 * 4
    assert list(json.loads(said["HELD"]).values()) == [2 * half, 2 * half]  # the table, and what Adagrad accumulates
    assert int(said["SENT"]) < half / 4  # in ten steps, where one reading of the table is two halves
    assert said["GRADIENT"] == "IndexedSlices"
    assert all(float(said[what]) < 5e-5 for what in ("WEIGHTS", "LOADED", "SLOTS", "PREDICT"))


@pytest.mark.thorough
def test_without_staleness_it_equals_one_device_where_each_server_has_a_part_of_every_variable(tmp_path):
    tests = [*equality_cases("parameter_server", 2, [*SHARDED, *WHOLE]), own_optimizers("parameter_server", 2)]
    assert f"{len(tests)} passed" in run_together("parameter_server", 2, *tests, cwd=tmp_path, ps=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("workers", "ps"), [(1, 2), (2, 1), (2, 2), (3, 3)])
def test_every_case_of_equality_holds_without_staleness(tmp_path, workers, ps):
    assert "passed" in run_together("parameter_server", workers, EQUALITY, cwd=tmp_path, ps=ps)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", [CALLBACKS, ORDER])
def test_callbacks_and_order_are_those_of_one_device(tmp_path, part):
    assert "passed" in run_together("parameter_server", 2, part, cwd=tmp_path, ps=2)


def serving(*options, run_dir, **more):
    servers = () if "--ps" in options else ("--ps", "1")
    options = (*servers, "--timeout-seconds", "5", *options)
    return train(*options, run_dir=run_dir, strategy="parameter_server", **more)


@pytest.mark.exhaustive
def test_one_core_for_all_processes_is_enough(tmp_path):
    with serving(
        "--epochs", "1", "--limit", "320", run_dir=tmp_path / "run", cores={min(os.sched_getaffinity(0))}
    ) as job:
        code, _, err = job.end()
    assert code == 0, err


@pytest.mark.thorough
def test_training_goes_on_without_a_killed_worker_which_comes_back(tmp_path):
    run_dir = tmp_path / "run"
    with serving("--epochs", "80", run_dir=run_dir) as job:
        code, _, err = after_two_epochs(job, run_dir, "worker", 0, signal.SIGKILL)
        assert job.left() == []
    assert code == 0, err
    assert "worker 0 was ended by SIGKILL; it is started again." in err
    assert "/job:worker/replica:0/task:0 failed" in (run_dir / "log.txt").read_text()
    assert len(record(run_dir)["epochs"]) == 80
    late = [epoch["metrics"]["staleness_max"] for epoch in record(run_dir)["epochs"]]
    assert max(late[-40:]) > 0  # two workers again


@pytest.mark.exhaustive
def test_training_goes_on_without_a_stopped_worker(tmp_path):
    run_dir = tmp_path / "run"
    with serving("--epochs", "20", run_dir=run_dir) as job:
        code, _, err = after_two_epochs(job, run_dir, "worker", 0, signal.SIGSTOP)
        assert job.left() == []
    assert code == 0, err
    assert len(record(run_dir)["epochs"]) == 20
    assert "Silent for 5 s: worker 0" in (run_dir / "log.txt").read_text()


@pytest.mark.thorough
def test_a_server_that_never_starts_is_named(tmp_path):
    cluster = {"chief": ["localhost:2301"], "worker": ["localhost:2302"], "ps": ["localhost:2303"]}
    config = {"cluster": cluster, "task": {"type": "chief", "index": 0}}
    seconds = {"TFDIST_START_SECONDS": "3"}
    chief = start_by_hand(tmp_path / "run", config, strategy="parameter_server", environment=seconds)
    _, err = chief.communicate(timeout=60)
    assert chief.returncode == 3
    assert "worker 0 (localhost:2302) and ps 0 (localhost:2303) did not start within 3 s" in err


@pytest.mark.thorough
def test_processes_that_disagree_are_refused_with_each_ones_value(tmp_path):
    own = (("--batch-size", "64"), ("--batch-size", "32"), ("--batch-size", "64"))
    roles = ("chief", "worker", "ps")
    with by_hand(tmp_path / "run", roles=roles, own=own, strategy="parameter_server") as processes:
        for process in processes:
            _, err = process.communicate(timeout=60)
            assert process.returncode == 2
            assert "`--batch-size`: chief 0" in err and "have `64`, worker 0" in err and "has `32`" in err


@pytest.mark.thorough
@pytest.mark.parametrize("compared", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_killed_parameter_server_is_named_and_the_job_goes_on_from_its_checkpoint(tmp_path, compared):
    """With a part of every variable on each server: the checkpoint has them whole, and gives each its part again."""
    options = ("--epochs", "6", "--limit", "640", "--ps", "2", "--staleness", "0", "--shard-bytes", "0")
    run_dir = tmp_path / "run"
    with serving(*options, "--restarts", "1", run_dir=run_dir) as job:
        code, _, err = after_two_epochs(job, run_dir, "ps", 1, signal.SIGKILL)
    assert code == 0, err
    assert "ps 1 was ended by SIGKILL" in err
    assert "Starting the job again, 1 of 1" in err
    assert [epoch["epoch"] for epoch in record(run_dir)["epochs"]] == list(range(1, 7))
    if compared:
        with serving(*options, run_dir=tmp_path / "unbroken") as job:
            code, _, err = job.end()
        assert code == 0, err
        for found, wanted in zip(weights(run_dir), weights(tmp_path / "unbroken"), strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.exhaustive
def test_the_error_of_the_chief_names_a_parameter_server_that_is_gone(tmp_path):
    run_dir, roles = tmp_path / "run", ("chief", "worker", "ps")
    with by_hand(run_dir, "--epochs", "2000", roles=roles, strategy="parameter_server") as (chief, worker, server):
        wait_for_epochs(run_dir, 2, (chief, worker, server))
        server.kill()
        _, err = chief.communicate(timeout=30)
        assert chief.returncode == 3
        assert "ps 0 (localhost:" in err and "Traceback" not in err
        _, err = worker.communicate(timeout=30)
        assert worker.returncode == 3 and "Gone, or silent for 60 s: " in err


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["chief", "ps"])
def test_every_process_that_lives_names_a_stopped_chief_or_parameter_server_in_time(tmp_path, role):
    run_dir, roles = tmp_path / "run", ("chief", "worker", "ps")
    options = ("--epochs", "20000", "--timeout-seconds", "5")
    with by_hand(run_dir, *options, roles=roles, strategy="parameter_server") as processes:
        wait_for_epochs(run_dir, 2, processes)
        stopped = processes[roles.index(role)]
        stopped.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        for process in processes:
            if process is not stopped:
                _, err = process.communicate(timeout=60)
                assert process.returncode == 3
                assert f"error: Gone, or silent for 5 s: {role} 0 (localhost:" in err and "Traceback" not in err
        assert time.monotonic() - began < 20
    if role == "ps":
        assert record(run_dir)["status"] == "failed"


@pytest.mark.thorough
def test_all_processes_end_without_an_error_after_the_chiefs_program(tmp_path):
    options = ("--epochs", "1", "--limit", "320")
    roles = ("chief", "worker", "ps")
    with by_hand(tmp_path / "run", *options, roles=roles, strategy="parameter_server") as processes:
        for process in processes:
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0 and "error" not in err


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)])
def test_all_end_with_the_chief(tmp_path, number):
    run_dir = tmp_path / "run"
    with serving("--epochs", "2000", run_dir=run_dir) as job:
        job.wait_for(lambda: epochs_done(run_dir) >= 1)
        servers = [job.process("worker", 0), job.process("worker", 1), job.process("ps", 0)]
        job.process("chief", 0).send_signal(number)
        began = time.monotonic()
        code, _, _ = job.end()
        assert time.monotonic() - began < 30
        assert job.left() == [] and not any(server.is_running() for server in servers)
    assert code == (128 + number)


@pytest.mark.parametrize("option", ["staleness", "shard_bytes"])
def test_an_option_below_zero_is_refused(option):
    with pytest.raises(UsageError, match=f"`{option}` is -1"):
        tfdist.strategy("parameter_server", **{option: -1})


@pytest.mark.thorough
def test_a_job_without_servers_is_refused(tmp_path):
    (tmp_path / "script.py").write_text("import tfdist\ntfdist.strategy('parameter_server')\n")
    with RunningJob("--workers", "2", "script.py", cwd=tmp_path) as job:
        code, _, err = job.end()
    assert code == 2
    assert "0 of the role `ps`" in err and "--ps 1" in err and "Traceback" not in err


COUNTING = ("--model", "tests.processes.counting:model", "--dataset", "tests.processes.counting:dataset")


def break_connections(server, process):
    """Resets the connections of a process to a parameter server, inside the job's network; their number."""
    tools = [tool for tool in ("ss", "nsenter") if shutil.which(tool) is None]
    if tools or os.getuid() != 0:
        pytest.skip(f"only root can break connections, with `ss` and `nsenter` (missing: {', '.join(tools) or 'none'})")
    port = json.loads(server.environ()["TF_CONFIG"])["cluster"]["ps"][0].rpartition(":")[2]
    inside = ["nsenter", "--target", str(process.pid), "--net", "ss", "--tcp", "--no-header"]
    listed = subprocess.run(
        [*inside, "--processes", "state", "established", f"dport = :{port}"], capture_output=True, text=True, check=True
    ).stdout
    own = re.findall(rf":(\d+) +\S+:{port} +users:.*pid={process.pid},", listed)
    for source in own:
        ends = f"sport = :{source} and dport = :{port}"
        subprocess.run([*inside, "--kill", "state", "established", ends], capture_output=True, check=True)
    return len(own)


# How long TensorFlow may take, on busy cores, to connect a few times again.
SECONDS_TO_CONNECT_AGAIN = 10.0


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["asp", pytest.param("easgd", marks=pytest.mark.exhaustive)])
def test_connections_of_a_worker_that_break_change_no_count(tmp_path, mode):
    run_dir = tmp_path / "run"
    options = ("--epochs", "40", "--batch-size", "16", "--strategy-option", f"mode={mode}", *COUNTING)
    with serving(*options, run_dir=run_dir) as job:
        job.wait_for(lambda: epochs_done(run_dir) >= 2)
        server, worker = job.process("ps", 0), job.process("worker", 0)
        looks, broken, until = 0, 0, time.monotonic() + SECONDS_TO_CONNECT_AGAIN
        while looks < 5 or (broken < 3 and time.monotonic() < until):
            looks += 1
            broken += break_connections(server, worker)
            time.sleep(0.3)
        code, _, err = job.end()
    assert code == 0, err
    assert broken >= 3
    epochs = record(run_dir)["epochs"]
    assert len(epochs) == 40
    assert {epoch["metrics"]["seen_once"] for epoch in epochs} == {320}
    assert {epoch["metrics"]["seen_at_most"] for epoch in epochs} == {1}


@pytest.mark.exhaustive
def test_a_connection_of_the_chief_that_breaks_is_named_where_the_job_cannot_go_on(tmp_path):
    run_dir = tmp_path / "run"
    with serving("--epochs", "2000", "--batch-size", "16", *COUNTING, run_dir=run_dir) as job:
        job.wait_for(lambda: epochs_done(run_dir) >= 2)
        server, chief = job.process("ps", 0), job.process("chief", 0)
        with contextlib.suppress(subprocess.CalledProcessError, psutil.Error):  # the chief has ended
            for _ in range(200):
                break_connections(server, chief)
        code, _, err = job.end(60)
    assert code == 3, err
    assert "Connections to ps 0 broke, although it is still running" in err and "hint" in err
    assert "Traceback" not in err
