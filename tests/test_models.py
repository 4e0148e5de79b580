"""Models: their size, what they take, and that their output is float32 logits."""

from __future__ import annotations

import doctest
import math
import re
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist.models
from tests import zoo
from tfdist.data import DataSpec
from tfdist.data.spec import END, START
from tfdist.errors import UnknownNameError, UsageError
from tfdist.models import _decoding, _transformer, segnet
from tfdist.run.config import OPTIMIZERS

ROOT = Path(__file__).parent.parent
SHAPES = [(28, 28, 1), (8, 8, 1), (32, 32, 3), (2, 3, 1)]
SMALL_IMAGES = ["cnn", "lenet", "mlp", "resnet18", "resnet20"]
LARGER_IMAGES = ["resnet50", "vgg11", "vgg16"]

MODELS_PAGE = (Path(__file__).parents[1] / "docs" / "models.md").read_text()


def spec_of(*input_shape: int, classes: int = 10) -> DataSpec:
    return DataSpec("some", "classification", input_shape, classes, {"train": 1})


def some_images(spec: DataSpec) -> np.ndarray:
    return np.random.default_rng(0).random((3, *spec.input_shape), np.float32)


# Others show the same in less time.
ZOO = [
    pytest.param(case, marks=pytest.mark.exhaustive) if case in ("resnet18", "resnet50") else case for case in zoo.SMALL
]
HALF = ["mixed_bfloat16", pytest.param("mixed_float16", marks=pytest.mark.exhaustive)]


def build(case: str, **options) -> keras.Model:
    """The model of a case of the zoo, small."""
    small = zoo.SMALL[case]
    return tfdist.models.build(zoo.name_of(case), small.spec, **(small.options | options))


def call(model: keras.Model, x) -> np.ndarray:
    return np.asarray(keras.ops.cast(model(x), "float32"))


def test_the_synopsis_runs():
    for module in (tfdist.models, _decoding):
        result = doctest.testmod(module)
        assert result.attempted and not result.failed


@pytest.mark.parametrize(("name", "parameters"), [("mlp", 101_770), ("cnn", 225_034), ("lenet", 21_840)])
def test_parameters_on_28x28x1_are_the_published_ones(name, parameters):
    assert tfdist.models.build(name, spec_of(28, 28, 1)).count_params() == parameters


IMAGENET, CIFAR = zoo.images(224, 224, 3, classes=1000), zoo.images(32, 32, 3, classes=10)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "spec", "published"),
    [
        pytest.param("vgg11", IMAGENET, 132.9e6, marks=pytest.mark.exhaustive),
        ("vgg16", IMAGENET, 138.4e6),
        ("resnet20", CIFAR, 0.27e6),
        ("resnet18", IMAGENET, 11.7e6),
        pytest.param("resnet50", IMAGENET, 25.6e6, marks=pytest.mark.exhaustive),
        ("unet", zoo.masks(572, 572, 1, classes=2), 31.0e6),
        ("segnet", zoo.masks(360, 480, classes=11), 29.4e6),
        ("vit", IMAGENET, 5_717_416),
        ("convnext_tiny", IMAGENET, 28_589_128),
        ("mobilenet_v3_small", IMAGENET, 2_542_856),
        ("efficientnet_b0", IMAGENET, 5_288_548),
    ],
)
def test_parameters_are_the_published_ones(name, spec, published):
    assert parameters(name, spec) == pytest.approx(published, rel=0.004)


GPT2 = {"positions": "learned", "normalization": "layer", "feed_forward": "gelu", "bias": True}


@pytest.mark.parametrize(
    ("name", "task", "tokens", "length", "options", "published"),
    [
        ("gpt", "characters", 50_257, 1024, GPT2, 124_439_808),
        pytest.param("gpt", "characters", 50_257, 1024, {}, 123_551_232, marks=pytest.mark.exhaustive),
        ("bert", "masked_lm", 30_522, 512, {}, 109.5e6),
    ],
)
def test_parameters_of_language_models_are_the_published_ones(name, task, tokens, length, options, published):
    spec = zoo.spec_of(task, length, target_shape=(length,), vocabulary_size=tokens, classes=tokens)
    assert parameters(name, spec, **options) == pytest.approx(published, rel=1e-3 if published % 1e5 == 0 else 0)


