"""Recommendation and click prediction: the two models by hand, their metrics, and the datasets from files."""

from __future__ import annotations

import gzip
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist.data
from tests import zoo
from tests.test_train import run
from tfdist import models, tasks
from tfdist.data import IndexedSource, Source
from tfdist.data.sources import ratings
from tfdist.data.spec import PADDING
from tfdist.errors import DataError, UsageError
from tfdist.tasks import recommendation


def build(name):
    """The small model of the tests' zoo, with the same weights each time."""
    keras.utils.set_random_seed(0)
    return models.build(name, zoo.SMALL[name].spec, **zoo.SMALL[name].options)


def by_layer(model):
    """The weights of each layer, by its name."""
    return {layer.name: layer.get_weights() for layer in model.layers if layer.weights}


def dense(x, weights, activation=lambda values: np.maximum(values, 0)):
    kernel, bias = weights
    return activation(x @ kernel + bias)


# The models


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def test_two_tower_multiplies_the_unit_vectors_of_users_and_items():
    model, (x, _) = build("two_tower"), zoo.data("two_tower", 5)
    weights = by_layer(model)
    (history,), (table, *of_items) = weights["history"], weights["catalogue"]
    users = np.stack([history[row[row != PADDING]].mean(axis=0) for row in x])
    users = dense(dense(users, weights["user_0"]), weights["user_1"], lambda values: values)
    items = dense(dense(table, of_items[:2]), of_items[2:], lambda values: values)
    np.testing.assert_allclose(model(x), unit(users) @ unit(items).T / 0.05, rtol=1e-4, atol=1e-4)


def test_dlrm_multiplies_the_vectors_of_all_pairs():
    model, (x, _) = build("dlrm"), zoo.data("dlrm", 5)
    weights = by_layer(model)
    values = x["numbers"]
    for number in range(4):
        values = dense(values, weights[f"bottom_{number}"])
    vectors = [values, *(weights[f"category_{i}"][0][column] for i, column in enumerate(x["categories"].T))]
    pairs = [(vectors[i] * vectors[j]).sum(axis=1) for i in range(4) for j in range(i)]
    features = np.concatenate([values, np.stack(pairs, axis=1)], axis=1)
    features = dense(dense(features, weights["top_0"]), weights["top_1"])
    np.testing.assert_allclose(model(x), dense(features, weights["logits"], lambda value: value), rtol=1e-4, atol=1e-5)


def gradients(name, x, y):
    """The gradient of the loss for each weight, by its path."""
    model = build(name)
    with tf.GradientTape() as tape:
        loss = tasks._module(zoo.SMALL[name].spec).loss(zoo.SMALL[name].spec)(y, model(x))
    found = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    return dict(zip([variable.path for variable in model.trainable_variables], found, strict=True))


def test_the_gradients_of_tables_that_are_looked_up_are_sparse():
    found = {name: gradients(name, *zoo.data(name, 5)) for name in ("two_tower", "dlrm")}
    sparse = {path for of in found.values() for path, gradient in of.items() if isinstance(gradient, tf.IndexedSlices)}
    assert sparse == {"history/embeddings", *(f"category_{i}/embeddings" for i in range(3))}


def test_a_user_without_items_has_finite_logits_and_gradients():
    found = gradients("two_tower", np.zeros((2, zoo.LENGTH), np.int32), np.array([3, 4]))
    assert all(np.isfinite(tf.convert_to_tensor(gradient)).all() for gradient in found.values())


def test_a_saved_two_tower_predicts_the_same(tmp_path):
    model, (x, _) = build("two_tower"), zoo.data("two_tower", 5)
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "model.keras")(x), model(x))


# The tasks


def test_recall_is_the_fraction_of_users_whose_next_item_is_among_the_ten_best():
    rng = np.random.default_rng(0)
    logits, y = rng.normal(size=(50, 30)).astype("float32"), rng.integers(0, 30, 50)
    (metric,) = recommendation.metrics(zoo.USERS)
    for half in (slice(0, 20), slice(20, 50)):
        metric.update_state(y[half], logits[half])
    ranks = (logits > logits[np.arange(50), y][:, None]).sum(axis=1)
    assert metric.name == "recall_at_10"
    assert float(metric.result()) == pytest.approx((ranks < 10).mean())


