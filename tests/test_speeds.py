"""`speeds`: replicas take parts of a global batch in proportion, and the result is that of equal parts."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import tfdist
from tfdist import data, spmd
from tfdist.__main__ import main
from tfdist.data.input.division import Division
from tfdist.errors import UsageError
from tfdist.jobs.world import World

X = np.random.default_rng(0).normal(size=(23, 4)).astype("float32")


def trained(strategy, x=X):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    strategy.fit(model, x, x[:, :1], batch_size=8, epochs=2, verbose=0)
    return model.get_weights()


@given(st.integers(0, 300), st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_parts_join_to_the_batch_and_each_is_within_one_example_of_its_proportion(examples, speeds):
    division = Division(len(speeds), tuple(speeds))
    parts = [division.part(examples, index) for index in range(len(speeds))]
    assert [part[0] for part in parts[1:]] == [part[1] for part in parts[:-1]]
    assert (parts[0][0], parts[-1][1]) == (0, examples)
    assert parts[0][1] > 0 or examples == 0
    for (begin, end), speed in zip(parts, speeds, strict=True):
        assert abs(end - begin - examples * speed / sum(speeds)) < 1
    length = division.even_length(examples)
    assert length is None or {end - begin for begin, end in parts} == {length}
    numbers = [
        tuple(map(int, division.part(tf.constant(examples), tf.constant(index)))) for index in range(len(speeds))
    ]
    assert numbers == parts


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["custom", "mirrored"])
def test_the_weights_are_those_of_equal_parts_and_each_replica_has_its_proportion(name, monkeypatch):
    seen, compute = [], spmd.compute
    keras.utils.set_random_seed(1)
    strategy = tfdist.strategy(name, devices=2, seed=3, speeds="6,2")
    assert strategy.speeds == (3, 1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    with monkeypatch.context() as patched:
        patched.setattr(spmd, "compute", lambda *given: seen.append(given[3]) or compute(*given))
        strategy.fit(model, X[:16], X[:16, :1], batch_size=8, verbose=0)
    assert set(seen) == {(6, 2)}
    for one, other in zip(
        trained(tfdist.strategy(name, devices=2, seed=3, speeds="3,1")),
        trained(tfdist.strategy("single", seed=3)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_processes_read_their_parts_of_files_in_proportion():
    whole = data.load("digits")
    parts = [whole.pipeline("train", 10, world=World(rank, 2, speeds=(4, 1)), seed=1) for rank in range(2)]
    together = whole.pipeline("train", 10, world=World(), seed=1)
    for first, second, all_of_it in zip(*parts, together, strict=True):
        if len(all_of_it[1]) == 10:
            assert (len(first[1]), len(second[1])) == (8, 2)
        np.testing.assert_array_equal(np.concatenate([first[0], second[0]]), all_of_it[0])


def test_a_measured_speed_is_a_small_number_for_each_replica():
    strategy = tfdist.strategy("custom", devices=2, seed=3, speeds="auto")
    assert strategy.speeds is None or (len(strategy.speeds) == 2 and max(strategy.speeds) == 20)
    for one, other in zip(trained(strategy), trained(tfdist.strategy("single", seed=3)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.thorough
def test_the_command_has_an_option_and_the_record_says_what_it_was(tmp_path):
    arguments = ["--strategy", "custom", "--devices", "2", "--speeds", "3,1", "--model", "mlp", "--dataset", "digits"]
    done = CliRunner().invoke(
        main, ["train", *arguments, "--epochs", "1", "--run-dir", str(tmp_path / "run"), "--quiet"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "run" / "run.json").read_text())["strategy"]["options"]["speeds"] == [3, 1]


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("custom", {"devices": 2, "speeds": "3,0"}, "`speeds` is `3,0`"),
        ("custom", {"devices": 2, "speeds": "fast"}, "`speeds` is `fast`"),
        ("custom", {"devices": 2, "speeds": [1.5, 1]}, r"cannot have `\[1.5, 1\]` as `speeds`"),
        ("custom", {"devices": 2, "speeds": "9999,2"}, "adds up to more than 10,000"),
        ("custom", {"devices": 2, "speeds": "3,1,1"}, "`speeds` is `3,1,1`, which is 3 numbers for 2 replicas"),
        ("custom", {"devices": 2, "speeds": "3"}, "`speeds` is `3`, which is 1 number for 2 replicas"),
        ("single", {"speeds": "1"}, "`single` does not know the option `speeds`"),
        ("pipeline", {"devices": 2, "speeds": "3,1"}, "`pipeline` does not know the option `speeds`"),
    ],
)
def test_speeds_that_cannot_be_are_refused_with_a_sentence(name, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        tfdist.strategy(name, seed=1, **options)
