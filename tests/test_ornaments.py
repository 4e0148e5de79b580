"""A picture, a log or a trace that cannot be written is named, and the training goes on; what is essential ends it."""

import contextlib
import io

import keras
import numpy as np
import pytest

from tfdist import callbacks, terminal
from tfdist.errors import RunFolderError
from tfdist.run import schema, session
from tfdist.run.folder import RunFolder, load_record


@pytest.fixture
def said(monkeypatch):
    """What the user is shown."""
    shown = io.StringIO()
    monkeypatch.setattr(terminal, "_terminal", [shown])
    return shown


def recorded():
    record = schema.example()
    record.epochs = [schema.EpochRecord.from_logs(1, {"loss": 0.5, "accuracy": 0.5}, 1.0)]
    return record


def fill(disk):
    with contextlib.suppress(OSError), (disk / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_full_disk_costs_the_picture_and_the_table_but_not_the_run(disk, said):
    folder = RunFolder(disk / "run")
    folder.write(recorded())
    fill(disk)
    folder.write_history(recorded())
    folder.draw_curves(recorded())
    lines = said.getvalue()
    for path in (folder.history, folder.curves):
        assert (
            f"warning: `{path}` cannot be written, and the run continues without it: No space left on device" in lines
        )
    assert not [path for path in folder.path.iterdir() if path.name.startswith(".")]


def test_a_row_that_does_not_fit_on_the_disk_leaves_the_table_as_it_was(disk, said):
    folder, record = RunFolder(disk / "run"), recorded()
    folder.write_history(record)
    fill(disk)
    before = folder.history.read_text()
    for number in range(2, 200):  # more than the rest of the last block
        record.epochs.append(schema.EpochRecord.from_logs(number, {"loss": 0.5, "accuracy": 0.5}, 1.0))
    folder.write_history(record)
    assert folder.history.read_text() == before
    assert "No space left on device" in said.getvalue()
    (disk / "fill").unlink()
    folder.write_history(record)
    assert len(folder.history.read_text().splitlines()) == 200


def test_a_full_disk_for_the_record_is_an_error_that_names_it(disk):
    folder = RunFolder(disk / "run")
    folder.write(recorded())
    fill(disk)
    with pytest.raises(RunFolderError, match=rf"`{folder.run_json}`: No space left on device"):
        folder.write(recorded())
    assert load_record(folder.path).epochs


def fitted(callback):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.zeros((32, 4), np.float32)
    history = model.fit(x, x[:, :1], batch_size=4, epochs=2, callbacks=[callback], verbose=0)
    return len(history.history["loss"])


def test_tensorboard_logs_that_cannot_be_written_are_named_once(tmp_path, said):
    path = tmp_path / "file"
    path.touch()
    board = keras.callbacks.TensorBoard(str(path / "logs"))
    assert fitted(session._that_may_fail(board, path / "logs")) == 2
    assert said.getvalue().count(f"warning: `{path / 'logs'}` cannot be written") == 1


def test_a_trace_that_cannot_be_written_is_named(tmp_path, said):
    path = tmp_path / "file"
    path.touch()
    assert fitted(callbacks.Profile(2, 4, path / "logs")) == 2
    assert said.getvalue().count(f"warning: The trace cannot be written to `{path / 'logs'}`") == 1
