"""Tasks: what has no part in loss and metrics, what a run shows in the end, what a model is trained with."""

from __future__ import annotations

import dataclasses
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tests.test_train import refuse, run
from tfdist import data, models, tasks, train
from tfdist.data import Source
from tfdist.data.input.division import Division
from tfdist.data.spec import TASKS
from tfdist.errors import UnknownNameError, UsageError
from tfdist.models.stateful_rnn import StreamLSTM
from tfdist.run import config, optimizers, recipes
from tfdist.tasks import characters, translation


def test_every_task_has_a_loss_metrics_and_something_to_show():
    for task in TASKS:
        module = tasks._module(zoo.spec_of(task, 4, 4, 1))
        assert callable(module.loss) and callable(module.metrics) and callable(module.show)


def scores(spec, y, logits, sample_weight=None):
    """What a compiled model reports of these logits."""
    model = keras.Sequential([keras.Input(logits.shape[1:]), keras.layers.Identity()])
    tasks.compile(model, spec, "sgd")
    return model.evaluate(logits, y, batch_size=2, sample_weight=sample_weight, verbose=0, return_dict=True)


@pytest.mark.parametrize("void", [3, 4], ids=["void among the classes", "void beyond the classes"])
def test_ignored_pixels_have_no_part_in_loss_and_metrics(void):
    spec = dataclasses.replace(zoo.masks(4, 5), ignored_class=void)
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 4, 5, 4)).astype("float32")
    y = np.where(rng.random((5, 4, 5)) < 0.4, void, rng.integers(0, 3, (5, 4, 5))).astype("int32")
    found = scores(spec, y, logits)
    labelled, right = y != void, logits.argmax(-1) == y
    logs = keras.ops.log_softmax(logits).numpy()
    cross_entropies = -np.take_along_axis(logs, np.minimum(y, 3)[..., None], -1)[..., 0]
    # Keras' mean over the examples weighs the batches of two and one alike by their number of examples.
    parts = [slice(0, 2), slice(2, 4), slice(4, 5)]
    losses = [cross_entropies[part][labelled[part]].mean() for part in parts]
    assert found["loss"] == pytest.approx(np.average(losses, weights=[2, 2, 1]), rel=1e-5)
    assert found["accuracy"] == pytest.approx(right[labelled].mean(), rel=1e-5)
    predicted = logits.argmax(-1)[labelled]
    counted = [number for number in range(4) if number != void]
    both = [((predicted == n) & (y[labelled] == n)).sum() for n in counted]
    either = [((predicted == n) | (y[labelled] == n)).sum() for n in counted]
    shares = [b / e for b, e in zip(both, either, strict=True) if e]
    assert found["mean_iou"] == pytest.approx(np.mean(shares), rel=1e-5)


def test_ignored_tokens_stay_out_of_a_weighted_accuracy():
    metric = tasks._targets.Accuracy(0)
    y = np.array([[1, 2, 0], [1, 0, 0]])
    logits = np.eye(3)[[[1, 1, 0], [2, 0, 0]]]
    metric.update_state(y, logits, sample_weight=np.array([1.0, 3.0]))
    assert float(metric.result()) == pytest.approx(1 / 5)
    again = keras.metrics.deserialize(keras.metrics.serialize(metric))
    assert again.ignored_class == 0 and again.name == "accuracy"


def test_perplexity_is_the_exponential_of_the_mean_over_all_tokens_of_an_epoch():
    """Not of the mean of its batches, which have different numbers of tokens."""
    spec = zoo.TRANSLATION
    rng = np.random.default_rng(0)
    y = rng.integers(1, spec.classes, (5, 10)) * (np.arange(10) < rng.integers(1, 10, (5, 1)))
    logits = rng.normal(size=(5, 10, spec.classes)).astype("float32")
    cross_entropies = -np.take_along_axis(keras.ops.log_softmax(logits).numpy(), y[..., None], -1)[..., 0]
    found = scores(spec, y, logits)
    assert found["perplexity"] == pytest.approx(np.exp(cross_entropies[y != 0].mean()), rel=1e-5)
    metric = tasks._targets.Perplexity(0)
    weights = np.array([1.0, 0.0, 2.0, 0.5, 3.0])
    metric.update_state(y, logits, sample_weight=weights)
    mean = np.average(cross_entropies, weights=(y != 0) * weights[:, None])
    assert float(metric.result()) == pytest.approx(np.exp(mean), rel=1e-5)
    for stored in (metric, tasks._targets.NatsPerByte([1, 2])):
        again = keras.metrics.deserialize(keras.metrics.serialize(stored))
        assert again.get_config() == stored.get_config() and again.additive


