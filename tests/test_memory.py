"""`tfdist memory`: the memory of a training, before anything is allocated."""

import math

import pytest
from click.testing import CliRunner

import tfdist
from tfdist import memory
from tfdist.__main__ import main


def test_weights_gradients_and_slots_are_those_of_the_variables():
    found = memory.estimate("mlp", "digits", 16, optimizer="adam")
    source = tfdist.data.load("digits")
    model = tfdist.models.build("mlp", source.spec)
    parameters = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    assert found.weights == pytest.approx(4 * parameters, abs=64)  # and a seed
    assert found.gradients == 4 * parameters
    assert found.slots == pytest.approx(8 * parameters, abs=64)  # and a counter and a rate


@pytest.mark.thorough
def test_activations_grow_with_the_batch_and_shrink_with_recomputation():
    options = {"task": "classification", "shape": (32, 32, 3)}
    small, large = (memory.estimate("resnet20", "synthetic", size, data_options=options) for size in (8, 32))
    assert 3.5 < large.activations / small.activations < 4.5
    again = memory.estimate("resnet20", "synthetic", 32, data_options=options, recompute="blocks")
    assert again.activations < 0.6 * large.activations
    assert again.weights == large.weights


def test_the_command_prints_a_table():
    typed = "memory --model mlp --dataset digits --strategy mirrored --replicas 2"
    result = CliRunner().invoke(main, typed.split())
    assert result.exit_code == 0, result.output
    for word in ("weights", "gradients", "slots", "activations", "allocator", "total"):
        assert word in result.output


@pytest.mark.parametrize(
    ("options", "sentence", "hint"),
    [
        ("--strategy pipeline", "The memory of `pipeline` cannot be estimated", "--balance memory"),
        ("--strategy mirorred", "Unknown strategy `mirorred`", "mirrored"),
        ("--replicas 64", "`--batch-size` is 32, and `--replicas` is 64", "at most one replica per example"),
        ("--recompute middle", "middle", "dense"),
    ],
)
def test_bad_input_is_one_sentence_with_a_hint(options, sentence, hint):
    result = CliRunner().invoke(main, f"memory --model mlp --dataset digits {options}".split())
    assert result.exit_code == 2
    assert sentence in result.output
    assert hint in result.output
