"""What a newcomer meets on the command line: the help, the lists of names, and answers to mistakes."""

import doctest
import json
import os
import re
import subprocess
import sys
import warnings

import click
import pytest
from click.testing import CliRunner

import tfdist
from tfdist import catalogue, data, models, strategies, terminal, train, world
from tfdist.__main__ import main
from tfdist.command_line import mistakes, options
from tfdist.data import spec
from tfdist.errors import CostWarning, JobWarning
from tfdist.jobs import job_environment

CONTEXT = click.Context(main)
COMMANDS = [(name, main.get_command(CONTEXT, name)) for name in sorted(main.list_commands(CONTEXT))]
EVERY_COMMAND = pytest.mark.parametrize(("name", "command"), [*COMMANDS, ("world", world.command)])


def answer(*arguments, code=2):
    """What `tfdist` says in answer to these arguments."""
    done = CliRunner().invoke(main, arguments, prog_name="tfdist")
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize("module", [mistakes, options])
def test_the_synopses_run(module):
    failed, tried = doctest.testmod(module)
    assert tried and not failed


@pytest.mark.parametrize(
    ("command", "typed", "meant"),
    [
        ("train", "--lr", "--learning-rate"),
        ("train", "--bs", "--batch-size"),
        ("train", "--epoch", "--epochs"),
        ("train", "--rate", "--learning-rate"),
        ("train", "--learnin_rate", "--learning-rate"),
        ("verify", "--device", "--devices"),
        ("launch", "--worker", "--workers"),
        ("compare", "--strategy", "--strategies"),
        ("memory", "--replica", "--replicas"),
        ("simulate", "--algorithms", "--algorithm"),
        ("profile", "--tops", "--top"),
        ("doctor", "--no-allreduce", "--no-all-reduce"),
        ("models", "--jsn", "--json"),
    ],
)
def test_an_unknown_option_is_answered_with_the_one_that_was_probably_meant(command, typed, meant):
    said = answer(command, typed, "1")
    assert said.startswith(f"error: `tfdist {command}` has no option `{typed.replace('_', '-')}`\n\nhint: ")
    assert f"did you mean `{meant}`? `tfdist {command} --help` lists the options" in said


def test_an_option_like_no_other_is_answered_with_the_help():
    said = answer("train", "--xyzzy")
    assert said == "error: `tfdist train` has no option `--xyzzy`\n\nhint: `tfdist train --help` lists the options\n"


def test_all_missing_options_are_named_at_once_and_where_their_names_are_listed():
    assert answer("train") == (
        "error: `--dataset`, `--model` and `--strategy` are not set\n\n"
        "hint: add `--dataset NAME --model NAME --strategy NAME`; `tfdist datasets`, `tfdist models` and "
        "`tfdist strategies` list the names\n"
    )
    assert "`--strategies`, `--model` and `--dataset` are not set" in answer("compare")
    assert "`--model` and `--strategy` are not set" in answer("verify", "--dataset", "digits")
    assert "`--model` is not set" in answer("train", "--dataset", "digits", "--strategy", "single")
    assert "`--algorithm` is not set" in answer("simulate", "--model", "mlp", "--dataset", "digits")
    assert "`RUN` is not set\n\nhint: add `RUN`" in answer("profile")


def test_what_a_recipe_sets_is_not_missing():
    assert answer("train", "--recipe", "fashion_mnist-cnn").startswith("error: `--strategy` is not set")


ONE_DEVICE = ("--model", "mlp", "--dataset", "digits")


@pytest.mark.parametrize(
    ("arguments", "sentence", "hint"),
    [
        (["train", "--epochs", "many", *ONE_DEVICE, "--strategy", "single"], "`--epochs` is `many`", "a whole number"),
        (["memory", *ONE_DEVICE, "--replicas", "0"], "`--replicas` is `0`", "use a whole number, 1 or more"),
        (
            ["simulate", *ONE_DEVICE, "--algorithm", "gosgd", "--probability", "2"],
            "`--probability` is `2`",
            "from 0 to 1",
        ),
        (["train", "--quiet=yes"], "`--quiet` is a flag, and takes no value", "write `--quiet` alone"),
        (["train", "--epochs"], "`--epochs` is set without a value", "write `--epochs N`"),
        (["train", "--resume", "--run-dir"], "`--run-dir` is set without a value", "write `--run-dir FOLDER`"),
        (
            ["train", *ONE_DEVICE, "--strategy", "single", "mirrored"],
            "`tfdist train` does not take the argument `mirrored`",
            "leave it out",
        ),
        (["profile", "run", "other"], "does not take the argument `other`", "leave it out"),
        (["trian"], "Unknown command `trian`", "did you mean `train`?"),
        (["--verson"], "`tfdist` has no option `--verson`", "did you mean `--version`?"),
    ],
)
def test_a_mistake_is_answered_in_a_sentence_and_a_hint(arguments, sentence, hint):
    said = answer(*arguments)
    assert said.startswith("error: ") and sentence in said.partition("\n\n")[0]
    assert hint in said.partition("\n\nhint: ")[2]
    assert "Usage:" not in said and "Error:" not in said


@EVERY_COMMAND
def test_every_option_is_under_a_heading_and_says_what_it_is(name, command):
    with click.Context(command, info_name=name) as context:
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert isinstance(parameter, options.GroupedOption), f"{parameter.opts} would be under `Other:`"
                assert parameter.help, f"{parameter.opts} says nothing"
        shown = command.get_help(context)
    assert re.findall(r"INTEGER|FLOAT|RANGE|\bx[<>]|[<>]=x|PATH", shown) == []


