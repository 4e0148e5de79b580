"""Atomic writes of files."""

import os
import stat
import subprocess
import sys

import pytest

from tfdist import files


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o007])
def test_a_file_gets_the_permissions_that_the_umask_gives(tmp_path, mask):
    script = (
        f"import os, pathlib, sys; os.umask({mask}); from tfdist import files\n"
        "files.write_text(pathlib.Path(sys.argv[1]), 'text')"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "file.txt"], check=True)
    assert stat.S_IMODE((tmp_path / "file.txt").stat().st_mode) == 0o666 & ~mask
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]


def test_a_write_never_changes_the_umask_which_all_threads_share(tmp_path, monkeypatch):
    changes = []
    monkeypatch.setattr(os, "umask", changes.append)
    files.write_text(tmp_path / "file.txt", "text")
    assert not changes
