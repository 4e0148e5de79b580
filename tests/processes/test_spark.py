"""Jobs on Spark: a real cluster of two executors with one core each, on this machine."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.jobs import ROOT, clean_environment

pytest.importorskip("pyspark", reason="PySpark is not installed: `pip install pyspark`")
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.independent,
    pytest.mark.skipif(shutil.which("java") is None, reason="needs Java: run scripts/install_java.sh"),
]

PROGRAM = Path(__file__).with_name("spark_jobs.py")


def run(name, folder):
    done = subprocess.run(
        [sys.executable, PROGRAM, name, folder],
        cwd=folder,
        env=clean_environment() | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_data_frame_trains_in_two_tasks_as_on_one_device(tmp_path):
    text = run("training", tmp_path)
    assert "ranks 0 1 rows 160 160\n" in text
    assert "equal\n" in text


def test_a_failed_task_ends_the_stage_and_is_named(tmp_path):
    raised, killed, slots = run("failures", tmp_path).splitlines()
    assert raised.startswith("raised TfdistError worker 1 (")
    assert raised.endswith("raised `ValueError`: the rate is negative soon")
    assert "worker 1 (" in killed
    assert "was ended by SIGKILL" in killed and killed.endswith(" soon")
    assert slots == "slots ClusterError `workers` is 3, and Spark has 2 task slots after 1 s"
