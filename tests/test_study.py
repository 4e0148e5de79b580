"""What runs say together: ratios within rounds, equal work, targets, prices, and the study's file."""

import contextlib
import dataclasses
import doctest
import json
import math
import subprocess
import sys
import time

import psutil
import pytest

from tests.test_doctor import program
from tests.test_profiler import serving
from tfdist import report
from tfdist.errors import RunFolderError, UsageError
from tfdist.run import schema
from tfdist.run.folder import RunFolder
from tfdist.run.schema import EpochRecord
from tfdist.study import (
    conditions,
    looks,
    measure,
    page,
    plan,
    prices,
    ratios,
    results,
    runs,
    stages,
    summary,
    verdicts,
)

CASE = {"model": "cnn", "dataset": "digits", "batch_size": 32}


@pytest.mark.parametrize("module", [looks, measure, page, plan, ratios, prices, verdicts])
def test_the_synopsis_runs(module):
    assert doctest.testmod(module).failed == 0


def made(folder, strategy="single", workers=1, round=0, seconds=1.0, error="", losses=(2.0, 1.0, 0.5), **changed):
    """A run as `compare` leaves it in `folder`: a record of some epochs, and what was measured."""
    place = folder / f"{strategy}-{workers}-{changed.get('global_batch_size', 32)}" / f"round-{round}"
    place.mkdir(parents=True)
    case = {**CASE, "batch_size": changed.get("global_batch_size", 32)}
    more = {name: changed.pop(name) for name in ("gpus_busy", "gpu_memory_bytes", "looks") if name in changed}
    measured = measure.Measured(
        **case,
        **more,
        **{"strategy": strategy, "workers": workers, "label": strategy, "study": "first", "round": round, "seed": 0},
        **{"command": ["tfdist", "train"], "started": f"2026-01-01T00:00:{round:02}", "wall_seconds": 9.0},
        **{"cpu_seconds": 5.0, "exit_code": int(bool(error)), "error": error},
    )
    (place / measure.MEASURED).write_text(measured.model_dump_json())
    if error:
        return
    record = schema.example().model_copy(update={"status": "completed", "initial_weights": "abc", **changed})
    record.strategy = schema.StrategyRecord(name=strategy, options={}, replicas=workers)
    for number, loss in enumerate(losses, start=1):
        took = seconds + (3.0 if number == 1 else 0.0)
        logs = {
            "loss": loss,
            "val_accuracy": 1 - loss / 2,
            "examples_per_second": 1000 / took,
            "step_seconds": took / 10,
        }
        more = {"elapsed_seconds": 10.0 * number, "network_bytes": 5000}
        record.epochs.append(EpochRecord.from_logs(number, logs, took, 0.25, **more))
    record.optimizer_steps = 10 * len(losses)
    RunFolder(place).write(record)


def test_the_gpus_are_watched_while_a_run_is_made_and_shown_where_there_are_any(tmp_path, monkeypatch):
    with measure.gpu_monitor() as none:
        pass
    assert none == measure.GpuUse() or measure.shutil.which(measure.PROGRAM)
    # What the driver's program prints of two GPUs, until it is killed.
    said = 'echo "$@" > asked; echo $$ > pid; while true; do echo "0, 75, 1000"; echo "1, 25, 3000"; sleep 0.1; done'
    monkeypatch.setenv("PATH", program(tmp_path, measure.PROGRAM, f"cd {tmp_path}; {said}"))
    with measure.gpu_monitor() as seen:
        time.sleep(1.0)
    assert seen == measure.GpuUse(busy=1.0, memory_bytes=3000 * 2**20)
    assert "utilization.gpu" in (tmp_path / "asked").read_text()
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    for number in range(2):
        machine = schema.example().machine.model_copy(update={"gpus": ["NVIDIA L4"]})
        made(tmp_path / "study", round=number, machine=machine, gpus_busy=seen.busy, gpu_memory_bytes=seen.memory_bytes)
    page_text = summary.markdown(results.of_runs(runs.load([tmp_path / "study"])))
    assert "| GPU memory in use, MiB | GPUs busy |" in page_text and "| 3,000 | 1.00 |" in page_text
    # Without a GPU that TensorFlow has seen, the driver counts other programs.
    made(tmp_path / "without", gpus_busy=seen.busy, gpu_memory_bytes=seen.memory_bytes)
    assert "GPUs busy" not in summary.markdown(results.of_runs(runs.load([tmp_path / "without"])))


