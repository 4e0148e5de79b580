"""More than ten workers, which TensorFlow orders by their names as text: `task:10` comes before `task:2`."""

import pytest

from tests.processes.jobs import run_script
from tfdist.groups.tensorflow import gathered_positions
from tfdist.jobs.tf_config import Task

TWELVE = """
import tfdist

strategy = tfdist.strategy("multiworker", communication="ring")
import keras
import numpy as np

rank, size = strategy.world.rank, strategy.world.world_size
assert strategy.exchange(str(rank).encode()) == [str(each).encode() for each in range(size)]
assert strategy.exchange(b"?" * rank) == [b"?" * each for each in range(size)]

x = np.arange(40, dtype="float32")[:, np.newaxis]
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    # The loss depends on which predictions and targets are neighbours in the global batch.
    model.compile(keras.optimizers.SGD(0.0), lambda y, p: keras.ops.sum(y[1:] * p[:-1]) / 40.0, jit_compile=False)
assert np.array_equal(strategy.predict(model, x, batch_size=25, verbose=0), x)
loss = strategy.evaluate(model, x, x, batch_size=40, verbose=0)
assert abs(loss - float(np.sum(x[1:] * x[:-1])) / 40.0) < 1e-3, loss
print("ALL RIGHT")
"""


@pytest.mark.thorough
def test_messages_predictions_and_losses_of_twelve_workers_are_in_the_order_of_ranks(tmp_path):
    assert run_script(TWELVE, cwd=tmp_path, options=("--workers", "12")).count("ALL RIGHT") == 12


def test_the_positions_of_ranks_in_what_tensorflow_gathers_follow_the_names_of_devices():
    chief = [Task("chief", 0, "host:1"), *(Task("worker", index, f"host:{2 + index}") for index in range(11))]
    one_each = gathered_positions(chief, ["/job:worker/replica:0/task:3/device:CPU:0"])
    assert one_each == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 3]
    two_each = gathered_positions(chief[:2], [f"/job:chief/replica:0/task:0/device:GPU:{index}" for index in (2, 10)])
    assert two_each == [1, 0, 3, 2]
