"""`tfdist advise`: the cost model, what it predicts, and what it refuses."""

import dataclasses
import doctest
import math
import os
import re

import pytest
from click.testing import CliRunner

from tfdist import advise, terminal
from tfdist.advisor import costs, measured, rounds
from tfdist.advisor.costs import Compute, Link, Message, Stages
from tfdist.pipeline_parallel import schedule
from tfdist.run import schema
from tfdist.run.schema import EpochRecord

COMPUTE = Compute(fixed_seconds=0.002, example_seconds=0.0001)
FAST, SLOW = Link(1e-6, 1e11), Link(1e-3, 1e7)


def test_the_synopsis_runs():
    assert doctest.testmod(costs).failed == 0


def facts(link, machines=True, batch_size=1024):
    names = ("multiworker", "horovod", "mpi_split", "parameter_server")
    compute = {1: COMPUTE, 2: COMPUTE}
    return costs.Facts(batch_size, 100, 4e6, compute, dict.fromkeys(names, link), machines, averaged_bytes=4e6)


def rates(*arguments, **named):
    return {one.name: one.examples_per_second for one in costs.predict(facts(*arguments, **named), [2, 4])}


def test_computation_is_divided_and_its_fixed_part_is_not():
    found = rates(FAST)
    assert found["single"] == pytest.approx(1024 / 0.1044)
    assert found["multiworker on 4"] == pytest.approx(1024 / (0.002 + 0.0256), rel=0.02)
    assert found["horovod on 4"] == found["multiworker on 4"]


def test_a_slow_link_makes_one_device_the_fastest_of_those_that_are_exact():
    found = rates(SLOW)
    assert found["multiworker on 4"] < found["multiworker on 2"] < found["single"]
    # A ring of 4 sends 2 * 3/4 of 4 MB at 10 MB/s, and averages only once in 100 steps.
    assert 1024 / found["multiworker on 4"] == pytest.approx(0.0276 + 6e-3 + 0.6)
    assert 1024 / found["mpi_split on 4"] == pytest.approx(0.0276 + 0.606 / 100)


def test_an_averaging_copies_what_it_sends_once_in_its_steps():
    copied = dataclasses.replace(facts(SLOW), copy_seconds=3.0)
    found = {one.name: one.examples_per_second for one in costs.predict(copied, [4])}
    assert 1024 / found["mpi_split on 4"] == pytest.approx(0.0276 + (3.0 + 0.606) / 100)


def test_an_averaging_sends_the_slots_too():
    adam = dataclasses.replace(facts(SLOW), averaged_bytes=12e6)
    found = {one.name: one.examples_per_second for one in costs.predict(adam, [4])}
    assert 1024 / found["mpi_split on 4"] == pytest.approx(0.0276 + (6e-3 + 1.8) / 100)


def test_servers_are_bound_by_their_link():
    assert 1024 / rates(SLOW)["parameter_server on 4"] == pytest.approx(2 * 4e6 / 1e7)
    assert 1024 / rates(FAST)["parameter_server on 4"] == pytest.approx(0.1044 / 4)


def stages(forward, backward, messages=None, parameters=None):
    """Stages that send one byte to the next one and back, unless `messages` are given."""
    count = len(forward)
    messages = messages or [Message(stage, stage + 1, 1.0, 1.0) for stage in range(count - 1)]
    return Stages(forward, backward, parameters or [1] * count, messages)


INSTANT = Link(0.0, 1e30)


def step(divided, link=INSTANT, rest=0.0, micro_batches=4):
    passes = micro_batches * (sum(divided.forward_seconds) + sum(divided.backward_seconds))
    return costs.pipeline(divided, passes + rest, link, micro_batches)


def test_even_stages_of_a_pipeline_wait_for_the_bubble():
    for count in (1, 2, 3, 7):
        even = stages([1.0] * count, [2.0] * count)
        assert step(even) == pytest.approx((4 + count - 1) * 3.0)