def rows(folder, **options):
    (comparison,) = results.of_runs(runs.load([folder]), **options)
    return {row.cell.name: row for row in comparison.rows}


def test_speed_is_compared_within_rounds_so_that_a_slow_hour_does_not_count(tmp_path):
    for number, drift in enumerate([1.0, 10.0, 3.0, 1.5, 2.0]):
        made(tmp_path, "single", round=number, seconds=2.0 * drift)
        made(tmp_path, "custom", 2, round=number, seconds=1.0 * drift)
    speed = rows(tmp_path)["custom on 2"].speed
    assert speed.estimate == pytest.approx(2) and speed.low == pytest.approx(2) and speed.high == pytest.approx(2)
    assert "fastest, 2.00 (2.00 to 2.00) times as fast" in summary.markdown(results.of_runs(runs.load([tmp_path])))


def test_an_interval_that_holds_1_is_no_difference(tmp_path):
    for number, ratio in enumerate([0.9, 1.1, 1.05, 0.95]):
        made(tmp_path, "single", round=number, seconds=ratio)
        made(tmp_path, "custom", 2, round=number)
    (comparison,) = results.of_runs(runs.load([tmp_path]))
    assert "not decided (0.86 to 1.15)" in summary.table(comparison)
    assert "no difference from `single` is certain enough" in summary.answer(comparison)


def test_an_interval_close_to_1_shows_that_there_is_no_difference_of_interest(tmp_path):
    for number, ratio in enumerate([0.99, 1.01, 1.005, 0.995]):
        made(tmp_path, "single", round=number, seconds=ratio)
        made(tmp_path, "custom", 2, round=number)
    (comparison,) = results.of_runs(runs.load([tmp_path]))
    assert "no difference (0.99 to 1.01)" in summary.table(comparison)
    assert "nothing is faster than `single` by more than 5%" in summary.answer(comparison)


def test_the_first_epoch_is_told_apart_as_warm_up(tmp_path):
    made(tmp_path, seconds=2.0)
    row = rows(tmp_path)["single"]
    assert (row.epoch_seconds, row.warm_up_seconds, row.evaluation_seconds) == (2.0, 3.0, 0.25)
    assert row.examples_per_second == 500
    assert row.network_bytes_per_step == pytest.approx(500)


@pytest.mark.parametrize(
    ("changed", "mark"),
    [
        ({"initial_weights": "def"}, "unequal initial weights: def instead of abc"),
        ({"optimizer": "sgd"}, "unequal optimizer: sgd 0.001 instead of adam 0.001"),
        ({"losses": (2.0, 1.5, 0.6)}, "unequal loss of epoch 3: 0.6 instead of 0.5, more than rounding explains"),
        ({"losses": (2.0, 1.0)}, "unequal steps per epoch"),
        ({"dataset": schema.DatasetRecord(name="digits", examples={"train": 7})}, "unequal training examples: 7"),
        ({"losses": (2.0, 2.0, 1.999)}, "did not learn: its training loss went from 2 to 2"),
        ({"losses": (2.0, math.nan)}, "did not learn: its loss is not finite"),
    ],
)
def test_unequal_work_and_what_did_not_learn_is_marked_with_the_reason(tmp_path, changed, mark):
    made(tmp_path)
    made(tmp_path, "custom", 2, seconds=0.1, **changed)
    (comparison,) = results.of_runs(runs.load([tmp_path]))
    if "steps per epoch" in mark:  # the same number of updates in fewer epochs
        comparison.rows[1].runs[0].record.optimizer_steps = 30
        (comparison,) = results.of_runs([row.runs[0] for row in comparison.rows])
    assert any(found.startswith(mark) for found in comparison.rows[1].marks), comparison.rows[1].marks
    assert f"| {summary.MARK} custom on 2 |" in summary.table(comparison)
    assert "no other strategy did equal work" in summary.answer(comparison)


