"""Checkpoints are written while the training goes on, from a copy, and nothing ends before the write has ended."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.test_checkpoint import ROOT, AtStep, killed, names, resumed, run
from tfdist import files
from tfdist.callbacks import Checkpoint
from tfdist.checkpointing import format as checkpoint_format
from tfdist.checkpointing import state as training_state
from tfdist.checkpointing.format import Entry, Header
from tfdist.errors import CheckpointError
from tfdist.jobs import job_environment
from tfdist.jobs.world import World

ENTRIES = 20


class Pass(AtStep):
    """Splits the training into the same calls as one that does something after the step."""

    def act(self, logs):
        pass


class HeldDisk:
    """A disk that takes nothing until `go` is set, and then fails if it is to."""

    def __init__(self, monkeypatch, error=None):
        self.go, self.begun, self.error = threading.Event(), threading.Event(), error
        self._write_whole = files.write_atomically
        monkeypatch.setattr(files, "write_atomically", self.write_atomically)

    def write_atomically(self, path, write):
        self.begun.set()
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        self._write_whole(path, write)


class Release(AtStep):
    """Has the disk take what it is given, after a step; `there` is what is in the folder before."""

    def __init__(self, step, disk, folder, after=lambda: None):
        super().__init__(step)
        self.disk, self.folder, self.after = disk, folder, after

    def act(self, logs):
        self.there = names(self.folder) if self.folder.exists() else []
        self.disk.go.set()
        self.after()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["single", "custom"])
def test_the_file_holds_the_state_of_its_step_though_the_training_went_on_meanwhile(strategy, tmp_path, monkeypatch):
    run(strategy, [Checkpoint(tmp_path / "free", every_steps=3, keep=9), Pass(5)])
    disk = HeldDisk(monkeypatch)
    release = Release(5, disk, tmp_path / "held")
    run(strategy, [Checkpoint(tmp_path / "held", every_steps=3, keep=9), release])
    assert disk.begun.is_set() and release.there == []
    first, second = (checkpoint_format.read(tmp_path / name / "step-00000003.ckpt") for name in ("free", "held"))
    for one, other in zip(first.entries, second.entries, strict=True):
        if one.group in ("model", "optimizer", "metrics"):
            np.testing.assert_array_equal(one.value, other.value)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["single", None])
def test_a_training_that_ends_has_written_its_last_checkpoint(strategy, tmp_path, monkeypatch):
    disk = HeldDisk(monkeypatch)
    threading.Timer(1.0, disk.go.set).start()
    keep = Checkpoint(tmp_path)
    run(strategy, [keep], epochs=1)
    assert names(tmp_path) == ["step-00000006.ckpt"]
    assert keep.saved == tmp_path / "step-00000006.ckpt"


def test_an_error_leaves_the_training_once_the_checkpoint_is_written(tmp_path, monkeypatch):
    disk = HeldDisk(monkeypatch)
    threading.Timer(1.0, disk.go.set).start()
    killed(5, callbacks=[Checkpoint(tmp_path, every_steps=3)])
    assert names(tmp_path) == ["step-00000003.ckpt"]


@pytest.mark.thorough
def test_a_write_that_fails_ends_the_training_at_the_next_save_at_the_latest(tmp_path, monkeypatch):
    disk = HeldDisk(monkeypatch, OSError(28, "No space left on device"))
    keep = Checkpoint(tmp_path, every_steps=2, every_epochs=None)
    with pytest.raises(CheckpointError, match=r"cannot be written to .* No space left on device"):
        run(callbacks=[keep, Release(3, disk, tmp_path)])
    assert keep.step <= 4 and keep.saved is None
    assert names(tmp_path) == []


KILLED = """
import os, signal, sys
from tests.test_checkpoint import run
from tfdist import files
from tfdist.callbacks import Checkpoint

whole = files.write_atomically

