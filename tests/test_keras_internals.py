"""Fails when Keras changes what `tfdist.internals.keras` and its neighbours use, and says what was seen before."""

import inspect
import itertools
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common.variables import AutocastScope
from keras.src.backend.tensorflow import numpy, random
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses import loss as loss_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers import trainer

from tfdist.errors import UsageError
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_data, keras_patches, keras_routes, keras_variables


def parameters(function):
    return list(inspect.signature(inspect.unwrap(function)).parameters)


def test_the_version_of_keras_is_the_one_that_was_read():
    assert keras.__version__ == keras_internals.SEEN_IN, "read tfdist/internals/keras*.py against the new Keras first"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (loss_module.reduce_values, ["values", "sample_weight", "reduction"]),
        (loss_module.reduce_weighted_values, ["values", "sample_weight", "mask", "reduction", "dtype"]),
        (keras.losses.Loss.__call__, ["self", "y_true", "y_pred", "sample_weight"]),
        (BaseOptimizer._backend_update_step, ["self", "grads", "trainable_variables", "learning_rate"]),
        (loss_module.apply_mask, ["sample_weight", "mask", "dtype", "reduction"]),
        (numpy.take, ["x", "indices", "axis"]),
        (keras.metrics.Mean.update_state, ["self", "values", "sample_weight"]),
        (BaseOptimizer.apply, ["self", "grads", "trainable_variables"]),
        (keras.optimizers.LossScaleOptimizer.apply, ["self", "grads", "trainable_variables"]),
        (TFOptimizer._all_reduce_sum_gradients, ["self", "grads_and_vars"]),
        (keras.layers.BatchNormalization._moments, ["self", "inputs", "mask"]),
        (keras.Layer.add_loss, ["self", "loss"]),
        (keras.StatelessScope.get_current_value, ["self", "variable"]),
        (keras.Variable._direct_assign, ["self", "value"]),
        (keras.Model._compute_loss, ["self", "x", "y", "y_pred", "sample_weight", "training"]),
        (keras.Model.make_train_function, ["self", "force"]),
        (keras.Model._make_function, ["self", "step_function"]),
        (keras.callbacks.CallbackList.set_model, ["self", "model"]),
        (keras.callbacks.CallbackList.set_model, ["self", "model"]),
        (keras.Model.make_test_function, ["self", "force"]),
        (keras.Model.make_predict_function, ["self", "force"]),
        (trainer.model_supports_jit, ["model"]),
        (keras.Model._should_eval, ["self", "epoch", "validation_freq"]),
        (keras.Model._flatten_metrics_in_order, ["self", "logs"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_a_patched_or_called_function_has_the_parameters_that_were_seen(function, expected):
    assert parameters(function) == expected


def test_the_attributes_that_are_read_exist():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    assert model._compile_config.config["jit_compile"] in (True, False)
    assert model._loss_tracker.total is not None
    assert model._initial_epoch is None
    assert hasattr(model.optimizer, "_trainable_variables") or not model.optimizer.built


@pytest.mark.parametrize("steps", [None, 2])
def test_the_last_learning_rate_is_that_of_the_last_step_with_any_kind_of_rate(steps):
    rates = []

    class Noted(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            rates.append(0.1 / (1.0 + float(step)))
            return rates[-1]

    variable = keras.Variable([1.0, 2.0])
    for rate in (Noted(), lambda: 0.25, 0.5):
        optimizer = keras.optimizers.SGD(rate, gradient_accumulation_steps=steps)
        for _ in range(4):
            optimizer.apply([keras.ops.ones(2)], [variable])
        expected = rates[-1] if isinstance(rate, Noted) else optimizer.learning_rate
        assert keras_internals.last_learning_rate(optimizer) == pytest.approx(float(expected))
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.125))
    assert keras_internals.last_learning_rate(scaled) == 0.125


def test_what_keras_calls_for_steps_is_its_own_and_new_after_a_compile():
    for kind in ("train", "test", "predict"):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=False)
        first = keras_internals.step_function(model, kind)
        assert keras_internals.step_function(model, kind) is first
        getattr(model, f"make_{kind}_function")(force=True)
        second = keras_internals.step_function(model, kind)
        model.compile("adam", "mse", run_eagerly=True)
        third = keras_internals.step_function(model, kind)
        assert len({id(function) for function in (first, second, third)}) == 3
        setattr(model, f"{kind}_function", lambda data: data)
        with pytest.raises(UsageError, match=f"`{kind}_function` of its own"):
            keras_internals.step_function(model, kind)


