"""The command: what it refuses and how, what it leaves behind, and how it ends when it is interrupted."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from click.testing import CliRunner

from tfdist import data, extras, models, train
from tfdist.errors import RunFolderError, UnknownNameError, UsageError
from tfdist.run import config as configs
from tfdist.run import folder as folders
from tfdist.run import recorder, resuming, schema, session
from tfdist.run.folder import RunFolder, load_record

QUICK = ["--dataset", "synthetic", "--model", "mlp", "--limit", "640"]


def run(*arguments, cwd, timeout=120, **environment):
    """The finished process of `python -m tfdist.train`."""
    return subprocess.run(
        [sys.executable, "-m", "tfdist.train", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def refuse(tmp_path, *arguments, **environment):
    """The message of a run that must end with exit code 2, one sentence and a hint."""
    done = run(*arguments, cwd=tmp_path, **environment)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "hint:" in done.stderr
    return done.stderr


def test_help_names_every_strategy_model_and_dataset_within_a_second(tmp_path):
    begun = time.monotonic()
    done = run("--help", cwd=tmp_path)
    assert time.monotonic() - begun < 3  # a second on an idle machine; the tests share theirs
    for name in ("mirrored", "cnn", "digits", "--gradient-accumulation", "--target-accuracy"):
        assert name in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_help_lists_the_options_by_what_they_are_about_and_shows_commands(tmp_path):
    headings = re.findall(r"^(\w+):$", run("--help", cwd=tmp_path).stdout, re.MULTILINE)
    assert headings == ["Data", "Model", "Optimisation", "Strategy", "Processes", "Run", "Other"]
    assert "python -m tfdist.train --strategy mirrored --model cnn" in run("--help", cwd=tmp_path).stdout


OWN_STRATEGY = """
from tfdist.strategies import base


class Mine(base.Strategy):
    name = "mine"

    def __init__(self, *, said: str = "nothing", **options):
        print("said", said)
        super().__init__(**options)

    def run(self, step):
        print("runs")
        return super().run(step)


