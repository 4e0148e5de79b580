"""`tfdist train --tracker`: what the trackers' own stores have of a run, on this machine and without an account."""

import json
import os
import struct
import subprocess
import sys

import pytest

OPTIONS = ["--strategy", "single", "--model", "mlp", "--dataset", "digits", "--run-dir", "run", "--seed", "3"]
METRICS = {"loss", "accuracy", "val_loss", "val_accuracy", "train_seconds", "examples_per_second"}


def train(folder, tracker, *options, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.train", *OPTIONS, "--tracker", tracker, *options],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr


def log_records(content):
    """The records of a file of Weights & Biases: LevelDB's log format, with seven bytes before the first record.

    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md.
    """
    position, parts = 7, []
    while position < len(content):
        if 32768 - position % 32768 < 7:  # a header does not cross blocks
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts.append(content[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield b"".join(parts)
            parts = []


def history(folder):
    record = json.loads((folder / "run" / "run.json").read_text(encoding="utf-8"))
    return [epoch["metrics"] for epoch in record["epochs"]]


@pytest.mark.thorough
def test_mlflow_has_the_parameters_the_metrics_and_the_folder_of_a_resumed_run(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/store.db"}
    for options in (["--epochs", "1"], ["--epochs", "3", "--resume"]):
        code, text = train(tmp_path, "mlflow", *options, **store)
        assert code == 0, text
    client = mlflow.MlflowClient(store["MLFLOW_TRACKING_URI"])
    (run,) = client.search_runs([client.get_experiment_by_name("tfdist").experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    assert run.data.params["strategy"] == "single" and run.data.params["seed"] == "3"
    assert set(run.data.metrics) >= METRICS
    steps = [(entry.step, entry.value) for entry in client.get_metric_history(run.info.run_id, "loss")]
    assert steps == [(1 + index, pytest.approx(metrics["loss"])) for index, metrics in enumerate(history(tmp_path))]
    assert len(steps) == 3
    assert {"run.json", "history.csv", "model.keras"} <= {file.path for file in client.list_artifacts(run.info.run_id)}


@pytest.mark.thorough
def test_wandb_has_the_parameters_the_metrics_and_the_folder_of_an_offline_run(tmp_path):
    pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    from wandb.proto import wandb_internal_pb2

    code, text = train(tmp_path, "wandb", "--epochs", "2")
    assert code == 0, text
    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    rows, parameters, artifacts = [], {}, []
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        for item in (*record.run.config.update, *record.config.update):
            parameters[item.key] = json.loads(item.value_json)
        if record.HasField("history"):
            rows.append({(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item})
        artifacts += [entry.path for entry in record.request.log_artifact.artifact.manifest.contents]
        artifacts += [entry.path for entry in record.artifact.manifest.contents]
    assert parameters["model"] == "mlp" and parameters["batch_size"] == 32
    assert [row["loss"] for row in rows] == pytest.approx([metrics["loss"] for metrics in history(tmp_path)])
    assert set(rows[0]) >= METRICS
    assert {"run.json", "history.csv", "model.keras"} <= set(artifacts)


@pytest.mark.thorough
def test_tensorboard_has_the_parameters_and_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    code, text = train(tmp_path, "tensorboard", "--epochs", "2")
    assert code == 0, text
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "run")).Reload()
    assert set(events.Tags()["tensors"]) >= METRICS
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    started = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert started.hparams["strategy"].string_value == "single"
    assert started.hparams["batch_size"].number_value == 32


@pytest.mark.thorough
def test_a_training_does_not_end_with_its_tracker(tmp_path):
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    code, text = train(tmp_path, "mlflow", "--epochs", "1", MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert code == 0, text
    assert text.count("warning: The tracker `mlflow` failed, and the run continues without it: ") == 1
    assert (tmp_path / "run" / "model.keras").exists()


@pytest.mark.parametrize(
    ("tracker", "said"),
    [("mlfow", "Unknown tracker `mlfow`"), ("wandb", "`--tracker wandb` needs the package `wandb`")],
)
def test_a_tracker_that_cannot_be_is_refused_before_the_training(tmp_path, tracker, said):
    hide = "import importlib.metadata as m; f = m.version; "
    hide += "m.version = lambda n: f(n) if n != 'wandb' else f('no-such-package'); "
    done = subprocess.run(
        [sys.executable, "-c", f"{hide}from tfdist.train import main; main()", *OPTIONS, "--tracker", tracker],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert said in done.stderr and "hint: " in done.stderr
    assert not (tmp_path / "run").exists()