def test_padding_has_no_part_in_a_translation():
    """More padding, the same loss and accuracy."""
    (x, y), small = zoo.data("seq2seq", 6), zoo.SMALL["seq2seq"]
    keras.utils.set_random_seed(0)
    model = models.build("seq2seq", small.spec, **small.options)
    tasks.compile(model, small.spec, "sgd")
    once = model.evaluate(x, y, batch_size=6, verbose=0)
    longer = {name: np.pad(array, ((0, 0), (0, 4))) for name, array in x.items()}
    assert model.evaluate(longer, np.pad(y, ((0, 0), (0, 4))), batch_size=6, verbose=0) == pytest.approx(once, rel=1e-5)


def test_bleu_is_that_of_sacrebleu_and_a_rare_word_is_never_right():
    vocabulary = ("", "?", "<", ">", "the", "cat", "sat", "here", "now")
    words = [4, 5, 6, 7, 8, 3, 0]
    assert translation.sentence(np.array(words), vocabulary, "!") == "the cat sat here now"
    assert translation.sentence(np.array([4, 1, 3]), vocabulary, "!") == "the !"
    assert translation.sentence(np.array([4, 5]), (), "!") == "4 5"
    assert translation.bleu(["the cat sat here now"], ["the cat sat here now"]) == pytest.approx(100)
    # 4/5 words, 3/4 pairs, 2/3 triples, 1/2 fours; as long as the reference.
    mean = (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4)
    assert translation.bleu(["the cat sat here <unknown>"], ["the cat sat here <rare>"]) == pytest.approx(100 * mean)


def test_a_model_writes_what_it_is_sure_of():
    """A model that is sure that each character's successor in the alphabet follows writes the alphabet."""
    spec = zoo.CHARACTERS
    tokens = keras.Input((None,), dtype="int32")
    sure = 100 * keras.ops.one_hot((tokens + 1) % spec.classes, spec.classes)
    model = keras.Model(tokens, sure)
    text = characters.generate(model, np.array([3, 4, 5], np.int32), 5, np.random.default_rng(0))
    assert text.tolist() == [6, 7, 8, 9, 10]
    for prompt in ([], "abc", [[3, 4]], [3, spec.classes], [-1], [0.5]):
        with pytest.raises(UsageError, match="`prompt` has the shape"):
            characters.generate(model, prompt, 5, np.random.default_rng(0))
    for wrong in ({"count": -1}, {"generator": 0}, {"context": 0}):
        with pytest.raises(UsageError, match=f"`generate` cannot have `.*` as `{next(iter(wrong))}`"):
            characters.generate(
                **{"model": model, "prompt": [3], "count": 5, "generator": np.random.default_rng()} | wrong
            )


