"""Tests that start processes of their own: `scripts/run_tests.sh` leaves the cores to them."""

from pathlib import Path

import pytest


@pytest.fixture
def script(tmp_path):
    """Writes a program into the test's folder; gives its name there."""

    def write(text):
        (tmp_path / "script.py").write_text(text)
        return "script.py"

    return write


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.processes)
