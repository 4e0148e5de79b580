"""`tfdist.horovod` in one process: what it refuses, and what its callbacks do to an optimizer.

Real processes are in tests/processes/test_horovod_facade.py.
"""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
import tfdist.horovod as hvd
from tests.processes.horovod_jobs import needs_horovod
from tests.processes.jobs import clean_environment
from tfdist.errors import UsageError

SGD = keras.optimizers.SGD


@pytest.mark.thorough
def test_without_horovod_one_line_says_how_to_install_it():
    program = (
        "import sys; sys.modules['horovod'] = None\n"
        "import tfdist.horovod as hvd\n"
        "from tfdist.errors import UsageError\n"
        "try:\n    hvd.init()\nexcept UsageError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("Horovod is not installed\n")
    assert "make horovod" in done.stdout


@needs_horovod
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": 2}, "can average or sum gradients. Received: op `2`"),
        ({"gradient_predivide_factor": 2.0, "op": 1}, "`gradient_predivide_factor` is 2, but"),
        ({"backward_passes_per_step": 0}, "`backward_passes_per_step` is 0"),
        ({"groups": 2}, "has no `groups`"),
        ({"process_set": None}, "has no `process_set`"),
        ({"average_over": "batches"}, "Unknown average_over `batches`: the names are `examples`, `processes`"),
    ],
)
def test_an_argument_that_cannot_work_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        hvd.DistributedOptimizer(SGD(), **options)


@needs_horovod
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": 2}, "DistributedGradientTape can average or sum gradients. Received: op `2`"),
        ({"groups": 2}, "DistributedGradientTape for Keras 3 has no `groups`"),
        ({"examples": 3, "op": 1}, "received `examples`, but does not average over them"),
        ({"examples": 3, "average_over": "processes"}, "received `examples`, but does not average over them"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_by_a_tape_too(options, message):
    with pytest.raises(UsageError, match=message):
        hvd.DistributedGradientTape(tf.GradientTape(), **options)


@needs_horovod
def test_local_layers_are_layers_of_keras():
    with pytest.raises(UsageError, match="`local_layers` takes layers of Keras 3"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])


@pytest.mark.parametrize("option", ["timeout_seconds", "callback_timeout_seconds"])
def test_a_time_that_cannot_be_is_refused(option):
    with pytest.raises(UsageError, match=f"`{option}` is 0"):
        hvd.init(**{option: 0})


def test_a_normalization_that_keras_3_does_not_have_is_refused():
    with pytest.raises(UsageError, match="does not support `fused=True`"):
        hvd.SyncBatchNormalization(fused=True)


def test_what_tensorflow_2_does_not_have_is_refused():
    with pytest.raises(UsageError, match="TensorFlow 2 has no global variables"):
        hvd.broadcast_global_variables(0)


@needs_horovod
def test_an_argument_that_nobody_knows_is_an_error_of_type():
    with pytest.raises(TypeError, match="backward_steps"):
        hvd.DistributedOptimizer(SGD(), backward_steps=2)


@needs_horovod
def test_only_an_optimizer_of_keras_can_be_distributed_and_only_once():
    with pytest.raises(UsageError, match="takes an optimizer of Keras 3"):
        hvd.DistributedOptimizer("sgd")
    optimizer = hvd.DistributedOptimizer(SGD(name="mine"))
    assert type(optimizer) is SGD
    for again in (optimizer, keras.optimizers.LossScaleOptimizer(optimizer)):
        with pytest.raises(UsageError, match="is already distributed"):
            hvd.DistributedOptimizer(again)


@needs_horovod
def test_a_strategy_and_a_distributed_optimizer_do_not_both_reduce():
    strategy = tfdist.strategy("custom", devices=2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(SGD(name="mine")), "mse")
    with pytest.raises(UsageError, match="`mine` are reduced both by the strategy and by `DistributedOptimizer`"):
        strategy.fit(model, np.ones((4, 2)), np.ones((4, 1)), verbose=0)


@needs_horovod
def test_a_model_without_an_optimizer_is_refused(tmp_path):
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(tmp_path / "model.keras")
    with pytest.raises(UsageError, match="has no optimizer"):
        hvd.load_model(tmp_path / "model.keras")


def test_a_file_with_code_in_a_lambda_layer_is_not_loaded(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Lambda(lambda x: x + 1), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="unsafe"):
        hvd.load_model(tmp_path / "model.keras")


def test_a_name_that_is_private_is_not_looked_up_in_horovod():
    with pytest.raises(AttributeError, match="_nothing"):
        hvd._nothing  # noqa: B018


def linear(optimizer):
    """A model whose gradient is 1 whatever its weight is."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(optimizer, loss=lambda y, output: output)
    return model


def run_linear(model, callback, epochs=3, steps=4, **options):
    ones = np.ones((steps, 1), "float32")
    model.fit(ones, ones, batch_size=1, epochs=epochs, callbacks=[callback], verbose=0, **options)
    return float(model.get_weights()[0][0, 0])


def by_hand(rates, momentum, correct):
    """Goyal et al. 2017, remark 2: the velocity was made with the rate before."""
    weight, velocity, before = 0.0, 0.0, rates[0]
    for now in rates:
        velocity = momentum * velocity * (now / before if correct else 1) - now
        weight, before = weight + velocity, now
    return weight


@pytest.mark.parametrize("correct", [True, False])
def test_the_velocity_follows_the_learning_rate(correct):
    callback = hvd.callbacks.LearningRateScheduleCallback(
        0.1, lambda epoch: 1 / (1 + epoch), staircase=False, momentum_correction=correct
    )
    found = run_linear(linear(SGD(0.1, momentum=0.9)), callback)
    rates = [0.1 / (1 + step / 4) for step in range(12)]
    assert found == pytest.approx(by_hand(rates, 0.9, correct), rel=1e-5)


def test_a_staircase_sets_the_rate_once_an_epoch_between_two_epochs():
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=1, end_epoch=3)
    model = linear(SGD(0.1))
    assert run_linear(model, callback, epochs=4) == pytest.approx(-4 * (0.1 + 0.1 + 0.05 + 0.05))
    assert model.history.history["lr"] == pytest.approx([0.1, 0.1, 0.05, 0.05])


def test_in_tfdists_loop_the_rate_is_set_as_often():
    strategy = tfdist.strategy("single")
    with strategy.scope():
        model = linear(SGD(0.1, momentum=0.9))
    strategy.prepare(model)
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1 / (1 + epoch), staircase=False)
    rates = [0.1 / (1 + step / 4) for step in range(12)]
    assert run_linear(model, callback) == pytest.approx(by_hand(rates, 0.9, True), rel=1e-5)


def test_an_optimizer_with_a_schedule_of_its_own_is_refused():
    model = linear(SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)))
    with pytest.raises(UsageError, match="LearningRateScheduleCallback cannot set the learning rate"):
        run_linear(model, hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5))


def test_a_generator_of_unknown_length_needs_the_steps_of_an_epoch():
    def batches():
        yield np.ones((1, 1)), np.ones((1, 1))

    with pytest.raises(UsageError, match="does not know the number of steps per epoch"):
        linear(SGD(0.1)).fit(batches(), callbacks=[hvd.callbacks.LearningRateWarmupCallback(0.1)], verbose=0)