def test_the_base_transformer_has_the_parameters_of_the_paper_with_one_table_for_both_languages():
    """The paper says 65 million for 37,000 tokens; its own numbers make 63.1."""
    spec = zoo.spec_of("translation", 50, target_shape=(50,), vocabulary_size=37_000, classes=37_000, ignored_class=0)
    assert parameters("transformer_translation", spec) - 37_000 * 512 == 63_084_544


# The number of different values of each category in the training data of Criteo's challenge at Kaggle.
CRITEO = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


def test_dlrm_has_the_parameters_of_the_paper_on_the_data_of_criteo():
    """About 540 million, in section 5 of the paper."""
    spec = zoo.spec_of("click_prediction", 13, classes=2, category_sizes=CRITEO)
    assert parameters("dlrm", spec) == 540_677_217


def test_two_tower_has_as_many_parameters_as_its_layers():
    spec = zoo.spec_of("recommendation", 50, vocabulary_size=3000, classes=3000)
    assert parameters("two_tower", spec) == 2 * (3000 * 128 + 129 * 512 + 513 * 128)


def parameters(name: str, spec: DataSpec, **options) -> int:
    with tf.Graph().as_default():  # names and shapes of weights, and no memory for them
        weights = tfdist.models.build(name, spec, **options).trainable_variables
    return sum(math.prod(weight.shape) for weight in weights)


def test_the_zoo_of_the_tests_is_the_zoo():
    assert {zoo.name_of(case) for case in zoo.SMALL} == set(tfdist.models.names())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", zoo.SMALL)
def test_every_model_gives_float32_logits_of_the_shape_of_its_task(case):
    spec, model = zoo.SMALL[case].spec, build(case)
    x, _ = zoo.data(case, 4)
    assert not model.compiled
    outputs = model(x)
    of_target = 1 if spec.task == "click_prediction" else spec.classes
    of_pixel = spec.input_shape[-1] if spec.targets_are_inputs else of_target
    shape = spec.input_shape[:-1] if spec.targets_are_inputs else spec.target_shape
    assert outputs.shape == (4, *shape, of_pixel)
    assert np.isfinite(np.asarray(outputs)).all()
    if not spec.targets_are_inputs:
        assert not np.allclose(keras.ops.sum(outputs, axis=-1), 1)  # logits, not probabilities


@pytest.mark.sampled(5)
@pytest.mark.parametrize("policy", HALF)
@pytest.mark.parametrize("case", ZOO)
def test_every_model_computes_in_half_precision_and_answers_in_float32(case, policy):
    keras.config.set_dtype_policy(policy)
    model = build(case)
    outputs = model(zoo.data(case, 4)[0])
    assert outputs.dtype.name == "float32" and np.isfinite(np.asarray(outputs)).all()
    computing = [layer for layer in model._flatten_layers() if layer.weights and "logits" not in layer.name]
    assert {layer.compute_dtype for layer in computing} - {"float32"} == {policy.removeprefix("mixed_")}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("error:The structure of `inputs`")
@pytest.mark.parametrize("name", ["vgg16", "resnet50", "convnext_tiny", "mobilenet_v3_small", "efficientnet_b0"])
def test_a_new_model_of_keras_applications_is_about_as_good_as_guessing(name):
    """Although their initializers are made for 1000 classes; and it takes pictures without a warning of Keras."""
    keras.utils.set_random_seed(0)
    spec = zoo.images(32, 32, 3)
    x, y = zoo.arrays(spec, 32)
    logits = tfdist.models.build(name, spec)(x, training=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, logits)
    assert float(loss) < 2 * math.log(spec.classes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ZOO)