def test_an_uneven_pipeline_takes_as_long_as_its_slowest_stage_and_the_way_to_it_and_back():
    # Forward passes end at 1, 2, 3, 4 in stage 0, and at 4, 7, 10, 13 in stage 1, whose backward passes end at 19, 25,
    # 31 and 37; the last one of stage 0 ends at 39.
    assert step(stages([1.0, 3.0], [2.0, 6.0])) == pytest.approx(39.0)
    # The slow stage first: forward until 12, and until 13 in stage 1, whose first backward pass ends at 15; the four of
    # stage 0 end at 15 + 4 · 6 = 39.
    assert step(stages([3.0, 1.0], [6.0, 2.0])) == pytest.approx(39.0)
    # The slow stage in the middle: 1 + 4 · 3 + 1 until the forward passes have ended, and 2 + 4 · 6 + 2 backward.
    assert step(stages([1.0, 3.0, 1.0], [2.0, 6.0, 2.0])) == pytest.approx(14 + 28)


def test_a_cut_costs_the_time_of_its_bytes_each_way_and_the_latency():
    gigabit = Link(latency_seconds=50e-6, bytes_per_second=1.25e8)
    # 2.5 MB take 20 ms. One micro-batch: forward, send, forward, backward, send, backward.
    one = stages([0.01, 0.01], [0.02, 0.02], [Message(0, 1, 2.5e6, 2.5e6)])
    assert step(one, gigabit, micro_batches=1) == pytest.approx(0.06 + 2 * (0.02 + 50e-6))
    # Four: stage 0 computes and sends for 4 · 30 ms, and stage 1 ends 10 ms after the last message. Back, stage 1
    # computes and sends for 4 · 40 ms, and stage 0 ends 20 ms after the last message.
    four = stages([0.01, 0.01], [0.02, 0.02], [Message(0, 1, 2.5e6, 2.5e6)])
    assert step(four, gigabit) == pytest.approx(0.12 + 0.01 + 0.16 + 0.02 + 2 * 50e-6)


def test_a_message_may_skip_a_stage_and_integers_have_no_gradients():
    link = Link(0.0, 1.0)
    skipping = stages([1.0] * 3, [1.0] * 3, [Message(0, 2, 5.0, 0.0)])
    # Stage 0 computes until 1, sends until 6, and waits for no gradient: it ends its step at 7.
    assert step(skipping, link, micro_batches=1) == pytest.approx(7.0)


def test_what_a_step_takes_besides_its_passes_is_divided_by_the_parameters_of_the_stages():
    uneven = stages([1.0, 1.0], [2.0, 2.0], parameters=[1, 3])
    # Stage 1 updates for 3 s while stage 0 computes its last backward pass, 2 s, and its update, 1 s.
    assert step(uneven, rest=4.0) == pytest.approx(15.0 + 1.0)
    # Steps that are shorter than the passes that were measured on their own scale these down.
    assert step(uneven, rest=-12.0) == pytest.approx(7.5)


def test_the_predicted_order_is_that_of_the_schedule():
    for count, number in ((2, 4), (3, 2)):
        order = [[("forward", index) for index in range(number)] + [("backward", index) for index in range(number)]]
        found = [schedule.tasks("gpipe", stage, count, number) for stage in range(count)]
        assert [[(task.direction, task.micro_batch) for task in tasks] for tasks in found] == order * count


def test_only_numbers_of_stages_that_were_measured_are_predicted():
    even = {2: stages([1.0, 1.0], [2.0, 2.0])}
    known = dataclasses.replace(
        facts(FAST), links={"pipeline": FAST}, stages=even, micro_batched_seconds={1: 24.0, 2: 99.0}
    )
    found = {one.name: one.examples_per_second for one in costs.predict(known, [2, 4])}
    assert set(found) == {"single", "pipeline on 2"} and 1024 / found["pipeline on 2"] == pytest.approx(15.0)


def test_processes_of_one_machine_have_the_cost_that_was_measured_together():
    shared = costs.Facts(64, 10, 1e6, {1: COMPUTE, 2: Compute(0.1, 0.0)}, {"multiworker": FAST}, machines=False)
    found = {one.name: one.examples_per_second for one in costs.predict(shared, [2])}
    assert found["multiworker on 2"] == pytest.approx(640, rel=0.01) and set(found) == {"single", "multiworker on 2"}


