"""`horovod` on real processes, over Gloo and over MPI: the contract, its launchers, and faults."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.processes.jobs import (
    ROOT,
    RunningJob,
    clean_environment,
    free_addresses,
    record,
    require_horovod,
    signalled,
    train,
)
from tests.processes.test_contract import (
    BY_HAND,
    CALL,
    CALLBACKS,
    EQUALITY,
    ORDER,
    QUICK_CALLBACKS,
    QUICK_STEPS,
    QUICK_USERS_STEPS,
    STEPS,
    USERS_STEPS,
    equality_cases,
    run_together,
)

require_horovod()

GLOO, MPI = (), ("--mpi",)
ENGINES = pytest.mark.parametrize("engine", [GLOO, MPI], ids=["Gloo", "MPI"])
LONG = ("--epochs", "2000", "--timeout-seconds", "8")

SCRIPT = """
import os, sys
import keras, numpy as np, tfdist

strategy = tfdist.strategy("horovod", seed=1, timeout_seconds=8, **eval(sys.argv[1]))
keras.utils.set_random_seed(3 + strategy.world.rank)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
x = np.random.default_rng(0).random((64, 4), "float32")
y = x.sum(1)
if "--raise" in sys.argv and strategy.world.rank == 1:
    class Raise(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 3:
                raise RuntimeError("this rank has had enough")
    callbacks = [Raise()]
else:
    callbacks = []
history = strategy.fit(model, x, y, batch_size=8, epochs=6, callbacks=callbacks, verbose=0).history
weights = float(sum(abs(w).sum() for w in model.get_weights()))
# In one piece, since the others write there too.
sys.stdout.write(f"ENGINE {strategy.group.engine}\\nLOSS {history['loss'][-1]}\\nWEIGHTS {weights}\\n")
"""

LOST_AT_START = """
import os, signal, sys
import tfdist
from tfdist.groups import horovod
from tfdist.jobs.world import World

if World.detect().rank == 1:
    horovod.load().init = lambda: os.kill(os.getpid(), getattr(signal, sys.argv[1]))
strategy = tfdist.strategy("horovod", timeout_seconds=3)
with strategy.scope():
    pass
"""

RESUMED = """
import sys
import keras, numpy as np, tensorflow as tf
import tfdist
from tfdist.callbacks import Checkpoint

strategy = tfdist.strategy(sys.argv[1], seed=1)
x = np.random.default_rng(0).normal(size=(39, 4)).astype("float32")
of_unknown_length = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8).filter(lambda *_: True)

class Ends(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise InterruptedError

def losses(folder, *callbacks, resume=False):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callbacks = [*callbacks, Checkpoint(folder, every_steps=5, resume=resume)]
    return strategy.fit(model, of_unknown_length, epochs=2, verbose=0, callbacks=callbacks).history["loss"]

try:
    losses("broken", Ends())
except InterruptedError:
    # In one piece, since the others write there too.
    sys.stdout.write(f"RESUMED {losses('broken', resume=True)} UNBROKEN {losses('unbroken')}\\n")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*command, cwd, **environment):
    return subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment() | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


def said(out, word):
    return [line.split(word)[1].strip() for line in out.splitlines() if word in line]


def long_training(engine, run_dir):
    """A training of two processes that does not end by itself."""
    if engine == GLOO:
        return train(*LONG, run_dir=run_dir, strategy="horovod")
    arguments = ["--strategy", "horovod", "--model", "mlp", "--dataset", "digits", "--run-dir", run_dir, *LONG]
    return RunningJob(
        "--mpi", "--log-dir", run_dir.parent / "logs", "-m", "tfdist.train", *arguments, cwd=run_dir.parent
    )


# What is sent otherwise; the rest is as under `multiworker`.
OF_THE_ENGINE = [
    "remainder 1",
    "mixed float16, inf on one replica",
    "mask, loss sum",
    "synchronized batch norm",
    "sparse gradients, adam",
    "auc",
]
EXHAUSTIVE = pytest.mark.exhaustive
# What the other engine shows in part.
RATHER_MPI = pytest.mark.parametrize("engine", [pytest.param(GLOO, marks=EXHAUSTIVE), MPI], ids=["Gloo", "MPI"])
RATHER_GLOO = pytest.mark.parametrize("engine", [GLOO, pytest.param(MPI, marks=EXHAUSTIVE)], ids=["Gloo", "MPI"])


