"""What `tfdist train` is told about its data: options, augmentation, bad examples, the vocabulary of a run."""

from __future__ import annotations

import json
import pickle

import pytest

from tests.test_train import refuse, run
from tfdist import registry
from tfdist.errors import UsageError


def test_options_of_a_dataset_are_numbers_truths_tuples_or_texts():
    settings = ["classes=5", "shape=(8,8,3)", "buckets=true", "encoding=latin-1", "train=a.txt,b.txt", "fold=none"]
    found = registry.parse_options(settings, "--data-option")
    assert found == {
        "classes": 5,
        "shape": (8, 8, 3),
        "buckets": True,
        "encoding": "latin-1",
        "train": "a.txt,b.txt",
        "fold": None,
    }
    for wrong in ("classes", "=5", "a b=5"):
        with pytest.raises(UsageError, match=f"`--data-option` is `{wrong}`, which is not NAME=VALUE"):
            registry.parse_options([wrong], "--data-option")
    with pytest.raises(UsageError, match="`--data-option` sets `classes` twice"):
        registry.parse_options(["classes=5", "classes=6"], "--data-option")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--augment", "crop"], "Unknown augmentation `crop`"),
        (["--on-bad-example", "ignore"], "Unknown policy for bad examples `ignore`"),
        (["--on-bad-example", "skip"], "`synthetic` does not know the option `on_bad_example`"),
        (["--input", "imagined"], "Unknown input `imagined`"),
        (["--input", "cached", "--augment", "resized_crop"], "which are not cached in memory"),
        (["--data-option", "sise=3"], "`synthetic` does not know the option `sise`"),
        (["--data-option", "classes"], "`--data-option` is `classes`, which is not NAME=VALUE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_option_is_one_sentence(tmp_path, arguments, message):
    assert message in refuse(tmp_path, "--strategy", "single", "--model", "mlp", "--dataset", "synthetic", *arguments)


def weights(path) -> bytes:
    import keras

    return pickle.dumps([weight.tolist() for weight in keras.models.load_model(path).get_weights()])


@pytest.mark.thorough
def test_augmented_training_is_recorded_and_resumed_where_it_stopped(tmp_path):
    base = ["--strategy", "single", "--model", "cnn", "--dataset", "synthetic", "--quiet", "--batch-size", 64]
    base += ["--augment", "crop_flip", "--data-option", "train=300", "--data-option", "shape=(8,8,3)"]
    for folder, epochs in (("whole", 2), ("broken", 1)):
        done = run(*base, "--run-dir", folder, "--epochs", epochs, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    dataset = json.loads((tmp_path / "whole" / "run.json").read_text())["dataset"]
    assert dataset["augment"] == "crop_flip" and dataset["options"] == {"train": "300", "shape": "(8, 8, 3)"}
    assert dataset["examples"]["train"] == 300 and dataset["skipped"] == 0
    again = ["--resume", "--run-dir", "broken", "--epochs", 2]
    assert run(*base, *again, cwd=tmp_path).returncode == 0
    assert weights(tmp_path / "broken" / "model.keras") == weights(tmp_path / "whole" / "model.keras")
    other = ["train=400" if argument == "train=300" else argument for argument in base]
    message = refuse(tmp_path, *other, *again)
    assert "`--data-option train=300`, and it is resumed with `--data-option train=400`" in message
