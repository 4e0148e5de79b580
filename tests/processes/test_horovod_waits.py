"""Processes of `tfdist.horovod` that wait for different things: the job ends in time, and says who waits for what."""

import time

import pytest

from tests.processes import horovod_jobs
from tests.processes.jobs import launched, unframed

pytestmark = horovod_jobs.needs_horovod
SECONDS = 4

SCRIPT = """
import sys, time
import keras, numpy as np, tensorflow as tf
import tfdist.horovod as hvd

case = sys.argv[1]
hvd.init(timeout_seconds=float(sys.argv[2]))
first = hvd.rank() == 0


class OwnLoss(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["loss"] = 1 / (1 + epoch) if first else 1.0
        if case == "busy in a callback" and not first and epoch == 1:
            time.sleep(3 * float(sys.argv[2]))


def fit(examples, epochs, *callbacks):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, name="mine")), "mse")
    begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    ones = np.ones((examples, 1))
    model.fit(ones, ones, batch_size=4, epochs=epochs, verbose=0, callbacks=[begin, *callbacks])


@tf.function
def step(weight):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight * 2.0)
    return hvd.DistributedGradientTape(tape).gradient(loss, weight)


if case == "numbers of batches":
    fit(12 if first else 8, 2, hvd.callbacks.MetricAverageCallback())
elif case == "shapes":
    hvd.allreduce(np.ones(2 if first else 3), name="sizes")
elif case == "tape":
    weight = keras.Variable([1.0])
    for _ in range(9 if first else 3):
        step(weight.value)
elif case == "busy in a callback":
    fit(8, 3, OwnLoss(), hvd.callbacks.MetricAverageCallback())
else:
    fit(8, 9, OwnLoss(), keras.callbacks.EarlyStopping("loss", patience=2))
    if case == "stopped, and exchanges":
        hvd.allreduce(1.0, name="accuracy")
    elif case == "stopped, and busy":
        time.sleep(100)
print("ENDED", flush=True)
"""

STOPPED = "after `fit`, which ended with epoch 3 (stopped by `EarlyStopping` on its own `loss`)"
ENDS = {
    "numbers of batches": (
        r"is waiting for the gradients of `mine` in batch 3 of epoch 1, and worker 1 (",
        "is waiting for the metrics of `MetricAverageCallback` after batch 2 of epoch 1",
    ),
    "stopped": (
        f"is gone from the job {STOPPED}, and worker 0 (",
        "is waiting for the gradients of `mine` in batch 1 of epoch 4",
    ),
    "stopped, and exchanges": (
        "is waiting for the gradients of `mine` in batch 1 of epoch 4, and worker 1 (",
        f"is waiting for `hvd.allreduce` of `accuracy` {STOPPED}",
    ),
    "stopped, and busy": (
        "is waiting for the gradients of `mine` in batch 1 of epoch 4, and worker 1 (",
        f"is busy {STOPPED}",
    ),
    "tape": ("is gone from the job, and worker 0 (", "is waiting for the gradients of a tape"),
    "shapes": ("The processes of the job disagree on what they send", "Mismatched ALLREDUCE tensor shapes"),
}
QUICK = ["numbers of batches", "stopped"]


def run(case, cwd, *options):
    (cwd / "script.py").write_text(SCRIPT)
    began = time.monotonic()
    done = launched("--workers", "2", *options, "script.py", case, str(SECONDS), cwd=cwd, timeout=100)
    return done, unframed(done.stdout + done.stderr), time.monotonic() - began


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.exhaustive) for case in ENDS]
)
def test_the_job_ends_in_time_and_says_which_process_waits_for_what(tmp_path, case):
    done, told, seconds = run(case, tmp_path)
    assert done.returncode in ({1} if case == "tape" else {2} if case == "shapes" else {3})
    assert all(part in told for part in ENDS[case]), told
    assert seconds < 45


@pytest.mark.exhaustive  # as over Gloo
@pytest.mark.parametrize("case", QUICK)
def test_over_mpi_it_says_so_too(tmp_path, case):
    done, told, seconds = run(case, tmp_path, "--mpi")
    assert done.returncode != 0
    assert all(part.replace("worker 1 (", "rank 1").replace("worker 0 (", "rank 0") in told for part in ENDS[case])
    assert seconds < 45


@pytest.mark.thorough
def test_a_process_that_is_busy_in_a_callback_is_waited_for(tmp_path):
    done, told, _ = run("busy in a callback", tmp_path)
    assert done.returncode == 0, told
    assert "Waiting for worker 1" in told