def test_the_methods_of_a_model_lead_to_its_strategy_and_those_of_others_stay():
    class Strategy:
        def __getattr__(self, name):
            return lambda model, *arguments, **named: (name, arguments, named)

    routed, plain = (keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]) for _ in range(2))
    keras_routes.set_strategy(routed, Strategy())
    for name in keras_routes.ROUTED:
        assert getattr(routed, name)(1, two=2) == (name, (1,), {"two": 2})
        assert parameters(getattr(keras.Model, name))[:2] == ["self", "x"]
    assert plain.predict(np.ones((3, 2)), verbose=0).shape == (3, 1)
    assert keras.models.clone_model(routed).predict(np.ones((3, 2)), verbose=0).shape == (3, 1)


def test_functions_that_draw_take_a_shape_first():
    for name in ("normal", "uniform", "truncated_normal", "randint", "gamma", "beta", "binomial"):
        assert parameters(getattr(random, name))[0] == "shape"


def test_a_categorical_draw_returns_what_was_seen():
    assert inspect.signature(inspect.unwrap(random.categorical)).parameters["dtype"].default == "int64"


def test_what_is_trained_on_plain_variables_is_what_keras_trains_and_stays_outside_of_the_model():
    def made():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        inner = keras.optimizers.Adam(0.1)
        model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse", jit_compile=False, run_eagerly=True)
        model.optimizer.build(model.trainable_variables)
        return model

    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    plain, model = made(), made()
    plain.train_on_batch(x, y)
    before, own = [value.tolist() for value in model.get_weights()], model.layers[0].kernel._value
    with keras_variables.on_plain_variables(model, [*model.variables, *model.optimizer.variables]):
        model.train_on_batch(x, y)
        trained = [value.tolist() for value in model.get_weights()]
    assert trained == [value.tolist() for value in plain.get_weights()] != before
    assert [value.tolist() for value in model.get_weights()] == before
    assert model.layers[0].kernel._value is own
    model.train_on_batch(x, y)
    assert [value.tolist() for value in model.get_weights()] == trained


def test_a_step_that_is_watched_tells_what_it_computes_and_keras_is_afterwards_as_before():
    class Adds(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.sum(x))
            return x

    model = keras.Sequential([keras.Input((2,)), Adds(name="adds"), keras.layers.Dense(1, name="dense")])
    model.compile("sgd", keras.losses.MeanSquaredError(name="error"), jit_compile=False, run_eagerly=True)
    watched = [keras.Layer.__call__, keras.Layer.add_loss, keras.losses.Loss.__call__, BaseOptimizer.apply]
    told = []

    def see(kind, of, value):
        told.append((kind, [one.path for one in of] if kind == "gradients" else of.name))
        return value

    with keras_patches.watching(model, see):
        model.train_on_batch(np.ones((4, 2)), np.ones((4, 1)))
    assert told == [
        ("added loss", "adds"),
        ("output", "adds"),
        ("output", "dense"),
        ("output", model.name),
        ("loss", "error"),
        ("whole loss", model.name),
        ("gradients", [variable.path for variable in model.trainable_variables]),
    ]
    assert watched == [keras.Layer.__call__, keras.Layer.add_loss, keras.losses.Loss.__call__, BaseOptimizer.apply]
    assert "compute_loss" not in vars(type(model))