@pytest.mark.parametrize(("measured_seconds", "for_three"), [(0.04, 0.02 + 0.01), (0.015, 0.02 * 0.5)])
def test_what_a_job_of_two_costs_besides_the_formulas_is_added_and_what_it_saves_is_a_proportion(
    measured_seconds, for_three
):
    compute = {1: COMPUTE, 2: Compute(0.03, 0.0), 3: Compute(0.02, 0.0)}
    instant = Link(0.0, math.inf)
    known = costs.Facts(64, 10, 1e6, compute, {"multiworker": instant}, machines=False)
    corrected = dataclasses.replace(known, jobs=costs.Jobs(2, 10, {"multiworker": measured_seconds}))
    found = {one.name: 64 / one.examples_per_second for one in costs.predict(corrected, [2, 3])}
    assert found["multiworker on 2"] == pytest.approx(measured_seconds)
    assert found["multiworker on 3"] == pytest.approx(for_three)
    assert costs.modelled_step_seconds(corrected, 2) == {"multiworker": pytest.approx(0.03)}


def test_a_job_with_short_epochs_corrects_a_training_with_long_ones():
    known = dataclasses.replace(facts(FAST, machines=False), links={"mpi_split": FAST}, copy_seconds=1.0)
    step = COMPUTE.seconds(512)
    # The job averages once in 10 steps, and loses 3 ms besides.
    jobs = costs.Jobs(2, 10, {"mpi_split": step + 1.0 / 10 + 0.003})
    found = {
        one.name: 1024 / one.examples_per_second for one in costs.predict(dataclasses.replace(known, jobs=jobs), [2])
    }
    assert found["mpi_split on 2"] == pytest.approx(step + 1.0 / 100 + 0.003, rel=1e-3)


def test_a_line_through_two_noisy_measurements_has_no_cost_below_zero():
    assert Compute.through((32, 0.010), (64, 0.009)) == Compute(0.010, 0.0)
    assert Compute.through((32, 0.001), (64, 0.010)).fixed_seconds == 0.0


def test_the_first_epoch_of_a_measured_run_only_warms_up(monkeypatch, tmp_path):
    def records(work, batch_size, processes, folder):
        record = schema.example()
        for number, step_seconds in enumerate((9.0, 0.001 * batch_size, 0.003 * batch_size), start=1):
            record.epochs.append(EpochRecord.from_logs(number, {"step_seconds": step_seconds}, 1.0, 0.0))
        return [record]

    monkeypatch.setattr(measured, "run_side_by_side", records)
    work = measured.Work({}, 64, 1000, (0,))
    assert measured.compute(work, 2, tmp_path)[0].seconds(32) == pytest.approx(0.002 * 32)
    line, _ = measured.compute_of_any_part(work, tmp_path)
    assert [line.seconds(16), line.seconds(64)] == pytest.approx([0.002 * 16, 0.002 * 64])


def test_predictions_of_several_rounds_say_how_far_a_run_may_be_from_them():
    def predicted(*rates):
        return [[costs.Prediction("single", 1, rate)] for rate in rates]

    (steady,), (noisy,) = costs.combined(predicted(100, 101, 99)), costs.combined(predicted(100, 130, 80))
    assert steady.examples_per_second == pytest.approx(100, rel=1e-3) and 1.03 < steady.within < 1.08
    assert noisy.within > 2
    assert costs.combined(predicted(100))[0].within == float("inf")


def test_a_prediction_that_the_measurements_do_not_decide_is_not_recommended():
    def predicted(*times):
        return [[costs.Prediction("multiworker", 2, 100 * n), costs.Prediction("single", 1, 100)] for n in times]

    decided, undecided = predicted(1.5, 1.52, 1.49), predicted(1.1, 1.6, 0.8)
    assert "Use `multiworker on 2`, 1.50 (1.4" in advise._recommendation(costs.combined(decided), decided)
    assert "too much to recommend it" in advise._recommendation(costs.combined(undecided), undecided)


