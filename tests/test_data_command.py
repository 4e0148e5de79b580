"""`python -m tfdist.data`: the table, the picture, and mistakes."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

import tfdist.data.__main__
from tests.shared_data import FILES, needs
from tfdist.data.spec import TASKS


def run(*arguments, cwd):
    command = [sys.executable, "-m", "tfdist.data", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_help_answers_without_tensorflow(tmp_path):
    begun = time.monotonic()
    done = run("--help", cwd=tmp_path)
    assert time.monotonic() - begun < 3  # a second on an idle machine; the tests share theirs
    assert "coco_folder" in done.stdout and "resized_crop" in done.stdout and "--sheet" in done.stdout
    code = "import sys, tfdist.data.__main__; assert not {'tensorflow', 'keras', 'matplotlib'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.thorough
@needs("camvid")
def test_the_pipeline_of_files_is_shown_stage_by_stage_with_its_bound_and_a_picture(tmp_path):
    options = ["--data-option", "cache=off", "--data-option", "size=90,120", "--augment", "crop_flip"]
    done = run(
        *("--dataset", "segmentation_folder", "--data-dir", FILES / "camvid", "--batch-size", 8, *options),
        *("--seconds", 1, "--sheet", "sheet.png"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for word in ("examples/s", "read", "decode", "check and fit", "crop_flip", "cores", "GB/s", "sheet.png"):
        assert word in done.stdout
    assert len(np.unique(np.asarray(Image.open(tmp_path / "sheet.png").convert("L")))) > 100


@pytest.mark.thorough
def test_the_pipeline_of_memory_is_shown(tmp_path):
    done = run("--dataset", "digits", "--seconds", 0.2, "--split", "test", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gather" in done.stdout and "test 300" in done.stdout and (tmp_path / "examples.png").exists()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("task", TASKS)
def test_examples_of_every_task_are_drawn(tmp_path, task):
    source = tfdist.data.load("synthetic", task=task, train=30)
    x, y = source.arrays("train")
    tfdist.data.__main__.draw_contact_sheet(tmp_path / "sheet.png", source.spec, x, y)
    assert np.asarray(Image.open(tmp_path / "sheet.png").convert("L")).std() > 5


def test_a_mistake_is_one_sentence_and_a_hint(tmp_path):
    for arguments in (["nothing"], ["digits", "--split", "dev"]):
        done = run("--dataset", *arguments, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.startswith("error: Unknown") and "hint:" in done.stderr
        assert "Traceback" not in done.stderr