def test_every_model_is_smaller_with_width_and_refuses_none(case):
    assert build(case, width=0.5).count_params() > build(case, width=0.25).count_params()
    with pytest.raises(UsageError, match="cannot have `0` as `width`: input should be greater than 0"):
        build(case, width=0)


@pytest.mark.parametrize("case", zoo.SMALL)
def test_every_model_refuses_a_dataset_for_another_task(case):
    others = {zoo.SMALL[other].spec.task: zoo.SMALL[other].spec for other in zoo.SMALL}
    takes = {small.spec.task for other, small in zoo.SMALL.items() if zoo.name_of(other) == zoo.name_of(case)}
    for task in others.keys() - takes:
        described = task.replace("_", " ")
        pattern = rf"`{zoo.name_of(case)}` does .*, but the dataset `some` is for {described}\n\nhint: use `--model "
        with pytest.raises(UsageError, match=pattern):
            tfdist.models.build(zoo.name_of(case), others[task])


@pytest.mark.parametrize("name", LARGER_IMAGES)
def test_images_that_are_too_small_are_refused(name):
    with pytest.raises(UsageError, match=rf"`{name}` takes images of 32x32 pixels or more, .* `\(31, 40, 3\)`"):
        tfdist.models.build(name, zoo.images(31, 40, 3))


def test_units_that_do_not_divide_among_the_heads_are_refused():
    with pytest.raises(UsageError, match="has 10 units, which is not divisible by `heads` 4"):
        tfdist.models.build("transformer", zoo.TEXTS, units=10, heads=4)


@pytest.mark.parametrize("case", ["nbow", "textcnn", "bilstm", "transformer", "seq2seq", "transformer_translation"])
def test_padding_changes_nothing(case):
    model, (x, _) = build(case), zoo.data(case, 4)

    def longer(tokens):
        return np.pad(tokens, ((0, 0), (0, 5)))

    more = {"source": longer(x["source"]), "target": x["target"]} if isinstance(x, dict) else longer(x)
    limit = slice(None, zoo.LENGTH)  # as many positions as the transformer knows
    if case == "transformer":
        model, x = tfdist.models.build("transformer", zoo.TEXTS, units=8, heads=2, dropout=0.0), x[:, :7]
        x[:, 6] = 0
        more = longer(x)[:, limit]
    np.testing.assert_allclose(call(model, more), call(model, x), atol=1e-5)


@pytest.mark.parametrize("name", ["nbow", "textcnn", "bilstm", "transformer"])
def test_a_text_without_words_has_finite_logits(name):
    assert np.isfinite(call(build(name), np.zeros((2, zoo.LENGTH), np.int32))).all()


@pytest.mark.parametrize("case", ["transformer, characters", "gpt", "gpt, as GPT-2"])
def test_a_character_is_told_by_those_before_it_alone(case):
    model, (x, _) = build(case), zoo.data(case, 2)
    other = x.copy()
    other[:, 3:] = (other[:, 3:] + 1) % zoo.WORDS
    np.testing.assert_allclose(call(model, x)[:, :3], call(model, other)[:, :3], atol=1e-5)
    assert np.abs(call(model, x)[:, 3:] - call(model, other)[:, 3:]).max() > 1e-3


def test_segnet_puts_each_maximum_back_where_it_was():
    image = np.random.default_rng(0).permutation(4 * 6 * 2).reshape(1, 4, 6, 2).astype("float32") - 20
    maxima, places = segnet.max_pool(keras.ops.convert_to_tensor(image))
    np.testing.assert_array_equal(maxima, keras.ops.max_pool(image, 2))
    put = np.asarray(segnet.unpool(maxima, places))
    there = put != 0
    assert there.sum() == maxima.shape[1] * maxima.shape[2] * 2 and (put[there] == image[there]).all()


