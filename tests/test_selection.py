"""Which tests `make test` runs, and which of the others CI runs with a commit."""

import os
import subprocess
import sys

import pytest

from tests.processes.jobs import ROOT

CONFTEST = """
from tests import selection


def pytest_addoption(parser):
    parser.addoption("--seventh-of")


def pytest_configure(config):
    for mark in ("thorough", "sampled", "exhaustive", "processes", "independent"):
        config.addinivalue_line("markers", f"{mark}: one of tfdist's")


def pytest_collection_modifyitems(config, items):
    selection.mark_samples(items)
    if config.getoption("--seventh-of"):
        items[:] = selection.in_seventh(items, config.getoption("--seventh-of"))
"""

TESTS = """
import pytest


def test_quick(): pass


@pytest.mark.thorough
@pytest.mark.parametrize("case", range(9))
def test_thorough(case): pass


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [0, 1, 2, 3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_sampled(case): pass
"""

A_JOB = """
import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.processes]


@pytest.mark.parametrize("case", range(3))
def test_of_a_job(case): pass
"""

APART = """
import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.processes, pytest.mark.independent]


@pytest.mark.parametrize("case", range(7))
def test_of_its_own_job(case): pass
"""


@pytest.fixture
def collected(tmp_path):
    """`collected(*arguments)`: the names of the tests that pytest collects."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one_process.py").write_text(TESTS)
    (tmp_path / "test_matrix.py").write_text(APART)
    for name in ("a", "b"):
        (tmp_path / f"test_job_{name}.py").write_text(A_JOB)

    def run(*arguments):
        command = (sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *arguments)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 5), done.stdout + done.stderr
        return [line for line in done.stdout.splitlines() if "::" in line]

    return run


def test_the_quick_tests_have_so_many_cases_of_each_as_its_mark_says(collected):
    names = [name.partition("::")[2] for name in collected("-m", "not thorough and not exhaustive")]
    assert names == ["test_quick", "test_sampled[0]", "test_sampled[2]"]


def test_seven_commits_run_each_thorough_test_once_and_those_of_a_job_together(collected):
    chosen = ("-m", "thorough and not exhaustive")
    sevenths = [collected("--seventh-of", f"abcde{number}", *chosen) for number in range(7)]
    assert sorted(name for names in sevenths for name in names) == sorted(collected(*chosen))
    for file in ("test_job_a.py", "test_job_b.py"):
        assert sorted(sum(file in name for name in names) for names in sevenths) == [0] * 6 + [3]
    assert all(sum("test_matrix.py" in name for name in names) == 1 for names in sevenths)