@pytest.mark.parametrize("strategy", ["mpi_split", "local_sgd", "gossip", "parameter_server", "hogwild"])
def test_a_strategy_that_averages_or_is_asynchronous_is_not_called_the_fastest_beside_equal_work(tmp_path, strategy):
    for number in range(3):
        made(tmp_path, round=number, seconds=2.0)
        made(tmp_path, "custom", 2, round=number, seconds=1.5)
        made(tmp_path, strategy, 2, round=number, losses=(2.0, 1.5, 0.9))
    (comparison,) = results.of_runs(runs.load([tmp_path]))
    (row,) = [row for row in comparison.rows if row.cell.strategy == strategy]
    (mark,) = row.marks  # and nothing is said against its loss
    assert mark.startswith("other work by design: its steps differ from those of one device")
    answer = summary.answer(comparison)
    assert "`custom on 2` is fastest" in answer
    assert f"By design, `{strategy} on 2` does other work than one device, and is not ranked" in answer


def test_parameter_servers_whose_workers_take_each_step_together_are_compared_as_equal_work(tmp_path):
    made(tmp_path)
    made(tmp_path, "parameter_server", 2)
    for as_one_device, marked in ((True, False), (False, True), (None, True)):
        found = runs.load([tmp_path])
        for run in found:
            if run.cell.strategy == "parameter_server":
                run.record.strategy.as_one_device = as_one_device
        (comparison,) = results.of_runs(found)
        assert [bool(row.marks) for row in comparison.rows] == [False, marked]


def test_runs_that_missed_the_target_or_failed_are_counted_beside_those_that_reached_it(tmp_path):
    for number, epoch in enumerate([2, None, 3]):
        target = schema.TargetRecord(monitor="val_accuracy", target=0.5, seconds=epoch and epoch * 1.5, epoch=epoch)
        made(tmp_path, round=number, time_to_target=target)
    made(tmp_path, round=3, error="error: out of memory")
    row = rows(tmp_path)["single"]
    assert row.reached == "2 of 4"
    assert (row.epochs_to_target, row.seconds_to_target, row.training_seconds_to_target) == (2.5, 25.0, 3.75)
    assert "`single` failed in 1 of 4 runs: error: out of memory" in summary.markdown(
        results.of_runs(runs.load([tmp_path]))
    )


def test_a_name_with_a_bar_stays_in_its_column(tmp_path):
    made(tmp_path, "single")
    (comparison,) = results.of_runs(runs.load([tmp_path]))
    cell = dataclasses.replace(comparison.rows[0].cell, strategy="mine:Own", label="a|b")
    row = dataclasses.replace(comparison.rows[0], cell=cell)
    assert "| a\\|b on 1 |" in summary.table(results.Comparison(comparison.case, [row]))


def test_scaling_is_told_beside_one_worker(tmp_path):
    made(tmp_path, "custom", 1, seconds=2.0)
    made(tmp_path, "custom", 2, seconds=1.25)
    made(tmp_path, "custom", 2, seconds=2.5, global_batch_size=64)
    strong, weak = results.of_runs(runs.load([tmp_path]))
    assert strong.rows[1].strong_efficiency == pytest.approx(0.8)
    assert weak.rows[0].weak_efficiency == pytest.approx(0.4)


def test_scaling_is_told_beside_single_where_one_worker_was_not_measured(tmp_path):
    made(tmp_path, "single", seconds=2.0)
    made(tmp_path, "single", seconds=3.0, global_batch_size=64)
    made(tmp_path, "custom", 2, seconds=1.25)
    made(tmp_path, "custom", 2, seconds=2.5, global_batch_size=64)
    small, large = results.of_runs(runs.load([tmp_path]))
    assert small.rows[1].strong_efficiency == pytest.approx(0.8)
    assert large.rows[1].strong_efficiency == pytest.approx(0.6)
    assert large.rows[1].weak_efficiency == pytest.approx(0.4)