def half(path, write):
    def cut(temporary):
        write(temporary)
        os.truncate(temporary, temporary.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    whole(path, cut if path.stem.endswith("12") else write)

files.write_atomically = half
run(callbacks=[Checkpoint(sys.argv[1])], epochs=3)
"""


@pytest.mark.thorough
def test_a_process_that_is_killed_as_it_writes_leaves_the_checkpoint_before(tmp_path):
    ended = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=ROOT, check=False)
    assert ended.returncode == -signal.SIGKILL
    keep = Checkpoint(tmp_path, resume=True)
    resumed(callbacks=[keep], epochs=2)
    assert keep.resumed_from.name == "step-00000006.ckpt"
    assert names(tmp_path) == ["step-00000006.ckpt", "step-00000012.ckpt"]


TERMINATED = """
import os, pathlib, signal, sys, time
from tfdist import files
from tfdist.checkpointing.writer import Writer
from tfdist.jobs import process_exit

def write():
    path = pathlib.Path(sys.argv[1])

    def slowly(temporary):
        temporary.write_text("who")
        time.sleep(1.5)
        temporary.write_text("whole")

    files.write_atomically(path, slowly)
    return path

with process_exit.closed_by(lambda status, reason: None):
    Writer().start(write)
    while not list(pathlib.Path(sys.argv[1]).parent.iterdir()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("grace_seconds", "left"),
    [(None, ["whole"]), ("4", ["whole"]), ("0.4", [])],
    ids=["without_a_limit", "within_the_grace", "longer_than_the_grace"],
)
def test_sigterm_waits_for_the_checkpoint_under_way_as_long_as_the_launcher_does(tmp_path, grace_seconds, left):
    told = {} if grace_seconds is None else {job_environment.END_SECONDS: grace_seconds}
    began = time.monotonic()
    command = [sys.executable, "-c", TERMINATED, tmp_path / "file"]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | told, check=False)
    assert ended.returncode == 128 + signal.SIGTERM
    assert [path.read_text() for path in tmp_path.iterdir()] == left and time.monotonic() - began < 50


def test_each_array_is_free_once_it_is_written(tmp_path, monkeypatch):
    entries = [Entry("model", str(number), np.full(4, number)) for number in range(ENTRIES)]
    held = []
    storable = checkpoint_format.little_endian
    monkeypatch.setattr(checkpoint_format, "little_endian", lambda value: held.append(len(entries)) or storable(value))
    path = checkpoint_format.write(tmp_path, Header(0, 0, 1, "SGD"), entries)
    assert held == list(range(ENTRIES - 1, -1, -1))
    assert [int(entry.value[0]) for entry in checkpoint_format.read(path).entries] == list(range(ENTRIES))


class Peer:
    """The second of two processes, which reads no state."""

    metrics_by_process = True
    world = World(1, 2, 1, 2, "a test")

    def exchange(self, message):
        return [message, message]


def test_only_the_chief_copies_the_state():
    model = run(epochs=1).model
    entries = training_state.snapshot(model, Peer())
    assert {entry.group for entry in entries} == {"metrics"}
    assert all(entry.by_replica and len(entry.value) == 2 for entry in entries)


def test_what_the_others_are_told_of_a_checkpoint_takes_no_memory_for_its_weights(tmp_path):
    found = run(callbacks=[Checkpoint(tmp_path)], epochs=1)
    stored = checkpoint_format.read(tmp_path / "step-00000006.ckpt")
    told = checkpoint_format.described_by(stored.described(without=training_state.is_shared))
    assert told.header == stored.header
    assert training_state.first_difference(found.model, told.entries, ("model", "optimizer", "metrics")) is None
    for entry, there in zip(told.entries, stored.entries, strict=True):
        assert entry.elsewhere == (there.group in ("model", "optimizer"))
        assert (entry.value.strides == (0,) * entry.value.ndim) == entry.elsewhere or entry.value.size < 2