other = 1
"""


@pytest.mark.thorough
def test_a_strategy_of_the_users_own_trains_with_options_of_its_own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_STRATEGY)
    options = ["--model", "mlp", "--dataset", "digits", "--epochs", "1", "--run-dir", "run"]
    done = run("--strategy", "mine:Mine", "--strategy-option", "said=hello", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "said hello" in done.stdout and "runs" in done.stdout
    assert json.loads((tmp_path / "run" / "run.json").read_text())["strategy"]["name"] == "mine:Mine"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["mine:other"], "The strategy `mine:other` is not callable"),
        (["mine:Path"], "`mine:Path` is not a subclass of `tfdist.strategies.base.Strategy`"),
        (["nowhere:Mine"], "No module `nowhere` for the strategy `nowhere:Mine`"),
        (["single", "--strategy-option", "said=hello"], "The strategy `single` does not know the option `said`"),
        (["single", "--strategy-option", "seed=1"], "`--strategy-option` sets `seed`, which the command sets"),
        (["single", "--strategy-option", "job_settings=1"], "`--strategy-option` sets `job_settings`"),
        (
            ["multiworker", "--timeout-seconds", "9", "--strategy-option", "timeout_seconds=9"],
            "`--timeout-seconds` and `--strategy-option timeout_seconds=...` are both set",
        ),
        (["single", "--strategy-option", "epochs=3"], "The strategy `single` does not know the option `epochs`"),
        (["single", "--strategy-option", "steps_per_call=0"], "`steps_per_call` is 0"),
    ],
)
def test_a_strategy_that_cannot_be_is_told_in_a_sentence(tmp_path, options, said):
    (tmp_path / "mine.py").write_text(OWN_STRATEGY + "from pathlib import Path")
    done = run("--strategy", *options, "--model", "mlp", "--dataset", "digits", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr and "hint: " in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("strategy", "package"), [("horovod", "horovod"), ("mpi_split", "mpi4py")])
def test_a_missing_package_is_told_once_before_processes_are_started(tmp_path, strategy, package):
    code = f"import sys; sys.modules[{package!r}] = None; from tfdist.train import main; main()"
    options = ["--strategy", strategy, "--model", "mlp", "--dataset", "digits", "--workers", "2", "--run-dir", "run"]
    done = subprocess.run(
        [sys.executable, "-c", code, *options], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    said = f"The strategy `{strategy}` needs the package `{package}`, which is not installed"
    assert (done.stdout + done.stderr).count(
        said
    ) == 1 and f"hint: run `{extras.command_of_engine(package)}`" in done.stderr
    assert not (tmp_path / "run").exists()


def test_options_are_checked_without_importing_tensorflow():
    code = (
        "import sys; from tfdist import train; "
        "from click.testing import CliRunner; "
        "r = CliRunner().invoke(train.command, ['--strategy', 'no', '--model', 'cnn', '--dataset', 'digits']); "
        "assert r.exit_code == 2, r; assert 'tensorflow' not in sys.modules and 'keras' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--strategy", "miror"], ["`miror`", "`single`", "did you mean `mirrored`?"]),
        (["--model", "cnm"], ["`cnm`", "`lenet`", "did you mean `cnn`?"]),
        (["--dataset", "fashion"], ["`fashion`", "did you mean `fashion_mnist`?"]),
        (["--optimizer", "adan"], ["`adan`", "`rmsprop`", "did you mean `adam`?"]),
        (["--dtype-policy", "float16"], ["`float16`", "`mixed_float16`"]),
        (["--epochs", "0"], ["`--epochs` is 0"]),
        (["--batch-size", "-3"], ["`--batch-size` is -3"]),
        (["--learning-rate", "0"], ["`--learning-rate`"]),
        (["--learning-rate", "inf"], ["`--learning-rate` is inf"]),
        (["--weight-decay", "inf"], ["`--weight-decay` is inf"]),
        (["--strategy", "multiworker", "--timeout-seconds", "inf"], ["cannot have `inf` as `timeout_seconds`"]),
        (
            ["--strategy", "horovod", "--callback-timeout-seconds", "nan"],
            ["cannot have `nan` as `callback_timeout_seconds`"],
        ),
        (["--strategy", "parameter_server", "--callback-timeout-seconds", "9"], ["does not take it", "`mpi_split`"]),
        (["--strategy", "mirrored", "--shard", "optimizer"], ["does not take it", "`horovod`, `mpi`, `multiworker`"]),
        (["--strategy", "single", "--strategy-option", "sync_every=2"], ["does not know the option `sync_every`"]),
        (["--strategy", "parameter_server", "--staleness", "few"], ["cannot have `few` as `staleness`"]),
        (["--strategy", "mine:Mine", "--workers", "2"], ["does not take it", "`TRAITS = Traits(processes=True)`"]),
        (["--devices", "0"], ["`--devices` is 0"]),
        (["--profile", "20:10"], ["20:10", "10:20"]),
        (["--target-accuracy", "93"], ["93", "0.9"]),
        (["--resume"], ["--run-dir"]),
        (["--quiet", "--verbose"], ["`--quiet`", "`--verbose`"]),
        (["--seed", "-1"], ["`--seed` is -1"]),
    ],
)
def test_a_wrong_option_is_one_sentence_and_a_hint(options, words):
    base = {"--strategy": "single", "--model": "mlp", "--dataset": "digits"}
    given = [part for name, value in base.items() if name not in options for part in (name, value)]
    result = CliRunner().invoke(train.command, given + options)
    assert result.exit_code == 2
    for word in [*words, "hint: "]:
        assert word in result.output


def record_of(folder, *arguments):
    """Writes the record of a run that was started with `arguments`."""
    command = ["tfdist", "train", *arguments]
    RunFolder(folder, resume=True).write(schema.example().model_copy(update={"command": command}))


BASE = ("--strategy", "multiworker", "--model", "mlp", "--dataset", "digits")


@pytest.mark.parametrize(
    ("recorded", "written"),
    [
        (["--elastic", "--host-discovery-script", "r/x"], "--elastic --host-discovery-script r/x"),
        (["--elastic", "--hostfile", "r/x"], "--elastic --hostfile r/x"),
        (["--workers", "2", "--expose"], "--expose"),
        (["--model", "r.x:build"], "--model r.x:build"),
        (["--dataset=r.x:load"], "--dataset r.x:load"),
        (["--strategy", "r.x:Mine"], "--strategy r.x:Mine"),
        (["--strategy", "horovod", "--timeline", "/etc/x"], "--timeline /etc/x"),
        (["--strategy", "horovod", "--strategy-option", "timeline=/etc/x"], "--strategy-option timeline=/etc/x"),
        (
            ["--strategy", "local_sgd", "--strategy-option", "outer=r.x:rule", "--sync-every", "2"],
            "--strategy-option outer=r.x:rule",
        ),
        (["--model", "x:\x1b[31m"], r"--model 'x:\x1b[31m'"),
    ],
)
def test_resume_takes_no_program_code_or_host_from_a_run_folder(recorded, written, working_folder):
    (working_folder / "r").mkdir()
    (working_folder / "r" / "x").write_text("#!/bin/sh\ntouch STARTED\n")
    (working_folder / "r" / "x").chmod(0o755)
    (working_folder / "r" / "x.py").write_text("open('STARTED', 'w')")
    record_of("r", *BASE, *recorded)
    result = CliRunner().invoke(train.command, ["--resume", "--run-dir", "r"])
    assert result.exit_code == 2
    assert f"The run in `r` was started with `{written}`" in result.output
    assert f"repeat it: `python -m tfdist.train --resume --run-dir r {written}`" in result.output
    assert not (working_folder / "STARTED").exists()


def test_steps_and_devices_with_a_colon_are_taken_from_a_run_folder():
    options = {"profile": "10:20", "strategy_option": ["devices=CPU:0"], "data_dir": "gs://bucket/data"}
    assert resuming.not_taken(options, {}) == {}


def test_a_failed_start_leaves_a_folder_in_which_the_same_command_starts_again(working_folder):
    (working_folder / "failing.py").write_text("import sys\ndef load(data_dir): sys.exit('Please set DATA_ROOT')\n")
    arguments = ["--strategy", "single", "--model", "mlp", "--dataset", "failing:load", "--run-dir", "run"]
    command = [sys.executable, "-m", "tfdist.train", *arguments, "--epochs", "1"]
    for _ in range(2):
        done = subprocess.run(command, cwd=working_folder, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 1 and "Please set DATA_ROOT" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and "already contains" not in done.stderr


def test_what_a_run_folder_may_not_choose_is_taken_from_the_command_line():
    recorded = {"strategy": "multiworker", "elastic": True, "host_discovery_script": "x", "model": "mine:build"}
    typed = {"elastic": True, "host_discovery_script": "y", "model": "mine:build"}
    options = resuming.merged(recorded, typed)
    assert resuming.not_taken(options, typed) == {} and options["host_discovery_script"] == "y"
    fixed = {"strategy": "multiworker", "model": "mine:build", "workers": "2"}
    assert resuming.merged(recorded, {"workers": "2"}) == fixed


def test_another_strategy_leaves_out_what_belongs_to_the_earlier_one():
    recorded = {"strategy": "horovod", "workers": "2", "compression": "bf16", "model_option": ["a=1", "b=2"]}
    options = resuming.merged(recorded, {"strategy": "single", "model_option": ["b=3"]})
    assert options == {"strategy": "single", "model_option": ["a=1", "b=3"]}
    assert resuming.merged(recorded, {"strategy": "multiworker"})["workers"] == "2"
    expected = ["--model-option", "a=1", "--model-option", "b=3", "--strategy", "single"]
    assert resuming.as_arguments(options, train.command.params) == expected


def test_a_run_folder_that_is_not_there_is_not_resumed(working_folder):
    result = CliRunner().invoke(train.command, [*BASE, "--resume", "--run-dir", "typo"])
    assert result.exit_code == 2 and "There is no run folder `typo` to resume" in result.output
    assert not (working_folder / "typo").exists()


@pytest.mark.parametrize("more", [BASE, ()])
@pytest.mark.parametrize(
    ("typed", "meant"), [("runs/mnist-cn", "runs/mnist-cnn"), ("mnits", "mnist"), ("runs", "runs/mnist-cnn")]
)
def test_a_folder_that_is_no_run_is_not_resumed_and_the_run_that_was_meant_is_named(working_folder, typed, meant, more):
    record_of("mnist", *BASE)
    record_of("runs/mnist-cnn", *BASE)
    result = CliRunner().invoke(train.command, [*more, "--resume", "--run-dir", typed])
    assert result.exit_code == 2
    if more or typed != "runs":
        assert f"hint: did you mean `--run-dir {meant}`?" in result.output
    assert {path.name for path in working_folder.rglob("*")} == {"mnist", "runs", "mnist-cnn", "run.json"}


@pytest.mark.parametrize("content", [[], ["log.txt"], ["output"], ["rank-1", ".nfs1"]])
def test_a_start_that_ended_before_its_record_is_resumed(working_folder, content):
    """As by a scheduler that starts the same command each time, with `--resume`, in a folder that is there."""
    for name in content:
        (working_folder / "run" / name).mkdir(parents=True)
    (working_folder / "run").mkdir(exist_ok=True)
    folders.require_run_or_its_start(Path("run"))


@pytest.mark.parametrize("name", ["run.json", "log.txt", "vocabulary.txt", "output/worker-0.log"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/etc/hostname"), Path.mkdir])
def test_only_regular_files_of_a_run_folder_are_opened(name, make, working_folder):
    record_of("r", *BASE, "--workers", "2")
    (working_folder / "r" / "output").mkdir()
    path = working_folder / "r" / name
    path.unlink(missing_ok=True)
    make(path)
    with pytest.raises(RunFolderError, match=r"it is a (FIFO|symbolic link|folder), not a regular file"):
        load_record("r")
        RunFolder("r", resume=True)
        folders.require_regular_outputs(Path("r/output"))


def test_a_record_beyond_its_limit_is_not_read(working_folder):
    record_of("r", *BASE)
    os.truncate("r/run.json", 1 << 40)
    with pytest.raises(RunFolderError, match="it has 1,099,511,627,776 bytes, and at most 67,108,864 are read"):
        load_record("r")


def test_dashes_and_underscores_both_work():
    parsed = CliRunner().invoke(
        train.command,
        ["--strategy", "x", "--model", "mlp", "--dataset", "digits", "--batch_size", "8", "--learning_rate", "1"],
    )
    assert "Unknown strategy `x`" in parsed.output


def test_the_optimizers_are_those_of_keras():
    found = {
        name.lower()
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and issubclass(value, keras.optimizers.Optimizer)
    }
    assert set(configs.OPTIMIZERS) == found - {"optimizer", "lossscaleoptimizer", "multioptimizer"}


def test_a_config_is_checked_when_it_is_made_in_python_too():
    with pytest.raises(UnknownNameError):
        configs.TrainConfig(strategy="single", model="mlp", dataset="digits", optimizer="no")
    with pytest.raises(UsageError):
        configs.TrainConfig(strategy="single", model="mlp", dataset="digits", limit=0)


@pytest.mark.parametrize(("dataset", "values"), [("synthetic", "bytes divided by 255"), ("digits", "divided by 16)")])
def test_the_end_says_how_the_pixels_were_scaled(tmp_path, dataset, values):
    source = data.load(dataset)
    model = keras.Sequential([keras.Input(source.spec.input_shape), keras.layers.Flatten()])
    (_, (row, text)) = recorder.rows(model, source, dataset, tmp_path / "model.keras")
    assert row == "input" and "pixels from 0 to 1 (" in text and values in text


@pytest.mark.thorough
def test_a_small_step_is_told_from_a_large_one():
    spec = data.load("synthetic").spec
    assert session.step_operations("mlp", spec, 32) == 3 * 32 * 2 * (784 * 128 + 128 * 10)
    assert session.step_is_small("mlp", spec, 32)
    assert not session.step_is_small("cnn", spec, 128)


def test_a_run_leaves_a_whole_folder_that_stock_keras_can_load(tmp_path, monkeypatch):
    done = run("--strategy", "custom", *QUICK, "--epochs", 2, "--run-dir", "r", "--tensorboard", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith("No GPU found: `custom` uses 1 CPU device")
    rows = ["test", "test", "examples/s", "training", "peak", "computation", "files", "load", "input"]
    assert [line.split()[0] for line in lines[-9:]] == rows
    assert lines[-1].split(maxsplit=1)[1] == "float32 [N, 28, 28, 1]; pixels from 0 to 1 (bytes divided by 255)"
    folder = tmp_path / "r"
    expected = {"run.json", "history.csv", "curves.png", "log.txt", "model.keras", "checkpoints", "tensorboard"}
    assert {path.name for path in folder.iterdir()} == expected | {"confusion_matrix.png"}
    found = load_record(folder)
    assert found.status == "completed"
    assert [epoch.epoch for epoch in found.epochs] == [1, 2]
    assert found.startup_seconds > 0 and found.peak_memory_bytes > 0 and found.test_metrics["accuracy"] > 0
    assert found.command[:3] == ["tfdist", "train", "--strategy"]
    assert found.typed == [f"{sys.executable} -m tfdist.train {shlex.join(found.command[2:])}"]
    said = (folder / "log.txt").read_text()
    for line in [lines[0], "Epoch 2/2", *lines[-9:]]:
        assert line in said.splitlines()
    assert "\x1b" not in said and "\b" not in said
    monkeypatch.chdir(tmp_path)
    *imports, loading = lines[-2].split(maxsplit=1)[1].split("; ")
    names = {}
    exec("; ".join(imports), names)  # as in a program that imports nothing else
    model = eval(loading, names)
    x, y = data.load("synthetic").arrays("test")
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    scores = model.evaluate(x, y, verbose=0, return_dict=True)
    assert np.isclose(scores["accuracy"], found.test_metrics["accuracy"])
    assert np.isclose(scores["loss"], found.test_metrics["loss"], atol=1e-4)


@pytest.mark.thorough
def test_a_profile_leaves_its_table_and_a_range_behind_the_end_is_a_sentence(tmp_path):
    options = ["--strategy", "single", *QUICK, "--epochs", 2, "--target-accuracy", 1e-9]  # ends after an epoch of 20
    assert run(*options, "--profile", "5:8", "--run-dir", "r", cwd=tmp_path).returncode == 0
    table = (tmp_path / "r" / "profile.txt").read_text()
    assert table.startswith("The 10 most expensive ops of 3 steps") and "…" not in table
    assert load_record(tmp_path / "r").files["profile"] == "profile.txt"
    assert table in (tmp_path / "r" / "log.txt").read_text()
    known = refuse(tmp_path, *options, "--profile", "40:50", "--run-dir", "known")
    assert "is 40:50, and training has 40 steps" in known
    late = refuse(tmp_path, *options, "--profile", "30:35", "--run-dir", "late")
    assert "Nothing was traced: training ended after 20 steps" in late
    assert load_record(tmp_path / "late").status == "stopped"


@pytest.mark.thorough
def test_every_strategy_leaves_the_same_record(tmp_path):
    """Point 7: the same fields, and on the same examples the same figures."""
    records = {}
    for name in ("single", "mirrored", "custom"):
        options = [*QUICK, "--epochs", 1, "--run-dir", name, "--quiet", "--devices", 1 if name == "single" else 2]
        done = run("--strategy", name, *options, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        records[name] = json.loads((tmp_path / name / "run.json").read_text())
    assert len({tuple(found) for found in records.values()}) == 1
    for found in records.values():
        assert found["seed"] == 0 and found["global_batch_size"] == 32
        for field in ("dataset", "initial_weights", "optimizer_steps"):
            assert found[field] and found[field] == records["single"][field], field
        elapsed = [epoch["elapsed_seconds"] for epoch in found["epochs"]]
        assert elapsed == sorted(elapsed) and elapsed[0] > found["epochs"][0]["train_seconds"]
        assert found["epochs"][0]["network_bytes"] is None
        assert found["processes"][0]["cpu_seconds"] > 0
    assert records["mirrored"]["strategy"]["replicas"] == 2


@pytest.mark.thorough
def test_a_run_is_resumed_with_its_own_options_and_what_is_given_besides(tmp_path):
    options = ["--strategy", "single", "--model", "mlp", "--dataset", "digits", "--seed", "3", "--batch-size", "64"]
    options += ["--schedule", "cosine"]
    assert run(*options, "--model-option", "width=16", "--epochs", "1", "--run-dir", "r", cwd=tmp_path).returncode == 0
    for epochs in (2, 3):
        done = run("--resume", "--run-dir", "r", "--epochs", str(epochs), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"warning: The run was started with `--epochs {epochs - 1}`" in done.stdout
        resumed = load_record(tmp_path / "r")
        assert [epoch.epoch for epoch in resumed.epochs] == list(range(1, epochs + 1))
        assert (resumed.global_batch_size, resumed.seed, resumed.model.options) == (64, 3, {"width": "16"})
        elapsed = [epoch.elapsed_seconds for epoch in resumed.epochs]
        assert elapsed == sorted(elapsed)
    assert "`elsewhere` has no readable `run.json`" in refuse(tmp_path, "--resume", "--run-dir", "elsewhere")
    assert "`--resume` needs `--run-dir`" in refuse(tmp_path, "--resume")


@pytest.mark.thorough
def test_resume_goes_on_where_the_run_stopped_and_refuses_another(tmp_path):
    base = ["--strategy", "single", *QUICK, "--run-dir", "r"]
    assert run(*base, "--epochs", 1, cwd=tmp_path).returncode == 0
    whole = ["--strategy", "single", *QUICK, "--run-dir", "whole", "--epochs", 3]
    assert run(*whole, cwd=tmp_path).returncode == 0
    assert "already contains a run" in refuse(tmp_path, *base, "--epochs", 3)
    assert "--batch-size 32" in refuse(tmp_path, *base, "--epochs", 3, "--resume", "--batch-size", 64)
    assert run(*base, "--epochs", 3, "--resume", cwd=tmp_path).returncode == 0
    resumed, unbroken = load_record(tmp_path / "r"), load_record(tmp_path / "whole")
    assert [epoch.metrics for epoch in resumed.epochs] == [epoch.metrics for epoch in unbroken.epochs]
    assert resumed.test_metrics == unbroken.test_metrics


@pytest.mark.thorough
def test_target_accuracy_stops_the_run_and_is_timed(tmp_path):
    options = [*QUICK, "--epochs", 20, "--target-accuracy", "0.3", "--run-dir", "r"]
    assert run("--strategy", "custom", *options, cwd=tmp_path).returncode == 0
    found = load_record(tmp_path / "r")
    assert found.status == "stopped"
    assert found.time_to_target.epoch == len(found.epochs) < 20
    assert found.time_to_target.seconds > 0


@pytest.mark.thorough
def test_a_model_and_a_dataset_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import keras, numpy as np\n"
        "from tfdist.data import Source\n"
        "def model(spec):\n"
        "    return keras.Sequential([keras.Input(spec.input_shape), keras.layers.Dense(spec.classes)])\n"
        "def dataset(data_dir):\n"
        "    x = np.random.default_rng(0).random((64, 4), 'float32')\n"
        "    return Source.from_arrays('mine', classes=2, train=(x, (x[:, 0] > 0.5).astype('int32')))\n"
    )
    options = ["--model", "mine:model", "--dataset", "mine:dataset", "--run-dir", "r", "--epochs", 1]
    done = run("--strategy", "custom", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_record(tmp_path / "r").model.name == "mine:model"


OWN = """
import keras, numpy as np
from tfdist.data import Source