def test_what_a_run_costs_follows_from_the_machines_price(tmp_path):
    made(tmp_path)
    machine = runs.load([tmp_path])[0].record.machine
    (tmp_path / "prices.txt").write_text(f"# an hour\n\n7.2  H100\n4.0 {machine.cpu}\n")
    assert rows(tmp_path, prices=prices.Prices.parse("3.6"))["single"].price == pytest.approx(0.009)
    assert rows(tmp_path, prices=prices.Prices.parse(str(tmp_path / "prices.txt")))["single"].price == pytest.approx(
        0.01
    )


@pytest.mark.parametrize("line", ["cheap EPYC", "3.0", "-1 EPYC", "nan EPYC"])
def test_a_bad_line_of_prices_is_named(tmp_path, line):
    (tmp_path / "prices.txt").write_text(f"# an hour\n{line}\n")
    with pytest.raises(UsageError, match=f"Line 2 of the prices in .* is `{line}`"):
        prices.Prices.parse(str(tmp_path / "prices.txt"))
    with pytest.raises(UsageError, match="neither a price per hour nor a file"):
        prices.Prices.parse(str(tmp_path / "elsewhere"))


def test_runs_of_plain_trainings_are_read_too_and_studies_add_up(tmp_path):
    made(tmp_path / "first")
    made(tmp_path / "second", "custom", 2)
    record = schema.example().model_copy(update={"status": "completed", "global_batch_size": 32})
    record.dataset.name = "digits"
    RunFolder(tmp_path / "third").write(record)
    found = runs.load([tmp_path / "first", tmp_path / "second", tmp_path / "third", tmp_path / "first"])
    assert sorted(run.cell.name for run in found) == ["custom on 2", "mirrored on 2", "single"]
    assert len({run.cell.case for run in found}) == 1


def test_runs_of_different_machines_are_not_compared(tmp_path):
    for strategy in ("single", "mirrored"):
        record = schema.example().model_copy(update={"status": "completed"})
        record.strategy = schema.StrategyRecord(name=strategy, options={}, replicas=2)
        record.machine = record.machine.model_copy(update={"cpu": f"of {strategy}"})
        record.epochs.append(EpochRecord.from_logs(1, {"loss": 1.0}, 2.0))
        RunFolder(tmp_path / strategy).write(record)
    (comparison,) = results.of_runs(runs.load([tmp_path]))
    assert [row.speed for row in comparison.rows] == [None, None]


def test_folders_without_runs_and_runs_of_another_schema_are_one_sentence(tmp_path):
    with pytest.raises(RunFolderError, match="has no run"):
        runs.load([tmp_path])
    made(tmp_path)
    (file,) = tmp_path.rglob(measure.MEASURED)
    file.write_text("{}")
    with pytest.raises(RunFolderError, match="is not what `tfdist compare` writes"):
        runs.load([tmp_path])


STUDY = """
models = ["mlp", "cnn"]
datasets = ["digits"]
batch_sizes = [32, 64]
workers = [1, 2]
repeats = 2
seeds = 2
strategies = [
    "single",
    "mirrored",
    { strategy = "horovod", label = "horovod, bf16", workers = [2], train = { compression = "bf16" } },
]

[train]
optimizer = "sgd"
learning-rate = 0.1
"""


def test_a_file_describes_a_whole_study(tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)
    study = plan.Plan(**plan.read(tmp_path / "study.toml"))
    cells = study.cells()
    assert len(cells) == 2 * 2 * (1 + 2 + 1)
    assert looks.planned(study.repeats, study.seeds) == ((4, 1.0),)
    turns = measure.turns(study, measure.Study("now", ((4, 1.0),)), tmp_path)
    assert sorted({(turn.round, turn.seed) for turn in turns}) == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert [cell.name for cell in cells[:4]] == ["single", "mirrored on 1", "mirrored on 2", "horovod, bf16 on 2"]
    options = cells[3].options(epochs=3, seed=1)
    pairs = dict(zip(options[::2], options[1::2], strict=True))
    assert pairs["--compression"] == "bf16" and pairs["--workers"] == "2" and pairs["--learning-rate"] == "0.1"
    assert pairs["--seed"] == "1" and pairs["--epochs"] == "3" and pairs["--optimizer"] == "sgd"
    assert len({cell.folder for cell in cells}) == len(cells)