class TestContract:
    def test_two_processes_end_where_one_device_ends(self, tmp_path):
        few = equality_cases("horovod", 2, ["remainder 1", "sparse gradients, adam"])
        chosen = "test_equality or queue"
        last = run_together("horovod", 2, *few, USERS_STEPS, "-k", chosen, cwd=tmp_path, options=MPI)
        assert f"{len(few) + 1} passed" in last

    @pytest.mark.thorough
    @RATHER_MPI
    def test_two_processes_keep_the_promises_that_need_most_of_them(self, tmp_path, engine):
        tests = equality_cases("horovod", 2, OF_THE_ENGINE)
        chosen = f"test_equality or (test_users_steps and ({QUICK_USERS_STEPS}))"
        last = run_together("horovod", 2, *tests, USERS_STEPS, "-k", chosen, cwd=tmp_path, options=engine)
        expected = len(tests) + len(QUICK_USERS_STEPS.split(" or "))
        assert f"{expected} passed" in last, last

    @EXHAUSTIVE  # as those of `multiworker`, which has the same loop
    def test_two_processes_have_the_callbacks_of_one_device(self, tmp_path):
        assert "passed" in run_together("horovod", 2, CALLBACKS, ORDER, "-k", QUICK_CALLBACKS, cwd=tmp_path)

    @EXHAUSTIVE  # as those of `multiworker`, whose step it is
    @ENGINES
    def test_two_processes_take_steps_of_the_users_own_as_one_device_does(self, tmp_path, engine):
        assert "passed" in run_together("horovod", 2, STEPS, "-k", QUICK_STEPS, cwd=tmp_path, options=engine)

    @EXHAUSTIVE
    @ENGINES
    @pytest.mark.parametrize("workers", [1, 2, 3])
    @pytest.mark.parametrize("part", [EQUALITY, CALLBACKS, CALL, ORDER, STEPS, BY_HAND])
    def test_the_whole_contract(self, tmp_path, engine, workers, part):
        assert "passed" in run_together("horovod", workers, part, cwd=tmp_path, options=engine)