WORK = ["--model", "mlp", "--dataset", "digits"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--workers", "two"], "`--workers` is `two`"),
        (["--workers", "4..2"], "`--workers` is `4..2`"),
        (["--workers", "2..4096", "--batch-size", "8192"], "the link is measured between processes of this machine"),
        (["--workers", "64", "--link", "1Gbit", "--latency", "50us"], "a global batch has 32 examples"),
        (["--link", "1Gbit"], "Only one of `--link` and `--latency` is set"),
        (["--link", "fast", "--latency", "50us"], "`--link` is `fast`"),
        (["--link", "1.2.3Gbit", "--latency", "50us"], "`--link` is `1.2.3Gbit`"),
        (["--link", ".Gbit", "--latency", "50us"], "`--link` is `.Gbit`"),
        (["--link", "1Gbit", "--latency", "1.2.3us"], "`--latency` is `1.2.3us`"),
        (["--link", "1Gbit", "--latency", "soon"], "`--latency` is `soon`"),
        (["--curves", "curves.gif"], "`--curves` is `curves.gif`"),
        (["--dataset", "nothing"], "Unknown dataset `nothing`"),
    ],
)
def test_what_cannot_be_predicted_is_one_sentence_and_a_hint(options, sentence):
    found = CliRunner().invoke(advise.command, [*WORK, *options])
    assert found.exit_code == 2, found.output
    assert sentence in found.output and "hint:" in found.output


def test_a_strategy_whose_job_fails_is_predicted_by_its_formula(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(terminal, "say", said.append)
    work = measured.Work({"model": "nothing", "dataset": "digits"}, 64, 1347, (0,))
    known = dataclasses.replace(facts(FAST, machines=False), links={"multiworker": FAST})
    found = rounds._with_jobs(known, work, [2], ["multiworker"], tmp_path)
    assert found.jobs is None and found.links
    assert "Unknown model `nothing`" in said[-1] and "`multiworker` is predicted without it" in said[-1]


@pytest.mark.thorough
@pytest.mark.slow
def test_machines_on_a_described_link_are_predicted_from_real_steps(tmp_path):
    options = ["--batch-size", "64", "--workers", "2..3", "--link", "10Gbit", "--latency", "50us"]
    options += ["--curves", str(tmp_path / "curves.svg")]
    found = CliRunner().invoke(advise.command, [*WORK, *options])
    assert found.exit_code == 0, found.output
    assert "examples/s on" in found.output and "parameter_server" in found.output
    assert "Use `" in found.output or "measure again on a quieter machine" in found.output
    # The model has four layers, of which two have weights.
    assert re.search(r"^pipeline +[\d,]+ +factor", found.output, re.MULTILINE), found.output
    assert "`pipeline on 3` is not predicted, because it cannot train here: Stage" in found.output
    assert advise.LEFT_OUT in found.output
    assert "parameter_server" in (tmp_path / "curves.svg").read_text()


@pytest.mark.parametrize(
    ("step_seconds", "evaluation_seconds", "examples", "steps", "epochs"),
    [
        (0.02, 0.0, 100_000, 250, 3),  # two epochs of 5 s, after one that warms up
        (0.004, 0.0, 100_000, 250, 11),  # ten epochs of 1 s
        (0.004, 1.0, 100_000, 250, 6),  # five epochs of 1 s, and their evaluations of 1 s
        (0.002, 0.0, 1_000, 250, 21),  # epochs of 15 steps
        (2.0, 0.0, 100_000, 10, 3),  # an epoch of ten steps takes longer than 5 s
    ],
)
def test_measurements_take_enough_steps_and_epochs(
    tmp_path, monkeypatch, step_seconds, evaluation_seconds, examples, steps, epochs
):
    def probe(work, batch_size, processes, folder):
        record = schema.example()
        record.epochs.append(EpochRecord.from_logs(1, {"step_seconds": step_seconds}, 1.0, evaluation_seconds))
        return [record]

    monkeypatch.setattr(measured, "run_side_by_side", probe)
    work = measured.Work({}, 64, examples, (0,))
    assert (work.steps, work.epochs) == (measured.PROBE_STEPS, 3)
    work = work.with_lengths_for(tmp_path)
    assert (work.steps, work.epochs) == (steps, epochs)


@pytest.mark.thorough
def test_a_small_model_is_measured_with_many_steps(tmp_path):
    work = measured.Work({"model": "mlp", "dataset": "digits"}, 64, 1347, tuple(sorted(os.sched_getaffinity(0))))
    work = work.with_lengths_for(tmp_path)
    assert work.steps == measured.MAX_STEPS and work.epochs > 3


@pytest.mark.thorough
def test_options_that_do_not_train_are_told_with_the_error_of_the_training():
    options = ["--model-option", "colour=red", "--workers", "2", "--link", "10Gbit", "--latency", "50us"]
    found = CliRunner().invoke(advise.command, [*WORK, *options])
    assert found.exit_code == 2, found.output
    assert "could not be measured" in found.output and "colour" in found.output