def test_strategies_take_turns_in_an_order_that_is_drawn_for_each_round_and_study_and_kept_on_resuming(tmp_path):
    study = plan.Plan(("mlp",), ("digits",), tuple(map(plan.Contestant, ("single", "custom", "mirrored"))))
    begun, other = measure.Study("1", ((8, 1.0),)), measure.Study("2", ((8, 1.0),))
    order, others = ([turn.cell.strategy for turn in measure.turns(study, one, tmp_path)] for one in (begun, other))
    rounds = [order[start : start + 3] for start in range(0, 24, 3)]
    assert all(sorted(turns) == ["custom", "mirrored", "single"] for turns in rounds)
    assert len({turns[0] for turns in rounds}) == 3
    assert order != others
    assert order == [turn.cell.strategy for turn in measure.turns(study, begun, tmp_path)]


WORK = 'models = ["mlp"]\ndatasets = ["digits"]\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("models = [", "is not valid TOML"),
        ('model = ["mlp"]', "unknown entry `model`"),
        ("[train]\nepoch = 3", r"in \[train\]: unknown entry `epoch`"),
        ('strategies = ["miror"]', "Unknown strategy `miror`"),
        ('strategies = [{ label = "one" }]', "has no `strategy`"),
        (
            WORK + 'strategies = ["custom", { strategy = "custom", train = { learning_rate = 0.1 } }]',
            "2 cells of the study have the name `mlp-digits-32-custom-1`",
        ),
        ('models = ["mlp"]\ndatasets = ["digits"]\nstrategies = []', "has no `contestants`"),
        (
            'models = ["mlp"]\ndatasets = ["digits"]\nstrategies = ["single"]\nrepeats = 0',
            "`repeats` of the study is 0",
        ),
    ],
)
def test_a_study_that_cannot_be_is_refused_in_one_sentence(tmp_path, text, sentence):
    (tmp_path / "study.toml").write_text(text)
    with pytest.raises(UsageError, match=sentence):
        plan.Plan(**plan.read(tmp_path / "study.toml"))


@pytest.mark.thorough
def test_tensorboard_shows_the_strategies_side_by_side(tmp_path):
    made(tmp_path / "runs")
    made(tmp_path / "runs", "custom", 2)
    made(tmp_path / "runs", "custom", 2, round=1, error="error: out of memory")
    report.write_events(results.of_runs(runs.load([tmp_path / "runs"])), tmp_path / "events")
    with serving(tmp_path / "events") as server:
        server.url = server.url.removesuffix("/profile")
        found = wait_for(lambda: json.loads(server.get("scalars/tags")[1]), lambda tags: len(tags) >= 2)
        assert "val_accuracy" in found["cnn-digits-32-custom-2-0"]
        asked = {"experimentName": "", "colParams": [], "sliceSize": 10, "allowedStatuses": ["STATUS_UNKNOWN"]}
        status, body = server.get("hparams/session_groups", request=json.dumps(asked))
        assert status == 200, body
        groups = json.loads(body)["sessionGroups"]
    assert {(group["hparams"]["strategy"], group["hparams"]["workers"]) for group in groups} == {
        ("single", 1.0),
        ("custom", 2.0),
    }
    assert len(groups) == 3


def wait_for(ask, is_there, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError, json.JSONDecodeError):
            if is_there(found := ask()):
                return found
        time.sleep(0.2)
    raise AssertionError("TensorBoard shows no runs")


def measured_with(folder, input, seconds, rounds=5, traced=None, **changed):
    """Runs with this input, whose traced steps, if there are any, took `traced` seconds for each kind."""
    if traced is not None:
        parts = zip(schema.BreakdownRecord.model_fields, traced, strict=True)
        changed["breakdown"] = schema.BreakdownRecord(**dict(parts))
    for number in range(rounds):
        made(folder / input, round=number, seconds=seconds * (1 + number / 100), **changed)
    for path in (folder / input).rglob(measure.MEASURED):
        path.write_text(json.dumps({**json.loads(path.read_text()), "input": input}))


def verdict(folder):
    (found,) = verdicts.of(results.of_runs(runs.load([folder])))
    return found


