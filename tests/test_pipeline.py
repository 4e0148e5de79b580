"""The strategy `pipeline`: where a model is cut, where its parts are, and in which order they compute.

That it trains as one device does is held by `tests/contract`.
"""

import itertools
import json
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner
from keras import layers

import tfdist
from tests import delayed_gradients
from tests.interruption import InterruptionError, Interrupts
from tfdist.__main__ import main
from tfdist.errors import UnknownNameError, UsageError
from tfdist.internals import keras_stages
from tfdist.pipeline_parallel import plan, schedule
from tfdist.pipeline_parallel.local_pipeline import Stages
from tfdist.profiling.stages import Busy, busy, of_all

X = np.random.default_rng(0).normal(size=(22, 8, 8, 2)).astype("float32")
Y = np.arange(22) % 3


def residual(**compile_options):
    """A skip connection from the first layer to the last but two, across every cut between them."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((8, 8, 2))
    first = layers.Conv2D(4, 3, padding="same", activation="relu", name="first")(inputs)
    second = layers.Conv2D(4, 3, padding="same", activation="relu", name="second")(first)
    third = layers.Conv2D(4, 3, padding="same", name="third")(second)
    both = layers.Add(name="both")([first, third])
    inner_inputs = keras.Input((8, 8, 4))
    inner_outputs = layers.GlobalAveragePooling2D(name="pool")(layers.Conv2D(5, 1, name="narrow")(inner_inputs))
    inner = keras.Model(inner_inputs, inner_outputs, name="inner")
    model = keras.Model(inputs, layers.Dense(3, name="last")(inner(both)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], **compile_options)
    return model


def pipeline(**options):
    return tfdist.strategy("pipeline", **{"devices": 2, "micro_batches": 3, "seed": 7, "balance": "memory"} | options)


def trained(strategy, model, epochs=1, **options):
    strategy.fit(model, X, Y, batch_size=10, epochs=epochs, shuffle=False, verbose=0, **options)
    return model


def device(variable):
    return variable.value.device[-5:]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cuts_make_the_slowest_stage_faster(seed):
    rng = np.random.default_rng(seed)
    found = rng.integers(0, 10, rng.integers(1, 9)).astype(float).tolist()
    for stages in range(1, len(found) + 1):
        begins = plan.balanced(found, stages)
        assert len(set(begins)) == stages
        others = ([0, *rest] for rest in itertools.combinations(range(1, len(found)), stages - 1))
        best = min(max(plan.of_stages(found, other)) for other in others)
        assert max(plan.of_stages(found, begins)) == best


@pytest.mark.parametrize("seed", range(20))
def test_every_stage_has_a_required_operation_and_no_other_such_cuts_are_faster(seed):
    rng = np.random.default_rng(seed)
    costs, required = rng.integers(0, 10, 7).astype(float).tolist(), (rng.random(7) < 0.6).tolist()
    for stages in range(1, sum(required) + 1):
        begins = plan.balanced(costs, stages, required)
        others = ([0, *rest] for rest in itertools.combinations(range(1, 7), stages - 1))
        allowed = [other for other in others if all(plan.of_stages(required, other))]
        assert begins in allowed
        assert max(plan.of_stages(costs, begins)) == min(max(plan.of_stages(costs, other)) for other in allowed)


def test_a_layer_without_weights_is_no_stage_of_its_own_if_every_stage_has_to_train():
    model = keras.Sequential([keras.Input((8, 8)), keras.layers.Flatten(), *map(keras.layers.Dense, (32, 10))])
    assert plan.make(model, 2, None, "memory", 16, 4, all_train=True).begins == [0, 2]
    assert plan.make(model, 2, None, "memory", 16, 4).begins == [0, 1]


def test_nested_models_are_opened_and_skip_connections_counted_once():
    model = residual()
    found = plan.make(model, 3, ["third", "narrow"], "time", 4, 3)
    assert [call.path[-1] for call in found.calls] == [
        *("first", "second", "third", "both", "narrow", "pool", "last"),
    ]
    assert found.layers_of(2) == ["inner/narrow", "inner/pool", "last"]
    pixels = 8 * 8 * 4 * 4
    assert found.bytes_across(1) == 2 * pixels  # the outputs of `first` and `second`
    assert found.bytes_across(2) == pixels
    assert sum(found.parameters_of(stage) for stage in range(3)) == model.count_params()


def test_a_slow_layer_gets_a_stage_with_little_else():
    inputs = keras.Input((64, 64, 3))
    slow = layers.Conv2D(64, 7, name="slow")(inputs)
    model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(layers.MaxPooling2D(8)(slow))))
    found = plan.make(model, 2, None, "time", 4, 3)
    assert found.layers_of(0) == ["slow"]
    assert all(cost > 0 for cost in found.costs)


def test_measuring_a_model_does_not_change_it():
    model = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(2)])
    before = [variable.numpy() for variable in model.variables]
    plan.measured(keras_stages.calls(model), 4, 3, "time", model)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.thorough
def test_variables_and_their_slots_are_on_the_device_of_their_stage():
    model = trained(pipeline(devices=3, stages=["third", "narrow"]), residual())
    places = {variable.path.split("/")[0]: device(variable) for variable in model.variables}
    assert places == {
        **dict.fromkeys(["first", "second"], "CPU:0"),
        "third": "CPU:1",
        **dict.fromkeys(["narrow", "last"], "CPU:2"),
    }
    for slots in (model.optimizer._momentums, model.optimizer._velocities):
        assert [device(slot) for slot in slots] == [device(variable) for variable in model.trainable_variables]


@pytest.mark.thorough
def test_slots_of_other_shapes_than_their_variables_move_too():
    model = residual()
    model.compile(keras.optimizers.Adafactor(0.01), model.loss, jit_compile=False)
    trained(pipeline(stages=["third"]), model)
    optimizer = model.optimizer
    for slots in (optimizer._r, optimizer._c, optimizer._v):
        assert [device(slot) for slot in slots] == [device(variable) for variable in model.trainable_variables]


def traced(strategy, model):
    """The operations of the graph in which the last step of `model` was traced."""
    seen = []
    original = strategy.mesh.computed

    def computed():
        original()
        seen.append(tf.compat.v1.get_default_graph().get_operations())

    strategy.mesh.computed = computed
    trained(strategy, model)
    return seen[0]  # of full batches


def test_forward_and_backward_products_of_a_layer_are_on_the_device_of_its_stage():
    operations = traced(pipeline(stages=["third"]), residual())
    heavy = re.compile("Conv2D|MatMul|BiasAddGrad|ReluGrad")
    found = {}
    for one in operations:
        task = schedule.task_of(one.name)
        if heavy.match(one.type) and task is not None:
            stage, (direction, micro_batch) = task[0], (task[1].direction, task[1].micro_batch)
            assert one.device.endswith(f"CPU:{stage}"), one.name
            found.setdefault((stage, direction, micro_batch), []).append(one.type)
    assert len(found) == 2 * 2 * 3
    for micro_batch in range(3):
        assert sorted(found[0, "backward", micro_batch]) == sorted(
            ["Conv2DBackpropInput", *["Conv2DBackpropFilter"] * 2, *["BiasAddGrad"] * 2, *["ReluGrad"] * 2]
        )
        assert found[1, "backward", micro_batch].count("Conv2DBackpropInput") == 2
        assert found[1, "backward", micro_batch].count("MatMul") == 2
    outside = [one.name for one in operations if one.type.startswith("Conv2D") and schedule.task_of(one.name) is None]
    assert not outside


def test_gradients_are_added_on_the_device_of_their_stage():
    operations = traced(pipeline(stages=["third"]), residual())
    places = {one.name: one.device.rpartition("device:")[2] for one in operations}
    backward = re.compile("Conv2DBackpropFilter|BiasAddGrad|MatMul")
    begun = {}
    for one in operations:
        task = schedule.task_of(one.name)
        if backward.match(one.type) and task is not None and task[1].direction == "backward":
            begun[one.name] = task[0]
    sums = []
    for one in operations:
        if one.type == "AddV2":  # of the first two micro-batches
            stages = {begun[source] for source in map(source_of, one.inputs) if source in begun}
            assert len(stages) < 2
            sums += [(places[one.name], f"CPU:{stage}") for stage in stages]
    assert len(sums) == 20  # of a kernel and a bias of each layer; the third micro-batch is added to the first two
    assert all(found == wanted for found, wanted in sums), sums


def source_of(tensor):
    """The name of the operation whose value `tensor` has, unless the replica has no example."""
    while tensor.op.type in ("Identity", "Reshape", "SelectV2"):
        tensor = tensor.op.inputs[1 if tensor.op.type == "SelectV2" else 0]
    return tensor.op.name


def reaches(operations, last, first):
    """Whether `first` waits for `last`."""
    waiting, seen = [first], set()
    while waiting:
        one = waiting.pop()
        if one is last or one.name == last.name:
            return True
        if one.name not in seen:
            seen.add(one.name)
            waiting += [*(tensor.op for tensor in one.inputs), *one.control_inputs]
    return False


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_each_stage_computes_in_the_order_of_the_schedule(name):
    operations = traced(pipeline(stages=["third"], schedule=name), residual())
    products = {}
    for one in operations:
        task = schedule.task_of(one.name)
        if task is not None and one.type in ("Conv2D", "Conv2DBackpropFilter"):
            products.setdefault(task, one)
    for stage in range(2):
        tasks = schedule.tasks(name, stage, 2, 3)
        for before, after in itertools.pairwise(tasks):
            assert reaches(operations, products[stage, before], products[stage, after]), (stage, before, after)


def test_1f1b_holds_no_more_micro_batches_than_stages_follow():
    for stages, micro_batches in itertools.product((1, 2, 3, 4), (1, 2, 3, 8)):
        for stage in range(stages):
            alive = peak = 0
            for task in schedule.tasks("1f1b", stage, stages, micro_batches):
                alive += 1 if task.direction == "forward" else -1
                peak = max(peak, alive)
            assert alive == 0
            assert peak == min(stages - stage, micro_batches)


@pytest.mark.thorough
def test_where_micro_batches_meet_in_a_step_gpipe_is_used_and_said():
    def build():
        inputs = keras.Input((8, 8, 2))
        x = layers.BatchNormalization(synchronized=True)(layers.Conv2D(3, 3)(inputs))
        model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    with pytest.warns(UserWarning, match="`gpipe` is used in place of `1f1b`"):
        trained(pipeline(schedule="1f1b"), build())
    with pytest.warns(UserWarning, match="`gpipe` is used in place of `2bw`, with its delayed gradients"):
        trained(pipeline(schedule="2bw"), build())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trained(pipeline(), build())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"micro_batches": 1}, 1),
        ({"micro_batches": 4, "devices": 3, "schedule": "1f1b"}, 4),
        ({"micro_batches": 10}, 10),  # the last batch has 2 examples
        ({"micro_batches": 3, "device_data_bytes": 1}, 3),
        ({"micro_batches": 3, "device_data_bytes": 1 << 20}, 3),
        ({"micro_batches": 4, "balance": "time"}, 4),
    ],
)
def test_trains_as_one_device_does(options, expected):
    strategy = pipeline(**options)
    assert strategy.num_replicas == expected
    stock = residual()
    stock.fit(X, Y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    model = trained(strategy, residual(), epochs=2)
    for found, wanted in zip(model.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)


DELAYED = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "all of adam": lambda: keras.optimizers.AdamW(
        0.01, global_clipnorm=0.5, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "clipped": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01),
        initial_scale=2.0**127,  # overflows when it has grown, and those steps are left out
        dynamic_growth_steps=2,
    ),
}


def delayed(optimizer="adam", **compile_options):
    model = residual()
    model.compile(DELAYED[optimizer](), model.loss, metrics=["accuracy"], **compile_options)
    return model


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        *(pytest.param(n, {}, marks=() if n == "all of adam" else pytest.mark.exhaustive) for n in DELAYED),
        ("adam", {"devices": 3}),
        pytest.param("adam", {"devices": 1}, marks=pytest.mark.exhaustive),
        ("sgd", {"recompute": "blocks"}),
    ],
)
def test_2bw_trains_as_a_loop_by_hand_with_gradients_at_the_weights_of_before_the_last_update(optimizer, options):
    by_hand, model, early = delayed(optimizer), delayed(optimizer), delayed(optimizer)
    delayed_gradients.train(by_hand, X, Y, 6, 2)  # four batches, the last one of 4 examples
    arguments = {"batch_size": 6, "epochs": 2, "shuffle": False, "verbose": 0}
    strategy = pipeline(schedule="2bw", **options)
    strategy.fit(model, X, Y, **arguments)
    for found, wanted in zip(model.get_weights(), by_hand.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)
    found = strategy.evaluate(model, X, Y, batch_size=6, verbose=0)
    np.testing.assert_allclose(found, by_hand.evaluate(X, Y, verbose=0), atol=2e-5)
    early.fit(X, Y, **arguments)
    assert max(np.abs(a - b).max() for a, b in zip(early.get_weights(), model.get_weights(), strict=True)) > 1e-3


@pytest.mark.thorough
def test_2bw_is_the_same_whether_the_host_looks_at_each_step_or_not():
    models = []
    for options in ({"run_eagerly": True}, {}, {}):
        watched = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
        models.append(delayed(**options))
        kept = [watched] if len(models) == 2 else []
        pipeline(schedule="2bw").fit(models[-1], X, Y, batch_size=6, epochs=2, shuffle=False, verbose=0, callbacks=kept)
    for other in models[1:]:
        for found, wanted in zip(other.get_weights(), models[0].get_weights(), strict=True):
            np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_a_run_with_2bw_that_is_resumed_within_an_epoch_ends_as_an_unbroken_one(tmp_path):
    def train(name, **options):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((8, 8, 2)), layers.Flatten(), layers.Dense(4, "tanh"), layers.Dense(3)])
        model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        kept = tfdist.callbacks.Checkpoint(tmp_path / name, every_steps=2, resume=True)
        callbacks = [kept, *options.pop("callbacks", [])]
        arguments = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}  # six steps in an epoch
        pipeline(schedule="2bw").fit(model, X, Y, callbacks=callbacks, **arguments)
        return model

    expected = train("unbroken")
    with pytest.raises(InterruptionError):
        train("broken", callbacks=[Interrupts()])
    for found, wanted in zip(train("broken").get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def own_step():
    inputs = keras.Input((8, 8, 2))
    model = OwnStep(inputs, layers.Dense(3)(layers.Flatten()(inputs)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.thorough
def test_2bw_refuses_a_backup_of_keras_within_epochs_and_takes_one_of_each_epoch(tmp_path):
    strategy = pipeline(schedule="2bw")
    with pytest.raises(UsageError, match="saves every 2 steps, and a run that goes on from there"):
        trained(strategy, residual(), callbacks=[keras.callbacks.BackupAndRestore(tmp_path, save_freq=2)])
    trained(strategy, residual(), callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])


class Tanh(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 5))

    def call(self, x):
        return tf.tanh(x @ self.kernel)


class TanhInAFunction(Tanh):
    call = tf.function(Tanh.call)


@pytest.mark.parametrize("schedule_name", ["gpipe", "2bw"])
def test_a_layer_in_a_function_of_tensorflow_uses_the_weights_of_its_stage(schedule_name):
    weights = []
    for layer in (Tanh, TanhInAFunction):
        keras.utils.set_random_seed(3)
        strategy = pipeline(schedule=schedule_name)
        with strategy.scope():
            model = keras.Sequential([keras.Input((8, 8, 2)), layers.Flatten(), layer(), layer(), layers.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.01), loss, jit_compile=False)
        weights.append(trained(strategy, model).get_weights())
    for plain, in_a_function in zip(*weights, strict=True):
        np.testing.assert_allclose(in_a_function, plain, atol=1e-6)


def test_2bw_refuses_a_layer_that_assigns_to_a_trained_variable():
    normalized = layers.SpectralNormalization(layers.Dense(4))
    model = keras.Sequential([keras.Input((8, 8, 2)), layers.Flatten(), normalized, layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(
        UsageError, match=r"assigns to `.*kernel`, which is trained.* \(in `SpectralNormalization.call`\)"
    ):
        trained(pipeline(schedule="2bw"), model)


def test_a_shared_layer_is_trained_by_both_of_its_stages():
    def build():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        shared = layers.Dense(4, activation="tanh", name="shared")
        x = layers.Dense(4, name="between")(shared(inputs))
        model = keras.Model(inputs, layers.Dense(3, name="last")(shared(x)))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    x = X[:, :4, 0, 0]
    stock, model = build(), build()
    stock.fit(x, Y, batch_size=10, shuffle=False, verbose=0)
    pipeline(stages=["between"]).fit(model, x, Y, batch_size=10, shuffle=False, verbose=0)
    for found, wanted in zip(model.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.thorough
def test_a_graph_of_before_the_cut_never_computes_with_old_weights():
    model = residual()
    encoder = keras.Model(model.inputs, model.get_layer("third").output)
    encoder.predict(X, verbose=0)
    model.predict(X, verbose=0)
    trained(pipeline(stages=["third"]), model)
    # Keras' own method of the model itself is traced again.
    np.testing.assert_allclose(model.predict(X, verbose=0), model(X), atol=1e-5)
    with pytest.raises(tf.errors.OpError):  # another model with these layers keeps its graph
        encoder.predict(X, verbose=0)


@pytest.mark.thorough
def test_a_checkpoint_of_three_stages_is_resumed_on_two_and_on_one_device(tmp_path):
    expected = trained(tfdist.strategy("single", seed=7), residual(), epochs=3).get_weights()
    kept = tfdist.callbacks.Checkpoint(tmp_path / "kept")
    trained(pipeline(devices=3, micro_batches=4), residual(), callbacks=[kept])
    for strategy in (pipeline(), tfdist.strategy("single", seed=7)):
        resume = tfdist.callbacks.Checkpoint(tmp_path / "kept", resume=True)
        model = trained(strategy, residual(), epochs=3, callbacks=[resume])
        for found, wanted in zip(model.get_weights(), expected, strict=True):
            np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.thorough
def test_a_saved_model_is_whole(tmp_path):
    model = trained(pipeline(), residual())
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-5)


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)


def own():
    model = Own()
    model.compile("sgd", "mse")
    return model


def too_large():
    """A tensor of ten terabytes between the last two layers."""
    inputs = keras.Input((8, 8, 2))
    pooled = layers.GlobalAveragePooling2D(name="pool")(layers.Conv2D(300, 3, name="first")(inputs))
    large = layers.Lambda(lambda x: keras.ops.sum(keras.ops.tile(x[:, None], [1, 1 << 30, 1]), 1), name="large")(pooled)
    model = keras.Model(inputs, layers.Dense(3, name="last")(large))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "build", "sentence", "hint"),
    [
        ({"devices": 3}, lambda: small(2), "3 stages were requested, and the model `.*` has 2 layers", "at most"),
        ({}, own, "The model `.*` cannot be cut into stages, because it has a custom `call`", "devices=1"),
        ({"stages": ["second", "third"]}, residual, "names the first layer of 2 stages", "name 1 layers"),
        ({"devices": 3, "stages": ["third", "second"]}, residual, "do not follow each other", "the order is first"),
        ({"stages": ["first"]}, residual, "do not follow each other", "without the first"),
        ({"micro_batches": 0}, residual, "cannot have `0` as `micro_batches`", "correct it"),
        ({"schedule": "zb"}, residual, "cannot have `zb` as `schedule`: .*'gpipe', '1f1b' or '2bw'", "correct it"),
        ({"schedule": "2bw"}, own_step, "has a custom `train_step`, and the schedule `2bw`", "or `1f1b`"),
        ({"balance": "luck"}, residual, "cannot have `luck` as `balance`", "correct it"),
        ({"devices": ["CPU:0", "CPU:0"]}, residual, "repeats a device", "each device once"),
        ({"steps_per_call": "few"}, residual, "cannot have `few` as `steps_per_call`", "correct it"),
        ({"micro_batches": 11}, residual, "`micro_batches` is 11, and a batch has 10 examples", "at most 10"),
        ({}, too_large, r"Stage 1 \(pool, large, last\) ran out of memory on CPU:1", "more micro-batches"),
    ],
)
def test_bad_input_is_one_sentence_with_a_hint(options, build, sentence, hint):
    with pytest.raises(UsageError, match=sentence) as raised:
        trained(pipeline(**options), build())
    assert hint in str(raised.value)


@pytest.mark.thorough
def test_stages_of_a_strategy_of_several_processes_train_in_one_too():
    for options in ({}, {"shard": "optimizer"}):  # which has nothing to divide
        model = trained(tfdist.strategy("multiworker", stages=2, micro_batches=3, seed=7, **options), residual())
        expected = trained(tfdist.strategy("single", seed=7), residual())
        for found, wanted in zip(model.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_devices_of_two_kinds_are_refused():
    with pytest.raises(UsageError, match="`devices` is CPU:0, GPU:0, which are of two kinds"):
        Stages(["CPU:0", "GPU:0"], 2, "gpipe", "time")


def small(count):
    model = keras.Sequential([keras.Input((8, 8, 2)), *[layers.Dense(2) for _ in range(count)]])
    model.compile("sgd", "mse")
    return model


def test_an_unknown_layer_is_named_with_those_that_there_are():
    with pytest.raises(UnknownNameError, match=r"`middle`.*`first`"):
        trained(pipeline(stages=["middle"]), residual())


@pytest.mark.thorough
def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    trained(pipeline(), residual(), callbacks=[tfdist.callbacks.Checkpoint(tmp_path)])
    other = keras.Sequential([keras.Input((8, 8, 2)), layers.Flatten(), layers.Dense(3)])
    other.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(tfdist.errors.CheckpointError):
        trained(pipeline(), other, callbacks=[tfdist.callbacks.Checkpoint(tmp_path, resume=True)])


def test_a_sequential_model_without_an_input_shape_is_cut_once_it_is_built():
    strategy = pipeline()
    model = keras.Sequential([layers.Flatten(), layers.Dense(4), layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    trained(strategy, model)
    assert len(strategy.plan_of(model).begins) == 2


def test_the_command_shows_the_plan():
    result = CliRunner().invoke(main, ["pipeline", "--model", "mlp", "--dataset", "digits", "--devices", "2"])
    assert result.exit_code == 0, result.output
    assert "bytes sent per example" in result.output
    assert "bubble with 4 micro-batches and even stages: 20% of the time" in result.output


def test_overlapping_operations_of_a_stage_count_once_and_waits_for_transfers_never():
    forward, backward = (
        "m/tfdist_stage_{}_micro_batch_{}/x:Add",
        "gradient_tape/m/tfdist_stage_{}_micro_batch_{}_1/x:Mul",
    )
    events = [
        *((forward.format(0, 0), begin, begin + 2.0) for begin in (10.0, 11.0)),
        ("m/tfdist_stage_1_micro_batch_0/x:_Recv", 10.0, 13.0),
        (backward.format(1, 1), 13.0, 14.0),
        ("adam/x:Add", 14.0, 19.0),
        (forward.format(0, 0), 30.0, 31.0),  # of no step that counts
    ]
    found = busy(events, [(9.0, 20.0)])
    assert (found.seconds, found.pass_seconds, found.micro_batches) == ((3.0, 1.0), 4.0, 2)
    assert found.bubble == 0.5
    assert busy(events, [(0.0, 5.0)]) is None


def test_the_stages_of_several_processes_are_told_together():
    """A process has its own stage alone, or, with data parallelism, all of them."""
    first, second = Busy((3.0,), 4.0, 2), Busy((0.0, 1.0), 5.0, 2)
    together = of_all([first, second])
    assert (together.seconds, together.pass_seconds, together.even_bubble) == ((3.0, 1.0), 5.0, 1 / 3)
    assert of_all([Busy((1.0, 2.0), 4.0, 2), Busy((3.0, 2.0), 4.0, 2)]).seconds == (2.0, 2.0)
    waits = [("cnn/tfdist_stage_0_micro_batch_0/PyFuncStateless:PyFuncStateless", 0.0, 9.0)]
    assert busy(waits, [(0.0, 10.0)]) is None


@pytest.mark.thorough
def test_the_record_has_the_stages(working_folder):
    from tfdist import train

    options = "--strategy pipeline --devices 2 --strategy-option micro_batches=3 --strategy-option balance=memory"
    profiled = "--profile 1:3 --batch-size 16"
    typed = f"{options} {profiled} --model mlp --dataset digits --limit 64 --epochs 1 --run-dir run --quiet".split()
    result = CliRunner().invoke(train.command, typed)
    assert result.exit_code == 0, result.output
    (path,) = working_folder.rglob("run.json")
    found = json.loads(path.read_text())["strategy"]
    assert found["options"]["micro_batches"] == 3
    assert [stage["device"] for stage in found["stages"]] == ["CPU:0", "CPU:1"]
    assert sum(stage["parameters"] for stage in found["stages"]) > 0
    assert all(stage["busy_seconds"] > 0 for stage in found["stages"])
    assert 0 < found["bubble"] < 1
    assert found["even_bubble"] == 1 / 4
    assert "stage 1 computes" in (path.parent / "profile.txt").read_text()