def test_auc_is_the_fraction_of_pairs_that_are_in_the_right_order():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 400)
    logits = (rng.normal(size=400) + y).astype("float32")[:, None]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
    tasks.compile(model, zoo.CLICKS, "sgd")
    found = model.evaluate(logits, y, batch_size=64, verbose=0, return_dict=True)
    clicks, others = logits[y == 1], logits[y == 0].T
    assert found["auc"] == pytest.approx((clicks > others).mean(), abs=5e-3)
    probabilities = 1 / (1 + np.exp(-logits[:, 0]))
    entropy = -np.log(np.where(y == 1, probabilities, 1 - probabilities)).mean()
    assert found["loss"] == pytest.approx(entropy, rel=1e-4)


def test_what_a_user_has_is_not_recommended_again():
    logits = np.array([[9.0, 8.0, 1.0, 5.0, 4.0, 3.0], [9.0, 8.0, 1.0, 5.0, 4.0, 3.0]])
    best = recommendation.best(logits, np.array([[3, 0], [2, 5]]), count=3)
    assert [row.tolist() for row in best] == [[4, 5, 2], [3, 4]]


# What a dataset has to be


def clicks(**changes):
    x = {"numbers": np.zeros((4, 2), np.float32), "categories": np.array([[0, 1], [2, 0], [1, 1], [0, 0]])}
    facts = {"classes": 2, "task": "click_prediction", "category_sizes": (3, 2)}
    return Source.from_arrays("mine", train=(x | changes, np.array([0, 1, 1, 0])), **facts)


def test_a_category_outside_its_table_is_refused():
    x, y = clicks().arrays("train")
    assert x["categories"].dtype == y.dtype == np.int32
    with pytest.raises(DataError, match=r"Category 1 of example 2 .* is `2`, outside its 2 values\n\nhint: "):
        clicks(categories=np.array([[0, 1], [2, 0], [1, 2], [0, 0]])).arrays("train")
    with pytest.raises(DataError, match=r"categories .* have the dtype `float64`"):
        clicks(categories=np.array([[0, 1], [2, 0], [1, 0.5], [0, 0]])).arrays("train")
    with pytest.raises(DataError, match=r"promises categories .*\n\nhint: .*`category_sizes`"):
        clicks(categories=np.zeros((4, 3), int)).arrays("train")


def test_inputs_with_other_names_are_refused():
    with pytest.raises(DataError, match=r"has the inputs `numbers`, `categories`, `other`.*\n\nhint: return `numbers`"):
        clicks(other=np.zeros(4)).arrays("train")


def test_clicks_that_are_read_by_number_make_the_same_batches():
    stored = tfdist.data.load("synthetic", task="click_prediction", words=9, length=3, train=10, validation=0, test=0)
    x, y = stored.arrays("train")
    by_number = IndexedSource(
        stored.spec, lambda split, numbers: ({name: values[numbers] for name, values in x.items()}, y[numbers])
    )
    batches = [source.pipeline("train", 4, seed=1, shuffle=False) for source in (stored, by_number)]
    for (x1, y1), (x2, y2) in zip(*(dataset.as_numpy_iterator() for dataset in batches), strict=True):
        np.testing.assert_array_equal(y1, y2)
        for name in ("numbers", "categories"):
            np.testing.assert_array_equal(x1[name], x2[name])


# Ratings

RATED = [
    *[("ann", f"film {i}", 4, 100 - i) for i in range(5)],  # the latest first, as some files have them
    *[("bob", f"film {i}", 5 if i != 2 else 1, i) for i in (0, 1, 2, 3, 4)],
    ("cid", "film 0", 3, 5),
    ("cid", "unseen", 3, 7),
]


