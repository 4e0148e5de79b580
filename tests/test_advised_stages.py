"""The stages that `tfdist advise` measures: what they send, how long they compute, and which are refused."""

import json

import keras
import pytest
from keras import layers

from tfdist.advisor import measured, stages
from tfdist.advisor.costs import Message
from tfdist.advisor.measured import Work
from tfdist.pipeline_parallel import plan


def across_a_stage():
    """Three layers with 4, 8 and 4 units, of which the last one also uses the output of the first."""
    inputs = keras.Input((6,))
    first = layers.Dense(4, name="first")(inputs)
    second = layers.Dense(8, name="second")(first)
    third = layers.Dense(4, name="third")(second)
    return keras.Model(inputs, layers.Add(name="both")([first, third]))


def indices(spec):
    """Rounds its input to integers, which cross the cut before the embedding."""
    inputs = keras.Input(spec.input_shape)
    first = layers.Dense(8, name="first")(layers.Flatten()(inputs))
    rounded = keras.ops.cast(keras.ops.abs(first) % 5, "int32")
    embedded = layers.Embedding(5, 3, name="embedding")(rounded)
    return keras.Model(inputs, layers.Dense(spec.classes)(layers.Flatten()(embedded)))


def custom(spec):
    """A model whose layers are not known."""

    class Custom(keras.Model):
        def __init__(self):
            super().__init__()
            self.flatten, self.dense = layers.Flatten(), layers.Dense(spec.classes)

        def call(self, x):
            return self.dense(self.flatten(x))

    return Custom()


def test_a_tensor_is_sent_to_each_stage_that_uses_it():
    made = plan.make(across_a_stage(), 3, ["second", "third"], "time", 5, 4)
    # Float32 numbers of 5 examples: 4 units to the next stage and to the last one, and 8 units.
    assert stages.messages(made, 5) == [Message(0, 1, 80, 80), Message(0, 2, 80, 80), Message(1, 2, 160, 160)]


def work(model, counts, **options):
    return stages.Work({"model": model, "dataset": "digits", **options}, 16, 4, counts)


def test_integers_are_sent_only_forward():
    model = stages._compiled(work("tests.test_advised_stages:indices", [2]))
    made = plan.make(model, 2, ["embedding"], "time", 4, 4)
    assert stages.messages(made, 4) == [Message(0, 1, 4 * 8 * 4, 0)]


def test_the_stages_of_a_model_are_measured_and_those_that_a_pipeline_refuses_are_not():
    found = stages.measure(work("mlp", [2, 99], model_option=["units=32"], optimizer="adam"))
    two = found["stages"][2]
    assert len(two["forward_seconds"]) == len(two["backward_seconds"]) == 2
    assert all(seconds > 0 for seconds in two["forward_seconds"])
    assert two["parameters"] == [64 * 32 + 32, 32 * 10 + 10 + 2]  # with the seed of dropout
    assert two["messages"][0]["forward_bytes"] == 4 * 32 * 4
    assert "99 stages were requested" in found["refusals"][99] and list(found["stages"]) == [2]
    # Adam has two slots per weight, and a learning rate.
    assert found["averaged_bytes"] == 3 * 4 * (64 * 32 + 32 + 32 * 10 + 10) + 4


def test_a_model_with_a_custom_call_has_no_stages_but_weights_and_slots():
    found = stages.measure(work("tests.test_advised_stages:custom", [2], optimizer="sgd"))
    assert not found["stages"] and "custom `call`" in found["refusals"][2]
    assert found["averaged_bytes"] >= 4 * 650


def test_a_layer_that_two_stages_would_call_is_refused():
    found = stages.measure(work("tests.test_advised_stages:shared", [3]))
    assert "`shared` is in stage" in found["refusals"][3]


def shared(spec):
    """Calls one layer first and last, so that every division into three stages separates the calls."""
    inputs = keras.Input(spec.input_shape)
    both = layers.Dense(64, name="shared")
    middle = layers.Dense(64, name="middle")(both(layers.Reshape((64,))(inputs)))
    return keras.Model(inputs, both(middle))


@pytest.mark.parametrize(("output", "reason"), [("error: the disk is full\n\nhint: x", "the disk is full"), ("", "?")])
def test_the_reason_of_a_failed_run_is_the_error_of_a_process(tmp_path, output, reason):
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "worker-0.log").write_text("Waiting for worker 1\n")
    (tmp_path / "output" / "worker-1.log").write_text(output)
    (tmp_path / measured.OUTPUT).write_text("│ error: in a box\n?")
    assert measured._reason(tmp_path, 2) == reason
    assert "took longer than" in measured._reason(tmp_path, None)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_child_process_measures_stages_while_another_one_shares_the_machine(tmp_path):
    training = Work({"model": "mlp", "dataset": "digits", "data_dir": tmp_path}, 16, 100, (0, 1))
    found = measured.pipelines(training, [2], 2, tmp_path / "stages")
    assert set(found.stages) == {2} and not found.refusals
    assert found.stages[2].messages == [Message(0, 1, 4 * 128 * 4, 4 * 128 * 4)]
    assert json.loads((tmp_path / "stages" / "1" / measured.RESULT).read_text())["stages"]["2"]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_strategy_says_itself_whether_it_trains_a_model(tmp_path):
    training = Work({"model": "tests.test_advised_stages:custom", "dataset": "digits"}, 16, 100, (0, 1))
    assert measured.refusal(training, "multiworker", tmp_path / "multiworker") is None
    assert "custom `call`" in measured.refusal(training, "pipeline", tmp_path / "pipeline")