def test_keras_notes_the_mask_and_the_logits_on_a_tensor():
    tokens = keras.layers.Embedding(3, 2, mask_zero=True)(tf.constant([[1, 0]]))
    probabilities = keras.layers.Activation("softmax")(tf.constant([[1.0, 2.0]]))
    for tensor, name in ((tokens, "_keras_mask"), (probabilities, "_keras_logits")):
        copy = keras_internals.with_attributes_of(tensor, tf.identity(tensor))
        assert getattr(copy, name) is getattr(tensor, name)


def test_a_batch_of_a_pydataset_is_standardized_as_keras_standardizes_it():
    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return np.ones((3, 2)), np.array([0, 1, 1])

    adapter = keras_data.get_data_adapter(x=Data(), class_weight={0: 1.0, 1: 2.0})
    x, y, weight = keras_data.standardized(adapter, Data()[0])
    assert x.shape == (3, 2)
    assert y.tolist() == [0, 1, 1]
    assert np.asarray(weight).tolist() == [1.0, 2.0, 2.0]


def test_the_spec_of_batches_and_what_is_yielded_are_those_of_keras_adapter_for_grain():
    batches = [([np.ones((3, 2), "float32")], None), ([np.ones((2, 2), "float32")], None)]
    ((x,), y) = keras_data.spec_of_batches(batches)
    assert x == tf.TensorSpec([None, 2], "float32") and isinstance(y, tf.OptionalSpec)
    (yielded,) = tf.data.Dataset.from_generator(
        lambda: map(keras_data.as_yielded, batches[:1]), output_signature=keras_data.spec_of_batches(batches)
    )
    assert yielded[0][0].shape == (3, 2) and not yielded[1].has_value()


def test_metrics_of_a_compiled_model_are_found_one_by_one_and_their_functions_are_known():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae", lambda y, p: y - p, keras.metrics.AUC()])
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    found = keras_internals.metrics_of(model)
    assert [keras_internals.is_additive(metric) for metric in found] == [True, True, False, True]


def test_around_the_update_of_an_optimizer_its_gradients_can_be_changed_and_none_of_it_is_saved():
    def double(optimizer, gradients, variables, update):
        update([2 * gradient for gradient in gradients])

    plain, doubled, scaled = (keras.optimizers.SGD(0.1, clipvalue=3.0) for _ in range(3))
    for optimizer in (doubled, scaled):
        keras_patches.set_around_apply(optimizer, double)
    outside = keras.optimizers.LossScaleOptimizer(scaled, initial_scale=2.0)
    for optimizer, expected in ((plain, -0.2), (doubled, -0.3), (outside, -0.2)):
        variable = keras.Variable([0.0])
        optimizer.apply([keras.ops.convert_to_tensor([2.0])], [variable])
        assert float(variable[0]) == pytest.approx(expected)
    assert doubled.get_config() | {"name": ""} == plain.get_config() | {"name": ""}


def test_an_optimizer_applies_gradients_as_it_is_told_within_a_context_alone():
    optimizer, weight, told = keras.optimizers.SGD(1.0), keras.Variable([3.0]), []

    def apply(original, gradients, variables):
        told.append((gradients, None if variables is None else list(variables)))
        original([2 * one for one in gradients], variables)

    optimizer.build([weight])
    with keras_patches.applying_with(optimizer, apply):
        optimizer.apply_gradients([(tf.constant([1.0]), weight)])
        optimizer.apply([tf.constant([0.5])])
    optimizer.apply([tf.constant([1.0])], [weight])
    assert weight.numpy().tolist() == [-1.0]
    assert [variables for _, variables in told] == [[weight], None]


def test_variables_stand_for_others_within_a_context_alone():
    weight, other = keras.Variable([1.0, 2.0]), tf.Variable([5.0])
    with keras_variables.backed_by([weight], [other]):
        weight.assign_add([1.0])
        assert weight.shape == (1,)
    assert weight.numpy().tolist() == [1.0, 2.0]
    assert other.numpy().tolist() == [6.0]