def write_ratings(folder, name="ratings.csv"):
    separator = {"ratings.csv": ",", "ratings.dat": "::", "u.data": "\t"}[name]
    lines = [separator.join(map(str, rating)) for rating in RATED]
    header = ["userId,movieId,rating,timestamp"] if name == "ratings.csv" else []
    (folder / name).write_text("\n".join([*header, *lines]) + "\n")


def shown(source, split):
    """The names of the items so far and of the next item, for each example."""
    x, y = source.arrays(split)
    names = source.spec.vocabulary
    return [
        ([names[item][-1] for item in row if item != PADDING], names[item][-1]) for row, item in zip(x, y, strict=True)
    ]


@pytest.mark.parametrize("name", ratings.NAMES)
def test_the_last_items_of_each_user_are_for_the_test_and_validation(tmp_path, name):
    write_ratings(tmp_path, name)
    source = tfdist.data.load("ratings", tmp_path, length=3)
    assert source.spec.task == "recommendation" and source.spec.classes == source.spec.vocabulary_size == 7
    assert source.spec.vocabulary == ("<padding>", "<unknown>", "film 2", "film 0", "film 1", "film 3", "film 4")
    assert shown(source, "train") == [(["4"], "3"), (["4", "3"], "2"), (["0"], "1"), (["0", "1"], "2")]
    assert shown(source, "validation") == [(["4", "3", "2"], "1"), (["0", "1", "2"], "3")]
    assert shown(source, "test") == [(["3", "2", "1"], "0"), (["1", "2", "3"], "4")]  # and not `unseen`


def test_low_ratings_and_rare_items_are_left_out(tmp_path):
    write_ratings(tmp_path)
    assert shown(tfdist.data.load("ratings", tmp_path, least=2), "test")[1] == (["0", "1", "3"], "4")
    few = tfdist.data.load("ratings", tmp_path, words=4)
    assert few.spec.vocabulary == ("<padding>", "<unknown>", "film 2", "film 0")
    assert shown(few, "train") == [([">", ">"], "2"), (["0", ">"], "2")]


def test_lines_that_are_not_ratings_are_refused_or_left_out(tmp_path):
    write_ratings(tmp_path)
    with (tmp_path / "ratings.csv").open("a") as file:
        file.write("dan,film 0,good,4\n")
    with pytest.raises(
        DataError, match=r"Line 14 of `.*` is `dan,film 0,good,4`, not a user, an item, a rating and a time"
    ):
        tfdist.data.load("ratings", tmp_path)
    assert len(tfdist.data.load("ratings", tmp_path, on_bad_example="skip").skipped) == 1
    with pytest.raises(DataError, match=r"has no user with four ratings of 5\.5 or more"):
        tfdist.data.load("ratings", tmp_path, least=5.5, on_bad_example="skip", file="ratings.csv")
    with pytest.raises(DataError, match=r"has no file `ratings\.csv` in"):
        tfdist.data.load("ratings", tmp_path / "..", file=None)


# Logs of clicks


def log_line(click, numbers=(), categories=()):
    fields = [*map(str, numbers), *[""] * (13 - len(numbers)), *categories, *[""] * (26 - len(categories))]
    return "\t".join([str(click), *fields])


def write_logs(path, count, opener=open):
    with opener(path, "wt") as file:
        file.writelines(log_line(i % 2, [i, -1, 7], [f"{i:08x}", "ffffffff"]) + "\n" for i in range(count))


def test_numbers_are_logarithms_and_categories_rows_of_their_tables(tmp_path):
    write_logs(tmp_path / "train.txt", 28)
    source = tfdist.data.load("click_logs", tmp_path, words=10)
    assert source.spec.examples == {"train": 24, "validation": 2, "test": 2}
    assert source.spec.input_shape == (13,) and source.spec.category_sizes == (10,) * 26
    x, y = source.arrays("train")
    np.testing.assert_array_equal(y, np.arange(24) % 2)
    np.testing.assert_allclose(x["numbers"][:, 0], np.log(1 + np.arange(24)), rtol=1e-6)
    np.testing.assert_allclose(x["numbers"][:, 1:4], np.tile([0, np.log(8), 0], (24, 1)), rtol=1e-6)
    np.testing.assert_array_equal(x["categories"][:, 0], 1 + np.arange(24) % 9)
    np.testing.assert_array_equal(x["categories"][:, 1:3], np.tile([1 + 0xFFFFFFFF % 9, 0], (24, 1)))
    np.testing.assert_allclose(source.arrays("test")[0]["numbers"][:, 0], np.log([27, 28]), rtol=1e-6)