def test_the_state_of_a_stream_goes_on_and_begins_anew_at_position_0():
    model, (x, _) = build("stateful_rnn"), zoo.data("stateful_rnn", 2 * zoo.STREAMS)
    halves = [{name: values[begin : begin + zoo.STREAMS] for name, values in x.items()} for begin in (0, zoo.STREAMS)]
    together = {
        "tokens": np.concatenate([half["tokens"] for half in halves], axis=1),
        "position": halves[0]["position"],
    }
    whole = call(model, halves[0] | together)
    parts = [call(model, half) for half in halves]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=1e-6)
    np.testing.assert_array_equal(call(model, halves[0]), parts[0])
    # The streams of a batch may come in any order, and in several parts.
    backwards = {name: values[::-1] for name, values in halves[1].items()}
    in_parts = [call(model, {name: values[i : i + 2] for name, values in backwards.items()}) for i in (0, 2)]
    np.testing.assert_allclose(np.concatenate(in_parts)[::-1], parts[1], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [("seq2seq", {"width": 0.05}), ("transformer_translation", {"layers": 1, "units": 16, "heads": 2})],
)
def test_a_translation_is_the_likeliest_that_its_beams_can_find(name, options):
    """One beam takes the likeliest token each time; as many as there are sequences find the best of all."""
    spec = zoo.spec_of("translation", 5, target_shape=(4,), vocabulary_size=9, classes=6, ignored_class=0)
    model = tfdist.models.build(name, spec, dropout=0.0, **options)
    for weight in model.trainable_variables:
        weight.assign(3 * weight)  # far from all tokens being alike
    source = np.array([[4, 5, 6, 0, 0], [8, 7, 6, 5, 4]], np.int32)
    every = [[END], *([first, second] for first in range(6) if first != END for second in range(6))]
    before = np.array([[START, *tokens[:-1], 0][:2] for tokens in every], np.int32)
    for sentence, greedy, best in zip(
        source, *(tfdist.models.translate(model, source, length=2, width=width) for width in (1, 40)), strict=True
    ):
        logits = model({"source": np.repeat(sentence[None], len(every), axis=0), "target": before})
        scores = np.asarray(keras.ops.log_softmax(logits))
        mean = [np.mean([scores[i, step, t] for step, t in enumerate(tokens)]) for i, tokens in enumerate(every)]
        assert best.tolist()[: len(every[np.argmax(mean)])] == every[np.argmax(mean)]
        first = int(scores[0, 0].argmax())
        after = next(scores[i, 1].argmax() for i, tokens in enumerate(every) if tokens[0] == first)
        assert greedy.tolist()[:2] == [first, END if first == END else after][: len(greedy)]


def test_only_models_for_translation_translate():
    assert tfdist.models.can_translate(build("seq2seq")) and not tfdist.models.can_translate(build("mlp"))
    with pytest.raises(UsageError, match="`translate` cannot use the model `mlp`"):
        tfdist.models.translate(build("mlp"), np.zeros((1, 3), np.int32))


def test_rotated_queries_and_keys_know_their_distance_alone():
    query, key = np.random.default_rng(0).normal(size=(2, 6)).astype("float32")
    rotated = [np.asarray(_transformer.Rotary()(np.tile(vector, (1, 9, 1, 1))))[0, :, 0] for vector in (query, key)]
    products = rotated[0] @ rotated[1].T
    for distance in (-4, 0, 3):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert products[0, 0] == pytest.approx(query @ key, rel=1e-5)
    assert abs(products[0, 4] - products[4, 0]) > 1e-3


def test_a_head_with_an_odd_number_of_units_is_not_rotated():
    with pytest.raises(UsageError, match="`gpt` has 3 units per head, which is odd, and `positions=rotary`"):
        tfdist.models.build("gpt", zoo.CHARACTERS, units=12, heads=4)
    tfdist.models.build("gpt", zoo.CHARACTERS, units=12, heads=4, layers=1, positions="learned")


