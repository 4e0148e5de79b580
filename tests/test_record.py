"""The run folder: files written whole, a schema that is documented, errors that say what to do."""

import csv
import doctest
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from pydantic import BaseModel, ValidationError

from tfdist import terminal
from tfdist.errors import RunFolderError
from tfdist.run import folder as folders
from tfdist.run import recorder, schema
from tfdist.run.config import TrainConfig
from tfdist.run.folder import RunFolder, load_record, require_regular_outputs
from tfdist.run.schema import EpochRecord, RunRecord

SCHEMA = Path(__file__).parent.parent / "docs" / "run.json.md"


def run_of(losses, *, validation=True, accuracy=True):
    run = schema.example()
    for number, loss in enumerate(losses, start=1):
        logs = {"loss": loss}
        if accuracy:
            logs["accuracy"] = 0.9 - 0.1 * loss
        if validation:
            logs |= {f"val_{name}": value + 0.05 for name, value in logs.items()}
        run.epochs.append(EpochRecord.from_logs(number, logs, train_seconds=1.5, evaluation_seconds=0.5))
    return run


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "runs" / "first")


@pytest.mark.parametrize("module", [schema, folders])
def test_the_synopsis_runs(module):
    assert doctest.testmod(module).failed == 0


def test_neither_tensorflow_nor_keras_nor_matplotlib_is_imported():
    code = (
        "import sys, tfdist.run.folder; print([m for m in ('tensorflow', 'keras', 'matplotlib') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout == "[]\n"


class TestRunJson:
    def test_what_is_written_is_read_back(self, folder):
        run = run_of([0.5, 0.25])
        run.status, run.reason = "stopped", "the target was reached"
        run.test_metrics = {"loss": 0.3}
        run.time_to_target = schema.TargetRecord(monitor="val_accuracy", target=0.9, seconds=3.0, epoch=2)
        folder.write(run)
        assert load_record(folder.path) == run

    def test_numbers_that_are_not_finite_are_null_in_strict_json(self, folder):
        run = run_of([math.nan, math.inf, -math.inf])
        run.test_metrics = {"loss": math.nan}
        folder.write(run)

        def refuse(constant):
            raise AssertionError(f"{constant} is not JSON")

        written = json.loads(folder.run_json.read_text(encoding="utf-8"), parse_constant=refuse)
        assert [epoch["metrics"]["loss"] for epoch in written["epochs"]] == [None] * 3
        assert written["test_metrics"] == {"loss": None}
        assert load_record(folder.path).epochs[0].metrics["val_loss"] is None

    def test_numpys_scalars_are_numbers(self):
        epoch = EpochRecord.from_logs(1, {"loss": np.float32(0.5)}, np.float64(1))
        assert epoch.metrics == {"loss": 0.5}

    def test_the_callbacks_figures_are_no_metrics(self):
        logs = {"loss": 0.5, "examples_per_second": 10.0, "step_seconds": 0.1, "peak_memory_bytes": 7}
        epoch = EpochRecord.from_logs(1, logs, 1.0)
        assert epoch.metrics == {"loss": 0.5}
        assert (epoch.examples_per_second, epoch.step_seconds) == (10.0, 0.1)

    def test_it_says_when_and_where_without_naming_the_machine(self, folder):
        folder.write(schema.example())
        written = json.loads(folder.run_json.read_text(encoding="utf-8"))
        assert written["schema_version"] == schema.SCHEMA_VERSION
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", written["started"])
        assert written["machine"]["cores"] >= 1
        assert written["machine"]["memory_bytes"] > 1e8
        assert written["machine"]["cpu"]
        assert written["versions"]["tensorflow"].startswith("2.")
        assert f'"{os.uname().nodename}"' not in folder.run_json.read_text(encoding="utf-8")

    def test_metrics_of_a_process_are_named_where_they_are_not_those_of_the_chief(self):
        figures = {"peak_memory_bytes": 1, "peak_gpu_memory_bytes": None}
        found = schema.ProcessRecord.of_all(
            [figures | {"metrics": {"loss": loss, "accuracy": None}} for loss in (0.5, 0.5, 0.25)]
        )
        assert [process.differing_metrics for process in found] == [None, None, {"loss": 0.25, "accuracy": None}]

    def test_mistakes_of_the_writer_are_refused(self):
        run = schema.example()
        with pytest.raises(ValidationError):
            run.status = "finished"
        with pytest.raises(ValidationError):
            EpochRecord.from_logs(0, {}, 1.0)
        with pytest.raises(ValidationError):
            RunRecord(**run.model_dump(), batch_size=3)

    def test_two_records_share_no_epochs(self):
        run_of([0.5])
        assert schema.example().epochs == []

    def test_a_write_that_fails_leaves_the_record_before(self, folder, monkeypatch):
        folder.write(run_of([0.5]))

        def full(path):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("tfdist.files.sync", full)
        with pytest.raises(RunFolderError, match="No space left on device"):
            folder.write(run_of([0.5, 0.4]))
        monkeypatch.undo()
        assert len(load_record(folder.path).epochs) == 1
        assert [path.name for path in folder.path.iterdir()] == ["run.json"]


class TestLoad:
    def test_no_record_is_refused(self, tmp_path):
        with pytest.raises(RunFolderError, match=r"no readable `run\.json`.*No such file"):
            load_record(tmp_path)

    @pytest.mark.parametrize("version", [11, 12])
    def test_a_newer_schema_is_refused_by_its_version(self, folder, version):
        folder.write(schema.example())
        written = json.loads(folder.run_json.read_text()) | {"schema_version": version, "new_field": 1}
        folder.run_json.write_text(json.dumps(written))
        with pytest.raises(RunFolderError, match=f"schema version {version}.*up to 10") as error:
            load_record(folder.path)
        assert "upgrade" in error.value.hint

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "the whole file: Invalid JSON"),
            ('{"schema_version": 1, "comm', "the whole file: Invalid JSON"),
            ("[]", "the whole file"),
            ("{}", "schema_version: Field required"),
            ('{"schema_version": 1}', "command: Field required"),
            ('{"schema_version": 0}', "schema_version: Input should be greater"),
        ],
    )
    def test_a_file_that_is_no_record_is_refused_with_the_place(self, folder, text, problem):
        folder.run_json.write_text(text)
        with pytest.raises(RunFolderError, match=f"not a valid record of a run: {problem}"):
            load_record(folder.path)

    def test_bytes_that_are_no_text_are_refused(self, folder):
        folder.run_json.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(RunFolderError, match="not a valid record"):
            load_record(folder.path)


