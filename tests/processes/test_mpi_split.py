"""`mpi_split` on real processes: what averaging promises, and how an MPI job ends."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.processes.jobs import ROOT, clean_environment, record, require_mpi, signalled, train, weights
from tests.processes.test_horovod import run, said

require_mpi()

LONG = ("--epochs", "2000", "--timeout-seconds", "8")
# Against one process that trains on the batches that those of all processes make together.
SCRIPT = """
import sys
import keras, numpy as np, tensorflow as tf, tfdist

strategy = tfdist.strategy("mpi_split", seed=1, sync_every=eval(sys.argv[1]))


class OwnOptimizer(keras.Sequential):
    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.own.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


size, examples = strategy.world.world_size, int(sys.argv[2])
x = np.random.default_rng(0).normal(size=(examples, 6)).astype("float32")
y = (x.sum(1) > 0).astype("int32")


def compiled():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


model = compiled()
history = strategy.fit(model, x, y, batch_size=12, epochs=2, shuffle=False, verbose=0).history
parts = np.array_split(np.arange(examples), size)
steps = -(-examples // 12)
ends = [[round(len(part) * min(step * 12, examples) / examples + 1e-9) for step in range(steps + 1)] for part in parts]
batches = [
    np.concatenate([part[end[step] : end[step + 1]] for part, end in zip(parts, ends)]) for step in range(steps)
]
assert sorted(np.concatenate(batches)) == list(range(examples))
single = compiled()
for _ in range(2):
    for batch in batches:
        single.train_on_batch(x[batch], y[batch])
found = [abs(a - b).max() for a, b in zip(model.get_weights(), single.get_weights())]
alone = model.evaluate(x, y, batch_size=12, verbose=0)
without = OwnOptimizer([keras.Input((6,)), keras.layers.Dense(1)])
without.own = keras.optimizers.SGD(0.1)
without.own.build(without.trainable_variables)
without.compile(None, "mse")
strategy.fit(without, x, y, batch_size=12, verbose=0)
streamed, single = compiled(), compiled()
stream = tf.data.Dataset.from_tensor_slices((x, y)).batch(9)  # whose batches do not divide evenly
strategy.fit(streamed, stream, verbose=0)
for batch in stream:
    single.train_on_batch(*batch)
of_stream = [abs(a - b).max() for a, b in zip(streamed.get_weights(), single.get_weights())]
said = {
    "STREAMED": max(of_stream),
    "WITHOUT": sum(float(abs(w).sum()) for w in without.get_weights()),
    "DIFFERENCE": max(found),
    "DISAGREEMENT": history["disagreement"][-1],
    "EVALUATED": np.abs(np.subtract(strategy.evaluate(model, x, y, batch_size=12, verbose=0), alone)).max() < 1e-5,
    "PREDICTED": abs(strategy.predict(model, x, verbose=0) - model(x).numpy()).max() < 1e-5,
    "WEIGHTS": float(sum(abs(w).sum() for w in model.get_weights())),
    "MOMENTUM": float(sum(abs(v.numpy()).sum() for v in model.optimizer.variables)),
}
# In one piece, since the others write there too.
sys.stdout.write("".join(f"{word} {value}\\n" for word, value in said.items()))
"""


@pytest.fixture
def split(tmp_path):
    """Runs the script in so many processes, and returns what all of them said."""
    (tmp_path / "script.py").write_text(SCRIPT)

    def start(sync_every, examples, workers=2):
        options = ("--mpi", "--workers", str(workers))
        done = run(
            *(sys.executable, "-m", "tfdist.launch", *options, "script.py", repr(sync_every), str(examples)),
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return start


@pytest.mark.thorough
@pytest.mark.parametrize(("workers", "examples"), [(2, 65), pytest.param(3, 100, marks=pytest.mark.exhaustive)])
def test_averaging_each_step_with_sgd_is_synchronous_training(split, workers, examples):
    out = split(1, examples, workers)
    assert [float(found) < 2e-6 for found in said(out, "DIFFERENCE")] == [True] * workers
    assert [float(found) < 2e-6 for found in said(out, "STREAMED")] == [True] * workers
    assert said(out, "EVALUATED") == said(out, "PREDICTED") == ["True"] * workers
    assert len(set(said(out, "WITHOUT"))) == 1  # a model without a compiled optimizer is averaged too


@pytest.mark.thorough
@pytest.mark.parametrize("sync_every", [3, pytest.param("epoch", marks=pytest.mark.exhaustive)])
def test_averaging_less_often_lets_ranks_disagree_and_says_how_much(split, sync_every):
    out = split(sync_every, 120)
    assert float(said(out, "DIFFERENCE")[0]) > 1e-4
    assert float(said(out, "DISAGREEMENT")[0]) > 1e-3
    assert len(set(said(out, "WEIGHTS"))) == len(set(said(out, "MOMENTUM"))) == 1  # averaged, all are alike again


# The same training with pieces of the usual size, in which all fits into one, and of 100 bytes.
PIECES = """
import sys
import keras, numpy as np, tfdist
from tfdist.internals import tensorflow_variables

strategy = tfdist.strategy("mpi_split", seed=1, sync_every=2)
x = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
y = (x.sum(1) > 0).astype("int32")


def trained():
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(40, "relu"), keras.layers.Dense(30, dtype="bfloat16"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(keras.optimizers.Adam(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = strategy.fit(model, x, y, batch_size=12, epochs=2, shuffle=False, verbose=0).history
    return [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)], history["disagreement"]


whole, disagreements = trained()
tensorflow_variables.PIECE_BYTES = 100
pieces, same = trained()
sys.stdout.write(
    f"EQUAL {all((a == b).all() for a, b in zip(whole, pieces, strict=True))}\\n"
    f"DISAGREEMENTS {np.allclose(disagreements, same, rtol=1e-5) and min(same) > 0}\\n"
    f"SUM {sum(float(abs(w.astype('float64')).sum()) for w in pieces)}\\n"
)
"""


@pytest.mark.exhaustive
def test_averaging_in_pieces_gives_what_averaging_at_once_does(tmp_path):
    (tmp_path / "script.py").write_text(PIECES)
    done = run(sys.executable, "-m", "tfdist.launch", "--mpi", "--workers", "2", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert said(done.stdout, "EQUAL ") == said(done.stdout, "DISAGREEMENTS ") == ["True"] * 2
    assert len(set(said(done.stdout, "SUM "))) == 1  # the processes have the same


@pytest.mark.thorough
def test_the_command_trains_on_two_processes_and_leaves_one_record(tmp_path):
    run_dir = tmp_path / "run"
    with train("--epochs", "2", "--sync-every", "5", run_dir=run_dir, strategy="mpi_split") as job:
        code, out, err = job.end()
    assert code == 0, err
    found = record(run_dir)
    assert found["strategy"]["options"]["sync_every"] == 5 and found["world"]["world_size"] == 2
    assert len(found["epochs"]) == 2 and "test accuracy" in out


@pytest.mark.exhaustive
def test_a_run_resumed_at_the_end_of_an_epoch_equals_an_unbroken_one(tmp_path):
    for run_dir, options in [
        ("unbroken", ["--epochs", "4"]),
        ("resumed", ["--epochs", "2"]),
        ("resumed", ["--epochs", "4", "--resume"]),
    ]:
        with train("--optimizer", "adam", *options, run_dir=tmp_path / run_dir, strategy="mpi_split") as job:
            code, _, err = job.end()
        assert code == 0, err
    for found, wanted in zip(weights(tmp_path / "resumed"), weights(tmp_path / "unbroken"), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.exhaustive)])
def test_all_end_when_a_rank_is_killed_or_stopped_and_it_is_named(tmp_path, number):
    with train(*LONG, run_dir=tmp_path / "run", strategy="mpi_split") as job:
        code, told = signalled(job, tmp_path / "run", number)
    assert code != 0
    expected = "rank 1 with PID" if number == signal.SIGKILL else "Gone, or silent for 8 s: rank 1"
    assert expected in told


@pytest.mark.thorough
def test_an_error_in_one_rank_ends_the_job(tmp_path):
    (tmp_path / "script.py").write_text(
        "import tfdist\n"
        "strategy = tfdist.strategy('mpi_split')\n"
        "if strategy.world.rank == 1:\n"
        "    raise RuntimeError('this rank has had enough')\n"
        "strategy.group.barrier()\n"
    )
    began = time.monotonic()
    done = run(sys.executable, "-m", "tfdist.launch", "--mpi", "script.py", cwd=tmp_path)
    assert time.monotonic() - began < 60
    assert done.returncode == 1
    assert (
        "this rank has had enough" in done.stdout + done.stderr
        and "rank 1 ends the job with exit code 1" in done.stderr + done.stdout
    )


def test_without_mpirun_the_launcher_says_what_to_install(tmp_path):
    done = run(sys.executable, "-m", "tfdist.launch", "--mpi", "script.py", cwd=tmp_path, PATH="/nowhere")
    assert done.returncode == 2
    assert "There is no `mpirun` on the path" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.thorough
def test_an_mpirun_of_another_library_is_told(tmp_path):
    """Its processes have the places that it gave them, and MPI finds each alone."""
    environment = clean_environment() | {"PMI_RANK": "0", "PMI_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", "import tfdist; tfdist.strategy('mpi_split')"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "PMI (PMI_RANK, PMI_SIZE) says that there are 2 processes, and MPI finds 1" in done.stderr
