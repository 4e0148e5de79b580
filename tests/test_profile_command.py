"""`tfdist profile RUN`: what a traced training is spent on, by layer and by kind, and what to try first."""

import doctest

import pytest
import tensorflow as tf
from click.testing import CliRunner

from tfdist import profile, train
from tfdist.profiling import breakdown, trace
from tfdist.run.folder import load_record


def test_the_synopsis_runs():
    assert doctest.testmod(breakdown).failed == 0


@pytest.mark.thorough
def test_a_traced_run_tells_of_its_layers_its_kinds_and_its_bound(working_folder, capfd):
    options = ["--strategy", "custom", "--devices", "2", "--model", "cnn", "--dataset", "digits", "--epochs", "1"]
    trained = CliRunner().invoke(train.command, [*options, "--quiet", "--profile", "10:20", "--run-dir", "run"])
    assert trained.exit_code == 0, trained.output
    found = CliRunner().invoke(profile.command, ["run", "--top", "400"])
    assert found.exit_code == 0, found.output
    lines = [line.strip() for line in found.output.splitlines()]
    assert lines[0].startswith("10 traced steps")
    names = {line.partition("  ")[2].strip() for line in lines}
    assert {"conv2d, forward", "conv2d, backward", "conv2d_1, backward", "update of the weights", "loss"} <= names
    assert {"FusedConv2D", "Conv2DBackpropFilterWithBias"} & names or "Conv2D" in names
    # Each operation is a row of its own, with its whole name.
    operations = lines[lines.index("share   operation") + 1 :]
    operations = operations[: operations.index("")]
    assert len(operations) == len({line.partition("  ")[2] for line in operations}) > 50
    shares = load_record(working_folder / "run").breakdown.model_dump()
    assert shares["compute_seconds"] > 0 and f"bound by {bound(shares)}" in found.output
    assert "Try first: " in found.output
    assert found.output.endswith(
        "`tensorboard --logdir run/tensorboard` shows these steps on a time line, in its tab PROFILE.\n"
    )
    assert "tfdist profile" not in found.output  # which is what the user has just run


def test_advice_on_compute_names_the_layers_wherever_they_are_listed():
    shares = {"compute": 0.9, "communication": 0.05, "input": 0.05, "waiting": 0.0}
    assert "tfdist profile RUN" in breakdown.advice(shares)
    assert breakdown.advice(shares, "the table above has the layers").endswith("; the table above has the layers.")
    waits = {"compute": 0.1, "communication": 0.05, "input": 0.05, "waiting": 0.8}
    assert "layers" not in breakdown.advice(waits)


def test_a_trace_without_steps_is_one_sentence(tmp_path):
    product = tf.function(lambda x: tf.matmul(x, x))
    product(tf.ones([256, 256]))
    with trace.trace(tmp_path):
        product(tf.ones([256, 256]))
    found = CliRunner().invoke(profile.command, [str(tmp_path)])
    assert found.exit_code == 2 and "has no step markers" in found.output and "hint:" in found.output


def bound(seconds):
    named = {kind: seconds[f"{kind}_seconds"] for kind in ("compute", "communication", "input", "waiting")}
    return breakdown.bound_of(named)


def test_a_run_without_a_trace_is_one_sentence(tmp_path):
    for options, said in ([str(tmp_path)], "No trace in"), ([str(tmp_path), "--top", "0"], "`--top` is 0"):
        found = CliRunner().invoke(profile.command, options)
        assert found.exit_code == 2 and said in found.output and "hint:" in found.output
