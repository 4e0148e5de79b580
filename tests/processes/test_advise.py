"""`tfdist advise` measures real links between two processes, and says how far it was from real runs."""

import re
import subprocess
import sys

import pytest


@pytest.mark.exhaustive
def test_two_processes_are_predicted_and_compared_with_runs(tmp_path):
    options = ["--model", "mlp", "--dataset", "digits", "--batch-size", "64", "--workers", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "tfdist", "advise", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in ("multiworker", "pipeline"):
        assert re.search(rf"^{name} +[\d,]+ +factor", done.stdout, re.MULTILINE), done.stdout
        assert re.search(rf"{name} on 2: [\d,]+ examples/s measured, the prediction is [+-]\d+% off", done.stdout)