STOCK = """
import sys
import keras, numpy as np, tfdist
from tfdist.data_parallel.stock_keras import StockKerasStrategy

group = tfdist.strategy("horovod").group
x = np.random.default_rng(0).normal(size=(128, 6)).astype("float32")
y = (x.sum(1) > 0).astype("int32")


def compiled():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, jit_compile=False)
    return model


with StockKerasStrategy(group).scope():
    model = compiled()
mine = np.concatenate([np.arange(b + group.rank * 8, b + group.rank * 8 + 8) for b in range(0, 128, 16)])
model.fit(x[mine], y[mine], batch_size=8, epochs=2, shuffle=False, verbose=0)
alone = compiled()
alone.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
found = max(abs(a - b).max() for a, b in zip(model.get_weights(), alone.get_weights()))
sys.stdout.write(f"DIFFERENCE {found}\\n")
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "engine"), [("horovod", GLOO), pytest.param("mpi_split", MPI, marks=EXHAUSTIVE)])
def test_resumed_behind_the_last_step_of_an_epoch_it_logs_the_metrics_of_all(tmp_path, strategy, engine):
    (tmp_path / "resumed.py").write_text(RESUMED)
    command = (sys.executable, "-m", "tfdist.launch", "--workers", "2", *engine, "resumed.py", strategy)
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    resumed, unbroken = said(done.stdout, "RESUMED")[0].split(" UNBROKEN ")
    assert json.loads(resumed)[0] == json.loads(unbroken)[0]  # of the epoch of which no step was left


@pytest.mark.thorough
def test_stock_fit_under_its_tf_distribute_strategy_equals_one_process(tmp_path):
    (tmp_path / "stock.py").write_text(STOCK)
    done = run(sys.executable, "-m", "tfdist.launch", "--mpi", "stock.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [float(found) < 2e-6 for found in said(done.stdout, "DIFFERENCE")] == [True, True]


class TestLaunchers:
    @pytest.mark.thorough
    def test_mpirun_horovodrun_and_the_launcher_end_with_the_same_weights(self, tmp_path, script):
        python = (sys.executable, script, "{}")
        ways = {
            "MPI": ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *python),
            "Gloo by horovodrun": ("horovodrun", "--gloo", "-np", "2", "--network-interfaces", "lo", *python),
            "Gloo": (sys.executable, "-m", "tfdist.launch", "--verbose", script, "{}"),
        }
        weights = set()
        for engine, command in ways.items():
            done = run(*command, cwd=tmp_path)
            assert done.returncode == 0, done.stderr[-3000:]
            assert said(done.stdout, "ENGINE") == [engine.partition(" ")[0]] * 2
            weights.update(said(done.stdout, "WEIGHTS"))
        assert len(weights) == 1

    @pytest.mark.parametrize("compression", ["bf16", "fp16"])
    @EXHAUSTIVE
    def test_compressed_gradients_train_almost_alike(self, tmp_path, script, compression):
        losses = []
        for options in ("{}", json.dumps({"compression": compression})):
            done = run(sys.executable, "-m", "tfdist.launch", "--mpi", script, options, cwd=tmp_path)
            assert done.returncode == 0, done.stderr[-3000:]
            losses.append(float(said(done.stdout, "LOSS")[0]))
        assert losses[0] != losses[1]
        assert losses[1] == pytest.approx(losses[0], rel=0.05)

    @EXHAUSTIVE
    @ENGINES
    def test_the_timelines_of_all_ranks_are_joined(self, tmp_path, engine, script):
        options = json.dumps({"timeline": "t.json"})
        done = run(sys.executable, "-m", "tfdist.launch", *engine, script, options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        assert sorted(path.name for path in tmp_path.glob("t.*")) == ["t.json", "t.rank-0.json", "t.rank-1.json"]
        events = json.loads((tmp_path / "t.json").read_text())
        tensors = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
        began = [
            [(tensors[rank, e["tid"]], e["ts"]) for e in events if e.get("name") == "ALLREDUCE" and e["pid"] == rank]
            for rank in range(2)
        ]
        assert len(began[0]) > 40 and abs(len(began[0]) - len(began[1])) <= 1  # one may be cut off at the end
        for (tensor, here), (same, there) in zip(*began, strict=False):
            assert tensor == same and abs(here - there) < 1e6
        ready = {e["name"] for e in events if e["ph"] == "X"}
        assert ready == {"0", "1"} and any(e.get("name") == "NEGOTIATE_ALLREDUCE" for e in events)


class TestFaults:
    @pytest.mark.thorough
    @RATHER_GLOO
    def test_all_end_when_a_rank_is_killed_and_it_is_named(self, tmp_path, engine):
        with long_training(engine, tmp_path / "run") as job:
            code, told = signalled(job, tmp_path / "run", signal.SIGKILL)
        assert code != 0
        assert ("rank 1 with PID" if engine == MPI else "worker 1 was ended by SIGKILL") in told

    @pytest.mark.thorough
    @RATHER_MPI
    def test_all_end_when_a_rank_is_stopped_and_it_is_named(self, tmp_path, engine):
        with long_training(engine, tmp_path / "run") as job:
            code, told = signalled(job, tmp_path / "run", signal.SIGSTOP)
        assert code == 3
        reason = f"Gone, or silent for 8 s: {'rank 1' if engine == MPI else 'worker 1'}"
        assert reason in told
        assert record(tmp_path / "run")["status"] == "failed"
        assert reason in record(tmp_path / "run")["reason"]

    @EXHAUSTIVE  # as under `mpi_split`
    @ENGINES
    def test_all_end_when_a_rank_raises_and_it_is_named(self, tmp_path, engine, script):
        began = time.monotonic()
        done = run(sys.executable, "-m", "tfdist.launch", "--verbose", *engine, script, "{}", "--raise", cwd=tmp_path)
        assert time.monotonic() - began < 60
        assert done.returncode != 0
        assert "this rank has had enough" in done.stdout + done.stderr

    @pytest.mark.thorough
    def test_ranks_that_disagree_are_refused_with_each_ones_value(self, tmp_path):
        train_with = [sys.executable, "-m", "tfdist.train", "--strategy", "horovod", "--dataset", "digits"]
        train_with += ["--run-dir", str(tmp_path / "run"), "--model"]
        mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
        done = run(*mpirun, "-np", "1", *train_with, "mlp", ":", "-np", "1", *train_with, "cnn", cwd=ROOT)
        assert done.returncode == 2
        assert "`--model`: rank 0 has `mlp`, rank 1 has `cnn`" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.thorough
    @pytest.mark.parametrize("number", ["SIGABRT", "SIGSTOP"], ids=["aborts", "hangs"])
    def test_a_rank_that_is_lost_while_horovod_starts_is_named(self, tmp_path, number):
        (tmp_path / "script.py").write_text(LOST_AT_START)
        cluster = {"worker": free_addresses(2)}
        started = [
            subprocess.Popen(
                [sys.executable, "script.py", number],
                cwd=tmp_path,
                env=clean_environment() | {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})},
                stderr=subprocess.PIPE,
                text=True,
            )
            for task in ({"type": "worker", "index": index} for index in range(2))
        ]
        try:
            _, errors = started[0].communicate(timeout=60)
        finally:
            for process in started:
                process.kill()
                process.communicate()
        assert started[0].returncode == 3, errors
        assert "error: Gone, or silent for 3 s: worker 1 (" in errors and "Traceback" not in errors

    @pytest.mark.thorough
    def test_a_network_interface_that_does_not_exist_is_told(self, tmp_path, script):
        done = run(sys.executable, "-m", "tfdist.launch", script, "{}", cwd=tmp_path, HOROVOD_GLOO_IFACE="nowhere9")
        assert done.returncode == 2
        assert "`HOROVOD_GLOO_IFACE` is `nowhere9`, and this machine has the network interfaces `lo`" in done.stderr

    @pytest.mark.thorough
    def test_a_horovod_for_another_tensorflow_is_told(self, tmp_path, script):
        """Its library as a build for another one leaves it: one that the loader refuses."""
        import horovod

        copy = tmp_path / "other" / "horovod"
        subprocess.run(["cp", "-r", os.path.dirname(horovod.__file__), copy.parent.mkdir() or copy], check=True)
        (library,) = (copy / "tensorflow").glob("mpi_lib*.so")
        library.write_bytes(b"not what the loader expects")
        done = run(
            sys.executable, "-m", "tfdist.launch", script, "{}", cwd=tmp_path, PYTHONPATH=f"{copy.parent}:{ROOT}"
        )
        assert done.returncode == 2
        assert "Horovod's library cannot be loaded with TensorFlow" in done.stderr

    def test_without_horovod_the_error_says_how_to_install_it(self, tmp_path):
        (tmp_path / "horovod").mkdir()
        (tmp_path / "horovod" / "__init__.py").write_text("raise ModuleNotFoundError('No module named horovod')")
        arguments = ["--strategy", "horovod", "--model", "mlp", "--dataset", "digits", "--run-dir", "run"]
        done = run(sys.executable, "-m", "tfdist.train", *arguments, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
        assert done.returncode == 2
        assert "Horovod is not installed" in done.stderr and "make horovod" in done.stderr

    @pytest.mark.thorough
    def test_only_the_chief_writes_a_checkpoint(self, tmp_path):
        with train("--epochs", "2", run_dir=tmp_path / "run", strategy="horovod") as job:
            code, _, err = job.end()
        assert code == 0, err
        assert list((tmp_path / "run" / "checkpoints").iterdir())
        assert not (tmp_path / "run" / "rank-1" / "checkpoints").exists()
        assert record(tmp_path / "run")["strategy"]["options"]["engine"] == "Gloo"