def test_draws_without_a_seed_take_it_from_a_generator_within_a_context_alone():
    generator = keras.random.SeedGenerator(3)
    with keras_variables.drawing_from(generator):
        drawn = keras.random.normal((2,))
    assert drawn.numpy().tolist() == keras.random.normal((2,), seed=3).numpy().tolist()
    before = generator.state.numpy().tolist()
    keras.random.normal((2,))
    assert generator.state.numpy().tolist() == before


def test_looking_up_rows_gives_what_taking_them_gives():
    table = keras.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    indices = keras.ops.convert_to_tensor([[2, 0], [-1, 2]])
    expected = inspect.unwrap(numpy.take)(table, indices, axis=0)
    keras_variables.look_up_rows()
    with tf.GradientTape() as tape:
        found = keras.ops.take(table, indices, axis=0)
    assert np.array_equal(found, expected)
    assert isinstance(tape.gradient(found, table.value), tf.IndexedSlices)
    with keras.StatelessScope([(table, 2 * table.value)]):
        assert np.array_equal(keras.ops.take(table, indices, axis=0), 2 * expected)
    with AutocastScope("float16"):
        assert keras.ops.take(table, indices, axis=0).dtype == tf.float16


def test_functions_of_keras_are_replaced_within_a_context_alone():
    before = loss_module.reduce_values, keras.metrics.Mean.update_state

    def nothing(original, *arguments):
        del original, arguments
        return 0.0

    with keras_patches.replaced({"reduce_values": nothing, "mean_update_state": nothing}):
        assert keras.losses.MeanSquaredError()([[1.0]], [[3.0]]) == 0.0
        mean = keras.metrics.Mean()
        mean.update_state(3.0)
        assert float(mean.result()) == 0.0
    assert (loss_module.reduce_values, keras.metrics.Mean.update_state) == before


MEMORY = """
import keras, numpy as np, tensorflow as tf
from tfdist.internals import keras_variables
from tfdist.callbacks import memory

keras_variables.fill_large_variables_in_place()
shape, size_bytes = (100_000, 200), 80_000_000
tf.function(lambda: tf.random.stateless_uniform((3,), (1, 2)))()  # what TensorFlow needs for the first one
initializers = (keras.initializers.RandomUniform(seed=1), keras.initializers.Constant(0.1))
before = memory.peak_resident_bytes()
variables = [keras.Variable(initializer, shape=shape) for initializer in initializers]
taken = (memory.peak_resident_bytes() - before) / size_bytes
assert 1.8 < taken < 2.6, taken
for variable, initializer in zip(variables, initializers, strict=True):
    assert np.array_equal(variable.value, initializer(shape))
"""


@pytest.mark.thorough
def test_large_variables_are_filled_without_further_tensors_of_their_size_and_as_ever():
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_constants_are_folded_again_once_a_large_variable_is_filled():
    keras_variables.fill_large_variables_in_place()
    keras.Variable(keras.initializers.RandomNormal(seed=1), shape=(1 << 12, 1 << 12))
    assert tf.config.optimizer.get_experimental_options()["constant_folding"]


def test_copies_of_a_large_variable_on_the_cpu_share_no_memory():
    keras_variables.fill_large_variables_in_place()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variable = keras.Variable(keras.initializers.RandomNormal(seed=1), shape=(1 << 12, 1 << 12))
    first, second = strategy.experimental_local_results(variable.value)
    assert np.array_equal(first, second)
    assert first.numpy().ctypes.data != second.numpy().ctypes.data


def test_a_generators_batches_are_asked_for_through_the_attribute_that_is_wrapped():
    adapter = keras_data.get_data_adapter(x=((np.ones([2, 1]) * k,) for k in range(3)))
    assert isinstance(adapter, keras_data.GeneratorDataAdapter)
    whole = adapter.generator
    adapter.generator = lambda: itertools.islice(whole(), 1)
    assert len(list(adapter.get_tf_dataset())) == 1
