"""Keras' own tests of its trainer and its callbacks, with models of a strategy: what differs, differs by design."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import keras
import pytest

from tests.processes.jobs import ROOT

SOURCES = Path(keras.__file__).parent / "src"
CALLBACKS = [
    f"callbacks/{name}_test.py"
    for name in (
        "backup_and_restore",
        "callback",
        "csv_logger",
        "early_stopping",
        "lambda_callback",
        "learning_rate_scheduler",
        "model_checkpoint",
        "monitor_callback",
        "reduce_lr_on_plateau",
        "swap_ema_weights",
        "tensorboard",
        "terminate_on_nan",
    )
]
# docs/contract.md says each of these in a sentence.
A_STRATEGY_OF_ITS_OWN = {"test_swap_ema_weights_with_tf_distribute"}
TRACED_ONCE_PER_REPLICA_AND_REHEARSED = {"test_retracing"}
ROWS_ARE_UPDATED_BY_A_KERNEL = {
    f"test_fit_sparse_{kind}_{mode}" for kind in ("scipy", "tf") for mode in ("eager", "graph")
}
NOT_ROUNDED_UP_TO_STEPS_PER_EXECUTION = {
    f"test_steps_per_execution_steps_per_epoch_match_multi_epoch_{mode}" for mode in ("eager", "jit", "non_jit")
}
# Of packages that are not installed here.
OTHERS = "not jax and not grain and not torch"


def failed(files, folder):
    """The names of the tests in `files` that fail with models of a strategy, and how many pass."""
    for file in files:
        shutil.copy(SOURCES / file, folder)
    report = folder / "report.xml"
    options = ["-q", "-p", "tests.keras_suite.routed", "-p", "no:cacheprovider", "--rootdir", str(folder), "-k", OTHERS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", str(folder)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-3000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    wrong = {case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None}
    return wrong, len(cases) - len(wrong)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("files", "expected", "at_least"),
    [
        (
            ["trainers/trainer_test.py"],
            TRACED_ONCE_PER_REPLICA_AND_REHEARSED
            | ROWS_ARE_UPDATED_BY_A_KERNEL
            | NOT_ROUNDED_UP_TO_STEPS_PER_EXECUTION,
            140,
        ),
        (CALLBACKS, A_STRATEGY_OF_ITS_OWN, 60),
    ],
    ids=["trainer", "callbacks"],
)
def test_what_keras_tests_differs_only_by_design(tmp_path, files, expected, at_least):
    wrong, passed = failed(files, tmp_path)
    assert wrong == expected
    assert passed >= at_least
