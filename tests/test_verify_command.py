"""`tfdist verify` answers whether a strategy computes what one device does, by its exit code and a table."""

import re

import pytest
from click.testing import CliRunner

from tfdist import verify

PLANTED = """
import keras
from keras import layers

class Centred(layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0)

def equal(spec):
    return keras.Sequential([keras.Input(spec.input_shape), layers.Flatten(), layers.Dropout(0.5), layers.Dense(10)])

def normalized(spec):
    inside = [layers.Dense(8), layers.BatchNormalization(name="planted")]
    return keras.Sequential([keras.Input(spec.input_shape), layers.Flatten(), *inside, layers.Dense(10)])

def centred(spec):
    inside = [layers.Dense(8), Centred(name="planted")]
    return keras.Sequential([keras.Input(spec.input_shape), layers.Flatten(), *inside, layers.Dense(10)])
"""


@pytest.fixture
def verified(working_folder, capfd):
    """`verified(*options)`: the exit code, and what is written to the terminal."""

    def run(*options):
        result = verification(working_folder, *options)
        said = capfd.readouterr()
        return result.exit_code, result.output + said.out + said.err

    return run


def verification(folder, *options):
    (folder / "planted.py").write_text(PLANTED)
    typed = ["--strategy", "custom", "--devices", "2", "--dataset", "digits", "--limit", "128", *options]
    return CliRunner().invoke(verify.command, typed)


def test_an_equal_model_ends_with_a_table_and_exit_code_0(verified, working_folder):
    code, output = verified("--model", "planted:equal", "--verify-steps", "2")
    assert code == 0, output
    assert "(steps: 2)" in output
    assert re.search(r"^weight .*dense.*kernel", output, re.MULTILINE), output
    assert "The steps of `custom` on 2 replicas are those of one device." in output
    assert not list(working_folder.rglob("run.json"))


@pytest.mark.parametrize(("model", "hint"), [("normalized", "synchronized=True"), ("centred", "tfdist.gather")])
def test_a_planted_fault_ends_with_its_layer_and_exit_code_1(verified, model, hint):
    code, output = verified("--model", f"planted:{model}")
    assert code == 1, output
    assert "the layer `planted` differs from one device" in output
    assert hint in output
    assert re.search(r"^output \S*planted .* differs$", output, re.MULTILINE), output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--model", "mlp", "--verify-steps", "0"), "`--verify-steps` is 0"),
        (("--model", "mlp", "--strategy", "mpi_split", "--devices", "1"), "differ from those of one device by design"),
        (("--model", "none"), "Unknown model `none`"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(verified, options, sentence):
    code, output = verified(*options)
    assert code == 2, output
    assert sentence in output
    assert "hint:" in output