@pytest.mark.parametrize(
    ("seconds", "traced", "bound", "input_share"),
    [
        (3.0, (0.05, 0.0, 0.05, 0.5), "input", 2 / 3),
        (1.0, (0.07, 0.02, 0.0, 0.5), "compute", 0),
        (1.0, (0.03, 0.09, 0.0, 0.0), "communication", 0),
        (1.0, (0.02, 0.03, 0.01, 0.0), "waiting", 0),  # the rest of a step of 0.1 s
        (1.25, (0.09, 0.0, 0.0, 0.0), "compute", 0.2),  # a difference, and yet not the largest part
        (3.0, None, "input", 2 / 3),
        (1.0, None, "", 0),
    ],
)
def test_what_bounds_the_training_is_the_largest_part_of_an_epoch(tmp_path, seconds, traced, bound, input_share):
    measured_with(tmp_path, "real", seconds)
    measured_with(tmp_path, "synthetic", 1.0, traced=traced)
    found = verdict(tmp_path)
    assert found.bound == bound and found.input_share == pytest.approx(input_share, abs=1e-3)
    assert sum(found.shares.values()) == pytest.approx(1 if traced else 0)
    assert ("Try first" in found.advice) == bool(bound)


@pytest.mark.thorough
def test_both_reports_say_what_bounds_the_training(tmp_path):
    measured_with(tmp_path, "real", 3.0)
    measured_with(tmp_path, "synthetic", 1.0, traced=(0.05, 0.0, 0.0, 0.0))
    found = results.of_runs(runs.load([tmp_path]))
    for text in (summary.markdown(found), page.html(found)):
        assert "What bounds the training" in text and "The step is bound by input: 67% of its time." in text
        assert "With synthetic input an epoch is 3.00 (3.00 to 3.00) times as fast." in text
        assert "with cached input" not in text  # which was not measured
    assert summary.headline(found) == "cnn on digits, global batch 32: there is nothing to compare with `single`."


def test_one_round_does_not_tell_what_input_costs(tmp_path):
    for input, seconds in (("real", 9.0), ("synthetic", 1.0)):
        measured_with(tmp_path, input, seconds, rounds=1, traced=(0.1, 0.0, 0.0, 0.0))
    found = verdict(tmp_path)
    assert found.bound == "" and found.shares == {} and "one round" in found.advice


@pytest.mark.parametrize(
    ("cached", "said"), [(1.0, "it is 3.00 (3.00 to 3.00) times as fast."), (3.0, "augmentation and batch transfer")]
)
def test_cached_input_tells_whether_reading_or_handing_over_takes_the_time(tmp_path, cached, said):
    for input, seconds in (("real", 3.0), ("cached", cached), ("synthetic", 1.0)):
        measured_with(tmp_path, input, seconds)
    assert said in verdict(tmp_path).advice


def test_losses_are_not_compared_between_inputs_and_unequal_steps_leave_no_verdict(tmp_path):
    measured_with(tmp_path, "real", 3.0)
    measured_with(tmp_path / "equal", "synthetic", 1.0, losses=(9.0, 9.0, 9.0))
    measured_with(tmp_path / "unequal", "synthetic", 1.0, initial_weights="def")
    both = runs.load([tmp_path / "real", tmp_path / "equal"])
    (found,) = verdicts.of(results.of_runs(both))
    assert found.bound == "input" and found.unequal == []
    assert [row.marks for one in results.of_runs(both) for row in one.rows] == [[], []]
    (found,) = verdicts.of(results.of_runs(runs.load([tmp_path / "real", tmp_path / "unequal"])))
    assert found.bound == "" and "initial weights: def instead of abc" in found.advice


def test_a_study_of_several_inputs_traces_the_cells_whose_input_costs_nothing(tmp_path):
    (tmp_path / "study.toml").write_text(f'{STUDY[: STUDY.index("[train]")]}inputs = ["real", "synthetic"]\n')
    study = plan.Plan(**plan.read(tmp_path / "study.toml"))
    assert len(study.cells()) == 2 * 2 * 2 * 4 and len({cell.folder for cell in study.cells()}) == 32
    assert {cell.case.input for cell in study.traced()} == {"synthetic"} and len(study.traced()) == 16
    options = study.traced()[0].options(epochs=3, seed=1)
    assert options[options.index("--input") + 1] == "synthetic"