SHOWN = {
    "classification": ("mlp", [], "confusion_matrix.png"),
    "segmentation": ("unet", ["--model-option", "width=0.0625"], "masks.png"),
    "text_classification": ("nbow", [], "confusion_matrix.png"),
    "translation": ("seq2seq", ["--model-option", "width=0.05", "--data-option", "length=5"], "translations.txt"),
    "masked_lm": ("bert", ["--model-option=layers=1", "--model-option=width=0.0625"], "masked_words.txt"),
    "characters": ("stateful_rnn", ["--model-option", "width=0.05", "--data-option", "length=8"], "sample.txt"),
    "autoencoding": ("conv_autoencoder", [], "reconstructions.png"),
    "generation": ("vae", [], "samples.png"),
    "recommendation": ("two_tower", ["--model-option", "width=0.25"], "recommendations.txt"),
    "click_prediction": ("dlrm", ["--data-option", "words=20"], "calibration.png"),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "task", [pytest.param(t, marks=() if t == "segmentation" else pytest.mark.exhaustive) for t in SHOWN]
)
def test_the_command_trains_every_task_and_shows_it(tmp_path, task):
    model, options, file = SHOWN[task]
    sizes = [f"--data-option={split}={count}" for split, count in (("train", 64), ("validation", 16), ("test", 16))]
    arguments = ["--strategy", "custom", "--devices", 2, "--model", model, "--dataset", "synthetic", *options, *sizes]
    done = run(
        *arguments, "--data-option", f"task={task}", "--batch-size", 16, "--epochs", 1, "--run-dir", "r", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "r" / "run.json").read_text())
    assert file in found["files"].values() and (tmp_path / "r" / file).stat().st_size > 100
    assert np.isfinite(found["test_metrics"]["loss"])
    assert ("bleu" in found["test_metrics"]) == (task == "translation")
    assert found["optimizer"].replace("_", "") == models.training(model).optimizer  # Keras calls AdamW "adam_w"
    of_texts = ("text_classification", "translation", "characters", "masked_lm")
    assert (found["epochs"][0]["tokens_per_second"] is not None) == ("tokens/s" in done.stdout) == (task in of_texts)


@pytest.mark.thorough
def test_the_state_of_streams_survives_the_command_on_any_number_of_replicas():
    """As `tests/contract` shows of arrays, here of the feed that the command makes of characters."""
    source = data.load("synthetic", task="characters", length=6, train=17, validation=0, test=0)
    losses = []
    for devices in (1, 2):
        keras.utils.set_random_seed(1)
        strategy = tfdist.strategy("custom", devices=devices, seed=0)
        with strategy.scope():
            model = models.build("stateful_rnn", source.spec, streams=4, width=0.05)
            tasks.compile(model, source.spec, keras.optimizers.SGD(0.5))
        history = strategy.fit(model, source.feed("train", 4, stream_positions=True), epochs=2, verbose=0).history
        losses.append(history["loss"])
        hidden = next(layer for layer in model.layers if isinstance(layer, StreamLSTM)).states[0]
        assert hidden.shape[0] == 4 and np.abs(hidden.numpy()).min(axis=1).all()
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_the_feed_says_where_each_example_is_in_its_stream():
    text = np.arange(14 * 3).reshape(14, 3) % 5
    source = Source.from_arrays("text", classes=5, train=(text, text), task="characters", vocabulary_size=5)
    feed = source.feed("train", 4, stream_positions=True)
    state = feed.start(0, 0)
    for step in range(feed.num_batches):
        (x, _), _ = feed.batches.part(state, feed.batches.fetch(state, step), 0, Division(1))[0], None
        assert x["stream"].numpy().tolist() == [0, 1, 2, 3]
        assert x["position"].numpy().tolist() == [step] * 4
        assert (x["tokens"].numpy() == text[[step + 3 * row for row in range(4)]]).all()


def settings(**options):
    of_run = {"strategy": "single", "model": "resnet20", "dataset": "digits"} | options
    return optimizers.settings(config.TrainConfig(**of_run))