def good(spec):
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(spec.classes)]
    return keras.Sequential([keras.Input(spec.input_shape), *layers])

def careless(spec):
    layers = [keras.layers.Flatten(), keras.layers.Dense(spec.classes, activation="softmax")]
    return keras.Sequential([keras.Input(spec.input_shape), *layers])

def reverse(spec):
    model = good(spec)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model

def binary(spec):
    model = keras.Sequential([good(spec), keras.layers.Dense(1, activation="sigmoid")])
    model.compile("adam", "binary_crossentropy")
    return model

def no_spec():
    return 1

def only_options(units=64):
    return 1

def data(data_dir):
    x = np.random.default_rng(0).integers(0, 256, (64, 4, 4, 1)).astype("uint8")
    return Source.from_arrays("mine", classes=2, train=(x, np.arange(64) % 2))

def no_folder():
    return 1
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("good", []),
        ("careless", ["ends in probabilities (softmax), and its loss expects logits", "whole numbers up to 255"]),
        (
            "binary",
            ["`--learning-rate` has no effect", "need a model that returns [2] per example, but `sequential_1`"],
        ),
        ("reverse", ["`--learning-rate` has no effect", "ends without an activation, and its loss expects prob"]),
    ],
)
def test_what_is_probably_not_meant_in_own_functions_is_told_in_sentences(tmp_path, model, told):
    (tmp_path / "mine.py").write_text(OWN)
    options = ["--model", f"mine:{model}", "--dataset", "mine:data", "--run-dir", "r", "--epochs", 1]
    done = run("--strategy", "single", *options, "--learning-rate", 0.01, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("warning:")]
    assert len(lines) == len(told)
    for line, words in zip(lines, told, strict=True):
        assert words in line