@pytest.mark.parametrize("name", tfdist.models.names())
def test_each_model_states_an_optimizer_of_keras_and_the_batch_of_its_learning_rate(name):
    training = tfdist.models.training(name)
    assert training.optimizer in OPTIMIZERS
    assert training.batch_size >= 1
    assert training.rate(training.batch_size) == training.learning_rate
    rate = f"{training.learning_rate:g}" if training.learning_rate >= 0.01 else f"{training.learning_rate:.0e}"
    row = next(line for line in MODELS_PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    stated = row.split("|")[6].strip().lower()
    assert stated == f"{training.batch_size}, {training.optimizer} {rate.replace('e-0', 'e-')}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SMALL_IMAGES)
def test_every_model_takes_every_image_and_gives_one_logit_a_class(name, shape):
    spec = spec_of(*shape, classes=7)
    model = tfdist.models.build(name, spec)
    logits = model(some_images(spec), training=True)
    assert logits.shape == (3, 7) and not model.compiled
    assert not np.allclose(np.asarray(logits).sum(axis=1), 1)  # they are no probabilities


@pytest.mark.parametrize(("name", "smallest"), [("cnn", 10), ("lenet", 16)])
def test_only_images_too_small_for_unpadded_convolutions_are_padded(name, smallest):
    def paddings(side: int) -> set[str]:
        return {
            layer.padding for layer in tfdist.models.build(name, spec_of(side, 40, 1)).layers if "conv" in layer.name
        }

    assert paddings(smallest) == {"valid"} and paddings(smallest - 1) == {"same"}


@pytest.fixture
def mixed_precision() -> Iterator[None]:
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    yield
    keras.mixed_precision.set_dtype_policy("float32")


@pytest.mark.parametrize("name", SMALL_IMAGES[:3])
def test_logits_are_float32_under_mixed_precision(name, mixed_precision):
    spec = spec_of(28, 28, 1)
    model = tfdist.models.build(name, spec)
    assert model(some_images(spec)).dtype.name == "float32"
    assert {layer.compute_dtype for layer in model.layers[:-1]} == {"bfloat16"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", ZOO)
def test_a_saved_model_is_the_same_model_in_stock_keras(case, tmp_path):
    x, _ = zoo.data(case, 4)
    model = build(case)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))


def test_options_reach_the_model():
    model = tfdist.models.build("mlp", spec_of(4), units=5, dropout=0.5)
    assert model.count_params() == 4 * 5 + 5 + 5 * 10 + 10
    rates = [
        layer.rate
        for layer in tfdist.models.build("lenet", spec_of(8, 8, 1), dropout=0.1).layers
        if "drop" in layer.name
    ]
    assert rates == [0.1, 0.1]


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"the names are `bert`, `bilstm`, .*\n\nhint: did you mean `lenet`\?"):
        tfdist.models.build("le_net", spec_of(8, 8, 1))


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(
        UsageError, match="`mlp` does not know the option `depth`: it takes `units`, `dropout`, `width`"
    ):
        tfdist.models.build("mlp", spec_of(8, 8, 1), depth=3)
    assert tfdist.models.knows("mlp", "units") and not tfdist.models.knows("cnn", "units")


@pytest.mark.parametrize("name", ["cnn", "lenet", *LARGER_IMAGES])
def test_a_convolution_over_examples_that_are_no_images_is_refused(name):
    with pytest.raises(UsageError, match=rf"`{name}` takes images .* of shape `\(16,\)`"):
        tfdist.models.build(name, spec_of(16))


def test_the_example_of_the_documentation_is_a_model(working_folder):
    text = (ROOT / "docs" / "models.md").read_text()
    code = re.search(r"```python\n# my_models\.py\n(.*?)```", text, re.DOTALL)
    (working_folder / "my_models.py").write_text(code.group(1))
    model = tfdist.models.build("my_models:wide", spec_of(8, 8, 1), units=16)
    assert model.output_shape == (None, 10)


def test_a_function_that_gives_no_model_is_named(working_folder):
    (working_folder / "no_models.py").write_text("def build(spec): return 5\n")
    with pytest.raises(UsageError, match=r"`no_models:build` returned a `int`, not a `keras\.Model`"):
        tfdist.models.build("no_models:build", spec_of(8, 8, 1))
