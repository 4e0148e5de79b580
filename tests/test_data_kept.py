"""What is made from files once and kept: the index of records, and decoded examples in few files."""

from __future__ import annotations

import doctest
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from tfdist.data.input import disk_cache, tfrecords
from tfdist.data.input.disk_cache import PackedFiles
from tfdist.data.input.tfrecords import Records
from tfdist.errors import DataError

COUNT = 300


def python(code: str, *arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(processes: list[subprocess.Popen]) -> list[str]:
    found = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), [error for _, error in found]
    return [output for output, _ in found]


# The index of records


@pytest.fixture
def files(tmp_path) -> tuple[Path, ...]:
    """Three files of records with the contents b"0", b"11", b"222", ...; the second one has none."""
    import tensorflow as tf

    contents = [str(number % 10).encode() * (number + 1) for number in range(20)]
    paths = tuple(tmp_path / f"{name}.tfrecord" for name in "abc")
    for path, some in zip(paths, (contents[:12], [], contents[12:]), strict=True):
        with tf.io.TFRecordWriter(str(path)) as writer:
            for content in some:
                writer.write(content)
    return paths


def test_records_are_found_once_and_mapped_at_the_next_start(files, monkeypatch):
    found = tfrecords.index(files)
    records = Records(files, found, "label")
    contents = [str(number % 10).encode() * (number + 1) for number in range(20)]
    assert [records.read(number) for number in range(20)] == contents
    assert records.file_numbers.tolist() == [0] * 12 + [2] * 8 and isinstance(found, np.memmap)

    def scan(*arguments):
        raise AssertionError("scanned again")

    monkeypatch.setattr(tfrecords, "_records_of", scan)
    np.testing.assert_array_equal(tfrecords.index(files), found)
    assert isinstance(records.keep(range(3, 9)).ranges, np.memmap)
    assert [records.keep([5, 3]).read(number) for number in range(2)] == [contents[5], contents[3]]


def test_other_files_have_another_index(files):
    before = tfrecords.index(files)
    files[0].write_bytes(files[0].read_bytes() + files[2].read_bytes())
    assert len(tfrecords.index(files)) == len(before) + 8
    assert len(tfrecords.index(files[1:2])) == 0
    files[2].unlink()
    with pytest.raises(DataError, match=f"`{files[2]}` cannot be read"):
        tfrecords.index(files)


def test_a_file_that_ends_within_a_record_leaves_no_index(files):
    files[0].write_bytes(files[0].read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(DataError, match=f"`{files[0]}` ends within a record"):
            tfrecords.index(files)
    assert not list(disk_cache.root().glob("*.npy"))


def test_where_nothing_can_be_written_records_are_found_all_the_same(files, monkeypatch, tmp_path):
    expected = np.array(tfrecords.index(files))
    (tmp_path / "file").touch()
    monkeypatch.setenv("TFDIST_CACHE_DIR", str(tmp_path / "file"))
    np.testing.assert_array_equal(tfrecords.index(files), expected)


def test_processes_that_start_together_share_one_index(files):
    code = """
        import sys
        from pathlib import Path
        from tfdist.data.input import tfrecords
        print(tfrecords.index([Path(path) for path in sys.argv[1:]]).sum())
    """
    outputs = finish([python(code, *files) for _ in range(4)])
    assert {int(output) for output in outputs} == {tfrecords.index(files).sum()}
    assert len(list(disk_cache.root().glob("*.npy"))) == 1


# Packed files


def content(number: int) -> bytes:
    return f"{number} ".encode() * (1 + number % 50)


def test_the_synopsis_of_packed_files_runs(tmp_path):
    result = doctest.testmod(disk_cache, extraglobs={"folder": tmp_path})
    assert result.attempted and not result.failed


def test_what_was_written_is_read_now_and_later(tmp_path):
    written = PackedFiles(tmp_path / "new", COUNT)
    assert written.read(3) == b""
    for number in range(0, COUNT, 2):
        written.write(number, content(number))
    assert [written.read(number) for number in (0, 1, 8)] == [content(0), b"", content(8)]
    del written
    later = PackedFiles(tmp_path / "new", COUNT)
    assert all(later.read(number) == (b"" if number % 2 else content(number)) for number in range(COUNT))
    assert len(list((tmp_path / "new").iterdir())) == 2


WRITE = """
    import sys, time
    from pathlib import Path
    from tfdist.data.input import disk_cache
    sys.path.insert(0, sys.argv[2])
    from tests.test_data_kept import COUNT, content
    disk_cache.SECONDS_BETWEEN_ROWS = disk_cache.SECONDS_BETWEEN_LOOKS = 0.0
    files = disk_cache.PackedFiles(Path(sys.argv[1]), COUNT)
    for turn in range(2):
        for number in range(int(sys.argv[3]) * 100, int(sys.argv[3]) * 100 + 200):
            assert files.read(number) in (b"", content(number))
            if not files.read(number):
                files.write(number, content(number))
    assert all(files.read(number) == content(number) for number in range(int(sys.argv[3]) * 100, 200))
    if sys.argv[3] == "1":
        print("written", flush=True)
        time.sleep(60)
"""


@pytest.mark.thorough
def test_processes_write_and_read_at_the_same_time_and_one_that_is_killed_leaves_whole_contents(tmp_path):
    root = Path(__file__).parent.parent
    writers = [python(WRITE, tmp_path / "kept", root, part) for part in range(2)]
    finish(writers[:1])
    assert writers[1].stdout.readline() == "written\n"
    writers[1].send_signal(signal.SIGKILL)
    writers[1].wait()
    index = max((tmp_path / "kept").glob("*.index"), key=lambda path: path.stat().st_size)
    with index.open("ab") as file:
        file.write(b"half of a row")
    files = PackedFiles(tmp_path / "kept", COUNT)
    assert [files.read(number) for number in range(COUNT)] == [content(number) for number in range(COUNT)]


def test_a_row_whose_content_is_not_there_counts_as_not_written(tmp_path):
    files = PackedFiles(tmp_path, COUNT)
    files.write(1, content(1))
    files.write(2, content(2))
    del files
    (data,) = tmp_path.glob("*.data")
    data.write_bytes(data.read_bytes()[:-1])
    later = PackedFiles(tmp_path, COUNT)
    assert (later.read(1), later.read(2)) == (content(1), b"")


def test_what_another_process_writes_is_found_while_this_one_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "SECONDS_BETWEEN_ROWS", 0.0)
    monkeypatch.setattr(disk_cache, "SECONDS_BETWEEN_LOOKS", 0.01)
    one, other = PackedFiles(tmp_path, COUNT), PackedFiles(tmp_path, COUNT)
    for number in range(5):
        one.write(number, content(number))
        time.sleep(0.02)
        assert other.read(number) == content(number)