STARTS_TENSORFLOW = """
import keras, tensorflow as tf
scale = tf.constant(1 / 255)
net = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])

def unbuilt(spec):
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(spec.classes)])

def few(spec):
    return keras.Sequential([keras.Input(spec.input_shape), keras.layers.Flatten(), keras.layers.Dense(1)])
"""


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", [["single"], ["custom", "--devices", "2"], ["mirrored", "--devices", "2"]])
def test_own_code_may_use_tensorflow_where_it_is_imported(tmp_path, strategy):
    (tmp_path / "mine.py").write_text(STARTS_TENSORFLOW)
    options = ["--dataset", "digits", "--run-dir", "r", "--epochs", "1"]
    done = run("--strategy", *strategy, "--model", "mine:unbuilt", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_record(tmp_path / "r").model.parameters == 64 * 10 + 10


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("net", "The model `mine:net` is a `keras.Model`, not a function that builds a model"),
        ("few", "are [1] per example, for 10 classes"),
    ],
)
def test_an_own_model_that_cannot_be_trained_is_refused_in_a_sentence(tmp_path, model, said):
    (tmp_path / "mine.py").write_text(STARTS_TENSORFLOW)
    options = ["--strategy", "single", "--model", f"mine:{model}", "--dataset", "digits", "--run-dir", "r"]
    assert said in refuse(tmp_path, *options)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("option", "name", "words"),
    [
        ("--model", "mine:no_spec", ["does not take `spec` as its first argument", "`def no_spec(spec, ...)`"]),
        ("--model", "mine:only_options", ["does not take `spec` as its first argument"]),
        ("--model", "mine.good", ["Unknown model `mine.good`", "hint: write your own model as `mine:good`"]),
        ("--model", "mine.py:good", ["names a file", "hint: write `mine:good`"]),
        ("--model", "mine.py", ["hint: write your own model as `mine:NAME`"]),
        ("--model", "mine", ["hint: write your own model as `mine:NAME`"]),
        ("--dataset", "mine:no_folder", ["does not take `data_dir` as its first argument"]),
        ("--dataset", "mine.data", ["hint: write your own dataset as `mine:data`"]),
        ("--dataset", "./mine.py:data", ["hint: write `mine:data`"]),
    ],
)
def test_an_own_function_that_is_written_otherwise_is_answered_with_how_to_write_it(
    working_folder, option, name, words
):
    (working_folder / "mine.py").write_text(OWN)
    config = {"strategy": "single", "model": "mlp", "dataset": "digits"} | {option[2:]: name}
    with pytest.raises(UsageError) as refused:
        asked = configs.TrainConfig(**config)
        models.build(asked.model, data.load(asked.dataset).spec)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [["--devices", "CPU:7"], ["--devices", "GPU:0"]])