def stage_of(study, begun, out, seconds):
    """Makes the runs of all stages as if they took `seconds(turn)`, and returns the rounds of each stage."""
    rounds = []
    for turns in stages.of(study, begun, out):
        rounds.append(sorted({turn.round for turn in turns}))
        for turn in turns:
            made(out, "custom" if turn.cell.strategy == "custom" else "single", 1, turn.round, seconds(turn))
    return rounds


TWO = (plan.Contestant("single"), plan.Contestant("custom"))


def begun_study(out, repeats=None, resume=False):
    study = plan.Plan(("cnn",), ("digits",), TWO, repeats=repeats)
    return study, measure.begin(study, out, resume)


@pytest.mark.parametrize(
    ("difference", "rounds"),
    [
        (0.5, [[0, 1, 2, 3], [], [], []]),  # plain at the first look
        (1.0, [[0, 1, 2, 3], [], [], []]),  # as plain that there is none
        (0.9, [[0, 1, 2, 3], [4, 5], [6, 7], []]),  # the noise below is as large
    ],
)
def test_a_study_ends_as_soon_as_its_results_are_settled(tmp_path, difference, rounds):
    noise = [1.0, 1.2, 0.9, 1.1, 0.85, 1.15, 1.0, 1.1] if difference == 0.9 else [1.0, 1.001] * 4

    def seconds(turn):
        return difference * noise[turn.round] if turn.cell.strategy == "custom" else 1.0

    study, begun = begun_study(tmp_path)
    assert stage_of(study, begun, tmp_path, seconds) == rounds


def test_rounds_that_are_added_once_the_results_are_known_leave_no_interval_and_no_winner(tmp_path):
    _, begun = begun_study(tmp_path, repeats=2)
    assert begun.looks == ((2, 1.0),)
    (tmp_path / measure.REPORT).touch()
    _, begun = begun_study(tmp_path, repeats=3, resume=True)
    assert begun.looks == ((2, 1.0), (3, 0.0))
    for number in range(3):
        made(tmp_path, round=number, seconds=2.0 + number / 10, looks=begun.looks)
        made(tmp_path, "custom", round=number, looks=begun.looks)
    (comparison,) = results.of_runs(runs.load([tmp_path]))
    assert "2.10 (rounds were added later)" in summary.table(comparison)
    assert "no difference from `single` is certain enough" in summary.answer(comparison)
    assert any("measure again in another `--out`" in line for line in summary.doubtful(comparison))


def test_rounds_may_grow_before_the_results_are_known(tmp_path):
    begun_study(tmp_path, repeats=2)
    assert begun_study(tmp_path, repeats=3, resume=True)[1].looks == ((3, 1.0),)
    assert begun_study(tmp_path, resume=True)[1].looks == ((3, 1.0),)


def test_a_run_knows_what_other_programs_used_of_its_cores():
    with conditions.watched() as alone:
        time.sleep(0.3)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(alone.cores)]
    try:
        time.sleep(0.2)
        with conditions.watched() as crowded:
            time.sleep(0.3)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert crowded.cores_of_others > alone.cores / 2 and crowded.load_before >= 1
    assert len(crowded.loop_seconds) == 2 and all(0 < seconds < 1 for seconds in crowded.loop_seconds)


def test_a_ratio_that_was_measured_once_and_one_that_was_not_decided_are_both_named(tmp_path):
    for number in range(2):
        made(tmp_path, round=number, seconds=1.0 + number)
        made(tmp_path, "custom", round=number)
    made(tmp_path, "mirrored")
    (comparison,) = results.of_runs(runs.load([tmp_path]))
    (line,) = (line for line in summary.doubtful(comparison) if "interval" in line)
    assert "`mirrored on 1` and `single`" in line and "a ratio was measured only once" in line


def test_without_scipy_a_comparison_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    for number in range(2):
        made(tmp_path, round=number)
        made(tmp_path, "custom", round=number, seconds=2.0 + number)
    with pytest.raises(UsageError, match="An interval needs the package `scipy`, which is not installed"):
        results.of_runs(runs.load([tmp_path]))
