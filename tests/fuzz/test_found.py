"""What fuzzing has found, by name, each in the smallest case that failed."""

import pytest

from tests.contract import contestants
from tests.fuzz import running
from tests.fuzz.drawing import Case

FOUND = {
    "a metric of the user's own with a count and a float": Case(metrics=("moving",)),
    "a loss that a layer adds, beside a loss of the whole batch": Case(
        layers=("dense", "add_loss"), target="marks", loss="dice"
    ),
    "a loss that a layer adds before a synchronized normalization": Case(
        layers=("dense, activity regularized", "batch normalization")
    ),
    "a synchronized normalization of what is masked": Case(
        inputs="tokens", layers=("embedding, masked", "batch normalization"), flattened=True
    ),
    "a step that returns logs of its own, operation by operation": Case(step=("gradients", "apply"), eager=True),
    "a rate that is set after an update, before weights are": Case(
        target="one hot", loss="focal", step=("gradients", "apply", "set the rate", "decay"), batch_size=7
    ),
    "values per example on a replica without examples, through a synchronized normalization": Case(
        inputs="series",
        layers=("simple rnn, unrolled", "batch normalization"),
        step=("gradients per example", "update by hand"),
        batch_size=1,
        examples=1,
    ),
    "rows of a table that are clipped before an optimizer squares them": Case(
        inputs="tokens",
        layers=("embedding",),
        flattened=True,
        optimizer="adam",
        step=("gradients", "clip", "apply"),
        batch_size=3,
    ),
    "a callback that predicts fewer examples than there are replicas, operation by operation": Case(
        inputs="tokens",
        layers=("embedding", "global max pooling 1d"),
        callbacks=("predicts",),
        examples=1,
        eager=True,
    ),
    "weights that are moved and put back before an optimizer divides by their norm": Case(
        optimizer="lamb", step=("gradients", "sharpness", "apply"), batch_size=8, examples=3
    ),
    "weights that are moved and put back, operation by operation": Case(
        optimizer="lamb", step=("gradients", "sharpness", "apply"), batch_size=8, examples=3, eager=True
    ),
    "a metric that vectorizes a function, operation by operation": Case(
        target="marks", loss="binary crossentropy", metrics=("auc, several labels",), eager=True
    ),
}


def pytest_generate_tests(metafunc):
    pairs = contestants.chosen(metafunc.config, contestants.EACH_COUNT)
    metafunc.parametrize("contestant", pairs, ids=[f"{name}-{count}" for name, count in pairs])


@pytest.mark.sampled(3)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_ends_as_on_one_device(name, contestant):
    assert not running.difference(FOUND[name], contestant)