def test_an_unknown_device_is_named_with_the_known_ones(tmp_path, options):
    assert "`CPU:0`" in refuse(tmp_path, "--strategy", "custom", *QUICK, "--run-dir", "r", *options)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["custom", pytest.param("mirrored", marks=pytest.mark.exhaustive)])
def test_a_remainder_and_batches_smaller_than_the_replicas_train(tmp_path, strategy):
    options = ["--model", "cnn", "--dataset", "digits", "--devices", 2, "--epochs", 1]
    for size, limit in ((8, 65), (1, 3)):
        more = ["--batch-size", size, "--limit", limit, "--run-dir", f"r{size}"]
        done = run("--strategy", strategy, *options, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_another_backend_is_refused(tmp_path):
    message = refuse(tmp_path, "--strategy", "single", *QUICK, KERAS_BACKEND="jax")
    assert "`KERAS_BACKEND` is `jax`" in message


def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "file/r" in refuse(tmp_path, "--strategy", "single", *QUICK, "--run-dir", "file/r")


@pytest.mark.thorough
def test_a_loss_that_is_not_a_number_stops_the_run_at_that_step(tmp_path):
    explosive = ["--optimizer", "sgd", "--learning-rate", "1e30"]
    message = refuse(tmp_path, "--strategy", "single", *QUICK, *explosive, "--run-dir", "r")
    assert "in epoch 1 at step 2" in message
    assert load_record(tmp_path / "r").status == "failed"


@pytest.mark.thorough
@pytest.mark.parametrize("then", ["pass", "raise RuntimeError('another process has gone')"])
def test_an_interrupt_that_is_lost_on_its_way_still_ends_the_run(tmp_path, then):
    """As one that arrives while an object is being deleted, or with the end of another process."""
    script = f"""
import os, signal, sys, keras
class Deaf(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            {then}
from tfdist import train
from tfdist.run import session
of_session = session.Session._callbacks
session.Session._callbacks = lambda self, strategy: [Deaf(), *of_session(self, strategy)]
train.main()
"""
    command = [sys.executable, "-c", script, "--strategy", "single", *QUICK[:4], "--epochs", "1000", "--run-dir", "r"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 130
    assert load_record(tmp_path / "r").status == "interrupted"


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_or_sigterm_closes_the_run_within_five_seconds(tmp_path, number):
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tfdist.train",
            "--strategy",
            "single",
            *QUICK[:4],
            "--epochs",
            "100000",
            "--run-dir",
            "r",
        ],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_for((tmp_path / "r" / "history.csv").exists)
        process.send_signal(number)
        begun = time.monotonic()
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - begun < 5
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + number
    assert "--resume" in errors and "Traceback" not in errors
    found = load_record(tmp_path / "r")
    assert found.status == "interrupted" and found.epochs
    assert found.reason == ("Ctrl-C" if number == signal.SIGINT else "SIGTERM")


def _wait_for(condition, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_names_are_known_without_importing_anything_slow():
    assert set(models.names()) >= {"mlp", "cnn", "lenet"}


WHOLE = """
import keras
import tensorflow as tf
from keras import layers

class Sorted(layers.Layer):
    def call(self, x):
        return tf.sort(x, axis=0)

def build(spec):
    inputs = keras.Input(spec.input_shape)
    return keras.Model(inputs, layers.Dense(spec.classes)(layers.GlobalAveragePooling2D()(Sorted()(inputs))))
"""


@pytest.mark.thorough
def test_a_step_that_every_replica_repeats_in_part_says_so_where_the_user_looks(tmp_path):
    (tmp_path / "own.py").write_text(WHOLE)
    options = ("--strategy", "custom", "--devices", 2, "--model", "own:build", "--dataset", "digits")
    done = run(*options, "--limit", 64, "--epochs", 1, "--run-dir", tmp_path / "run", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"warning: Each replica of `custom` repeats \d+% of the computation of a step", done.stderr)
    assert "own.py, line 8" in done.stderr and "hint: the result equals that of one device" in done.stderr