class TestRunFolder:
    def test_it_is_made_with_its_parents(self, folder):
        assert folder.path.is_dir()
        assert list(folder.path.iterdir()) == []

    def test_its_files_lie_in_it(self, folder):
        names = ["run_json", "history", "curves", "log", "profile", "tensorboard", "checkpoints", "model"]
        paths = [getattr(folder, name) for name in names]
        assert {path.parent for path in paths} == {folder.path}
        assert sorted(path.name for path in paths) == sorted(folders._NAMES)

    def test_a_path_below_a_regular_file_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(RunFolderError, match=r"cannot be written.*Not a directory") as error:
            RunFolder(tmp_path / "file" / "run")
        assert "--run-dir" in error.value.hint

    def test_a_regular_file_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(RunFolderError, match="cannot be written"):
            RunFolder(tmp_path / "file")

    def test_a_folder_that_takes_no_files_is_refused(self):
        with pytest.raises(RunFolderError, match="cannot be written"):
            RunFolder("/proc/self")  # not even root may make a file there

    def test_a_folder_with_another_run_is_refused_and_left_as_it_is(self, folder):
        folder.write(schema.example())
        before = folder.run_json.read_bytes()
        with pytest.raises(RunFolderError, match=r"already contains a run: `run\.json`") as error:
            RunFolder(folder.path)
        assert "--resume" in error.value.hint
        assert folder.run_json.read_bytes() == before

    @pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
    def test_a_link_in_place_of_a_folder_is_refused(self, folder, tmp_path, name):
        folder.write(run_of([0.5]))
        (folder.path / name).symlink_to(tmp_path)
        with pytest.raises(RunFolderError, match=rf"`{folder.path / name}` of the run folder is a symbolic link"):
            RunFolder(folder.path, resume=True)

    def test_a_link_to_a_run_folder_is_one(self, folder, tmp_path):
        folder.write(run_of([0.5]))
        (tmp_path / "link").symlink_to(folder.path)
        RunFolder(tmp_path / "link", resume=True)

    @pytest.mark.parametrize("kind", ["rank-1", "output"])
    def test_a_link_in_place_of_the_files_of_another_process_is_refused(self, folder, tmp_path, kind):
        (folder.path / kind).symlink_to(tmp_path)
        with pytest.raises(RunFolderError, match="is a symbolic link"):
            RunFolder(folder.path, rank=1) if kind == "rank-1" else require_regular_outputs(folder.path / kind)

    def test_with_resume_that_run_goes_on(self, folder):
        folder.write(run_of([0.5]))
        assert len(load_record(RunFolder(folder.path, resume=True).path).epochs) == 1

    def test_foreign_files_are_no_run(self, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        RunFolder(tmp_path)
        assert (tmp_path / "notes.txt").read_text() == "mine"


class TestHistory:
    def read(self, folder):
        with open(folder.history, encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def test_it_has_a_row_an_epoch_and_every_epochs_metrics(self, folder):
        run = run_of([0.5, math.nan], validation=False)
        run.epochs.append(EpochRecord.from_logs(3, {"loss": 0.25, "val_loss": 0.3}, 1.0))
        folder.write_history(run)
        rows = self.read(folder)
        assert [row["epoch"] for row in rows] == ["1", "2", "3"]
        assert [row["loss"] for row in rows] == ["0.5", "", "0.25"]
        assert [row["val_loss"] for row in rows] == ["", "", "0.3"]
        assert rows[0]["train_seconds"] == "1.5"

    def test_rows_are_appended_until_a_metric_is_new_or_the_file_has_changed(self, folder):
        run = run_of([0.5], validation=False)
        for epoch, logs in enumerate([{"loss": 0.4}, {"loss": 0.3}, {"loss": 0.2, "val_loss": 0.3}, {"loss": 0.1}], 2):
            folder.write_history(run)
            file = folder.history.stat().st_ino
            if epoch == 3:
                folder.history.write_text("edited\n")
            run.epochs.append(EpochRecord.from_logs(epoch, logs, 1.0))
            folder.write_history(run)
            assert (folder.history.stat().st_ino == file) == (epoch in (2, 5))
            assert [row["epoch"] for row in self.read(folder)] == [str(number + 1) for number in range(epoch)]
        assert [row["val_loss"] for row in self.read(folder)] == ["", "", "", "0.3", ""]
        del run.epochs[1:]  # as after a restart from an earlier checkpoint
        folder.write_history(run)
        assert [row["epoch"] for row in self.read(folder)] == ["1"]

    def test_before_the_first_epoch_it_has_the_heading(self, folder):
        folder.write_history(schema.example())
        assert folder.history.read_text().startswith("epoch,train_seconds,evaluation_seconds,")


class TestCurves:
    @pytest.mark.parametrize(
        "run",
        [
            run_of([0.9, 0.5, 0.3]),
            run_of([0.9]),
            run_of([0.9, math.nan, math.nan, 0.3]),
            run_of([math.nan]),
            run_of([0.9, 0.5], validation=False),
        ],
        ids=["three epochs", "one epoch", "a gap", "nothing finite", "no validation"],
    )
    def test_a_picture_of_two_panels_is_drawn(self, folder, run):
        folder.draw_curves(run)
        height, width, _ = imread(folder.curves).shape
        assert 2 * height < width < 3 * height

    def test_without_a_second_metric_there_is_one_panel(self, folder):
        folder.draw_curves(run_of([0.9, 0.5], accuracy=False))
        height, width, _ = imread(folder.curves).shape
        assert height < width < 2 * height

    def test_before_the_first_epoch_there_is_no_picture(self, folder):
        folder.draw_curves(schema.example())
        assert not folder.curves.exists()

    def panel(self, run, name):
        axes = Figure().subplots()
        folders._draw_panel(axes, run.epochs, name)
        return axes, {line.get_label(): line for line in axes.lines}

    def test_the_best_validation_epoch_is_marked(self):
        run = run_of([0.9, 0.3, 0.5])
        _, lines = self.panel(run, "loss")
        assert list(lines["best: 0.35 in epoch 2"].get_xdata()) == [2]
        _, lines = self.panel(run, "accuracy")
        assert list(lines["best: 92.00 % in epoch 2"].get_xdata()) == [2]

    def test_without_validation_the_best_training_epoch_is_marked(self):
        _, lines = self.panel(run_of([0.9, 0.3, 0.5], validation=False), "loss")
        assert "best: 0.3 in epoch 2" in lines
        assert "validation" not in lines

    def test_what_is_not_finite_is_a_gap(self):
        _, lines = self.panel(run_of([0.9, math.nan, 0.5]), "loss")
        np.testing.assert_equal(list(lines["training"].get_ydata()), [0.9, math.nan, 0.5])

    def test_axes_have_names_and_units_and_lines_differ_without_colour(self):
        axes, lines = self.panel(run_of([0.9, 0.5]), "accuracy")
        assert axes.get_xlabel() == "epoch"
        assert axes.get_ylabel() == "accuracy (%)"
        assert lines["training"].get_linestyle() != lines["validation"].get_linestyle()
        assert lines["training"].get_marker() != lines["validation"].get_marker()
        assert axes.get_legend() is not None

    def test_the_title_names_model_dataset_strategy_and_what_went_wrong(self):
        run = run_of([0.9])
        assert folders.title_of(run) == "cnn, fashion_mnist, mirrored on 2 replicas"
        run.status = "failed"
        assert folders.title_of(run).endswith("(failed)")

    def test_curves_that_cannot_be_drawn_are_a_warning(self, folder, monkeypatch):
        shown = io.StringIO()
        monkeypatch.setattr(terminal, "_terminal", [shown])
        folder.path.rmdir()
        folder.path.write_text("a file now")
        folder.draw_curves(run_of([0.9]))
        assert "curves.png` cannot be written, and the run continues without it" in shown.getvalue()


class TestResumed:
    @pytest.mark.parametrize(
        ("schedule", "before", "now", "done", "warning"),
        [
            ("constant", 2, 5, 2, None),
            ("cosine", 5, 5, 2, None),
            ("cosine", None, 5, 2, None),
            ("cosine", 2, 5, 2, "was started with `--epochs 2`, and it is resumed with `--epochs 5`"),
            ("constant", 2, 2, 2, "The run has trained 2 epochs already, and `--epochs` is 2: the model is only"),
        ],
    )
    def test_what_is_different_in_it_is_warned_of(self, schedule, before, now, done, warning):
        config = TrainConfig("single", "mlp", "digits", epochs=now, schedule=schedule)
        earlier = run_of([0.5] * done).model_copy(update={"planned_epochs": before})
        found = recorder.resume_warning(config, earlier)
        assert found is None if warning is None else warning in found


class TestSchema:
    def documented(self):
        sections = re.split(r"^## ", SCHEMA.read_text(encoding="utf-8"), flags=re.M)[1:]
        return {
            section.split("\n", 1)[0].strip(): re.findall(r"^\| `(\w+)` \|", section, flags=re.M)
            for section in sections
        }

    def models(self):
        found = {}

        def visit(model):
            found[model.__name__] = list(model.model_fields)
            for field in model.model_fields.values():
                for part in [field.annotation, *getattr(field.annotation, "__args__", ())]:
                    if isinstance(part, type) and issubclass(part, BaseModel):
                        visit(part)

        visit(RunRecord)
        return found

    def test_the_documented_fields_are_the_records_in_their_order(self):
        assert self.documented() == self.models()

    def test_the_documented_version_and_statuses_are_the_records(self):
        text = SCHEMA.read_text(encoding="utf-8")
        assert text.startswith(f"# `run.json`, schema version {schema.SCHEMA_VERSION}\n")
        for status in schema.Status.__args__:
            assert f"`{status}`" in text