def test_several_files_and_compressed_ones_are_read_in_their_order(tmp_path):
    write_logs(tmp_path / "day_0", 3)
    write_logs(tmp_path / "day_1.gz", 5, gzip.open)
    source = tfdist.data.load("click_logs", tmp_path, train="day_0,day_1.gz", test="day_0")
    assert source.spec.examples == {"train": 8, "validation": 0, "test": 3}
    np.testing.assert_array_equal(source.arrays("train")[1], [0, 1, 0, 0, 1, 0, 1, 0])


@pytest.mark.parametrize("line", [log_line(2), log_line(1) + "\t", log_line(1, ["x"]), log_line(0, [], ["xyz"])])
def test_lines_in_another_layout_are_refused_or_left_out(tmp_path, line):
    write_logs(tmp_path / "train.txt", 14)
    with (tmp_path / "train.txt").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(
        DataError, match=r"Line 15 of `.*` is .*, not a click, 13 numbers and 26 hexadecimal categories"
    ):
        tfdist.data.load("click_logs", tmp_path)
    assert len(tfdist.data.load("click_logs", tmp_path, on_bad_example="skip").skipped) == 1


def test_logs_without_examples_and_tables_of_one_row_are_refused(tmp_path):
    (tmp_path / "train.txt").write_text("")
    with pytest.raises(DataError, match=r"There are no examples in `.*train.txt`"):
        tfdist.data.load("click_logs", tmp_path)
    with pytest.raises(UsageError, match="`words` is 1, but value 0 is for missing categories"):
        tfdist.data.load("click_logs", tmp_path, words=1)


# Made-up examples, and the command


def test_synthetic_users_and_clicks_can_be_learned():
    x, y = tfdist.data.load("synthetic", task="recommendation", words=102, train=2000).arrays("train")
    groups = np.stack([((x - 2) % 10 == group) & (x != PADDING) for group in range(10)]).sum(axis=2)
    assert (groups.argmax(axis=0) == (y - 2) % 10).mean() > 0.9
    x, y = tfdist.data.load("synthetic", task="click_prediction", words=3, length=2, train=4000).arrays("train")
    features = np.concatenate([x["numbers"], np.eye(9)[3 * x["categories"][:, 0] + x["categories"][:, 1]]], axis=1)
    weights = np.linalg.lstsq(features[:3000], 2.0 * y[:3000] - 1, rcond=None)[0]
    assert ((features[3000:] @ weights > 0) == y[3000:]).mean() > 0.75


@pytest.mark.thorough
def test_the_command_recommends_items_of_a_file_by_their_names(tmp_path):
    rng = np.random.default_rng(0)
    lines = [f"{user}::film-{rng.integers(30)}::5::{time}" for user in range(30) for time in range(12)]
    (tmp_path / "ratings.dat").write_text("\n".join(lines))
    options = ["--model-option", "width=0.1", "--epochs", 1, "--run-dir", "r"]
    done = run(
        *("--strategy", "single", "--model", "two_tower", "--dataset", "ratings", "--data-dir", tmp_path),
        *options,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "item IDs, the lines of vocabulary.txt" in done.stdout and "tokens/s" not in done.stdout
    names = (tmp_path / "r" / "vocabulary.txt").read_text().splitlines()
    first = (tmp_path / "r" / "recommendations.txt").read_text().split("\n\n")[0].splitlines()
    items, recommended, next_item = ({*line[12:].split()} for line in first)
    assert len(recommended) == 10 and not recommended & items and items | recommended | next_item <= {*names}
    assert 0 <= json.loads((tmp_path / "r" / "run.json").read_text())["test_metrics"]["recall_at_10"] <= 1