@EVERY_COMMAND
def test_underscores_stand_for_dashes_in_every_command(name, command):
    option = next((o for p in command.params for o in p.opts if "-" in o.strip("-")), None)
    if option is not None:
        context = click.Context(command, **command.context_settings)
        assert command.make_parser(context).parse_args([f"--{option[2:].replace('-', '_')}", "1"])[0]


def test_the_help_shows_every_command_under_a_heading_with_its_whole_summary():
    shown = answer("--help", code=0)
    words = " ".join(shown.split())
    for name, command in COMMANDS:
        summary = " ".join((command.help or "").partition("\n\n")[0].split())
        assert summary.endswith(".") and f"{name} {summary}" in words
    assert re.findall(r"^([A-Z].*):$", shown, re.MULTILINE) == [
        *("Options", "Train", "What there is", "Before a training", "Measured", "This machine"),
    ]


@pytest.mark.parametrize(
    ("command", "names"), [("strategies", strategies.names()), ("models", models.names()), ("datasets", data.names())]
)
def test_the_lists_have_every_name_and_say_what_it_is_for(command, names):
    entries = json.loads(answer(command, "--json", code=0))
    assert sorted(entry["name"] for entry in entries) == names
    shown = " ".join(answer(command, code=0).split())
    for entry in entries:
        assert len(entry["description"]) > 15 and entry["group"]
        assert f"{entry['name']} {entry['description']}" in shown


def test_a_dataset_is_listed_under_the_task_that_it_has():
    groups = {entry["name"]: entry["group"] for entry in json.loads(answer("datasets", "--json", code=0))}
    assert groups["digits"] == data.load("digits").spec.task.capitalize()
    assert groups["synthetic"] == "Every task"
    tasks = {task.replace("_", " ") for task in spec.TASKS}
    assert {group.lower() for group in groups.values()} - {"every task"} <= tasks


def test_a_dataset_is_listed_with_where_its_files_come_from():
    texts = {entry["name"]: entry["description"] for entry in json.loads(answer("datasets", "--json", code=0))}
    without_files = {"digits", "synthetic"}
    assert {name for name, text in texts.items() if not text.endswith((*catalogue.FILES.values(),))} == without_files
    assert texts["mnist"].endswith("Downloaded by TensorFlow Datasets.")
    assert texts["image_folder"].endswith("Reads your files: `--data-dir FOLDER`.")


def test_the_lists_are_shown_without_tensorflow_and_without_other_commands():
    code = (
        "import sys; from click.testing import CliRunner; from tfdist.__main__ import main\n"
        "for command in ('strategies', 'models', 'datasets'):\n"
        "    assert CliRunner().invoke(main, [command]).exit_code == 0\n"
        "assert not {'tensorflow', 'keras', 'tfdist.train', 'tfdist.compare'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_verification_on_a_busy_machine_says_so(monkeypatch):
    said = []
    monkeypatch.setattr(terminal, "say", said.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load in (1.0, 20.0):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, load, load))
        train.warn_of_load()
    (line,) = said
    assert line.startswith("warning: The load of this machine is 20.0, and it has 2 cores")


def test_more_devices_or_workers_than_cores_are_worth_a_sentence(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert job_environment.crowding(2, "workers") is None
    assert job_environment.crowding(99, "workers").startswith("99 workers share 2 cores")
    from tfdist.interface import devices  # here, because it imports TensorFlow

    with pytest.warns(CostWarning, match="3 logical devices share 2 cores"):
        devices.choose(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        devices.choose(2)
        devices.choose(None, default_cpus=3)  # which nobody has asked for


@pytest.mark.parametrize("name", ["local_sgd", "gossip", "multiworker"])
def test_a_strategy_for_several_processes_says_that_it_is_alone(name):
    with pytest.warns(JobWarning, match=f"`{name}` trains in several processes, and this process is alone"):
        tfdist.strategy(name)


@pytest.mark.parametrize(
    ("name", "options"), [("single", {}), ("custom", {"devices": 2}), ("pipeline", {"devices": 2})]
)
def test_a_strategy_for_one_process_says_nothing_of_being_alone(name, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", JobWarning)
        tfdist.strategy(name, **options)


def test_a_study_that_is_not_there_is_not_resumed(working_folder):
    study = ("compare", "--strategies", "single", *ONE_DEVICE, "--resume")
    assert "`--resume` needs `--out`, which is not set" in answer(*study)
    assert "`--resume` is set, and `typo` has no study" in answer(*study, "--out", "typo")
    assert not list(working_folder.iterdir())


@pytest.mark.parametrize(
    ("command", "option", "file"),
    [
        ("advise", "--curves", "folder/curves.svg"),
        ("advise", "--curves", "curves.svg"),
        ("data", "--sheet", "folder/sheet.png"),
        ("simulate", "--out", "folder/results.json"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(command, option, file, working_folder):
    (working_folder / "folder").write_text("")  # where a folder is needed
    (working_folder / "curves.svg").mkdir()
    needed = [] if command == "data" else ["--model", "mlp"]
    needed += ["--algorithm", "bsp"] if command == "simulate" else []
    said = answer(command, "--dataset", "digits", *needed, option, file)
    assert f"error: `{option}` is `{file}`, which cannot be written: " in said and "hint: " in said


def test_a_picture_of_examples_in_a_format_that_cannot_be_drawn_is_refused(working_folder):
    assert "`--sheet` is `sheet.foo`" in answer("data", "--dataset", "digits", "--sheet", "sheet.foo")
