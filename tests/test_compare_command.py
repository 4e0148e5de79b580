"""`tfdist compare` and `tfdist report`: real runs, taken up again, with those that fail among them."""

import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from tfdist.compare import command
from tfdist.run.folder import load_record

FEW = ["--model", "mlp", "--dataset", "digits", "--steps", "5", "--epochs", "2"]


def tfdist(*arguments, cwd, timeout=300):
    """The finished process."""
    return subprocess.run(
        [sys.executable, "-m", "tfdist", *arguments],
        cwd=cwd,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.thorough
def test_two_strategies_are_measured_in_turns_and_reported(tmp_path):
    options = ["--strategies", "single,custom", *FEW, "--repeats", "2", "--learning-rate", "0.01", "--out", "study"]
    options += ["--data-dir", str(tmp_path)]  # which is kept in the study as text; `digits` has no files
    done = tfdist("compare", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # The order within a round is drawn.
    assert re.search(r"\[1/4\] round 1: (single|custom on 1), mlp on digits, global batch 32: ", done.stderr)
    assert "left] round 2: custom on 1" in done.stderr
    assert done.stderr.startswith("4 runs, ")
    assert re.search(r"^strategy +times as fast +epoch, s +warm-up, s +runs *\nsingle +1 \(base\) ", done.stdout, re.M)
    report = (tmp_path / "study" / "report.md").read_text()
    assert "| custom on 1 |" in report and "| single | 1 (base) |" in report
    record = load_record(tmp_path / "study" / "runs" / "mlp-digits-32-custom-1" / "round-1")
    assert (record.dataset.examples["train"], len(record.epochs)) == (160, 2)
    assert record.learning_rate == pytest.approx(0.01)

    assert "has a study already" in tfdist("compare", *options, cwd=tmp_path).stderr
    again = tfdist("compare", *options, "--resume", cwd=tmp_path)
    assert again.returncode == 0 and "round" not in again.stderr, again.stderr

    more = ["--price", "1", "--tensorboard", "events"]
    elsewhere = tfdist("report", "study", "--out", "elsewhere", *more, cwd=tmp_path)
    assert len(list((tmp_path / "events").glob("mlp-digits-32-*"))) == 4
    assert elsewhere.returncode == 0 and "| price |" in (tmp_path / "elsewhere" / "report.md").read_text()


def test_more_steps_than_an_epoch_has_are_refused_before_the_first_run(tmp_path):
    options = ["--strategies", "single", "--model", "mlp", "--dataset", "digits", "--steps", "43"]
    options += ["--out", str(tmp_path / "study")]
    done = CliRunner().invoke(command, options)
    assert done.exit_code == 2
    assert "`--steps` is 43, and an epoch of `digits` has 42 whole steps at a global batch of 32" in done.output
    assert not (tmp_path / "study").exists()


FAILS_ONCE = """
import keras, pathlib

def build(spec):
    if not pathlib.Path("mended").exists():
        raise ValueError("planted <b>fault</b>")
    return keras.Sequential([keras.Input(spec.input_shape), keras.layers.Flatten(), keras.layers.Dense(10)])
"""


@pytest.mark.thorough
def test_a_run_that_fails_stands_in_the_report_and_is_made_again_when_the_study_is_taken_up(tmp_path):
    (tmp_path / "own.py").write_text(FAILS_ONCE)
    options = ["--strategies", "single,custom", "--model", "own:build", *FEW[2:], "--repeats", "1", "--out", "study"]
    done = tfdist("compare", *options, cwd=tmp_path)
    assert done.returncode == 1
    report = (tmp_path / "study" / "report.md").read_text()
    assert "`single` failed in 1 of 1 runs: ValueError: planted &lt;b>fault&lt;/b>" in report
    assert "round 1: single, own:build on digits, global batch 32: failed: ValueError: planted" in done.stderr
    assert "no run did equal work and ended well" in done.stdout
    (tmp_path / "mended").touch()
    again = tfdist("compare", *options, "--resume", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "failed" not in (tmp_path / "study" / "report.md").read_text()


@pytest.mark.thorough
def test_a_run_that_takes_too_long_is_ended_with_its_processes(tmp_path):
    # It answers a request to end with exit code 0, and has failed all the same.
    waits = "import os, signal, time\n\ndef build(spec):\n    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
    (tmp_path / "own.py").write_text(f"{waits}    time.sleep(600)\n")
    options = ["--strategies", "single", "--model", "own:build", *FEW[2:], "--repeats", "1", "--out", "study"]
    done = tfdist("compare", *options, "--run-seconds", "12", cwd=tmp_path, timeout=120)
    assert done.returncode == 1
    (measured,) = (tmp_path / "study").rglob("measured.json")
    found = json.loads(measured.read_text())
    assert found["error"].startswith("It was ended after 12 s.") and found["wall_seconds"] < 40


@pytest.mark.thorough
def test_a_run_that_is_killed_and_says_nothing_is_told_by_its_exit_code(tmp_path):
    (tmp_path / "own.py").write_text(
        "import os, signal\n\ndef build(spec):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    options = ["--strategies", "single", "--model", "own:build", *FEW[2:], "--repeats", "1", "--out", "study"]
    done = tfdist("compare", *options, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "`single` failed in 1 of 1 runs" in (tmp_path / "study" / "report.md").read_text()


SLOW = """
import time
import tfdist.data

def load(data_dir=None):
    x, y = tfdist.data.load("digits").arrays("train")
    examples = {"train": 256, "validation": 0, "test": 0}
    spec = tfdist.data.DataSpec("slow", "classification", x.shape[1:], 10, examples)

    def read_at(split, indices):
        time.sleep(0.1)
        return x[indices], y[indices]

    return tfdist.data.IndexedSource(spec, read_at)
"""
INPUTS = ("--input", "real,synthetic", "--strategies", "single", "--repeats", "3", "--epochs", "3", "--out", "study")


def bounds(folder):
    """What the report says bounds the training, by the row's name."""
    report = (folder / "study" / "report.md").read_text()
    table = report.partition("## What bounds the training")[2].partition("\n- ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    return {row[0]: row[1] for row in rows[2:]}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_dataset_that_takes_its_time_for_each_batch_bounds_the_training(tmp_path):
    (tmp_path / "own.py").write_text(SLOW)
    done = tfdist("compare", *INPUTS, "--model", "mlp", "--dataset", "own:load", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The step is bound by input" in done.stdout and "Try first: prepare examples once" in done.stdout
    assert bounds(tmp_path) == {"single, mlp on own:load, global batch 32": "input"}
    runs = tmp_path / "study" / "runs"
    assert load_record(runs / "mlp-own.load-32-synthetic-single-1" / "round-0").dataset.input == "synthetic"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_digits_in_memory_do_not_bound_the_training_of_a_cnn(tmp_path):
    done = tfdist("compare", *INPUTS, "--model", "cnn", "--dataset", "digits", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (bound,) = bounds(tmp_path).values()
    assert bound in ("compute", "waiting (latency)")


ONE = ("--strategies", "single", "--model", "mlp", "--dataset", "digits")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--model", "mlp", "--dataset", "digits"), "`--strategies` is not set"),
        (("--strategies", "single,miror", "--model", "mlp", "--dataset", "digits"), "Unknown strategy `miror`"),
        (("--strategies", "single", "--model", "mpl", "--dataset", "digits"), "Unknown model `mpl`"),
        (
            ("--strategies", "single", "--model", "mlp", "--dataset", "digits", "--workers", "two"),
            "`--workers` is `two`",
        ),
        (
            ("--strategies", "single", "--model", "mlp", "--dataset", "digits", "--repeats", "0"),
            "`repeats` of the study",
        ),
        ((*ONE, "--input", "real,imagined"), "Unknown input `imagined`"),
        ((*ONE, "--price", "dear"), "`--price` is `dear`"),
        (("--matrix", "nowhere.toml"), "The study `nowhere.toml` cannot be read"),
    ],
)
def test_a_wrong_option_is_one_sentence_and_a_hint_before_anything_runs(tmp_path, options, sentence):
    done = tfdist("compare", *options, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert sentence in done.stderr and "hint:" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_runs_is_one_sentence(tmp_path):
    done = tfdist("report", ".", cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and "has no run" in done.stderr and "hint:" in done.stderr