def test_a_model_is_trained_as_it_usually_is_unless_something_else_is_said():
    usual = {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
    assert settings(batch_size=128) == usual
    assert settings(optimizer="sgd", learning_rate=0.2) == usual | {"learning_rate": 0.2}
    assert settings(optimizer="adam") == {"optimizer": "adam"}
    assert settings(model="mlp") == {"optimizer": "adam", "learning_rate": 1e-3}


def test_the_usual_rate_is_scaled_to_the_examples_of_an_update():
    assert settings(batch_size=32)["learning_rate"] == 0.025
    assert settings(batch_size=256)["learning_rate"] == 0.2
    assert settings(batch_size=64, gradient_accumulation=4)["learning_rate"] == 0.2
    assert settings(model="mlp", batch_size=128)["learning_rate"] == 0.002
    assert settings(batch_size=256, optimizer="adam") == {"optimizer": "adam"}


def test_a_scaled_rate_is_said_in_a_sentence():
    def said(steps_per_epoch=10, **options):
        return optimizers.scaling(config.TrainConfig("single", "resnet20", "digits", **options), steps_per_epoch)

    assert said(batch_size=256, epochs=10) == (
        "The learning rate is 0.2: 0.1, the usual rate of `resnet20` for 128 examples per update, scaled to 256; it "
        "rises from 0 in the first 1 epoch."
    )
    assert said(None, batch_size=256).endswith("scaled to 256.")  # without a number of steps there is no warm-up
    assert said(batch_size=32).endswith("for 128 examples per update, scaled to 32.")
    assert said(batch_size=128) is said(batch_size=32, learning_rate=0.1) is said(optimizer="adam") is None


def compiled(steps_per_epoch=10, **options):
    """The optimizer of a run, with a model of one layer."""
    of_run = {"strategy": "single", "model": "mlp", "dataset": "digits"} | options
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    optimizers.compile(model, data.load("digits").spec, config.TrainConfig(**of_run), steps_per_epoch)
    return model.optimizer


def test_a_rate_that_is_scaled_up_rises_in_the_first_tenth_of_the_run_at_most_five_epochs():
    def rates(steps, **options):
        optimizer = compiled(batch_size=128, **options)
        return [float(optimizer._learning_rate(step)) for step in steps]

    assert rates([0, 5, 10, 99], epochs=10) == pytest.approx([0, 0.001, 0.002, 0.002])
    assert rates([25, 50, 999], epochs=100) == pytest.approx([0.001, 0.002, 0.002])
    for steady in ({"warmup_epochs": 0.0}, {"steps_per_epoch": None}):
        assert float(compiled(batch_size=128, **steady).learning_rate) == pytest.approx(0.002)
    assert float(compiled(batch_size=8).learning_rate) == pytest.approx(0.0005)
    assert float(compiled(batch_size=128, learning_rate=0.1).learning_rate) == pytest.approx(0.1)


def rates(steps, **options):
    optimizer = compiled(learning_rate=0.1, **options)
    return [float(optimizer._learning_rate(step)) for step in steps]


def test_a_cosine_ends_at_zero_and_a_warm_up_begins_there():
    assert rates([0, 20, 40], epochs=4, schedule="cosine") == pytest.approx([0.1, 0.05, 0.0])
    assert rates([0, 5, 10, 39], epochs=4, warmup_epochs=1.0) == pytest.approx([0, 0.05, 0.1, 0.1])
    assert rates([0, 5, 20], epochs=4, schedule="cosine", gradient_accumulation=2) == pytest.approx(
        [0.1, 0.05 * (1 + np.cos(np.pi / 4)), 0.0]
    )


def test_a_setting_that_an_optimizer_does_not_have_is_refused():
    with pytest.raises(UsageError, match=r"The optimizer `adam` cannot have .*`momentum` 0\.9: .*\n\nhint: leave"):
        compiled(momentum=0.9)
    with pytest.raises(UsageError, match="`--warmup-epochs` depends on the number of steps, which is unknown"):
        compiled(None, warmup_epochs=1.0)
    with pytest.raises(UsageError, match="`--schedule cosine` depends on the number of steps, which is unknown"):
        compiled(None, schedule="cosine")


def test_weight_decay_with_sgd_passes_through_the_momentum_as_in_a_loop_by_hand():
    """Momentum SGD on the gradient of the cross-entropy plus 1e-2 times the kernels, as in PyTorch and the papers."""
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(3)
    x, y = rng.random((24, 8, 8, 1), np.float32), rng.integers(0, 10, 24).astype(np.int32)
    source = Source.from_arrays("some", classes=10, train=(x, y))
    model = models.build("resnet20", source.spec, width=0.25)
    by_hand = keras.models.clone_model(model)
    by_hand.set_weights(model.get_weights())
    options = {"batch_size": 8, "learning_rate": 0.05, "weight_decay": 1e-2}
    optimizers.compile(model, source.spec, config.TrainConfig("single", "resnet20", "digits", **options), 3)
    tfdist.strategy("single", seed=0).fit(model, x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)

    velocities = [tf.zeros(variable.shape) for variable in by_hand.trainable_variables]
    for batch in [*range(0, 24, 8)] * 2:
        with tf.GradientTape() as tape:
            logits = by_hand(x[batch : batch + 8], training=True)
            loss = keras.losses.sparse_categorical_crossentropy(y[batch : batch + 8], logits, from_logits=True)
            loss = tf.reduce_mean(loss)
        gradients = tape.gradient(loss, [variable.value for variable in by_hand.trainable_variables])
        for i, (variable, gradient) in enumerate(zip(by_hand.trainable_variables, gradients, strict=True)):
            decay = 1e-2 * variable if variable.path.endswith("kernel") else 0.0
            velocities[i] = 0.9 * velocities[i] - 0.05 * (gradient + decay)
            variable.assign_add(velocities[i])
    for trained, expected in zip(model.get_weights(), by_hand.get_weights(), strict=True):
        np.testing.assert_allclose(trained, expected, rtol=1e-4, atol=1e-5)


def test_weight_decay_is_stored_with_the_model_and_other_optimizers_have_their_own(tmp_path):
    def regularizers(model):
        return [layer.kernel_regularizer for layer in model.layers if hasattr(layer, "kernel")]

    spec = data.load("digits").spec
    model = models.build("resnet20", spec, width=0.25)
    optimizers.compile(model, spec, config.TrainConfig("single", "resnet20", "digits"), 10)
    model.save(tmp_path / "model.keras")
    stored = regularizers(keras.models.load_model(tmp_path / "model.keras"))
    assert {float(regularizer.l2) for regularizer in stored} == {0.5e-4}
    assert model.optimizer.weight_decay is None

    adamw = models.build("resnet20", spec, width=0.25)
    options = {"optimizer": "adamw", "weight_decay": 0.01}
    optimizers.compile(adamw, spec, config.TrainConfig("single", "resnet20", "digits", **options), 10)
    assert set(regularizers(adamw)) == {None} and adamw.optimizer.weight_decay == 0.01


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"momentum": 1.0}, "`--momentum` is 1.0"),
        ({"weight_decay": -1.0}, "`--weight-decay` is -1.0"),
        ({"warmup_epochs": 5.0}, "`--warmup-epochs` is 5 of 5 epochs"),
        ({"schedule": "step"}, "Unknown schedule `step`"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_is_refused(option, message):
    with pytest.raises(UsageError, match=message):
        config.TrainConfig(strategy="single", model="mlp", dataset="digits", **option)


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_is_made_of_options_that_can_be(name):
    known = {parameter.name for parameter in train.command.params}
    found = recipes.load(name)
    assert set(found) <= known and {"model", "dataset", "epochs", "batch_size"} <= set(found)
    plain = {key: value for key, value in found.items() if key not in ("model_option", "data_option")}
    config.TrainConfig(strategy="single", **plain)
    head = (recipes._FOLDER / f"{name}.toml").read_text().partition("\n\n")[0]
    assert f"--recipe {name}" in head and all(line.startswith("#") for line in head.splitlines())


@pytest.mark.thorough
def test_the_command_line_takes_the_place_of_a_recipe(tmp_path):
    small = ["--recipe", "fashion_mnist-cnn", "--dataset", "digits", "--epochs", 1, "--augment", "none", "--quiet"]
    done = run("--strategy", "single", *small, "--run-dir", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "r" / "run.json").read_text())
    assert (found["model"]["name"], found["dataset"]["name"]) == ("cnn", "digits")
    assert found["global_batch_size"] == 128 and found["learning_rate"] is None and len(found["epochs"]) == 1


def test_an_unknown_recipe_lists_the_known_ones(tmp_path):
    message = refuse(tmp_path, "--strategy", "single", "--recipe", "fashion_mnist")
    assert "Unknown recipe `fashion_mnist`" in message and "`fashion_mnist-cnn`" in message
    with pytest.raises(UnknownNameError):
        recipes.load("no")


@pytest.mark.thorough
def test_a_model_for_another_task_is_refused_before_training(tmp_path):
    message = refuse(tmp_path, "--strategy", "single", "--model", "unet", "--dataset", "digits")
    assert "The model `unet` does segmentation, but the dataset `digits` is for classification" in message
