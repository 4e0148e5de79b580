"""A job that is ended while it writes a checkpoint to a slow disk leaves whole checkpoints, and goes on from one."""

import signal

import numpy as np
import pytest

from tests.processes.jobs import RunningJob, record, weights
from tfdist.checkpointing import format as checkpoint_format

# A dataset of the user's whose module makes the disk slow, where there is a file "slow" with the seconds.
SLOW = """
import pathlib, time
import tfdist.data
from tfdist import files

sync = files.sync


def slowly(path):
    if pathlib.Path("slow").exists() and path.suffix == ".ckpt":
        pathlib.Path("writing").touch()
        time.sleep(float(pathlib.Path("slow").read_text()))
    sync(path)


files.sync = slowly


def load(data_dir=None):
    return tfdist.data.load("digits")
"""


def train(folder, *options):
    (folder / "digits_on_slow_disk.py").write_text(SLOW)
    arguments = ("--strategy", "multiworker", "--workers", 2, "--model", "mlp", "--dataset", "digits_on_slow_disk:load")
    return RunningJob(*arguments, "--run-dir", "run", "--epochs", 8, *options, module="tfdist.train", cwd=folder)


def checkpoints(folder):
    return list((folder / "run" / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    with train(folder) as job:
        code, _, err = job.end()
    assert code == 0, err
    return weights(folder / "run")


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [pytest.param(1, marks=pytest.mark.exhaustive), 60])
@pytest.mark.parametrize("by", ["sigterm", pytest.param("failure", marks=pytest.mark.exhaustive)])
def test_a_job_that_is_ended_while_it_writes_leaves_whole_checkpoints_and_goes_on(tmp_path, unbroken, seconds, by):
    with train(tmp_path) as job:
        job.wait_for(lambda: any((tmp_path / "run" / "checkpoints").glob("step-*")))  # a whole one, before it is slow
        (tmp_path / "slow").write_text(str(seconds))
        job.wait_for((tmp_path / "writing").exists)
        if by == "sigterm":
            job.signal(signal.SIGTERM)
        else:
            job.process("worker", 1).kill()
        code, _, err = job.end(seconds=50)
        assert job.left() == []
    assert code == 128 + (signal.SIGTERM if by == "sigterm" else signal.SIGKILL), err
    assert ("was aborted" in err) == (seconds > 4)
    assert record(tmp_path / "run")["status"] == "interrupted"  # the launcher ends a job by SIGTERM
    left = checkpoints(tmp_path)
    assert left and all(path.name.startswith("step-") for path in left)  # and no temporary file
    for path in left:
        checkpoint_format.read(path)
    (tmp_path / "slow").unlink()
    with train(tmp_path, "--resume") as job:
        code, _, err = job.end()
    assert code == 0, err
    for one, other in zip(weights(tmp_path / "run"), unbroken, strict=True):
        np.testing.assert_array_equal(one, other)
