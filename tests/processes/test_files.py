"""Training on files in several processes: each rank decodes its own part, and the result is that of one."""

import json

import keras
import numpy as np
import pytest
from PIL import Image

from tests.processes.jobs import RunningJob
from tests.test_train import run

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]

COMMON = ["--model", "cnn", "--dataset", "image_folder", "--data-dir", "data", "--data-option", "cache=off", "--quiet"]
COMMON += ["--augment", "crop_flip", "--batch-size", 8, "--epochs", 2, "--optimizer", "sgd", "--learning-rate", 0.01]
TWO = ["--strategy", "multiworker", "--workers", 2]


@pytest.fixture
def folder(tmp_path):
    """39 pictures of noise in three classes, one of them truncated."""
    generator = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        (tmp_path / "data" / "train" / name).mkdir(parents=True)
        for number in range(13):
            pixels = generator.integers(0, 255, (12, 12, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / "train" / name / f"{number}.png")
    bad = tmp_path / "data" / "train" / "b" / "7.png"
    bad.write_bytes(bad.read_bytes()[:100])
    return tmp_path


def weights(path):
    model = keras.models.load_model(path / "model.keras")
    return np.concatenate([weight.reshape(-1) for weight in model.get_weights()])


def test_two_ranks_end_with_the_weights_of_one_and_name_or_leave_out_the_same_bad_file(folder):
    with RunningJob(*TWO, *COMMON, "--run-dir", "failed", cwd=folder, module="tfdist.train") as job:
        code, _, errors = job.end()
    assert code == 2 and "`data/train/b/7.png` cannot be decoded" in errors and "Traceback" not in errors
    skip = ["--on-bad-example", "skip"]
    with RunningJob(*TWO, *COMMON, *skip, "--run-dir", "two", cwd=folder, module="tfdist.train") as job:
        code, _, errors = job.end()
    assert code == 0, errors
    done = run("--strategy", "single", *COMMON, *skip, "--run-dir", "one", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "two" / "run.json").read_text())["dataset"]["skipped"] == 1
    np.testing.assert_allclose(weights(folder / "two"), weights(folder / "one"), atol=5e-5)
