"""Several processes on the GPUs of one machine; they share a single one, and then TensorFlow's ring adds gradients."""

import json
import signal

import numpy as np
import pytest
import tensorflow as tf

from tests.gpu import traces
from tests.processes.jobs import RunningJob, epochs_done, record, require_horovod, require_mpi, train, weights

SHARED = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "NVIDIA_TF32_OVERRIDE": "0", "TF_DETERMINISTIC_OPS": "1"}
# Dropout draws one mask per replica.
OPTIONS = ("--epochs", "3", "--batch-size", "32", "--model-option", "dropout=0", "--quiet")
STRATEGIES = {"multiworker": (), "horovod": (), "mpi_split": ("--sync-every", "1"), "parameter_server": ("--ps", "1")}


def needs_gpus(count):
    found = len(tf.config.list_physical_devices("GPU"))
    return pytest.mark.skipif(
        found < count, reason=f"needs {count} GPUs, and there {'is 1' if found == 1 else 'are none'}"
    )


def run(run_dir, strategy, *options, workers="2"):
    with train(*OPTIONS, *options, "--workers", workers, run_dir=run_dir, strategy=strategy, environment=SHARED) as job:
        code, out, err = job.end()
    assert code == 0, out[-2000:] + err[-4000:]
    return record(run_dir)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run on one device."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    with RunningJob(
        *("--strategy", "single", "--model", "mlp", "--dataset", "digits", "--run-dir", folder, *OPTIONS),
        module="tfdist.train",
        cwd=folder.parent,
        environment=SHARED,
    ) as job:
        code, out, err = job.end()
    assert code == 0, out + err
    return folder


@pytest.mark.parametrize("strategy", ["multiworker", "horovod"])
def test_two_processes_on_gpus_end_with_the_weights_of_one(strategy, alone, tmp_path):
    if strategy == "horovod":
        require_horovod()
    found = run(tmp_path / "run", strategy)
    assert found["machine"]["gpus"] and found["strategy"]["devices"] == ["GPU:0"]
    for one, other in zip(weights(tmp_path / "run"), weights(alone), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("strategy", ["mpi_split", "parameter_server"])
def test_workers_on_gpus_learn(strategy, tmp_path):
    if strategy == "mpi_split":
        require_mpi()
    found = run(tmp_path / "run", strategy, *STRATEGIES[strategy])
    losses = [epoch["metrics"]["loss"] for epoch in found["epochs"]]
    assert losses[-1] < 0.7 * losses[0]


def test_a_job_that_a_worker_was_killed_in_is_resumed_to_the_same_weights(alone, tmp_path):
    run_dir = tmp_path / "run"
    with train(*OPTIONS, run_dir=run_dir, environment=SHARED) as job:
        job.wait_for(lambda: epochs_done(run_dir) >= 1)
        job.process("worker", 1).send_signal(signal.SIGKILL)
        code, _, err = job.end()
    assert code != 0 and "worker 1" in err
    with train("--resume", run_dir=run_dir, environment=SHARED) as job:
        assert job.end()[0] == 0
    for one, other in zip(weights(run_dir), weights(alone), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_a_profile_shows_what_ran_on_the_gpu(tmp_path):
    run(tmp_path / "run", "multiworker", "--profile", "3:6")
    assert "GPU" in (tmp_path / "run" / "profile.txt").read_text() or traces.read(tmp_path / "run").kernels


WHICH = """
import json, os, sys
import tfdist
strategy = tfdist.strategy(sys.argv[1])
import tensorflow as tf
every = tf.config.list_physical_devices("GPU")
seen = [every.index(gpu) for gpu in tf.config.get_visible_devices("GPU")]
given = os.environ.get("CUDA_VISIBLE_DEVICES")
mine = [given.split(",")[number] for number in seen] if given else list(map(str, seen))
found = [json.loads(one) for one in strategy.exchange(json.dumps(mine).encode())]
if strategy.world.is_chief:
    print("GPUS", json.dumps(found), strategy.options().get("communication"))
"""


@needs_gpus(2)
@pytest.mark.parametrize("how", ["the launcher", "mpirun"])
@pytest.mark.parametrize("strategy", ["multiworker", "horovod"])
def test_the_processes_of_a_machine_have_different_gpus(strategy, how, tmp_path):
    if strategy == "horovod":
        require_horovod()
    if how == "mpirun" and strategy == "multiworker":
        pytest.skip("MPI knows no addresses, which `multiworker` needs")
    (tmp_path / "which.py").write_text(WHICH)
    options = ["--mpi"] * (how == "mpirun")
    with RunningJob("--workers", 2, *options, "which.py", strategy, cwd=tmp_path) as job:
        code, out, err = job.end()
    assert code == 0, err
    line = next(line for line in out.splitlines() if "GPUS" in line)
    first, second = json.loads(line[line.index("[") : line.rindex("]") + 1])
    assert first and second and not set(first) & set(second)
    assert strategy != "multiworker" or line.endswith("nccl")


@needs_gpus(2)
@pytest.mark.parametrize("strategy", ["multiworker", "mirrored"])
def test_gradients_between_gpus_go_by_nccl(strategy, tmp_path):
    options = ("--workers", "2") if strategy == "multiworker" else ()
    arguments = ["--strategy", strategy, "--model", "mlp", "--dataset", "digits", "--run-dir", tmp_path / "run"]
    with RunningJob(*arguments, *OPTIONS, "--profile", "3:9", *options, module="tfdist.train", cwd=tmp_path) as job:
        code, out, err = job.end()
    assert code == 0, out + err
    kernels = traces.read(tmp_path / "run").kernels
    assert any("nccl" in name.lower() for name in kernels), kernels.most_common(20)
